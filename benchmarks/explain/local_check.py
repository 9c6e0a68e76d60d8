"""How far a score predicts what dropping its record does: `python -m benchmarks.explain.local_check RUN --round 5`.

One SGD step on (1/n) * sum of the kept records' policy losses, n the size of the round and the advantages normalised as
before whatever is kept, moves the parameters by lr/n * sum of grad(-L_i). So without a set S of records f_return ends up, to
first order,

    predicted(S) = - lr/n * sum of the scores of S

away from where it ends up with all. Here the differences are measured, in float64, for random sets S: after one step, at
several learning rates, and along the minibatch steps of the round's update, in its order, with the records of S left out of
their minibatches' sums. There predicted(S) is the sum, over the minibatches so far, of - lr/(its size) * the sum of the scores
of its records in S. The value loss and Adam have no part in it. Writes RUN/explain/round_00000K_local.csv and .png.
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch
import tyro

from benchmarks import files
from benchmarks.explain import snapshots
from benchmarks.explain.snapshots import save_figure, write_csv
from iif_core import return_influence


@dataclass
class Args:
    run: tyro.conf.Positional[str]
    """the folder of a run"""
    round: int
    """which of its saved rounds"""
    sets: int = 50
    """how many random sets of records to leave out"""
    percent: float = 12.5
    """percentage of the round's records in each set"""
    learning_rates: tuple[float, ...] = ()
    """those to try (default: the run's, times 0.001, ..., 1000 for one step and 0.1, 1, 10 along the update)"""
    any_version: bool = False
    """open the snapshot also where the environment's packages have other versions"""
    out: str | None = None
    """the folder to write to (default: RUN/explain/)"""


class Local:
    """A round in float64: f_return, the losses of its records with their advantages normalised once, and their scores."""

    def __init__(self, snapshot, seed=0):
        self.args, self.agent = snapshot.args, snapshot.agent().double()
        batch = {name: snapshot.batch[name].double() for name in ("obs", "advantages")}
        # Atari's network divides bytes by 255 on their way to float, and takes other numbers as they are.
        self.obs = batch["obs"] / 255 if hasattr(self.agent, "scale") else batch["obs"]
        actions = snapshot.batch["actions"]
        self.actions, self.advantages = actions.double() if actions.is_floating_point() else actions, batch["advantages"]
        self.n = len(self.advantages)
        # as the script's score normalises them: in minibatches of a shuffle, or over the whole round
        inds = torch.randperm(self.n, generator=torch.Generator().manual_seed(seed))
        size = self.n if "continuous" in snapshot.script.SCRIPT else self.args.minibatch_size
        self.normalized = self.advantages.clone()
        if self.args.norm_adv and size > 1:
            for part in inds.split(size):
                a = self.advantages[part]
                self.normalized[part] = (a - a.mean()) / (a.std() + 1e-8)
        self.theta = [p.detach().clone() for p in self.agent.parameters()]
        with torch.no_grad():
            self.logprobs = self.logprob(torch.arange(self.n))
        how = {"minibatch_size": size if self.args.norm_adv else 1, "inds": inds, "chunk_size": 256}
        self.scores = return_influence(self.agent, self.logprob, self.advantages, **how)

    def logprob(self, inds):
        return self.agent.get_logprob(self.obs[inds], self.actions[inds])

    @torch.no_grad()
    def f_return(self):
        return (self.advantages * self.logprob(torch.arange(self.n))).mean().item()

    def losses(self, inds):
        """PPO's policy losses of records at the current parameters."""
        ratio = (self.logprob(inds) - self.logprobs[inds]).exp()
        clipped = ratio.clamp(1 - self.args.clip_coef, 1 + self.args.clip_coef)
        return torch.max(-self.normalized[inds] * ratio, -self.normalized[inds] * clipped)

    def reset(self):
        with torch.no_grad():
            for p, start in zip(self.agent.parameters(), self.theta):
                p.copy_(start)

    def step(self, inds, weights, lr):
        """One SGD step on the mean over `inds` of weights * losses: with weight 0 a record is left out, and still counted."""
        loss = (weights[inds] * self.losses(inds)).mean()
        parameters = list(self.agent.parameters())
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():
            for p, grad in zip(parameters, grads):
                if grad is not None:
                    p.sub_(lr * grad)

    def follow(self, steps, weights, lr, marks):
        """f_return after each of the numbers of steps in `marks`, along `steps`, a list of minibatches."""
        self.reset()
        values = []
        for count, inds in enumerate(steps[: max(marks)], start=1):
            self.step(inds, weights, lr)
            if count in marks:
                values.append(self.f_return())
        self.reset()
        return np.array(values)


def differences(local, sets, steps, lr, marks):
    """Predicted and measured differences of f_return, [len(sets), len(marks)] each, from leaving out each of the `sets`."""
    share = torch.zeros(len(marks), local.n, dtype=torch.double)  # lr times each record's part in the means of the first steps
    so_far = torch.zeros(local.n, dtype=torch.double)
    for count, inds in enumerate(steps[: max(marks)], start=1):
        so_far.index_add_(0, inds, torch.full((len(inds),), lr / len(inds), dtype=torch.double))
        if count in marks:
            share[marks.index(count)] = so_far
    predicted = np.array([[-(row[s] * local.scores[s]).sum().item() for row in share] for s in sets])
    whole = local.follow(steps, torch.ones(local.n, dtype=torch.double), lr, marks)
    measured = []
    for s in files.progress(sets, "set"):
        weights = torch.ones(local.n, dtype=torch.double)
        weights[s] = 0
        measured.append(local.follow(steps, weights, lr, marks) - whole)
    return predicted, np.array(measured)


def agreement(predicted, measured):
    """Slope of measured against predicted differences (least squares through zero), and their correlation."""
    slope = (predicted * measured).sum() / (predicted**2).sum()
    return slope, np.corrcoef(predicted, measured)[0, 1] if len(predicted) > 1 else np.nan


def random_sets(n, size, number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(n, generator=generator)[:size] for _ in range(number)]


def plot(path, title, scatter, rows):
    plt = files.pyplot()
    fig, axes = plt.subplots(1, 3, figsize=(13, 3.7), dpi=110)
    lr, predicted, measured = scatter
    ends = [min(predicted.min(), measured.min()), max(predicted.max(), measured.max())]
    axes[0].plot(ends, ends, color="black", lw=0.8)
    axes[0].scatter(predicted, measured, s=8)
    axes[0].set(xlabel="predicted: -lr/n * sum of scores", ylabel="measured difference of f_return")
    axes[0].set_title(f"one step on the whole round, lr {lr:.0e}: slope {agreement(predicted, measured)[0]:.4f}", fontsize=9)
    one = [row for row in rows if row[0] == "round"]
    for label, error in (("|slope - 1|", lambda row: abs(row[3] - 1)), ("1 - correlation", lambda row: 1 - row[4])):
        axes[1].loglog([row[1] for row in one], [max(error(row), 1e-16) for row in one], "o-", ms=4, label=label)
    axes[1].set(xlabel="learning rate")
    axes[1].set_title("one step on the whole round", fontsize=9)
    axes[1].legend(frameon=False, fontsize=8)
    for lr in dict.fromkeys(row[1] for row in rows if row[0] == "minibatches"):
        path_rows = [row for row in rows if row[0] == "minibatches" and row[1] == lr]
        axes[2].semilogx([row[2] for row in path_rows], [row[4] for row in path_rows], "o-", ms=3, label=f"lr {lr:.0e}")
    axes[2].set(xlabel="minibatch steps of the round's update", ylabel="correlation", ylim=(None, 1.05))
    axes[2].set_title("along the update", fontsize=9)
    axes[2].legend(frameon=False, fontsize=8)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    fig.suptitle(title)
    fig.tight_layout()
    save_figure(fig, path)
    plt.close(fig)


def table(folder):
    """Markdown, from every CSV in the folders FOLDER/RUN/: the slope of a single step and the correlation along the update."""
    lines = []
    for path in sorted(folder.glob("*/round_*_local.csv")):
        rows = files.read_csv(path)
        for one in (row for row in rows if row["step_on"] == "round"):
            along = [r for r in rows if r["step_on"] == "minibatches" and r["learning_rate"] == one["learning_rate"]]
            end = (
                [along[-1]["steps"], *(f"{float(along[-1][c]):.3f}" for c in ("slope", "correlation"))] if along else [""] * 3
            )
            cells = [path.parent.name.replace("_", " "), int(path.name.split("_")[1]), f"{float(one['learning_rate']):.0e}"]
            lines.append([*cells, *(f"{float(one[c]):.4f}" for c in ("slope", "correlation")), *end])
    header = "run|round|learning rate|one step: slope|correlation|steps of the update|slope after them|correlation"
    return files.table(header.split("|"), lines)


def main(args):
    snapshot = snapshots.load(args.run, args.round, args.any_version)
    out, name = snapshots.folder(args.run, args.out), f"round_{args.round:06d}_local"
    local = Local(snapshot)
    size = max(1, int(args.percent * local.n / 100))
    sets = random_sets(local.n, size, args.sets)
    lrs = args.learning_rates or [snapshot.args.learning_rate * 10.0**e for e in range(-3, 4)]
    rows, scatter = [], None
    for lr in files.progress(lrs, "rate"):
        predicted, measured = (x[:, 0] for x in differences(local, sets, [torch.arange(local.n)], lr, [1]))
        rows.append(("round", lr, 1, *map(float, agreement(predicted, measured)), args.sets, size))
        scatter = scatter or (lr, predicted, measured)
        files.say("one step, lr {:.1e}: slope {:.4f}, correlation {:.4f}".format(*rows[-1][1:2], *rows[-1][3:5]))
    # the order of the round's update, all records in it
    _, generator, _ = snapshot.script.random_streams(snapshot.args.seed, args.round)
    epochs = range(snapshot.args.update_epochs)
    steps = [inds for _ in epochs for inds in snapshot.script.minibatches(torch.arange(local.n), snapshot.args, generator)]
    marks = sorted({min(2**e, len(steps)) for e in range(len(steps).bit_length() + 1)})
    for lr in files.progress(args.learning_rates or lrs[2:5], "rate"):
        predicted, measured = differences(local, sets, steps, lr, marks)
        for i, mark in enumerate(marks):
            rows.append(("minibatches", lr, mark, *map(float, agreement(predicted[:, i], measured[:, i])), args.sets, size))
        files.say("{} steps, lr {:.1e}: slope {:.4f}, correlation {:.4f}".format(mark, lr, *rows[-1][3:5]))
    write_csv(out / f"{name}.csv", ("step_on", "learning_rate", "steps", "slope", "correlation", "sets", "set_size"), rows)
    title = f"{snapshot.args.env_id}, seed {snapshot.args.seed}, round {args.round}: {args.sets} random sets of {size} records"
    plot(out / f"{name}.png", title, scatter, rows)


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.sets < 2 or not 0 < args.percent < 100 or any(not lr > 0 for lr in args.learning_rates):
        sys.exit("--sets must be at least 2, --percent lie between 0 and 100, --learning-rates be positive")
    main(args)
