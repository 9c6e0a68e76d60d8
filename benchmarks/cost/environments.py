"""Atari's environments side by side: `python -m benchmarks.cost.environments` (needs envpool).

Steps a second of PongNoFrameskip-v4 with random actions, in Gymnasium one after the other, in a process each, and in envpool's
threads; the three take turns, in wall-clock time. No network: with one, the gain is a part of a round's rollout.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import tyro

import ppo_iif_atari
from benchmarks import files

KINDS = {"sync": {}, "async": {"vectorization": "async"}, "envpool": {"envpool": True}}
COLUMNS = ("kind", "environments", "cores", "repeat", "steps_per_second")


@dataclass
class Args:
    num_envs: int = 8
    """environments"""
    steps: int = 150
    """steps of each environment in a turn"""
    repeats: int = 5
    """turns"""
    output: Path = files.RESULTS / "cost" / "environments.csv"
    """the CSV to write"""


def table(path=files.RESULTS / "cost" / "environments.csv"):
    """Markdown, from the CSV alone."""
    found = {}
    for row in files.read_csv(path):
        found.setdefault(row["kind"], []).append(row)
    lines = []
    for kind, rows in found.items():
        speed = [[float(row["steps_per_second"]) for row in group] for group in (rows, found["sync"])]
        ratio = median(a / b for a, b in zip(*speed))
        lines.append([kind, rows[0]["environments"], rows[0]["cores"], f"{median(speed[0]):.0f}", f"{ratio:.2f}"])
    return files.table("kind|environments|cores|steps a second|to sync".split("|"), lines)


if __name__ == "__main__":
    args, rows, rng = tyro.cli(Args), [], np.random.default_rng(1)
    made = {}
    for kind, flags in KINDS.items():
        made[kind] = ppo_iif_atari.make_envs(ppo_iif_atari.Args(num_envs=args.num_envs, **flags), "environments")
        made[kind].reset(seed=1)
    for repeat in range(args.repeats):
        for kind, envs in made.items():
            actions = rng.integers(envs.single_action_space.n, size=(args.steps, args.num_envs))
            start = time.perf_counter()
            for row in actions:
                envs.step(row)
            speed = actions.size / (time.perf_counter() - start)
            rows.append([kind, args.num_envs, os.cpu_count(), repeat, speed])
    for envs in made.values():
        envs.close()
    files.write_csv(args.output, COLUMNS, rows)
    print(table(args.output))
