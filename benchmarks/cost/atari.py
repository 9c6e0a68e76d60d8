"""Which way is cheapest for Atari's network: `python -m benchmarks.cost.atari`.

`return_influence` on the synthetic Atari round of benchmarks/cost/scoring.py: forward and reverse mode, at several chunk sizes, in
float32 and under bfloat16 autocast. Time is CPU time as a ratio to forward mode with the training script's chunk size, in the
same turn; the median over `--repeats` turns. Decisions are the records that the filter drops, at 12.5 and at 100 percent of the
negative ones: how many of them float32 would have kept.
"""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

import iif_core
from benchmarks import files
from benchmarks.cost.scoring import NETWORKS, Round, allocator

OURS = ("forward", "float32", 128)  # what ppo_iif_atari.py does
WAYS = [
    *(("forward", "float32", chunk) for chunk in (32, 64, 128, 256, 512, 1024)),
    *(("reverse", "float32", chunk) for chunk in (32, 128, 512, None)),
    *((mode, "bfloat16", 128) for mode in ("forward", "reverse")),
]
COLUMNS = (
    "mode",
    "precision",
    "chunk",
    "repeat",
    "cpu_seconds",
    "error",
    "spearman",
    "changed_12.5",
    "changed_100",
    "dropped_100",
)


@dataclass
class Args:
    repeats: int = 5
    """turns of all ways"""
    output: Path = files.RESULTS / "cost" / "atari.csv"
    """the CSV to write"""


def scores(r, mode, precision, chunk):
    with torch.autocast("cpu", torch.bfloat16) if precision == "bfloat16" else contextlib.nullcontext():
        return iif_core.return_influence(
            r.agent,
            lambda inds: r.logprob(inds).float(),
            r.advantages,
            minibatch_size=r.network.minibatch_size,
            inds=r.order,
            chunk_size=chunk,
            forward_mode=mode == "forward",
        )


def dropped(x, percent):
    return set(range(len(x))) - set(iif_core.filter_bottom(x, percent).tolist())


def table(path=files.RESULTS / "cost" / "atari.csv"):
    """Markdown, from the CSV alone."""
    found = {}
    for row in files.read_csv(path):
        found.setdefault((row["mode"], row["precision"], row["chunk"]), []).append(row)
    if not found:
        return ""
    ours, lines = found[tuple(map(str, OURS))], []
    for (mode, precision, chunk), rows in found.items():
        ratio = np.median([float(a["cpu_seconds"]) / float(b["cpu_seconds"]) for a, b in zip(rows, ours)])
        x = {name: float(rows[0][name]) for name in COLUMNS[5:]}
        cells = [f"{x['error']:.0e}", f"{x['spearman']:.4f}", *(f"{x[name]:.0f}" for name in COLUMNS[7:])]
        lines.append([mode, precision, chunk or "whole round", f"{ratio:.2f}", *cells])
    header = (
        "mode|precision|records a call|time|largest error|Spearman|decisions changed, 12.5%|decisions changed, 100%|negative"
    )
    return files.table(header.split("|"), lines, left=2)


if __name__ == "__main__":
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    allocator(keep=True)
    r, rows = Round(NETWORKS["atari"]), []
    reference = scores(r, *OURS)
    for repeat in range(args.repeats):
        for way in WAYS:
            start = time.process_time()
            x = scores(r, *way)
            seconds = time.process_time() - start
            error = ((x - reference).abs().max() / reference.abs().max()).item()
            rank = np.corrcoef(iif_core._ranks(x.numpy()), iif_core._ranks(reference.numpy()))[0, 1]
            changed = [len(dropped(x, p) - dropped(reference, p)) for p in (12.5, 100)]
            row = [way[0], way[1], way[2] or "", repeat, seconds, error, rank, *changed, int((x < 0).sum())]
            print(*row, flush=True)
            rows.append(row)
    files.write_csv(args.output, COLUMNS, rows)
    print(table(args.output))
