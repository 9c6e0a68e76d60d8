"""How the stages of a round grow with the work: `python -m benchmarks.cost.scaling`.

One of three things grows, the others stay at BASE: the records of a round, the width of the network's hidden layers, the number
of environments (at the same records). Each point is the median over `--repeats` rounds of ppo_iif.py's own stages on
LunarLander-v3, in one process with one thread, in CPU time; the points take turns. Minibatches keep their size of 64 records, so that a larger
round has more of them.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import tyro
from torch import nn

from benchmarks import files

sys.path.insert(0, str(files.ROOT))
import ppo_iif  # noqa: E402

BASE = {"records": 2048, "width": 64, "environments": 8}
AXES = {
    "records": tuple(2**i for i in range(9, 16)),
    "width": tuple(2**i for i in range(6, 11)),
    "environments": tuple(2**i for i in range(7)),
}
STAGES = ("rollout", "scoring", "update")
COLUMNS = ("axis", "value", "repeat", *STAGES)


@dataclass
class Args:
    repeats: int = 5
    """rounds of each point"""
    output: Path = files.RESULTS / "cost" / "scaling.csv"
    """the CSV to write, one row per round; the picture goes beside it"""


def heads(agent, width):
    """Give the agent's networks hidden layers of this width."""
    for name, std in (("actor", 0.01), ("critic", 1.0)):
        first, *_, last = (layer for layer in getattr(agent, name) if isinstance(layer, nn.Linear))
        sizes = (first.in_features, width, width)
        layers = [m for i, o in zip(sizes, sizes[1:]) for m in (ppo_iif.layer_init(nn.Linear(i, o)), nn.Tanh())]
        setattr(agent, name, nn.Sequential(*layers, ppo_iif.layer_init(nn.Linear(width, last.out_features), std)))


class Point:
    """A training run that is asked for one round at a time."""

    def __init__(self, axis, value):
        size = BASE | {axis: value}
        envs, records = size["environments"], size["records"]
        self.args = ppo_iif.Args(num_envs=envs, num_steps=records // envs, num_minibatches=records // 64)
        self.envs = ppo_iif.make_envs(self.args, "scaling")
        torch.manual_seed(1)
        self.agent = ppo_iif.Agent(self.envs)
        heads(self.agent, size["width"])
        self.optimizer = torch.optim.SGD(self.agent.parameters(), lr=self.args.learning_rate, fused=True)
        self.obs, _ = self.envs.reset(seed=1)

    def round(self, k):
        """CPU seconds of each stage."""
        args, times = self.args, [time.process_time()]
        rng, shuffles, filters = ppo_iif.random_streams(1, k)
        batch, _, self.obs = ppo_iif.rollout(self.agent, self.envs, self.obs, args.num_steps, rng)
        batch = {name: x.flatten(0, 1) for name, x in ppo_iif.gae(batch, args.gamma, args.gae_lambda).items()}
        times.append(time.process_time())
        batch["scores"] = ppo_iif.score(self.agent, batch, args, filters)
        selection = ppo_iif.select(batch, args, filters)
        times.append(time.process_time())
        ppo_iif.update(self.agent, self.optimizer, batch, selection, args, shuffles)
        return np.diff([*times, time.process_time()]).tolist()


def medians(path):
    """{axis: {value: {stage: seconds}}}"""
    found = {}
    for row in files.read_csv(path):
        found.setdefault(row["axis"], {}).setdefault(int(row["value"]), []).append([float(row[stage]) for stage in STAGES])
    return {
        axis: {value: dict(zip(STAGES, map(median, zip(*rows)))) for value, rows in sorted(values.items())}
        for axis, values in found.items()
    }


def table(path=files.RESULTS / "cost" / "scaling.csv"):
    """Milliseconds of each stage, and by which power they grow over the upper half of the points, as Markdown."""
    rows = []
    for axis, values in medians(path).items():
        ends = list(values)[len(values) // 2], list(values)[-1]
        for stage in STAGES:
            power = np.log(values[ends[1]][stage] / values[ends[0]][stage]) / np.log(ends[1] / ends[0])
            cells = ", ".join(f"{1e3 * s[stage]:.3g}" for s in values.values())
            rows.append([axis, ", ".join(map(str, values)), stage, cells, f"{power:.2f}"])
    return files.table(["what grows", "values", "stage", "CPU ms", "power, upper half"], rows, left=4)


def draw(path):
    plt, found = files.pyplot(), medians(path)
    fig, axes = plt.subplots(1, len(found), figsize=(11, 3.4), dpi=110, sharey=True)
    for ax, (axis, values) in zip(axes, found.items()):
        x = np.array(list(values))
        for stage in STAGES:
            ax.plot(x, [1e3 * s[stage] for s in values.values()], "o-", label=stage, ms=4)
        last = 1e3 * list(values.values())[-1]["update"]
        ax.plot(x, last * x / x[-1], ":", color="grey", label="in proportion")
        ax.set(xscale="log", yscale="log", xlabel={"records": "records of a round"}.get(axis, axis), xticks=x, xticklabels=x)
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("CPU ms a round")
    axes[0].legend(frameon=False)
    fig.tight_layout()
    files.save_small(fig, path.with_suffix(".png"))


if __name__ == "__main__":
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    points = {(axis, value): Point(axis, value) for axis, values in AXES.items() for value in values}
    rows = []
    for repeat in range(args.repeats + 1):
        for (axis, value), point in points.items():
            seconds = point.round(repeat)
            if repeat:  # the first round is a warm-up
                rows.append([axis, value, repeat, *seconds])
    files.write_csv(args.output, COLUMNS, rows)
    draw(args.output)
    print(table(args.output))
