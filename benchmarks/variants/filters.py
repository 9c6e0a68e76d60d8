"""Other rules for `--filter module:function`: those of the paper's appendices, heuristics on the advantages (B.4) and weighting
by the TD error (B.5); and one that leaves out rounds. For one environment (`--num-envs 1`), whose round is in the order of time.

A rule gets the round, a dict of flat tensors [N], and returns the indices of the records to keep, or a sampling weight each.
"""

from functools import partial

import torch

GAMMA = 0.99  # that of the scripts


def identical(*columns):
    """Group [N] of each record, the same for records with the same values in all columns [N, ...]."""
    groups, columns = {}, [x.cpu().contiguous().numpy() for x in columns]
    return torch.tensor([groups.setdefault(tuple(x.tobytes() for x in row), len(groups)) for row in zip(*columns)])


def mc_advantages(batch, gamma=GAMMA, num_envs=1):
    """Monte-Carlo advantages Q - V [N] of a flat round in time order, from its own returns (paper, section 4).

    The discounted return-to-go of a record begins anew after each done; that of the last episode, which the round's end cuts,
    is not bootstrapped. Q is its mean over identical (s, a), V over identical s.
    """
    rewards, dones = (batch[name].cpu().double().view(-1, num_envs) for name in ("rewards", "dones"))
    returns, carry = torch.empty_like(rewards), torch.zeros(num_envs, dtype=torch.double)
    for t in reversed(range(len(rewards))):
        returns[t] = carry = rewards[t] + gamma * (1 - dones[t]) * carry

    def mean_over(group):
        count = group.bincount()
        return (torch.zeros(len(count), dtype=torch.double).index_add_(0, group, returns.flatten()) / count)[group]

    return mean_over(identical(batch["obs"], batch["actions"])) - mean_over(identical(batch["obs"]))


def keep_all_but(lowest_first, percent, n):
    """Indices to keep of n records after the first `percent` of the candidates, floor(percent * their number / 100), go."""
    dropped = lowest_first[: int(percent * len(lowest_first) / 100)]
    kept = torch.ones(n, dtype=torch.bool)
    kept[dropped] = False
    return kept.nonzero().flatten()


def h1(batch, percent):
    """Of the records whose estimated and Monte-Carlo advantage differ in sign, drop those where they are furthest apart."""
    true, estimate = mc_advantages(batch), batch["advantages"].double().cpu()
    differ = (true.sign() != estimate.sign()).nonzero().flatten()
    order = (true - estimate).abs()[differ].argsort(descending=True, stable=True)
    return keep_all_but(differ[order], percent, len(true))


def h2(batch, percent):
    """Of the records whose estimated and Monte-Carlo advantage differ in sign, drop those with the most negative product."""
    true, estimate = mc_advantages(batch), batch["advantages"].double().cpu()
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


def unless_alike(batch, spread):
    """All records, or none, which leaves the round out, if the returns of its finished episodes are within `spread`.

    (An episode begun in the round before counts with its rewards in this one.)
    """
    episode = batch["dones"].cpu().long().cumsum(0) - batch["dones"].cpu().long()
    returns = torch.zeros(len(episode) + 1).index_add_(0, episode, batch["rewards"].cpu())[: batch["dones"].sum()]
    alike = len(returns) > 1 and returns.max() - returns.min() <= spread
    return torch.arange(0 if alike else len(episode))


unless_alike_0, unless_alike_02 = partial(unless_alike, spread=1e-6), partial(unless_alike, spread=0.02)
h1_50, h2_50 = partial(h1, percent=50), partial(h2, percent=50)
h1_12_5, h2_12_5 = partial(h1, percent=12.5), partial(h2, percent=12.5)
