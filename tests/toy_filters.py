"""Rules for `--filter toy_filters:NAME`, right ones and wrong ones."""

import os
import signal

import torch

seen = []  # the rounds that `first_half` was given
number = 3  # not a rule


def first_half(batch):
    seen.append(batch)
    return torch.arange(len(batch["scores"]) // 2)


def first_half_or_death(batch, rounds=[0]):
    """The process is killed in the round that $DEATH_IN_ROUND names."""
    rounds[0] += 1
    if os.environ.get("DEATH_IN_ROUND") == str(rounds[0] - 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return first_half(batch)


def weights(batch):
    """Nothing of the first half, and three times as much of the last quarter as of the third."""
    n = len(batch["scores"])
    return torch.cat([torch.zeros(n // 2), torch.full((n // 4,), 1.0), torch.full((n - n // 2 - n // 4,), 3.0)])


def nothing(batch):
    return torch.empty(0, dtype=torch.long)


def empty_list(batch):
    return []


def everything(batch):
    return list(range(len(batch["scores"])))


def every_other_round(batch, rounds=[0]):
    rounds[0] += 1
    return everything(batch) if rounds[0] % 2 else nothing(batch)


def one_weight_too_few(batch):
    return torch.ones(len(batch["scores"]) - 1)


def negative_weight(batch):
    return torch.linspace(-1, 1, len(batch["scores"]))


def nan_weight(batch):
    return torch.full((len(batch["scores"]),), float("nan"))


def zero_weights(batch):
    return torch.zeros(len(batch["scores"]))


def mask(batch):
    return batch["scores"] > 0


def number_mask(batch):
    return mask(batch).long()


def bytes_mask(batch):
    return (batch["scores"] > 0).to(torch.uint8)


def one_number(batch):
    return 1.0


def out_of_range(batch):
    return torch.arange(len(batch["scores"])) + 1


def negative_index(batch):
    return torch.tensor([-1])


def two_dimensional(batch):
    return torch.zeros(2, 2, dtype=torch.long)
