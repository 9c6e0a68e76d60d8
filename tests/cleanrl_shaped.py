"""A script in the shape of CleanRL's ppo.py, cut down to what the README's five lines touch: `python cleanrl_shaped.py`
trains."""

import os
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical
from torch.utils.tensorboard import SummaryWriter


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


if __name__ == "__main__":
    args = SimpleNamespace(num_envs=2, num_steps=64, num_iterations=3, update_epochs=2, minibatch_size=16, batch_size=128)
    torch.manual_seed(1)
    np.random.seed(1)
    writer = SummaryWriter(os.environ["FOLDER"])
    envs = gym.vector.SyncVectorEnv(
        [lambda: gym.make("CartPole-v1")] * args.num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )
    agent = Agent(envs)
    optimizer = optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
    obs = torch.zeros((args.num_steps, args.num_envs, 4))
    actions = torch.zeros((args.num_steps, args.num_envs))
    logprobs, rewards, dones, values = (torch.zeros((args.num_steps, args.num_envs)) for _ in range(4))
    next_obs = torch.Tensor(envs.reset(seed=1)[0])
    global_step = 0
    for iteration in range(1, args.num_iterations + 1):
        for step in range(args.num_steps):
            global_step += args.num_envs
            obs[step] = next_obs
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
            values[step], actions[step], logprobs[step] = value.flatten(), action, logprob
            next_obs, reward, terminations, truncations, infos = envs.step(action.numpy())
            rewards[step], dones[step] = torch.tensor(reward), torch.Tensor(terminations | truncations)
            next_obs = torch.Tensor(next_obs)

        advantages, lastgaelam = torch.zeros_like(rewards), 0
        for t in reversed(range(args.num_steps - 1)):
            delta = rewards[t] + 0.99 * values[t + 1] * (1 - dones[t]) - values[t]
            advantages[t] = lastgaelam = delta + 0.99 * 0.95 * (1 - dones[t]) * lastgaelam

        # flatten the batch
        b_obs = obs.reshape(-1, 4)
        b_logprobs = logprobs.reshape(-1)
        b_actions = actions.reshape(-1)
        b_advantages = advantages.reshape(-1)
        b_returns = (advantages + values).reshape(-1)

        # Optimizing the policy and value network
        b_inds = np.arange(args.batch_size)
        for epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for start in range(0, args.batch_size, args.minibatch_size):
                end = start + args.minibatch_size
                mb_inds = b_inds[start:end]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions.long()[mb_inds])
                ratio = (newlogprob - b_logprobs[mb_inds]).exp()
                mb_advantages = b_advantages[mb_inds]
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                pg_loss = torch.max(-mb_advantages * ratio, -mb_advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
                v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb_inds]) ** 2).mean()
                loss = pg_loss + 0.5 * v_loss - 0.01 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        writer.add_scalar("losses/policy_loss", pg_loss.item(), global_step)
        writer.add_scalar("minibatch", len(mb_inds), global_step)
    writer.close()
