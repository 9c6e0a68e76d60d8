"""Other rules for `--filter module:function`, as the paper's appendices describe them: heuristics on the advantages (B.4) and
weighting by the TD error (B.5). For one environment (`--num-envs 1`), whose round is in the order of time.

A rule gets the round, a dict of flat tensors [N], and returns the indices of the records to keep, or a sampling weight each.
"""

from functools import partial

import numpy as np
import torch

GAMMA = 0.99  # that of the scripts


def monte_carlo_advantages(batch, gamma=GAMMA):
    """Q(s, a) - V(s) [N] from the returns of the round itself.

    The return of a record is the discounted sum of the rewards from it to the end of its episode; an episode that the round's
    end cuts off has no future after it. Q is the mean return of the records with the same observation and action, V that
    of those with the same observation.
    """
    rewards, dones = batch["rewards"].double().cpu().numpy(), batch["dones"].cpu().numpy()
    returns, future = np.empty_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        future = rewards[t] + gamma * future * (not dones[t])
        returns[t] = future
    obs = batch["obs"].cpu().numpy().reshape(len(rewards), -1)
    _, state = np.unique(obs, axis=0, return_inverse=True)
    actions = batch["actions"].cpu().numpy().reshape(len(rewards), -1)
    _, pair = np.unique(np.column_stack([state, actions]), axis=0, return_inverse=True)

    def mean_in(group):
        return (np.bincount(group, returns) / np.bincount(group))[group]

    return torch.from_numpy(mean_in(pair) - mean_in(state)).round(decimals=12)  # so that equal means differ by zero


def keep_all_but(lowest_first, percent, n):
    """Indices to keep of n records after the first `percent` of the candidates, floor(percent * their number / 100), go."""
    dropped = lowest_first[: int(percent * len(lowest_first) / 100)]
    kept = torch.ones(n, dtype=torch.bool)
    kept[dropped] = False
    return kept.nonzero().flatten()


def h1(batch, percent):
    """Of the records whose estimated and Monte-Carlo advantage differ in sign, drop those where they are furthest apart."""
    true, estimate = monte_carlo_advantages(batch), batch["advantages"].double().cpu()
    differ = (true.sign() != estimate.sign()).nonzero().flatten()
    order = (true - estimate).abs()[differ].argsort(descending=True, stable=True)
    return keep_all_but(differ[order], percent, len(true))


def h2(batch, percent):
    """Of the records whose estimated and Monte-Carlo advantage differ in sign, drop those with the most negative product."""
    true, estimate = monte_carlo_advantages(batch), batch["advantages"].double().cpu()
    differ = (true.sign() != estimate.sign()).nonzero().flatten()
    order = (true * estimate)[differ].argsort(stable=True)
    return keep_all_but(differ[order], percent, len(true))


def td_error(batch, alpha=0.6, gamma=GAMMA):
    """Weights of prioritised replay by rank: (1 / rank of |delta|) ** alpha, delta = r + gamma V(s') - V(s)."""
    delta = batch["rewards"] + gamma * batch["next_values"] * ~batch["terminations"] - batch["values"]
    order = delta.abs().cpu().argsort(descending=True, stable=True)
    weights = torch.empty(len(order))
    weights[order] = torch.arange(1, len(order) + 1).float() ** -alpha
    return weights


h1_50, h2_50 = partial(h1, percent=50), partial(h2, percent=50)
h1_12_5, h2_12_5 = partial(h1, percent=12.5), partial(h2, percent=12.5)
