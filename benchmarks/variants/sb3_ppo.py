"""stable-baselines3's own PPO with the arguments, evaluation and logged names of ppo_iif.py: is plain PPO there right?

Everything but the loop below is stable-baselines3's: environments, network, rollout, advantages, update, evaluation. On MiniGrid
the first layers are the paper's, handed to stable-baselines3 as a features extractor.
"""

import json
import time
from dataclasses import dataclass
from typing import Literal

import gymnasium as gym
import minigrid
import numpy as np
import torch
import torch.nn as nn
import tyro
from minigrid.wrappers import ImgObsWrapper
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch.utils.tensorboard import SummaryWriter

from ppo_iif import derive_seed


@dataclass
class Args:
    """Those of ppo_iif.py and ppo_iif_minigrid.py that have a counterpart, with their meanings and ppo_iif.py's defaults."""

    exp_name: str = "sb3_ppo"
    seed: int = 1
    cuda: bool = True
    env_id: str = "LunarLander-v3"
    env_kwargs: str = "{}"
    obs_scale: Literal[255] = 255  # stable-baselines3 divides images by no other number
    total_timesteps: int = 204_800
    learning_rate: float = 5e-3
    optimizer: Literal["adam", "sgd"] = "sgd"
    num_envs: int = 1
    num_steps: int = 2048
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int = 32
    update_epochs: int = 10
    clip_coef: float = 0.2
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.0
    eval_episodes: int = 20


class MiniGridFeatures(BaseFeaturesExtractor):
    """The layers of ppo_iif_minigrid.py's network that actor and critic share."""

    def __init__(self, space):
        super().__init__(space, 64)
        channels, width, height = space.shape
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 3),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * (width - 4) * (height - 4), 64),
            nn.ReLU(),
        )

    def forward(self, x):
        return self.layers(x)


class Log(BaseCallback):
    """Evaluates theta(k) before every round, and logs what ppo_iif.py logs."""

    def __init__(self, writer, eval_envs, episodes):
        super().__init__()
        self.writer, self.eval_envs, self.episodes, self.round = writer, eval_envs, episodes, 0

    def _on_step(self):
        return True

    def _on_rollout_start(self):
        if self.round:
            self.log_round()
        self.evaluate()
        self.times = [time.perf_counter()]

    def _on_rollout_end(self):
        self.times.append(time.perf_counter())
        self.round += 1

    def _on_training_end(self):
        self.log_round()
        self.evaluate()

    def log_round(self):
        self.times.append(time.perf_counter())
        for name, seconds in zip(("time/rollout", "time/update"), np.diff(self.times)):
            self.writer.add_scalar(name, seconds, self.num_timesteps)
        self.writer.add_scalar("charts/round", self.round - 1, self.num_timesteps)

    def evaluate(self):
        returns, _ = evaluate_policy(
            self.model, self.eval_envs, self.episodes, deterministic=False, return_episode_rewards=True
        )
        print(f"round={self.round}, eval_episodic_return={np.mean(returns):.3f}")
        self.writer.add_scalar("eval/episodic_return", np.mean(returns), self.num_timesteps)
        self.writer.add_scalar("eval/episodic_return_std", np.std(returns), self.num_timesteps)
        self.writer.flush()


if __name__ == "__main__":
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    writer = SummaryWriter(f"runs/{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns()}")

    gym.register_envs(minigrid)
    on_minigrid = args.env_id.startswith("MiniGrid-")

    def make_env():
        env = gym.make(args.env_id, **json.loads(args.env_kwargs))
        return ImgObsWrapper(env) if on_minigrid else env

    def make_envs(number, seed):
        return make_vec_env(make_env, number, seed=seed % 2**31)

    policy = {"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {}} if args.optimizer == "sgd" else {}
    if on_minigrid:
        policy["features_extractor_class"] = MiniGridFeatures
    model = PPO(
        "CnnPolicy" if on_minigrid else "MlpPolicy",
        make_envs(args.num_envs, args.seed),
        learning_rate=args.learning_rate,
        n_steps=args.num_steps,
        batch_size=args.num_envs * args.num_steps // args.num_minibatches,
        n_epochs=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef,
        max_grad_norm=args.max_grad_norm or float("inf"),
        policy_kwargs=policy,
        seed=args.seed,
        device="cuda" if args.cuda and torch.cuda.is_available() else "cpu",
    )
    eval_envs = make_envs(args.eval_episodes, derive_seed(args.seed, 3))
    model.learn(args.total_timesteps, callback=Log(writer, eval_envs, args.eval_episodes))
    writer.close()
