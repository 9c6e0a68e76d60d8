"""Whether envpool's games are those of stable-baselines3's wrappers: `python -m benchmarks.cost.random_play` (needs envpool).

Whole games of uniformly random actions in ppo_iif_atari.py's environments, with and without --envpool: the return of each and how
many actions it took. As many games from each environment, so that short ones are not favoured.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

import ppo_iif_atari as script
from benchmarks import files

KINDS = {"sync": {}, "envpool": {"envpool": True}}
COLUMNS = ("game", "kind", "environment", "return", "steps")
PATH = files.RESULTS / "cost" / "random_play.csv"


@dataclass
class Args:
    games: tuple[str, ...] = ("Breakout", "Pong")
    """names of games; others keep the rows that they have"""
    num_envs: int = 8
    """environments"""
    each: int = 16
    """games of each environment"""
    output: Path = PATH
    """the CSV to write, one row per game"""


def play(game, kind, args):
    """[environment, return, steps] of every game."""
    settings = script.Args(env_id=f"{game}NoFrameskip-v4", num_envs=args.num_envs, **KINDS[kind])
    envs, rng = script.make_envs(settings, ""), np.random.default_rng(1)
    envs.reset(seed=1)
    rows, steps, left = [], np.zeros(args.num_envs, int), np.full(args.num_envs, args.each)
    while left.any():
        *_, infos = envs.step(rng.integers(envs.single_action_space.n, size=args.num_envs))
        steps += 1
        for i in np.flatnonzero(infos.get("_final_info", ())):
            final = infos["final_info"]
            if f"_{script.STATISTICS}" in final and final[f"_{script.STATISTICS}"][i]:  # else a life was lost
                rows += [[int(i), float(final[script.STATISTICS]["r"][i]), int(steps[i])]] * int(left[i] > 0)
                left[i], steps[i] = max(left[i] - 1, 0), 0
    envs.close()
    return rows


def table(path=PATH):
    """Means with their standard errors, the difference with its 95% interval, and the test of Kolmogorov and Smirnov, as Markdown
    from the CSV alone."""
    from scipy.stats import ks_2samp, ttest_ind

    found = {}
    for row in files.read_csv(path):
        for what in ("return", "steps"):
            found.setdefault((row["game"], what), {}).setdefault(row["kind"], []).append(float(row[what]))
    lines = []
    for (game, what), kinds in found.items():
        means = [f"{np.mean(x):.4g} ± {np.std(x, ddof=1) / np.sqrt(len(x)):.2g}" for x in kinds.values()]
        difference = np.mean(kinds["envpool"]) - np.mean(kinds["sync"])
        low, high = ttest_ind(kinds["envpool"], kinds["sync"], equal_var=False).confidence_interval()
        p = ks_2samp(*kinds.values()).pvalue
        lines.append([game, what, len(kinds["sync"]), *means, f"{difference:.2g} [{low:.2g}, {high:.2g}]", f"{p:.2g}"])
    header = "game|of a game|games of each|sync|`--envpool`|difference, 95% interval|p, distributions"
    return files.table(header.split("|"), lines, left=2)


if __name__ == "__main__":
    args = tyro.cli(Args)
    rows = [[row[column] for column in COLUMNS] for row in files.read_csv(args.output) if row["game"] not in args.games]
    rows += [[game, kind, *row] for game in args.games for kind in KINDS for row in play(game, kind, args)]
    files.write_csv(args.output, COLUMNS, rows)
    print(table(args.output))
