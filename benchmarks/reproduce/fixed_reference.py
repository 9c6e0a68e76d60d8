"""Filtering against a fixed reference, one round at a time: `python -m benchmarks.reproduce.fixed_reference`.

The authors' rebuttal: when records are scored against the rollout of a well-trained policy instead of the round itself,
dropping the harmful ones still raises that target function, but not the return. For each seed: plain PPO trains an expert,
whose rollout is the fixed reference set. Then, in every round of a second plain PPO run with another seed, three updates start
from the same theta(k) with the same shuffling: on the whole round, without the records of negative influence on the round's own
return, and without those of negative influence on the reference. What is compared is the target function after the update, and
the return (EPISODES sampled episodes, the same seeds for all three). The run itself goes on with the whole round. Writes one
CSV a seed.
"""

import copy
import shlex
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
import tyro

import ppo_iif
from benchmarks.files import RESULTS, pyplot, read_csv, save_small, table
from benchmarks.reproduce import metrics, pages
from benchmarks.reproduce.entries import FIRST_SEED, Run
from benchmarks.reproduce.suites import ENVIRONMENTS
from benchmarks.run import code, now, save
from iif_core import filter_bottom, influence_scores, target_gradient

SUITE = "fixed_reference"
CHOSEN = ("FrozenLake", "Acrobot")
EPISODES = 100
SEEDS = tuple(range(FIRST_SEED, FIRST_SEED + 5))
REFERENCES = ("own", "fixed")
COLUMNS = "environment seed round reference dropped target_change return_change".split()


@dataclass
class Args:
    only: tuple[str, ...] = CHOSEN
    """environments"""
    seeds: tuple[int, ...] = SEEDS
    """seeds of the runs; their experts have 1000 more"""


class Training:
    """Plain PPO, round by round, out of the stages of ppo_iif.py."""

    def __init__(self, environment, seed):
        script, arguments, self.rounds, _ = ENVIRONMENTS[environment]
        self.args = replace(
            tyro.cli(ppo_iif.Args, args=shlex.split(arguments)), seed=seed, eval_episodes=EPISODES, filter="none"
        )
        torch.manual_seed(seed)
        self.envs = ppo_iif.make_envs(self.args, "")
        self.eval_envs = ppo_iif.make_eval_envs(self.args)
        self.agent = ppo_iif.Agent(self.envs)
        self.rng = np.random.default_rng(ppo_iif.derive_seed(seed, 0))
        self.generator = torch.Generator().manual_seed(ppo_iif.derive_seed(seed, 1))
        self.next_obs, _ = self.envs.reset(seed=seed)

    def collect(self):
        """One round with the current policy, flat."""
        args = self.args
        batch, _, self.next_obs = ppo_iif.rollout(self.agent, self.envs, self.next_obs, args.num_steps, self.rng)
        return {name: x.flatten(0, 1) for name, x in ppo_iif.gae(batch, args.gamma, args.gae_lambda).items()}

    def updated(self, batch, kept, generator):
        """A copy of the agent after PPO's epochs on the records kept."""
        agent = copy.deepcopy(self.agent)
        optimizer = torch.optim.SGD(agent.parameters(), lr=self.args.learning_rate, fused=True)
        ppo_iif.update(agent, optimizer, batch, kept, self.args, generator)
        return agent

    def train(self, batch):
        self.agent = self.updated(batch, torch.arange(len(batch["obs"])), self.generator)

    def evaluate(self, agent, k):
        return ppo_iif.evaluate(agent, self.eval_envs, EPISODES, ppo_iif.derive_seed(self.args.seed, 3, k)).mean()


def target(agent, reference):
    """f_return of a set of records: the mean of advantage * log pi(a|s)."""
    return (reference["advantages"] * agent.get_logprob(reference["obs"], reference["actions"])).mean()


def influence_on(reference, training, batch, generator):
    """Influence [N] of a round's records on the target function of a set of records."""
    agent, args = training.agent, training.args
    # Normalised in the random minibatches that training would use.
    inds = torch.randperm(len(batch["obs"]), generator=generator)
    normalised = torch.empty_like(batch["advantages"])
    for part in inds.split(args.minibatch_size):
        a = batch["advantages"][part]
        normalised[part] = (a - a.mean()) / (a.std() + 1e-8)
    direction = target_gradient(agent, lambda: target(agent, reference))

    def losses(i):
        return -normalised[i] * agent.get_logprob(batch["obs"][i], batch["actions"][i])

    return influence_scores(agent, losses, direction, len(inds))


def runs(only=CHOSEN, seeds=SEEDS):
    table = [(seed, environment) for seed in seeds for environment in only]
    script = "benchmarks/reproduce/fixed_reference"
    return [Run(SUITE, e, "reference", seed, ENVIRONMENTS[e][2], script, f"--only {e} --seeds {seed}") for seed, e in table]


def execute(environment, seed, expert_seed, rounds=None):
    """The rows of one seed."""
    expert = Training(environment, expert_seed)
    for _ in range(rounds or expert.rounds):
        expert.train(expert.collect())
    reference = expert.collect()
    training = Training(environment, seed)
    rows = []
    for k in range(rounds or training.rounds):
        batch = training.collect()
        shuffle_seed = ppo_iif.derive_seed(seed, 1, k)
        updated = {}
        for name, of in (("whole", None), ("own", batch), ("fixed", reference)):
            kept = torch.arange(len(batch["obs"]))
            if of is not None:
                generator = torch.Generator().manual_seed(ppo_iif.derive_seed(seed, 2, k))
                kept = filter_bottom(influence_on(of, training, batch, generator), 100)
            agent = training.updated(batch, kept, torch.Generator().manual_seed(shuffle_seed))
            updated[name] = agent, training.evaluate(agent, k), len(batch["obs"]) - len(kept)
        whole, whole_return, _ = updated["whole"]
        for name, of in zip(REFERENCES, (batch, reference)):
            agent, mean_return, dropped = updated[name]
            with torch.no_grad():
                change = (target(agent, of) - target(whole, of)).item()
            rows.append([environment, seed, k, name, dropped, f"{change:.5g}", f"{mean_return - whole_return:.5g}"])
        training.agent = whole
    return rows


def load(results):
    """{environment: {reference: (change of the target, change of the return), each [seeds, rounds]}}."""
    data = {}
    for path in sorted((results / SUITE).glob("*.csv")):
        rows = read_csv(path) if path.name != "runs.csv" else []
        for name in REFERENCES if rows else ():
            mine = [row for row in rows if row["reference"] == name]
            changes = [[float(row[column]) for row in mine] for column in ("target_change", "return_change")]
            data.setdefault(mine[0]["environment"], {}).setdefault(name, []).append(changes)
    return {e: {name: np.array(x).transpose(1, 0, 2) for name, x in found.items()} for e, found in data.items()}


def body(results):
    """The Markdown of its page: what was run, and means over the rounds, with 95% intervals over seeds."""
    data = load(results)
    if not data:
        return "Not yet run."
    rows = []
    for environment, found in data.items():
        for name, (of_target, of_return) in found.items():
            scored = "the round itself" if name == "own" else "the fixed reference"
            gain = pages.interval(of_return.mean(1), 3 if environment == "FrozenLake" else 1)
            rows.append([f"{environment}, {scored}", len(of_target), f"{100 * (of_target > 0).mean():.0f}%", gain])
    header = ["records scored against", "seeds", "rounds in which the target rises", "change of the return [95%]"]
    text = "*Without the records of negative influence, minus the whole round; mean and 95% interval over seeds.*"
    image = f"![Change by filtering one round]({SUITE}.png)"
    made = pages.made(SUITE, {run.name for run in runs()}, results)
    return "\n\n".join(filter(None, [made, image, text, table(header, rows)]))


def draw(results):
    plt = pyplot()
    data = load(results)
    figure, axes = plt.subplots(2, len(data), figsize=(4 * len(data), 4.6), dpi=90, squeeze=False, sharex="col")
    for column, (environment, found) in zip(axes.T, data.items()):
        for name, changes in found.items():
            for ax, values in zip(column, changes):
                mean, _, half = np.array([metrics.t_interval(x) for x in values.T]).T
                (line,) = ax.plot(mean, lw=1.2, label={"own": "the round itself", "fixed": "fixed reference"}[name])
                ax.fill_between(np.arange(len(mean)), mean - half, mean + half, color=line.get_color(), alpha=0.15, lw=0)
        for ax, label in zip(column, ("target function", "return")):
            ax.axhline(0, color="k", lw=0.6, ls="--")
            ax.set_ylabel(f"change of the {label}", fontsize=8)
            ax.tick_params(labelsize=8)
            ax.spines[["top", "right"]].set_visible(False)
        column[0].set_title(environment, fontsize=9)
        column[1].set_xlabel("round k", fontsize=9)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save_small(figure, results / SUITE / f"{SUITE}.png")
    plt.close(figure)


if __name__ == "__main__":
    args = tyro.cli(Args)
    if set(args.only) - set(CHOSEN):
        sys.exit(f"--only {(set(args.only) - set(CHOSEN)).pop()}: not one of {', '.join(CHOSEN)}")
    torch.set_num_threads(1)
    for run in runs(args.only, args.seeds):
        if not (RESULTS / SUITE / f"{run.name}.csv").exists():
            print(run.name, flush=True)
            record = {"run": run.name, "command": run.command, "rounds": run.rounds, **code(run.script)}
            start = time.process_time()
            rows = execute(run.environment, run.seed, expert_seed=run.seed + 1000)
            record |= {"cpu_seconds": f"{time.process_time() - start:.1f}", "finished": now()}
            save(RESULTS, run, rows, record, COLUMNS)
