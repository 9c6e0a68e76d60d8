# DQN with influence-based filtering: the three parts of iif_core.py in an algorithm that is not on-policy.
#   what is attributed   the squared Bellman error of each transition of the update's batch, drawn from the replay buffer
#   to what              minus the mean squared Bellman error on fresh transitions of the current policy. The replay buffer
#                        cannot stand for them, so they are played for this alone, and counted: charts/environment_steps
#   how                  TracIn: the target's gradient as it is
# python examples/dqn_iif.py --env-id CartPole-v1 --filter influence
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
import tyro
from torch.utils.tensorboard import SummaryWriter

sys.path.append(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
)  # where iif_core.py is, unless it lies beside this file
from iif_core import filter_bottom, influence_scores, log_influence, target_gradient  # noqa: E402


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment"""
    torch_threads: int = 1
    """CPU threads of torch"""

    # Algorithm specific arguments
    env_id: str = "CartPole-v1"
    """the id of the environment: vector observations, discrete actions"""
    total_timesteps: int = 20_000
    """steps of the training environment, the fresh transitions not among them"""
    learning_rate: float = 1e-3
    """the learning rate of the optimizer, Adam"""
    buffer_size: int = 10_000
    """transitions in the replay buffer"""
    gamma: float = 0.99
    """the discount factor gamma"""
    target_network_frequency: int = 500
    """steps between two copies to the target network"""
    batch_size: int = 128
    """transitions of one update"""
    start_e: float = 1.0
    """the probability of a random action at the beginning"""
    end_e: float = 0.05
    """the probability of a random action at the end of the exploration"""
    exploration_fraction: float = 0.5
    """the part of total_timesteps over which it falls"""
    learning_starts: int = 1_000
    """the step of the first update"""
    train_frequency: int = 10
    """steps between two updates"""

    # Influence-based filtering
    filter: Literal["influence", "random", "none"] = "influence"
    """influence, none (plain DQN), or random (as many dropped as influence would, at random)"""
    filter_percent: float = 50.0
    """percentage of the batch's transitions with a negative score to drop, the most negative first"""
    fresh_size: int = 128
    """transitions of the current policy that the target is measured on"""
    fresh_frequency: int = 500
    """steps between two fresh sets"""
    eval_episodes: int = 10
    """episodes of the greedy policy in each of ten evaluations"""


class QNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(int(np.prod(env.observation_space.shape)), 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, int(env.action_space.n)),
        )

    def forward(self, x):
        return self.network(x)


def bellman_errors(q_network, target_network, transitions, gamma):
    """Squared Bellman errors [n] of transitions, a tuple (obs [n, dim], actions [n], rewards [n], next_obs, terminations)."""
    obs, actions, rewards, next_obs, terminations = transitions
    with torch.no_grad():
        td_target = rewards + gamma * target_network(next_obs).max(1).values * (1 - terminations)
    return (td_target - q_network(obs).gather(1, actions.unsqueeze(1)).squeeze(1)).square()


def score(q_network, target_network, transitions, fresh, gamma):
    """Influence [n] of the transitions on minus the mean squared Bellman error of the fresh ones."""
    direction = target_gradient(q_network, lambda: -bellman_errors(q_network, target_network, fresh, gamma).mean())
    return influence_scores(
        q_network,
        lambda inds: bellman_errors(q_network, target_network, tuple(x[inds] for x in transitions), gamma),
        direction,
        len(transitions[1]),
    )


class Player:
    """Epsilon-greedy steps in an environment of its own."""

    def __init__(self, env_id, seed):
        self.env = gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))
        self.rng = np.random.default_rng(seed)
        self.obs, _ = self.env.reset(seed=seed)

    def step(self, q_network, epsilon):
        """One transition (obs, action, reward, next_obs, termination), and the episode's return if that was its end."""
        if self.rng.random() < epsilon:
            action = int(self.rng.integers(self.env.action_space.n))
        else:
            with torch.no_grad():
                action = int(q_network(torch.as_tensor(self.obs, dtype=torch.float32)).argmax())
        obs = self.obs
        self.obs, reward, termination, truncation, info = self.env.step(action)
        transition = (obs, action, reward, self.obs, termination)
        if termination or truncation:
            self.obs, _ = self.env.reset()
            return transition, float(info["episode"]["r"])
        return transition, None


class ReplayBuffer:
    def __init__(self, size, obs_dim):
        shapes = ((obs_dim,), (), (), (obs_dim,), ())
        self.columns = [np.empty((size, *shape), dtype=np.float32) for shape in shapes]
        self.size, self.added = size, 0

    def add(self, transition):
        for column, value in zip(self.columns, transition):
            column[self.added % self.size] = value
        self.added += 1

    def get(self, inds):
        obs, actions, *rest = (torch.from_numpy(column[inds]) for column in self.columns)
        return obs, actions.long(), *rest


def evaluate(q_network, env_id, num_episodes, seed):
    """Mean return of the greedy policy over the first episode of each of num_episodes environments, side by side."""
    envs = gym.vector.SyncVectorEnv([lambda: gym.make(env_id)] * num_episodes)
    obs, _ = envs.reset(seed=seed)
    returns, playing = np.zeros(num_episodes), np.ones(num_episodes, dtype=bool)
    while playing.any():
        with torch.no_grad():
            actions = q_network(torch.as_tensor(obs, dtype=torch.float32)).argmax(1).numpy()
        obs, rewards, terminations, truncations, _ = envs.step(actions)
        returns += rewards * playing
        playing &= ~(terminations | truncations)
    envs.close()
    return returns.mean()


if __name__ == "__main__":
    args = tyro.cli(Args)
    for name in (
        "total_timesteps",
        "batch_size",
        "train_frequency",
        "target_network_frequency",
        "fresh_size",
        "eval_episodes",
    ):
        if getattr(args, name) < 1:
            sys.exit(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.learning_starts < args.fresh_frequency and args.filter != "none":
        sys.exit(
            f"--learning-starts {args.learning_starts}: there is no fresh set before step {args.fresh_frequency}; begin there"
        )
    if not 0 <= args.filter_percent <= 100:
        sys.exit(f"--filter-percent must lie in [0, 100], got {args.filter_percent}")
    torch.set_num_threads(args.torch_threads)
    run_name = f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.filter}__{args.seed}__{int(time.time())}"
    writer = SummaryWriter(f"runs/{run_name}")
    writer.add_text("hyperparameters", "|param|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in asdict(args).items()))

    # TRY NOT TO MODIFY: seeding
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    rng, filter_rng = np.random.default_rng([args.seed, 0]), np.random.default_rng([args.seed, 1])

    # the fresh transitions come from an environment of their own, and each random stream serves one purpose: until the first
    # dropped record, every arm is the same run
    player, fresh_player = Player(args.env_id, args.seed), Player(args.env_id, args.seed + 10_000)
    q_network, target_network = QNetwork(player.env), QNetwork(player.env)
    target_network.load_state_dict(q_network.state_dict())
    optimizer = optim.Adam(q_network.parameters(), lr=args.learning_rate)
    obs_dim = int(np.prod(player.env.observation_space.shape))
    buffer, fresh, fresh_steps = ReplayBuffer(args.buffer_size, obs_dim), None, 0

    # TRY NOT TO MODIFY: start the game
    for global_step in range(1, args.total_timesteps + 1):
        decayed = (global_step - 1) / (args.exploration_fraction * args.total_timesteps)
        epsilon = max(args.end_e, args.start_e + (args.end_e - args.start_e) * decayed)
        transition, episodic_return = player.step(q_network, epsilon)
        buffer.add(transition)
        if episodic_return is not None:
            writer.add_scalar("charts/episodic_return", episodic_return, global_step)

        if args.filter != "none" and global_step >= args.learning_starts and global_step % args.fresh_frequency == 0:
            fresh_buffer = ReplayBuffer(args.fresh_size, obs_dim)
            for _ in range(args.fresh_size):
                fresh_buffer.add(fresh_player.step(q_network, epsilon)[0])
            fresh, fresh_steps = fresh_buffer.get(np.arange(args.fresh_size)), fresh_steps + args.fresh_size

        # ALGO LOGIC: training
        if global_step >= args.learning_starts and global_step % args.train_frequency == 0:
            transitions = buffer.get(rng.integers(min(buffer.added, args.buffer_size), size=args.batch_size))
            kept = torch.arange(args.batch_size)
            if fresh:
                scores = score(q_network, target_network, transitions, fresh, args.gamma)
                kept = filter_bottom(scores, args.filter_percent)
                if args.filter == "random":
                    kept = torch.from_numpy(filter_rng.permutation(args.batch_size)[: len(kept)])
            if len(kept):
                loss = bellman_errors(q_network, target_network, tuple(x[kept] for x in transitions), args.gamma).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if global_step % 1000 == 0:
                    writer.add_scalar("losses/td_loss", loss.item(), global_step)
                    if fresh:
                        log_influence(writer, scores, kept, global_step)

        if global_step % args.target_network_frequency == 0:
            target_network.load_state_dict(q_network.state_dict())
        if global_step % max(args.total_timesteps // 10, 1) == 0:
            mean_return = evaluate(q_network, args.env_id, args.eval_episodes, seed=args.seed + 20_000)
            print(f"global_step={global_step}, environment_steps={global_step + fresh_steps}, eval_return={mean_return:.1f}")
            writer.add_scalar("eval/episodic_return", mean_return, global_step)
            writer.add_scalar("charts/environment_steps", global_step + fresh_steps, global_step)
    writer.close()
