"""Environments in which every step can be told from every other, for the tests: `--env-id toy_envs:Toy-v0`."""

import gymnasium as gym
import numpy as np


class Toy(gym.Env):
    """Episodes whose lengths, ends and rewards are written down beforehand, whatever the actions.

    lengths, ends: of the first, second, ... episode since the environment was made, over and over; an end is "terminated" or
        "truncated". With by_seed, an episode's length is instead chosen among `lengths` by the seed that it was reset with.
    rewards: of the first, second, ... step since the environment was made, over and over; None: the number of the step, from
    1. bad_reward, bad_obs: (number, value) of one step that has this reward, or shows this mark.

    The observation's mark is 10 * episode + steps taken in it, both from 0: the first episode shows 0, 1, 2, ..., the second
    10, 11, ..., the observation after the last step included.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, lengths=(4,), ends=("terminated",), rewards=(1.0,), by_seed=False, bad_reward=(0, 0), bad_obs=(-1, 0)):
        self.lengths, self.ends, self.rewards, self.by_seed = lengths, ends, rewards, by_seed
        self.bad_reward, self.bad_obs = bad_reward, bad_obs
        self.episode, self.steps = -1, 0
        self.begun, self.finished = [], []  # lengths of episodes

    def show(self, mark):
        return np.array([mark, 1, 0], dtype=np.float32)

    def observe(self):
        return self.show(self.bad_obs[1] if self.steps == self.bad_obs[0] else 10 * self.episode + self.t)

    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        self.episode, self.t = self.episode + 1, 0
        i = self.np_random.integers(len(self.lengths)) if self.by_seed else self.episode % len(self.lengths)
        self.length = self.lengths[i]
        self.begun.append(self.length)
        return self.observe(), {}

    def step(self, action):
        assert np.isnan(action).any() or self.action_space.contains(action), f"{action} is not in {self.action_space}"
        self.t, self.steps = self.t + 1, self.steps + 1
        reward = self.steps if self.rewards is None else self.rewards[(self.steps - 1) % len(self.rewards)]
        reward = float(self.bad_reward[1] if self.steps == self.bad_reward[0] else reward)
        end = self.ends[self.episode % len(self.ends)] if self.t == self.length else None
        if end:
            self.finished.append(self.length)
        return self.observe(), reward, end == "terminated", end == "truncated", {}


class Shifted(Toy):
    action_space = gym.spaces.Discrete(3, start=5)


class Continuous(Toy):
    action_space = gym.spaces.Box(-1.0, 1.0, (2,))


class MultiDiscrete(Toy):
    action_space = gym.spaces.MultiDiscrete([2, 3])


class Nested(Toy):
    observation_space = gym.spaces.Dict({"mark": Toy.observation_space, "code": gym.spaces.Discrete(3)})

    def show(self, mark):
        return {"mark": super().show(mark), "code": 1}


class Pixels(Toy):
    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)

    def show(self, mark):
        return np.full((210, 160, 3), mark % 256, dtype=np.uint8)


class Invisible(Toy):
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        return None


class Episodic(Toy):
    """Has its own info["episode"]."""

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"episode": self.episode}


def recorded():
    return gym.wrappers.RecordEpisodeStatistics(Toy())


def monitored():
    from stable_baselines3.common.monitor import Monitor

    return Monitor(Toy())


# ---- that are not what they declare, or what Gymnasium asks for


class OldReset(Toy):
    def reset(self, seed=None, options=None):
        return super().reset(seed=seed)[0]


class OldStep(Toy):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, info


class OtherShape(Toy):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0][None], {}


class OtherShapeLater(Toy):
    def step(self, action):
        return np.zeros(4, dtype=np.float32), *super().step(action)[1:]


class OtherType(Toy):
    observation_space = gym.spaces.Box(0, 100, (3,), np.int64)  # shows float32


class ListOfRewards(Toy):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward]), *rest


class WholeNumbers(Toy):
    action_space = gym.spaces.Box(-5, 5, (2,), np.int64)


def grid(**kwargs):
    """A toy that passes for one of MiniGrid; its marks are modulo 256."""
    from minigrid.minigrid_env import MiniGridEnv

    class Grid(Toy, MiniGridEnv):
        observation_space = gym.spaces.Dict({"image": gym.spaces.Box(0, 255, (7, 7, 3), np.uint8)})
        action_space = gym.spaces.Discrete(7)
        agent_view_size, window = 7, None

        def show(self, mark):
            return {"image": np.full((7, 7, 3), mark % 256, dtype=np.uint8)}

    return Grid(**kwargs)


for name, toy in (("Grid", grid), ("Recorded", recorded), ("Monitored", monitored)):
    gym.register(f"{name}-v0", entry_point=toy)
for toy in (Toy, *Toy.__subclasses__()):
    gym.register(f"{toy.__name__}-v0", entry_point=toy)
