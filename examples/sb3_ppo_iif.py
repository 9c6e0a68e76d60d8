# stable-baselines3's PPO with influence-based filtering. It needs iif_core.py and nothing else of its project.
# python examples/sb3_ppo_iif.py --env-id LunarLander-v3
import os
import sys
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # where iif_core.py is, unless beside this file
from iif_core import filter_bottom, return_influence  # noqa: E402


class FilteredBuffer(RolloutBuffer):
    """Gives minibatches of the records `kept` only, indices in the buffer's own order, environment after environment. All are
    of batch_size: a trailing partial one is dropped, unless it is all there is."""

    def column(self, name):
        """One column of the round that was just collected, in that order, as a tensor."""
        return self.to_torch(self.swap_and_flatten(getattr(self, name)))

    def get(self, batch_size=None):
        if len(self.kept) == self.buffer_size * self.n_envs:
            yield from super().get(batch_size)
            return
        if not self.generator_ready:
            next(super().get())  # puts the columns into that order, once a round
        order = np.random.permutation(self.kept)
        size = batch_size or len(order)
        for start in range(0, max(len(order) - size, 0) + 1, size):
            yield self._get_samples(order[start : start + size])


class PPOIIF(PPO):
    """PPO that drops filter_percent % of the records with a negative influence from each round, before its epochs."""

    def __init__(self, *args, filter_percent=12.5, **kwargs):
        self.filter_percent = filter_percent
        super().__init__(*args, rollout_buffer_class=FilteredBuffer, **kwargs)
        self.filter_rng = torch.Generator().manual_seed(self.seed or 0)

    def score(self):
        """Influence [n] of the records on their own round's return, at the policy that collected them."""
        obs, actions, advantages = map(self.rollout_buffer.column, ("observations", "actions", "advantages"))
        if isinstance(self.action_space, spaces.Discrete):
            actions = actions.long().flatten()
        return return_influence(
            self.policy,
            lambda inds: self.policy.evaluate_actions(obs[inds], actions[inds])[1],
            advantages.flatten(),
            minibatch_size=self.batch_size if self.normalize_advantage else 1,
            inds=torch.randperm(len(actions), generator=self.filter_rng),
        )

    def train(self):
        scores = self.score()
        kept = filter_bottom(scores, self.filter_percent).cpu()
        self.logger.record("influence/negative_fraction", (scores < 0).float().mean().item())
        self.logger.record("influence/records_kept", len(kept))
        self.rollout_buffer.kept = kept.numpy()
        if len(kept):
            super().train()

    def _excluded_save_params(self):
        return super()._excluded_save_params() + ["filter_rng"]  # a generator cannot be pickled


@dataclass
class Args:
    env_id: str = "LunarLander-v3"
    """the id of the environment"""
    total_timesteps: int = 204_800
    """total timesteps of the experiment"""
    seed: int = 1
    """seed of the experiment"""
    learning_rate: float = 3e-4
    """the learning rate of the optimizer, Adam"""
    filter_percent: float = 12.5
    """percentage of the records with a negative score to drop; 0 is stable-baselines3's own PPO"""


if __name__ == "__main__":
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    options = {"seed": args.seed, "learning_rate": args.learning_rate, "device": "cpu", "verbose": 1}
    model = PPOIIF("MlpPolicy", args.env_id, filter_percent=args.filter_percent, **options)
    model.learn(args.total_timesteps)
