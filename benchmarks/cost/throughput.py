"""How fast the training scripts are: `python -m benchmarks.cost.throughput`.

Each row of WORKLOADS is run as a plain CleanRL-shaped loop (benchmarks/cost/plain_ppo.py), as its script with `--filter none`, and
with `--filter influence`: the same environment, hyper-parameters, logging and one torch thread, each in a process of its own,
in turn, `--repeats` times. Seconds are those of whole rounds, evaluation off, the first WARMUP of each process left out
(imports). Ratios are taken within a repeat, so that a machine whose speed drifts does not favour anyone; their median is
reported. With `--cleanrl PATH`, a checkout of CleanRL, each workload is run by its own script as well (benchmarks/cost/cleanrl.py),
with the same rounds, minibatches and epochs; with `--before FOLDER` by earlier versions of our scripts; with `--compiled` by IIF
with `--compile`, whose first rounds, which compile, are left out; Atari also with `--score-bfloat16`. Scoring is given as a share of the `none` arm's update, and the peak memory (RSS) of each process as a ratio to the
`none` arm's.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks import files
from benchmarks.files import ROOT

RESULTS = files.RESULTS / "cost" / "throughput.csv"
WARMUP = 2
MUJOCO = "--norm-obs --norm-reward --max-grad-norm 0.5 --anneal-lr --clip-vloss --vf-coef 0.25"
WORKLOADS = {  # name: script, its arguments, rounds
    "LunarLander": ("ppo_iif", "", 12),
    "BipedalWalker": ("ppo_iif_continuous", "", 8),
    "HalfCheetah": ("ppo_iif_continuous", f"--env-id HalfCheetah-v5 {MUJOCO}", 8),
    "MiniGrid": ("ppo_iif_minigrid", "", 8),
    "Atari": ("ppo_iif_atari", "", 5),
}
CLEANRL = {"ppo_iif": "ppo", "ppo_iif_continuous": "ppo_continuous_action", "ppo_iif_atari": "ppo_atari"}
COLUMNS = "workload arm repeat seconds_per_round steps_per_second rollout scoring update peak_rss_mb".split()


@dataclass
class Args:
    only: tuple[str, ...] = ()
    """workloads to run (default: all)"""
    repeats: int = 3
    """how often each workload is run"""
    cleanrl: Path | None = None
    """a checkout of https://github.com/vwxyzjn/cleanrl, whose own scripts are run as well"""
    before: Path | None = None
    """a folder with earlier versions of the scripts and of iif_core.py, which are run as well"""
    compiled: bool = False
    """run IIF with --compile as well"""
    output: Path = RESULTS
    """the CSV to write, one row per process"""
    table: bool = False
    """print the table of an existing CSV, and run nothing"""


def command_of(arm, script, arguments, rounds, args):
    """The command line of one process, without the interpreter, and the records of a round; None if the arm has no such script."""
    sys.path.insert(0, str(ROOT))
    defaults = __import__(script).Args()
    total = ["--total-timesteps", str(rounds * defaults.batch_size)]
    if arm == "cleanrl":
        names = "num_envs num_steps num_minibatches update_epochs".split()
        same = [word for name in names for word in ("--" + name.replace("_", "-"), str(getattr(defaults, name)))]
        env_id = arguments.split()[1] if arguments else {"ppo_iif_atari": "PongNoFrameskip-v4"}.get(script, defaults.env_id)
        head = ["-m", "benchmarks.cost.cleanrl", str(args.cleanrl.resolve()), CLEANRL.get(script)]
        return [*head, "--env-id", env_id, *same, *total] if script in CLEANRL else None
    arguments = [*arguments.split(), *total, "--torch-threads", "1"]
    if arm == "plain":
        return ["-m", "benchmarks.cost.plain_ppo", "runs", script, *arguments]
    if arm == "bfloat16":
        own = [*arguments, "--filter", "influence", "--score-bfloat16"]
        return [str(ROOT / f"{script}.py"), *own] if script == "ppo_iif_atari" else None
    if arm == "compiled":
        return [str(ROOT / f"{script}.py"), *arguments, "--filter", "influence", "--compile"]
    place = args.before.resolve() if arm.startswith("before") else ROOT
    return [str(place / f"{script}.py"), *arguments, "--filter", arm.removeprefix("before ")]


def run_once(arm, script, arguments, rounds, args):
    """One process. Returns its row: median seconds of a round and of its stages, peak RSS in MB; None where there is no such arm."""
    command, batch_size = command_of(arm, script, arguments, rounds, args), __import__(script).Args().batch_size
    if command is None:
        return None
    command = [sys.executable, *command]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with open(Path(folder) / "log", "w") as log:
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
            status, _, peak = files.ended(process)
        output = (Path(folder) / "log").read_text()
        if status:
            sys.exit(f"{' '.join(command)} failed:\n{output}")
        row = {"peak_rss_mb": peak}
        if arm == "plain":
            seconds = json.loads(output.splitlines()[-1])
        else:
            (run,) = Path(folder).glob("runs/*")
            events = EventAccumulator(str(run)).Reload()
            clock = [event.wall_time for event in events.Scalars("losses/explained_variance")]
            seconds = [None, *(b - a for a, b in zip(clock, clock[1:]))]
            for stage in ("rollout", "scoring", "update") if arm != "cleanrl" else ():
                row[stage] = median(event.value for event in events.Scalars(f"time/{stage}")[WARMUP:])
    row["seconds_per_round"] = median(seconds[WARMUP:])
    row["steps_per_second"] = batch_size / row["seconds_per_round"]
    return row


def table(path=RESULTS):
    """The table as Markdown, from the CSV alone."""
    rows = {}
    for row in files.read_csv(path):
        rows.setdefault(row["workload"], {}).setdefault(row["arm"], []).append(row)

    def ratio(a, column_a, b, column_b):
        return median(float(x[column_a]) / float(y[column_b]) for x, y in zip(a, b))

    lines = []
    for workload, arms in rows.items():
        if not {"plain", "none", "influence"} <= arms.keys():  # of a run that was ended
            continue
        plain, none, iif = arms["plain"], arms["none"], arms["influence"]
        speed = [f"{median(float(r['steps_per_second']) for r in arm):.0f}" for arm in (plain, none, iif)]
        split = " / ".join(f"{1e3 * median(float(r[k]) for r in iif):.0f}" for k in ("rollout", "scoring", "update"))
        cells = [f"{ratio(plain, 'seconds_per_round', none, 'seconds_per_round'):.2f}"]
        cells += [f"{ratio(iif, 'seconds_per_round', none, 'seconds_per_round'):.3f}", split]
        cells += [f"{ratio(iif, 'scoring', none, 'update'):.2f}", f"{median(float(r['peak_rss_mb']) for r in none):.0f}"]
        lines.append([workload, *speed, *cells, f"{ratio(iif, 'peak_rss_mb', none, 'peak_rss_mb'):.2f}"])
    header = "workload|steps/s: plain loop|`none`|IIF|`none` / plain|IIF / `none`, time of a round|rollout / scoring / update of IIF, ms"
    header += "|scoring / update of `none`|peak RSS of `none`, MB|IIF / `none`, RSS"
    return files.table(header.split("|"), lines)


def compared(path=RESULTS):
    """Speed as multiples of CleanRL's own scripts, and of our earlier ones, as Markdown, from the CSV alone."""
    rows = {}
    for row in files.read_csv(path):
        rows.setdefault(row["workload"], {}).setdefault(row["arm"], []).append(float(row["steps_per_second"]))

    def cell(arms, a, b):
        return f"{median(x / y for x, y in zip(arms[a], arms[b])):.2f}" if a in arms and b in arms else ""

    pairs = [(arm, "cleanrl") for arm in ("plain", "none", "influence", "compiled")]
    pairs += [("none", "before none"), ("influence", "before influence"), ("compiled", "influence"), ("bfloat16", "none")]
    lines = [[name, *(cell(arms, *pair) for pair in pairs)] for name, arms in rows.items()]
    header = "workload|plain / CleanRL|`none` / CleanRL|IIF / CleanRL|compiled IIF / CleanRL|`none` / before|IIF / before|compiled / IIF"
    header += "|IIF, scored in bfloat16 / `none`"
    return files.table(header.split("|"), lines)


if __name__ == "__main__":
    args = tyro.cli(Args)
    unknown = set(args.only) - set(WORKLOADS)
    if unknown:
        sys.exit(f"--only {unknown.pop()}: not one of {', '.join(WORKLOADS)}")
    if not args.table:
        kept = []  # workloads that this call does not run keep the rows they have
        if args.only:
            kept = [row for row in files.read_csv(args.output) if row["workload"] not in args.only]
        arms = (
            ["plain", "none", "influence", "bfloat16"]
            + ["compiled"] * args.compiled
            + ["cleanrl"] * (args.cleanrl is not None)
        )
        arms += ["before none", "before influence"] if args.before else []
        rows = []
        for workload in args.only or WORKLOADS:
            for repeat in range(args.repeats):
                for arm in arms:
                    measured = run_once(arm, *WORKLOADS[workload], args)
                    if measured is None:
                        continue
                    row = {"workload": workload, "arm": arm, "repeat": repeat, **measured}
                    rows.append({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
                    print({k: rows[-1][k] for k in ("workload", "arm", "repeat", "steps_per_second")}, flush=True)
                    done = sorted(kept + rows, key=lambda row: list(WORKLOADS).index(row["workload"]))
                    files.write_csv(args.output, COLUMNS, [[row.get(column) for column in COLUMNS] for row in done])
    print(table(args.output), compared(args.output), sep="\n\n")
