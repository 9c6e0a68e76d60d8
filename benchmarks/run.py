"""Run a suite of benchmarks/reproduce/suites.py: `python -m benchmarks.run fig6 --workers 2`.

Every run is a training script in a process of its own, as it is, with one thread, in a folder of its own in
results/SUITE/work/. Its results are results/SUITE/ENVIRONMENT_ARM_SEED.csv, one row a round (the last one: the policy after
the last round), and a row of results/SUITE/runs.csv: the command, the code, the versions, the cost. Both are written when the
run is finished. So a suite that was killed goes on with the runs that are not. What another suite has run is taken over from
it.
"""

import contextlib
import datetime
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.files import RESULTS, ROOT, ended, read_csv, write_csv
from benchmarks.reproduce.entries import options
from benchmarks.reproduce.suites import SUITES

TRIAL = ROOT / "benchmarks" / "trial"
COLUMNS = (
    "suite environment arm percent optimizer seed round global_step return episodes records_kept negative_fraction"
    " rollout_seconds scoring_seconds update_seconds wall_seconds"
).split()
RECORD = "run command rounds reused_from commit scripts python torch numpy gymnasium cpu_seconds finished".split()


@dataclass
class Args:
    suite: Annotated[Literal[tuple(SUITES)], tyro.conf.Positional]
    """what to run"""
    seeds: int | None = None
    """number of seeds, from 101 up (default: the suite's)"""
    workers: int = 2
    """runs at a time, one core each (ray: as many as its cluster has cores)"""
    only: tuple[str, ...] = ()
    """environments to run (default: all of the suite)"""
    filter: tuple[str, ...] = ()
    """arms to run (default: all of the suite)"""
    rounds: int | None = None
    """another number of rounds, for a trial"""
    engine: Literal["local", "ray"] = "local"
    """ray: hand the runs to the cluster of RAY_ADDRESS, or to one started here"""
    results: Path | None = None
    """folder of the results (default: benchmarks/results, and benchmarks/trial with --rounds)"""


# ---- one run

children = set()  # processes of this one
stopping = threading.Event()


def call(command, cwd, log, on_line=lambda line: None):
    """Run a command to its end in the folder `cwd`, with one thread, its output in the file `log` and line by line to
    on_line. Returns its exit status and its CPU seconds."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", "PYTHONPATH": path}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
    with open(log, "w", encoding="utf-8") as file, subprocess.Popen(command, cwd=cwd, env=env, **pipe) as process:
        children.add(process)
        if stopping.is_set():
            process.terminate()
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                on_line(line)
        except BaseException:
            process.kill()
            raise
        status, cpu_seconds, _ = ended(process)
        children.discard(process)
    return status, cpu_seconds


def read_scalars(folder):
    """What a run has logged to TensorBoard: {name: [its events, with step, value and wall_time]}."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 1, "tensors": 1}).Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def rows_of(run, folder):
    """The rows of a finished run, one a round: the return of theta(k) and what round k did; last, the final policy. The
    wall-clock starts when theta(0) has been evaluated, and includes evaluation."""
    scalars = read_scalars(folder)
    given = options(run.arguments)
    percent = given.get("--filter-percent", "")
    labels = [run.suite, run.environment, run.arm, percent, given["--optimizer"], run.seed]
    names = ("influence/records_kept", "influence/negative_fraction", "time/rollout", "time/scoring", "time/update")
    columns = [{event.step: event.value for event in scalars.get(name, ())} for name in names]
    more = [(name, {event.step: event.value for event in scalars.get(name, ())}) for _, name in run.columns]
    ends = [event.step for event in scalars["charts/round"]]
    if run.returns.startswith("charts/"):
        return training_rows(run, scalars[run.returns], ends, labels, columns, [column for _, column in more])
    evaluations = scalars[run.returns]
    if len(ends) != run.rounds or [event.step for event in evaluations] != [0, *ends]:
        raise ValueError(f"{len(ends)} rounds and {len(evaluations)} evaluations, expected {run.rounds} and one more")
    rows = []
    for k, (event, end) in enumerate(zip(evaluations, [*ends, None])):
        kept, negative, *seconds = (column.get(end) for column in columns)
        if end and kept is None:  # not scored
            kept = end - event.step
        did = [*(x if x is None else f"{x:.5g}" for x in (kept, negative)), *(x if x is None else f"{x:.4f}" for x in seconds)]
        wall = event.wall_time - evaluations[0].wall_time
        episodes = given.get("--eval-episodes") or given["--eval-prompts"]
        # evaluations are of theta(k), before round k
        extra = [column.get(event.step if name.startswith("eval/") else end) for name, column in more]
        extra = [x if x is None else f"{x:.5g}" for x in extra]
        rows.append([*labels, k, event.step, f"{event.value:.6g}", episodes, *did, f"{wall:.1f}", *extra])
    return rows


def training_rows(run, episodes, ends, labels, columns, more):
    """The rows of a run that is judged by the episodes that it trains on: of each round, the mean return of those that ended in
    it, which the sampled policy theta(k) played, and how many they are."""
    if len(ends) != run.rounds:
        raise ValueError(f"{len(ends)} rounds, expected {run.rounds}")
    rows = []
    for k, (start, end) in enumerate(zip([0, *ends], ends)):
        returns = [event.value for event in episodes if start < event.step <= end]
        mean = f"{sum(returns) / len(returns):.6g}" if returns else ""
        kept, negative, *seconds = (column.get(end) for column in columns)
        kept = end - start if kept is None else kept
        did = [*(x if x is None else f"{x:.5g}" for x in (kept, negative)), *(x if x is None else f"{x:.4f}" for x in seconds)]
        extra = [column.get(end) for column in more]
        extra = [x if x is None else f"{x:.5g}" for x in extra]
        rows.append([*labels, k, start, mean, len(returns), *did, "", *extra])
    return rows


def execute(run, folder, on_round=lambda: None):
    """One run from its start to its end, in `folder`. Returns its rows and its record; raises RuntimeError with the end of its
    log, which stays there."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    record = {"run": run.name, "command": run.command, "rounds": run.rounds, **code(run.script)}
    command = [sys.executable, str(ROOT / f"{run.script}.py"), *shlex.split(run.arguments)]
    # The scripts print a line like this before the first round and after each.
    status, cpu = call(command, folder, log, lambda line: on_round() if re.match(r"round=[1-9]\d*, eval|SPS:", line) else None)
    try:
        if status:
            raise ValueError(f"exit status {status}")
        (events,) = (folder / "runs").iterdir()
        rows = rows_of(run, events)
    except Exception as error:
        shutil.rmtree(folder / "runs", ignore_errors=True)
        end = "\n".join(log.read_text(encoding="utf-8").splitlines()[-15:])
        raise RuntimeError(f"{run.name} failed ({error}); the end of {log}:\n{end}") from None
    shutil.rmtree(folder)
    return rows, {**record, "cpu_seconds": f"{cpu:.1f}", "finished": now()}


def now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def code(script):
    """Which code runs: the commit, a hash of the script and of iif_core.py, versions."""
    scripts = hashlib.sha256(b"".join((ROOT / f"{name}.py").read_bytes() for name in (script, "iif_core"))).hexdigest()[:12]
    packages = {name: version(name) for name in ("torch", "numpy", "gymnasium")}
    return {"commit": commit(), "scripts": scripts, "python": platform.python_version(), **packages}


def commit():
    """The commit, with -dirty if the Python code differs from it; empty outside a repository."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    dirty = subprocess.run([*git, "status", "--porcelain", "--", "*.py"], capture_output=True, text=True).stdout
    return f"{head}-dirty" if head and dirty else head


# ---- many runs


def work_folder(results, run):
    return results.resolve() / run.suite / "work" / run.name


def run_here(runs, results, workers, on_round):
    """Yield (run, its rows and record, or an exception) as the runs finish, `workers` at a time."""
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(execute, run, work_folder(results, run), lambda run=run: on_round(run)): run for run in runs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.exception() or future.result()
        except BaseException:
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(children):
                process.terminate()
            raise


def run_on_ray(runs, results, on_round):
    """The same on a Ray cluster, one core a run. The cluster gets a copy of this project."""
    try:
        import ray
        from ray.util.queue import Queue

        from benchmarks.run import execute  # by its module's name, which the cluster can import, and not of __main__
    except ImportError:
        sys.exit("--engine ray needs Ray: pip install -r requirements-benchmarks.txt")
    ray.init(
        runtime_env={
            "working_dir": str(ROOT),
            "excludes": [".git", ".venv", "runs", "benchmarks/trial", "benchmarks/results"],
        },
        logging_level="warning",
    )
    try:
        progress = Queue()
        task = ray.remote(num_cpus=1, max_retries=0)(lambda run, folder: execute(run, folder, lambda: progress.put(run)))
        waiting = {task.remote(run, work_folder(results, run)): run for run in runs}
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=1)
            while not progress.empty():
                on_round(progress.get())
            for reference in done:
                run = waiting.pop(reference)
                try:
                    yield run, ray.get(reference)
                except Exception as error:
                    yield run, getattr(error, "cause", None) or error
    finally:
        ray.shutdown()


# ---- results


def columns_of(run):
    return [*COLUMNS, *dict(run.columns)]


def save(results, run, rows, record, columns=None):
    """Write the results of a run; the record last, for it says that the run is finished."""
    write_csv(results / run.suite / f"{run.name}.csv", columns or columns_of(run), rows)
    from filelock import FileLock

    path = results / run.suite / "runs.csv"
    (results / run.suite / "work").mkdir(parents=True, exist_ok=True)
    with FileLock(results / run.suite / "work" / "lock"):
        records = {r["run"]: r for r in read_csv(path)} | {run.name: record}
        write_csv(path, RECORD, [[records[name].get(column) for column in RECORD] for name in sorted(records)])


def key(command):
    """What makes two runs the same: the script and the values of all its arguments."""
    _, script, arguments = command.split(" ", 2)
    return script, tuple(sorted(options(arguments).items()))


def to_do(queue, results):
    """The runs of the queue that are not finished; those that another suite has finished are taken over from it."""
    finished = {}  # key: where it is
    for path in (results / suite / "runs.csv" for suite in sorted(SUITES)):
        for record in read_csv(path):
            data = path.parent / f"{record['run']}.csv"
            if data.exists():
                finished.setdefault(key(record["command"]), (data, record))
    mine = {suite: {r["run"]: r for r in read_csv(results / suite / "runs.csv")} for suite in {run.suite for run in queue}}
    rest = []
    for run in queue:
        data, record = results / run.suite / f"{run.name}.csv", mine[run.suite].get(run.name)
        if record and data.exists():
            if key(record["command"]) != key(run.command):
                sys.exit(f"{data} is of another command than the suite's: remove it, or choose other --results")
        elif key(run.command) in finished and not SUITES[run.suite].timed:
            source, record = finished[key(run.command)]
            rows = [{**row, "suite": run.suite, "environment": run.environment, "arm": run.arm} for row in read_csv(source)]
            reused = {"run": run.name, "cpu_seconds": 0, "reused_from": f"{source.parent.name}/{source.stem}"}
            save(results, run, [[row[column] for column in columns_of(run)] for row in rows], {**record, **reused})
        else:
            rest.append(run)
    return rest


def main(args):
    if not (find_spec("tqdm") and find_spec("filelock")):
        sys.exit("benchmarks.run needs tqdm and filelock: pip install -r requirements-benchmarks.txt")
    from tqdm import tqdm

    for name, value in (("--seeds", args.seeds), ("--workers", args.workers), ("--rounds", args.rounds)):
        if value is not None and value < 1:
            sys.exit(f"{name} must be at least 1, got {value}")
    for name, chosen, known in (
        ("--only", args.only, {e.environment for e in SUITES[args.suite].entries}),
        ("--filter", args.filter, {arm for e in SUITES[args.suite].entries for arm in e.arms}),
    ):
        if set(chosen) - known:
            sys.exit(f"{name} {(set(chosen) - known).pop()}: {args.suite} has {'; '.join(sorted(known))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    results = args.results or (TRIAL if args.rounds else RESULTS)
    queue = SUITES[args.suite].runs(args.seeds, args.only, args.filter, args.rounds)
    rest = to_do(queue, results)
    done, failed, rounds = len(queue) - len(rest), [], Counter()
    print(f"{args.suite}: {done} of {len(queue)} runs are finished", flush=True)
    bar = tqdm(total=sum(run.rounds for run in rest), unit="round", smoothing=0, mininterval=1 if sys.stderr.isatty() else 60)

    def on_round(run):
        rounds[run.name] += 1
        bar.update()

    def describe():
        bar.set_description(f"{done}/{len(queue)} runs" + f", {len(failed)} failed" * bool(failed))

    with bar:
        describe()
        local = args.engine == "local"
        outcomes = run_here(rest, results, args.workers, on_round) if local else run_on_ray(rest, results, on_round)
        with contextlib.closing(outcomes):
            for run, outcome in outcomes:
                if isinstance(outcome, Exception):
                    failed.append(run.name)
                    bar.write(str(outcome), file=sys.stderr)
                else:
                    save(results, run, outcome[0], {**outcome[1], "commit": outcome[1]["commit"] or commit()})
                    done += 1
                bar.update(run.rounds - rounds[run.name])  # of a failed run: those that will not come
                describe()
    if failed:
        sys.exit(f"{len(failed)} of {len(queue)} runs failed: {', '.join(failed)}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except KeyboardInterrupt:
        sys.exit(130)
