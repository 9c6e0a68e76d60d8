"""Learning curves of the training scripts, one run of each arm: `python -m benchmarks.reproduce.learning`.

Runs what RUNS lists (in the folder runs/ here; a run that is finished is not run again, one that was killed goes on from its
last checkpoint), writes one CSV a run and one picture a figure. `--plot` draws the pictures from the CSVs alone. One seed
shows that a script learns, and nothing about which arm is better.
"""

import sys
from dataclasses import dataclass

import numpy as np
import tyro

from benchmarks import files
from benchmarks.files import ROOT, pyplot, read_csv, save_small
from benchmarks.run import call, read_scalars

RESULTS = files.RESULTS / "learning"
MUJOCO = "--total-timesteps 1000000 --norm-obs --norm-reward --max-grad-norm 0.5 --anneal-lr --clip-vloss --vf-coef 0.25"
ARMS = {"influence": "--filter influence", "none": "--filter none"}
RUNS = {  # figure: (script, arguments, {label of a curve: its arguments}, seeds)
    "LunarLander": ("ppo_iif", "--eval-episodes 20", ARMS, (101,)),
    "Acrobot": (
        "ppo_iif",
        "--env-id Acrobot-v1 --total-timesteps 40960 --filter-percent 50 --eval-episodes 20",
        ARMS,
        (101,),
    ),
    "BipedalWalker": ("ppo_iif_continuous", "", ARMS, (101,)),
    "MiniGrid": (
        "ppo_iif_minigrid",
        "--eval-episodes 20",
        {f"{arm}, / {scale}": f"{flags} --obs-scale {scale}" for scale in (255, 10) for arm, flags in ARMS.items()},
        (101,),
    ),
    "HalfCheetah": (
        "ppo_iif_continuous",
        MUJOCO + " --filter none",
        {
            "truncation bootstraps": "--env-id HalfCheetah-v5",
            "truncation as termination": "--env-id benchmarks.variants.envs:HalfCheetahTerminating-v5",
        },
        (101, 102, 103),
    ),
    "Pong": ("ppo_iif_atari", "--total-timesteps 1000000 --save-every 100", ARMS, (101,)),
}
COLUMNS = "figure label seed round global_step eval_return training_return episodes records_kept seconds".split()
LOSSES = ("approx_kl", "clipfrac", "entropy")  # further columns, of which older files have none


@dataclass
class Args:
    only: tuple[str, ...] = ()
    """figures to run (default: all)"""
    seeds: tuple[int, ...] = ()
    """seeds to run (default: those of the figure)"""
    labels: tuple[str, ...] = ()
    """curves to run, by a part of their label (default: all)"""
    table: bool = False
    """only print the table of final returns, from the CSVs there are"""
    plot: bool = False
    """only draw the pictures, from the CSVs there are"""


def name_of(figure, label, seed):
    return f"{figure}_{''.join(c if c.isalnum() else '-' for c in label)}_{seed}"


def run(figure, label, seed):
    """One run to its end, and its CSV."""
    script, arguments, labels, _ = RUNS[figure]
    name = name_of(figure, label, seed)
    folders = list(ROOT.glob(f"runs/*__{name}__{seed}__*"))
    if not any((folder / f"{name}.cleanrl_model").exists() for folder in folders):
        command = [sys.executable, str(ROOT / f"{script}.py")]
        checkpoints = [folder / "checkpoint.pt" for folder in folders if (folder / "checkpoint.pt").exists()]
        if checkpoints:
            command += ["--resume", str(checkpoints[-1])]
        else:
            command += [*arguments.split(), *labels[label].split(), "--seed", str(seed), "--exp-name", name, "--save-model"]
        status, _ = call(command, ROOT, RESULTS / f"{name}.log")
        if status:
            sys.exit(f"{name} failed; see {RESULTS / name}.log")
        folders = list(ROOT.glob(f"runs/*__{name}__{seed}__*"))
    (folder,) = (folder for folder in folders if (folder / f"{name}.cleanrl_model").exists())
    write_csv(folder, figure, label, seed)


def write_csv(folder, figure, label, seed):
    """One row a round: return of theta(k) where it was evaluated, mean return of the episodes that ended in round k, ..."""
    scalars = {tag: [(event.step, event.value) for event in events] for tag, events in read_scalars(folder).items()}
    ends = [step for step, _ in scalars["charts/round"]]
    evaluations = dict(scalars.get("eval/episodic_return", ()))
    kept = dict(scalars.get("influence/records_kept", ()))
    losses = [dict(scalars[f"losses/{name}"]) for name in LOSSES]
    seconds = {step: 0.0 for step in ends}
    for stage in ("rollout", "scoring", "update"):
        for step, value in scalars[f"time/{stage}"]:
            seconds[step] += value
    rows = []
    for k, (begin, end) in enumerate(zip([0, *ends], ends)):
        returns = [value for step, value in scalars["charts/episodic_return"] if begin < step <= end]
        row = [evaluations.get(begin), np.mean(returns) if returns else None, len(returns), kept.get(end, end - begin)]
        row = [f"{x:.6g}" if isinstance(x, float) else x for x in row]
        did = [f"{column[end]:.4g}" if end in column else None for column in losses]
        rows.append([figure, label, seed, k, begin, *row, f"{seconds[end]:.4f}", *did])
    if end in evaluations:  # of the policy after the last round
        rows.append([figure, label, seed, k + 1, end, f"{evaluations[end]:.6g}", None, 0, *[None] * 5])
    files.write_csv(RESULTS / f"{name_of(figure, label, seed)}.csv", [*COLUMNS, *LOSSES], rows)


def plot(figure):
    """Return against steps: evaluations of theta(k) where there are any, else the mean training return of the last ten
    rounds."""
    plt = pyplot()
    from matplotlib.ticker import EngFormatter, MaxNLocator

    _, _, labels, _ = RUNS[figure]
    fig, ax = plt.subplots(figsize=(5, 3.2), dpi=110)
    for colour, label in enumerate(labels):
        for i, path in enumerate(sorted(RESULTS.glob(f"{name_of(figure, label, '*')}.csv"))):
            rows = read_csv(path)
            column = "eval_return" if rows[0]["eval_return"] else "training_return"
            x = np.array([float(r["global_step"]) for r in rows if r[column]])
            y = np.array([float(r[column]) for r in rows if r[column]])
            if column == "training_return":
                y = np.array([y[max(0, k - 9) : k + 1].mean() for k in range(len(y))])
            ax.plot(x, y, color=f"C{colour}", label=label if i == 0 else None, lw=1.3)
    ax.set(title=figure, xlabel="environment steps", ylabel="episodic return")
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.legend(frameon=False, fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    save_small(fig, RESULTS / f"{figure}.png")
    plt.close(fig)


def table(folder=RESULTS):
    """Mean return of the last hundred training episodes of each run, CleanRL's measure (here up to whole rounds), and means
    over all rounds of how far the policy moved in an update and of its entropy, as Markdown."""
    lines = []
    for figure, (_, _, labels, _) in RUNS.items():
        for label in labels:
            for path in sorted(folder.glob(f"{name_of(figure, label, '*')}.csv")):
                rows = [row for row in read_csv(path) if row["seconds"]]
                total, episodes = 0.0, 0
                for row in reversed(rows):
                    if row["training_return"] and episodes < 100:
                        total += float(row["training_return"]) * int(row["episodes"])
                        episodes += int(row["episodes"])
                steps = int(rows[-1]["global_step"]) + int(rows[1]["global_step"])
                means = [
                    np.mean([float(row[name]) for row in rows if row[name]]) if name in rows[0] else None for name in LOSSES
                ]
                cells = [f"{total / episodes:.2f}", *("" if x is None else f"{x:.3g}" for x in means)]
                lines.append([figure, label, rows[0]["seed"], steps, *cells])
    return files.table(
        "figure|curve|seed|steps|last 100 training episodes|approx_kl|clipfrac|entropy".split("|"), lines, left=2
    )


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.table:
        print(table())
        sys.exit()
    unknown = set(args.only) - set(RUNS)
    if unknown:
        sys.exit(f"--only {unknown.pop()}: not one of {', '.join(RUNS)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for figure in args.only or RUNS:
        _, _, labels, seeds = RUNS[figure]
        for label in labels:
            for seed in args.seeds or seeds:
                if not args.plot and (not args.labels or any(part in label for part in args.labels)):
                    print(f"{figure}, {label}, seed {seed}", flush=True)
                    run(figure, label, seed)
        if list(RESULTS.glob(f"{figure}_*.csv")):
            plot(figure)
