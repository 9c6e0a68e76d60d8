"""A plain PPO loop in the shape of CleanRL's ppo.py: what the training scripts' speed is measured against.

Per step: one forward pass of actor and critic with torch.distributions, copies between numpy and torch, and the storage
tensors; then GAE in torch and the epochs over shuffled minibatches with CleanRL's diagnostics. It logs through a SummaryWriter
as CleanRL does. Its environments are the training script's own (for Atari cheaper than CleanRL's, which resizes in colour). It
is a yardstick of speed, not a baseline of returns: truncations count as terminations.
"""

import importlib
import json
import sys
import time

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical
from torch.distributions.normal import Normal
from torch.utils.tensorboard import SummaryWriter


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


def mlp(inputs, outputs, std):
    return nn.Sequential(
        layer_init(nn.Linear(inputs, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, outputs), std=std),
    )


class CategoricalAgent(nn.Module):
    """Actor and critic over features of the observation (none, for vectors)."""

    def get_value(self, x):
        return self.critic(self.features(x))

    def get_action_and_value(self, x, action=None):
        hidden = self.features(x)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


class VectorAgent(CategoricalAgent):
    def __init__(self, envs):
        super().__init__()
        obs_dim = int(np.prod(envs.single_observation_space.shape))
        self.critic = mlp(obs_dim, 1, std=1.0)
        self.actor = mlp(obs_dim, int(envs.single_action_space.n), std=0.01)

    def features(self, x):
        return x


class MinigridAgent(CategoricalAgent):
    def __init__(self, envs):
        super().__init__()
        width, height, channels = envs.single_observation_space.shape
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(channels, 16, 3)),
            nn.ReLU(),
            layer_init(nn.Conv2d(16, 32, 3)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(32 * (width - 4) * (height - 4), 64)),
            nn.ReLU(),
        )
        self.critic = mlp(64, 1, std=1.0)
        self.actor = mlp(64, int(envs.single_action_space.n), std=0.01)

    def features(self, x):
        return self.network(x.permute(0, 3, 1, 2) / 255.0)


class AtariAgent(CategoricalAgent):
    def __init__(self, envs):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, int(envs.single_action_space.n)), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1)

    def features(self, x):
        return self.network(x / 255.0)


class ContinuousAgent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        obs_dim, action_dim = (int(np.prod(s.shape)) for s in (envs.single_observation_space, envs.single_action_space))
        self.critic = mlp(obs_dim, 1, std=1.0)
        self.actor_mean = mlp(obs_dim, action_dim, std=0.01)
        self.actor_logstd = nn.Parameter(torch.zeros(1, action_dim))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        action_mean = self.actor_mean(x)
        action_logstd = self.actor_logstd.expand_as(action_mean)
        probs = Normal(action_mean, torch.exp(action_logstd))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)


AGENTS = {
    "ppo_iif": VectorAgent,
    "ppo_iif_continuous": ContinuousAgent,
    "ppo_iif_minigrid": MinigridAgent,
    "ppo_iif_atari": AtariAgent,
}


def train(envs, agent_class, args, writer):
    """Train on the vector environment with the hyper-parameters of `args` (a training script's Args). Returns seconds per
    round."""
    device = torch.device("cpu")
    agent = agent_class(envs).to(device)
    if args.optimizer == "sgd":
        optimizer = optim.SGD(agent.parameters(), lr=args.learning_rate)
    else:
        optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    # ALGO Logic: Storage setup
    obs = torch.zeros((args.num_steps, args.num_envs) + envs.single_observation_space.shape).to(device)
    actions = torch.zeros((args.num_steps, args.num_envs) + envs.single_action_space.shape).to(device)
    logprobs = torch.zeros((args.num_steps, args.num_envs)).to(device)
    rewards = torch.zeros((args.num_steps, args.num_envs)).to(device)
    dones = torch.zeros((args.num_steps, args.num_envs)).to(device)
    values = torch.zeros((args.num_steps, args.num_envs)).to(device)

    global_step = 0
    next_obs, _ = envs.reset(seed=args.seed)
    next_obs = torch.Tensor(next_obs).to(device)
    next_done = torch.zeros(args.num_envs).to(device)
    seconds = []

    for _ in range(args.num_iterations):
        start = time.perf_counter()
        for step in range(args.num_steps):
            global_step += args.num_envs
            obs[step] = next_obs
            dones[step] = next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step] = action
            logprobs[step] = logprob
            next_obs, reward, terminations, truncations, infos = envs.step(action.cpu().numpy())
            next_done = np.logical_or(terminations, truncations)
            rewards[step] = torch.tensor(reward).to(device).view(-1)
            next_obs, next_done = torch.Tensor(next_obs).to(device), torch.Tensor(next_done).to(device)
            if "final_info" in infos:
                episode = infos["final_info"].get("ppo_iif_episode")  # none where only a life is lost
                for i in np.flatnonzero(infos["_final_info"]) if episode else ():
                    print(f"global_step={global_step}, episodic_return={episode['r'][i]}")
                    writer.add_scalar("charts/episodic_return", episode["r"][i], global_step)
                    writer.add_scalar("charts/episodic_length", episode["l"][i], global_step)

        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards).to(device)
            lastgaelam = 0
            for t in reversed(range(args.num_steps)):
                if t == args.num_steps - 1:
                    nextnonterminal = 1.0 - next_done
                    nextvalues = next_value
                else:
                    nextnonterminal = 1.0 - dones[t + 1]
                    nextvalues = values[t + 1]
                delta = rewards[t] + args.gamma * nextvalues * nextnonterminal - values[t]
                advantages[t] = lastgaelam = delta + args.gamma * args.gae_lambda * nextnonterminal * lastgaelam
            returns = advantages + values

        b_obs = obs.reshape((-1,) + envs.single_observation_space.shape)
        b_logprobs = logprobs.reshape(-1)
        b_actions = actions.reshape((-1,) + envs.single_action_space.shape)
        b_advantages = advantages.reshape(-1)
        b_returns = returns.reshape(-1)
        b_values = values.reshape(-1)

        b_inds = np.arange(args.batch_size)
        clipfracs = []
        for _epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for begin in range(0, args.batch_size, args.minibatch_size):
                mb_inds = b_inds[begin : begin + args.minibatch_size]
                mb_actions = b_actions[mb_inds]
                if isinstance(envs.single_action_space, gym.spaces.Discrete):
                    mb_actions = mb_actions.long()
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], mb_actions)
                logratio = newlogprob - b_logprobs[mb_inds]
                ratio = logratio.exp()

                with torch.no_grad():
                    old_approx_kl = (-logratio).mean()
                    approx_kl = ((ratio - 1) - logratio).mean()
                    clipfracs += [((ratio - 1.0).abs() > args.clip_coef).float().mean().item()]

                mb_advantages = b_advantages[mb_inds]
                if args.norm_adv:
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()

                newvalue = newvalue.view(-1)
                if args.clip_vloss:
                    v_loss_unclipped = (newvalue - b_returns[mb_inds]) ** 2
                    v_clipped = b_values[mb_inds] + torch.clamp(newvalue - b_values[mb_inds], -args.clip_coef, args.clip_coef)
                    v_loss = torch.max(v_loss_unclipped, (v_clipped - b_returns[mb_inds]) ** 2).mean()
                else:
                    v_loss = ((newvalue - b_returns[mb_inds]) ** 2).mean()

                entropy_loss = entropy.mean()
                loss = pg_loss - args.ent_coef * entropy_loss + v_loss * args.vf_coef

                optimizer.zero_grad()
                loss.backward()
                if args.max_grad_norm:
                    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        y_pred, y_true = b_values.cpu().numpy(), b_returns.cpu().numpy()
        var_y = np.var(y_true)
        explained_var = np.nan if var_y == 0 else 1 - np.var(y_true - y_pred) / var_y
        seconds.append(time.perf_counter() - start)
        writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], global_step)
        writer.add_scalar("losses/value_loss", v_loss.item(), global_step)
        writer.add_scalar("losses/policy_loss", pg_loss.item(), global_step)
        writer.add_scalar("losses/entropy", entropy_loss.item(), global_step)
        writer.add_scalar("losses/old_approx_kl", old_approx_kl.item(), global_step)
        writer.add_scalar("losses/approx_kl", approx_kl.item(), global_step)
        writer.add_scalar("losses/clipfrac", np.mean(clipfracs), global_step)
        writer.add_scalar("losses/explained_variance", explained_var, global_step)
        writer.add_scalar("charts/SPS", int(args.num_steps * args.num_envs / seconds[-1]), global_step)
    return seconds


# python -m benchmarks.cost.plain_ppo FOLDER SCRIPT [ARGUMENTS OF THE SCRIPT]: its environment and hyper-parameters
if __name__ == "__main__":
    folder, script, *sys.argv[1:] = sys.argv[1:]
    script = importlib.import_module(script)
    args, _ = script.parse_args()
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    envs = script.make_envs(args, "plain")
    seconds = train(envs, AGENTS[script.__name__], args, SummaryWriter(folder))
    envs.close()
    print(json.dumps(seconds))
