"""Whether `--compile` pays within a script's default run: `python -m benchmarks.cost.compiling`.

Each script's default command, whole, in a process of its own: eager; compiled with an empty cache (TORCHINDUCTOR_CACHE_DIR and
TRITON_CACHE_DIR in a new folder); compiled again with the cache that the run before has left. They take turns, `--repeats`
times. CPU seconds (which count the compiler's processes) and wall-clock seconds, imports and all.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro

from benchmarks import files

COLUMNS = ("script", "way", "repeat", "seconds", "cpu_seconds")
WAYS = {"eager": (), "compiled, empty cache": ("--compile",), "compiled, warm cache": ("--compile",)}


@dataclass
class Args:
    scripts: tuple[str, ...] = ("ppo_iif", "ppo_iif_continuous", "ppo_iif_minigrid")
    """scripts to run"""
    repeats: int = 2
    """turns of all ways"""
    output: Path = files.RESULTS / "cost" / "compiling.csv"
    """the CSV to write, one row per process"""


def seconds_of(script, flags, cache, folder):
    """Wall-clock and CPU seconds of one process and its children."""
    places = {name: str(cache) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    command = [sys.executable, str(files.ROOT / f"{script}.py"), *flags]
    start = time.perf_counter()
    with open(folder / "log", "w") as log:
        env = os.environ | places | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed:\n{(folder / 'log').read_text()[-2000:]}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime


def table(path=files.RESULTS / "cost" / "compiling.csv"):
    """Markdown, from the CSV alone."""
    found = {}
    for row in files.read_csv(path):
        found.setdefault(row["script"], {}).setdefault(row["way"], []).append(row)
    lines = []
    for script, ways in found.items():
        eager = ways["eager"]
        for way, rows in ways.items():
            cells = [f"{median(float(row[column]) for row in rows):.0f}" for column in COLUMNS[3:]]
            ratios = [f"{median(float(a[c]) / float(b[c]) for a, b in zip(rows, eager)):.2f}" for c in COLUMNS[3:]]
            lines.append([f"`{script}.py`", way, len(rows), *cells, *ratios])
    header = "default run of|way|runs|seconds|CPU seconds|seconds / eager|CPU seconds / eager"
    return files.table(header.split("|"), lines, left=2) if lines else ""


if __name__ == "__main__":
    args, rows = tyro.cli(Args), []
    for repeat in range(args.repeats):
        for script in args.scripts:
            with tempfile.TemporaryDirectory() as folder:
                for way, flags in WAYS.items():
                    seconds = seconds_of(script, flags, Path(folder) / "cache", Path(folder))
                    rows.append([script, way, repeat, *seconds])
                    print(*rows[-1], flush=True)
                    files.write_csv(args.output, COLUMNS, rows)
    print(table(args.output))
