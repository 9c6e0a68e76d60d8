"""Environments that only benchmarks need; `--env-id benchmarks.variants.envs:NAME` registers them."""

import gymnasium as gym


class TruncationTerminates(gym.Wrapper):
    """Counts a time limit as the end of the future, as CleanRL's scripts do."""

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated or truncated, False, info


def half_cheetah_terminating(**kwargs):
    return TruncationTerminates(gym.make("HalfCheetah-v5", **kwargs))


gym.register("HalfCheetahTerminating-v5", entry_point=half_cheetah_terminating)
