"""What all rooms share: where results are, CSVs, Markdown tables, pictures."""

import csv
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def read_csv(path):
    """The rows of a CSV as dicts; none if there is no such file."""
    if not Path(path).exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_csv(path, columns, rows):
    """Write a CSV whole or not at all; floats with seven digits."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.tmp", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([f"{x:.7g}" if isinstance(x, float) else x for x in row] for row in rows)
    os.replace(f"{path}.tmp", path)


def table(header, rows, left=1):
    """Markdown; all columns but the first `left` are flushed right."""
    lines = [header, ["---" if i < left else "--:" for i in range(len(header))], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def progress(items, unit, total=None):
    """The items, on a terminal with a bar that shows the time left, where tqdm is installed. total: how many, if they have no
    length."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, unit=unit, total=total, disable=None, leave=False)


def say(text):
    """Print a line above the bars."""
    tqdm = sys.modules.get("tqdm")
    tqdm.tqdm.write(text) if tqdm else print(text)
    sys.stdout.flush()


def ended(process):
    """Wait for a process: its exit status, its CPU seconds, its peak memory in MB (RSS); nan where the system does not tell, as
    Windows does not."""
    if not hasattr(os, "wait4"):
        return process.wait(), float("nan"), float("nan")
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_small(fig, path):
    """A PNG of 128 colours, a third of the size."""
    from PIL import Image

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
