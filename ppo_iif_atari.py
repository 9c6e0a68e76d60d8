# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "numpy==2.4.6", "gymnasium==1.4.0", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0",
#     "moviepy==2.2.1", "ale-py==0.12.1", "stable-baselines3==2.9.2", "opencv-python-headless==5.0.0.93",
# ]
# ///
"""PPO with influence-based filtering (IIF), for Atari games from pixels.

A round: roll out the policy, estimate advantages, score every record by its influence on the round's return, leave out the most
harmful ones, run PPO's epochs over the rest. In this order: arguments, agent, stages of a round, book-keeping, main loop. Needs
iif_core.py beside it, nothing else of its project. Method: Hu et al., "A Snapshot of Influence", NeurIPS 2025, arXiv 2505.19281.
"""

import importlib.metadata
import json
import os
import pkgutil
import random
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from stable_baselines3.common.atari_wrappers import AtariWrapper
from torch.utils.tensorboard import SummaryWriter

from iif_core import filter_bottom, log_influence, return_influence

gym.register_envs(ale_py)

SCRIPT = "ppo_iif_atari.py"
WHICH = "vectors: ppo_iif.py, or ppo_iif_continuous.py; images: ppo_iif_minigrid.py, ppo_iif_atari.py; other ids: module:id"
EVAL_STEPS = 27_000  # of an evaluation episode, where the environment has no limit: half an hour of an Atari game
STATISTICS = "ppo_iif_episode"  # in an environment's info; "episode" may be taken


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]  # the name of this experiment
    seed: int = 1  # seed of the experiment; fixes everything on the CPU
    torch_deterministic: bool = True  # sets `torch.backends.cudnn.deterministic`
    cuda: bool = True  # if toggled, cuda will be used where there is one
    torch_threads: int = 1
    """CPU threads of torch; more are faster only where no other process wants the cores, and several times slower where one
    does"""
    compile: bool = False
    """compile the minibatch step: same curve but for rounding; takes half a minute, pays in long runs; untested on a GPU"""
    vectorization: Literal["sync", "async"] = "sync"
    """async: a process for each environment, for slow ones on many cores; same numbers, unless they use global generators"""
    envpool: bool = False
    """play the training games in envpool, in parallel; episodes begin a little differently there (docs/details.md), so compare
    arms within it only; evaluation stays with the wrappers of stable-baselines3"""
    track: bool = False  # if toggled, this experiment will be tracked with Weights and Biases
    wandb_project_name: str = "ppo-iif"  # the wandb's project name
    wandb_entity: str | None = None  # the entity (team) of wandb's project
    capture_video: bool = False  # whether to capture videos of the agent (in `videos/{run_name}`, and in W&B if tracked)
    save_model: bool = False  # whether to save the agent at the end into `runs/{run_name}/{exp_name}.cleanrl_model`
    save_every: int = 0  # save `runs/{run_name}/checkpoint.pt` every so many rounds and begin fresh episodes (0: never)
    resume: str | None = None  # path of a checkpoint to go on from, with its arguments
    snapshot_rounds: str = ""
    """rounds to save whole, as charts/round counts them, into `runs/{run_name}/snapshots/`, to be explained by benchmarks/:
    `2,5,10`, `every:10` (0, 10, 20, ...) or `all`; training stays the same. With track, their records of the lowest and
    highest scores go to W&B as a table"""

    # Algorithm specific arguments
    env_id: str = "PongNoFrameskip-v4"
    """the id of the environment: a NoFrameskip-v4 one, or ALE/Name-v5, made with frameskip=1 since the wrappers skip"""
    env_kwargs: str = "{}"  # arguments of the environment, as JSON, e.g. '{"repeat_action_probability": 0.25}'
    total_timesteps: int = 10_000_000  # total timesteps of the experiment (rounded down to whole rounds)
    learning_rate: float = 2.5e-4  # the learning rate of the optimizer
    optimizer: Literal["adam", "sgd"] = "adam"  # plain SGD, or Adam with eps 1e-5; scores are computed as if it were SGD
    num_envs: int = 8  # the number of parallel game environments
    num_steps: int = 128  # the number of steps to run in each environment per round
    anneal_lr: bool = True  # toggle learning rate annealing
    gamma: float = 0.99  # the discount factor gamma
    gae_lambda: float = 0.95  # the lambda for the general advantage estimation
    num_minibatches: int = 4  # the number of mini-batches of a whole round
    update_epochs: int = 4  # the K epochs to update the policy
    norm_adv: bool = True  # toggles advantages normalization (per minibatch)
    clip_coef: float = 0.1  # the surrogate clipping coefficient
    clip_vloss: bool = True  # toggles whether or not to use a clipped loss for the value function
    ent_coef: float = 0.01  # coefficient of the entropy
    vf_coef: float = 0.25  # coefficient of the value loss mean((V - R)^2): 0.25 is what CleanRL's 0.5 means
    max_grad_norm: float = 0.5  # the maximum norm for the gradient clipping; 0 turns it off
    target_kl: float | None = None  # the target KL divergence threshold

    # Influence-based filtering
    filter: str = "influence"
    """influence (IIF), none (plain PPO), random (as many dropped as IIF would, at random), or `module:function`: gets the
    round (a dict of its tensors, scores included), returns the indices to keep, or a sampling weight per record"""
    filter_percent: float = 12.5  # percentage of the records with a negative score (see filter_of) to drop, lowest first
    filter_of: Literal["negative", "all"] = "negative"  # what filter_percent counts: the records with a negative score, or all
    filter_when: Literal["signal", "always"] = "signal"
    """signal leaves a round whole if all its rewards are equal and so are its episodes' returns; always is the paper's rule"""
    score_bfloat16: bool = False
    """compute the scores in bfloat16: in little more than half the time on processors that have it, and the filter's choice changes
    for about one record in a thousand"""
    eval_episodes: int = 0
    """evaluate the policy of every round over so many episodes of sampled actions, in environments of their own (0: never);
    where the environment has no time limit, an episode is cut after 27,000 steps"""

    batch_size = property(lambda self: self.num_envs * self.num_steps)
    minibatch_size = property(lambda self: self.batch_size // self.num_minibatches)
    num_iterations = property(lambda self: self.total_timesteps // self.batch_size)


# ---- the agent


def layer_init(layer, std=np.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and critic of frames [n, 4, 84, 84] and actions [n]: log-probs and entropies [n], values [n, 1]."""

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
        self.critic = layer_init(nn.Linear(512, 1), std=1.0)
        self.to(memory_format=torch.channels_last)  # convolutions on the CPU are a third faster so

    def features(self, x):
        if x.dtype == torch.uint8:  # x / 255.0 takes eight times as long
            x = x.contiguous(memory_format=torch.channels_last).float().mul_(1 / 255)
        return self.network(x)

    def get_value(self, x):
        return self.critic(self.features(x))

    def get_logprob(self, x, action):
        return -F.cross_entropy(self.actor(self.features(x)), action, reduction="none")

    def get_logits_and_value(self, x):
        hidden = self.features(x)
        return self.actor(hidden), self.critic(hidden)

    def get_logprob_entropy_value(self, x, action):
        logits, value = self.get_logits_and_value(x)
        logprobs = F.log_softmax(logits, dim=-1)
        entropy = torch.special.entr(logprobs.exp()).sum(-1)
        return logprobs.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy, value

    def policy(self, rng):
        """The sampling policy as a function of numpy frames [n, 4, 84, 84], drawing from `rng`.

        It returns actions [n], their log-probs [n] and values [n]: the trunk is shared, so one pass gives all three.
        """
        device = self.critic.weight.device

        @torch.no_grad()
        def act(x):
            logits, value = self.get_logits_and_value(torch.from_numpy(x).to(device))
            logprobs = F.log_softmax(logits, dim=-1).cpu().numpy()
            action = (logprobs + rng.gumbel(size=logprobs.shape)).argmax(-1)  # Gumbel-max: a sample of softmax(logits)
            return action, logprobs[np.arange(len(action)), action], value.squeeze(-1).cpu().numpy()

        return act


# ---- the stages of a round


def rollout(agent, envs, next_obs, num_steps, rng, device="cpu"):
    """Collect one round with the agent's current policy, theta(k).

    Returns the round, a dict of tensors [num_steps, num_envs, ...] on `device`; its finished games, a list of (step, env,
    return, length) with the raw return; and the observations [num_envs, 4, 84, 84] to begin the next round with.
    """
    shape, space = (num_steps, envs.num_envs), envs.single_observation_space
    obs = np.empty((num_steps + 1, envs.num_envs, *space.shape), dtype=np.uint8)
    actions, (logprobs, rewards) = np.empty(shape, dtype=np.int64), np.empty((2, *shape), dtype=np.float32)
    values, (terminations, truncations) = np.empty((num_steps + 1, envs.num_envs), np.float32), np.empty((2, *shape), bool)
    act, episodes, cut = agent.policy(rng), [], {}

    obs[0] = next_obs
    for t in range(num_steps):
        actions[t], logprobs[t], values[t] = act(obs[t])
        obs[t + 1], rewards[t], terminations[t], truncations[t], infos = envs.step(actions[t])
        for i in np.flatnonzero(infos.get("_final_info", ())):
            ended, episode = (infos["final_info"].get(name) for name in (f"_{STATISTICS}", STATISTICS))
            if ended is not None and ended[i]:  # a lost life ends an episode, not the game
                episodes.append((t, int(i), float(episode["r"][i]), int(episode["l"][i])))
            if not terminations[t, i]:  # a truncated episode goes on, only unseen
                cut[t, i] = infos["final_obs"][i]
    values[-1] = act(obs[-1])[2]

    arrays = {"obs": obs[:-1], "actions": actions, "logprobs": logprobs, "rewards": rewards, "values": values[:-1]}
    arrays |= {"next_values": values[1:].copy(), "terminations": terminations, "dones": terminations | truncations}
    if cut:  # obs shows the episode after it
        arrays["next_values"][tuple(zip(*cut))] = act(np.stack(list(cut.values())))[2]
    return {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}, episodes, obs[-1].copy()


def gae(batch, gamma, gae_lambda):
    """Add generalised advantage estimates and returns to a round, [num_steps, num_envs] each.

    A termination ends the future, so nothing is bootstrapped; any end of an episode ends the sum over its steps.
    """
    deltas = batch["rewards"] + gamma * batch["next_values"] * ~batch["terminations"] - batch["values"]
    deltas, carry = deltas.cpu().numpy(), gamma * gae_lambda * (~batch["dones"]).float().cpu().numpy()
    advantages, lastgaelam = np.empty_like(deltas), np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = lastgaelam = deltas[t] + carry[t] * lastgaelam
    batch["advantages"] = torch.from_numpy(advantages).to(batch["values"].device)
    batch["returns"] = batch["advantages"] + batch["values"]
    return batch


def score(agent, batch, args, generator):
    """Influence [batch_size] of the records of a flat round on its return, advantages normalised as training does it."""

    def logprob(inds):
        return agent.get_logprob(batch["obs"][inds], batch["actions"][inds])

    inds = torch.randperm(args.batch_size, generator=generator)
    size = args.minibatch_size if args.norm_adv else 1  # alone in its minibatch, a record is not normalised
    with torch.autocast(batch["obs"].device.type, torch.bfloat16, enabled=args.score_bfloat16):
        advantages, ways = batch["advantages"], {"chunk_size": 128, "forward_mode": True}
        return return_influence(agent, logprob, advantages, minibatch_size=size, inds=inds, **ways)


def tells_apart(batch, episodes, args):
    """Whether anything in a scored round tells good records from bad ones. If not, it is left whole."""
    if not batch["scores"].any():  # they would be rounding errors: the policy is all but deterministic
        return False
    returns = {episodic_return for _, _, episodic_return, _ in episodes}
    return args.filter_when == "always" or len(returns) > 1 or bool((batch["rewards"] != batch["rewards"][0]).any())


def select(batch, args, generator):
    """What to train on: indices of the records to keep, or a sampling weight [batch_size] per record."""
    n = args.batch_size
    if args.filter in ("influence", "random"):
        kept = filter_bottom(batch["scores"].cpu(), args.filter_percent, of=args.filter_of)
        return kept if args.filter == "influence" else torch.randperm(n, generator=generator)[: len(kept)].sort().values
    chosen = torch.as_tensor(pkgutil.resolve_name(args.filter)(batch)).cpu()
    if not chosen.numel():
        return chosen.flatten().long()
    if chosen.is_floating_point():
        good = chosen.shape == (n,) and chosen.isfinite().all() and chosen.min() >= 0 and chosen.sum() > 0
    else:
        good = chosen.dtype in (torch.int32, torch.int64) and chosen.dim() == 1 and chosen.min() >= 0 and chosen.max() < n
        good = good and len(chosen.unique()) == len(chosen)  # a mask of 0 and 1 is refused, too
    kinds = f"distinct indices of records, or one finite non-negative weight for each of the {n} records, not all zero"
    need(good, f"--filter {args.filter} must return {kinds}; got {chosen.dtype} {list(chosen.shape)}")
    return chosen


def minibatches(selection, args, generator):
    """The minibatches of one epoch, index tensors over a fresh shuffle of the selected records.

    All are of minibatch_size, and what is left over sits this epoch out. With few minibatches that would cost a filtered round
    much of its data: fewer than 16 are nearly equal parts instead.
    """
    if selection.is_floating_point():
        inds = torch.multinomial(selection, len(selection), replacement=True, generator=generator)
    else:
        inds = selection[torch.randperm(len(selection), generator=generator)]
    if args.num_minibatches < 16:
        return [mb_inds for mb_inds in inds.tensor_split(args.num_minibatches) if len(mb_inds)]
    if 0 < len(inds) < args.minibatch_size:
        return [inds]
    return [mb_inds for mb_inds in inds.split(args.minibatch_size) if len(mb_inds) == args.minibatch_size]


def loss_gradients(agent, params, args, mb_obs, mb_actions, mb_logprobs, mb_advantages, mb_returns, mb_values):
    """Gradients of PPO's loss of one minibatch, clipped, in the order of the agent's `params`; and what is logged of it."""
    newlogprob, entropy, newvalue = agent.get_logprob_entropy_value(mb_obs, mb_actions)
    logratio = newlogprob - mb_logprobs
    ratio = logratio.exp()
    if args.norm_adv and len(mb_advantages) > 1:
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
    clipped_ratio = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(-mb_advantages * ratio, -mb_advantages * clipped_ratio).mean()
    newvalue = newvalue.view(-1)
    v_loss = (newvalue - mb_returns).square()
    if args.clip_vloss:
        v_clipped = mb_values + torch.clamp(newvalue - mb_values, -args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - mb_returns).square())
    v_loss = v_loss.mean()
    loss = pg_loss + args.vf_coef * v_loss
    if args.ent_coef:
        loss = loss - args.ent_coef * entropy.mean()
    gradients = torch.autograd.grad(loss, params)
    if args.max_grad_norm:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        scale = (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
        gradients = [gradient * scale for gradient in gradients]
    return gradients, *(x.detach() for x in (ratio, logratio, entropy, pg_loss, v_loss))


@cache
def compiled_gradients():
    """loss_gradients as one compiled function; as it is, and a line says why, where nothing can be compiled."""
    torch._dynamo.config.trace_autograd_ops = True  # or the backward pass would be left out
    try:
        torch.compile(torch.exp)(torch.ones(2))
    except Exception as error:
        print(f"--compile: nothing can be compiled here, so the steps stay eager ({str(error).strip().splitlines()[0]})")
        return loss_gradients
    return torch.compile(loss_gradients, mode="reduce-overhead" if torch.cuda.is_available() else None)


def update(agent, optimizer, batch, selection, args, generator):
    """PPO's epochs over the selected records of a flat round. Returns the losses to log and the number of optimizer steps."""
    if not len(selection):
        return {}, 0
    columns, ratios = ("obs", "actions", "logprobs", "advantages", "returns", "values"), []
    step, params = compiled_gradients() if args.compile else loss_gradients, list(agent.parameters())
    for epoch in range(args.update_epochs):
        mbs = minibatches(selection, args, generator)
        inds, sizes = torch.cat(mbs), [len(mb_inds) for mb_inds in mbs]
        for minibatch in zip(*(batch[column][inds].split(sizes) for column in columns)):
            if args.compile:
                torch.compiler.cudagraph_mark_step_begin()  # on a GPU, the step before may be overwritten
            gradients, ratio, logratio, entropy, pg_loss, v_loss = step(agent, params, args, *minibatch)
            ratios.append(ratio.clone() if args.compile else ratio)
            for p, gradient in zip(params, gradients):  # a fused optimizer takes them in the order in memory
                p.grad = gradient if gradient.stride() == p.stride() else torch.empty_like(p).copy_(gradient)
            optimizer.step()
        approx_kl = ((ratio - 1) - logratio).mean().item()
        if args.target_kl is not None and approx_kl > args.target_kl:
            break

    var_y, residual = (x.var(correction=0).item() for x in (batch["returns"], batch["returns"] - batch["values"]))
    losses = {  # as CleanRL logs them: of the last minibatch, but clipfrac and explained_variance
        "value_loss": v_loss.item(),
        "policy_loss": pg_loss.item(),
        "entropy": entropy.mean().item(),
        "old_approx_kl": (-logratio).mean().item(),
        "approx_kl": approx_kl,
        "clipfrac": ((torch.cat(ratios) - 1).abs() > args.clip_coef).float().mean().item(),
        "explained_variance": 1 - residual / var_y if var_y else np.nan,
    }
    return losses, len(ratios)


def evaluate(agent, envs, num_episodes, seed):
    """Returns [num_episodes] of episodes with sampled actions, in the list `envs`; all randomness from `seed`.

    They are played side by side, each to its end before others begin, so that short ones get no favour. Without a time limit of
    the environment, one that goes on after EVAL_STEPS counts as it stands, and a line says so.
    """
    rng = np.random.default_rng(seed)
    act, seeds, returns = agent.policy(rng), rng.integers(2**31, size=num_episodes).tolist(), []
    for begun in range(0, num_episodes, len(envs)):
        playing = [(env, env.reset(seed=s)[0]) for env, s in zip(envs, seeds[begun:])]
        steps, limit = 0, envs[0].spec.max_episode_steps or EVAL_STEPS
        while playing and steps < limit:
            actions, _, _ = act(np.stack([obs for _, obs in playing]))
            after = [(env, *env.step(action)) for (env, _), action in zip(playing, actions)]
            games = [(env, obs, lost or cut) for env, obs, _, lost, cut, info in after if STATISTICS not in info]
            playing = [(env, env.reset()[0] if life_lost else obs) for env, obs, life_lost in games]
            steps += 1
        if playing:
            print(f"{len(playing)} evaluation episodes did not end in {limit} steps: they count with their returns so far")
        returns += [env.get_wrapper_attr("episode_returns") for env in envs[: num_episodes - begun]]
    return np.array(returns, dtype=np.float64)


# ---- book-keeping: refusals, arguments, environments, random numbers, checkpoints, logs


def need(condition, message):
    if not condition:
        sys.exit(message)


@contextmanager
def one_line(message, hint="", kind=Exception):
    """End the script with one line on an error."""
    try:
        yield
    except kind as error:
        sys.exit(f"{message}: {' '.join(str(error).split())[:300] or type(error).__name__}{hint and f' ({hint})'}")


def check_args(args):
    """Refuse arguments that cannot work, before anything is started."""
    n = args.batch_size
    limits = {
        "at least 1": (lambda x: x >= 1, "num_envs num_steps num_minibatches update_epochs torch_threads"),
        "at least 0": (lambda x: x >= 0, "save_every eval_episodes clip_coef max_grad_norm"),
        "at least 0 and less than 2**32": (lambda x: 0 <= x < 2**32, "seed"),
        "in [0, 1]": (lambda x: 0 <= x <= 1, "gamma gae_lambda"),
        "in [0, 100]": (lambda x: 0 <= x <= 100, "filter_percent"),
        "finite": (lambda x: x is None or np.isfinite(x), "vf_coef ent_coef target_kl"),
        "positive and finite": (lambda x: 0 < x < np.inf, "learning_rate"),
        "without a slash, which would make folders of it": (lambda x: "/" not in x, "exp_name"),
        f"a divisor of the {n} records of a round": (lambda x: n % x == 0, "num_minibatches"),
        f"at least one round of {n}": (lambda x: x >= n, "total_timesteps"),
    }
    for limit, (holds, names) in limits.items():
        for name in names.split():
            value = getattr(args, name)
            need(holds(value), f"--{name.replace('_', '-')} {value} must be {limit}")
    snapshot_rounds(args)
    if args.envpool:
        need(find_spec("envpool"), "--envpool: it is not installed; pip install envpool==1.2.5")
        others = {"env_kwargs": "{}", "capture_video": False, "vectorization": "sync", "snapshot_rounds": ""}
        for name, other in others.items():
            need(getattr(args, name) == other, f"--envpool goes without --{name.replace('_', '-')}; leave one of them out")
        need(game(args.env_id), f"--envpool has no --env-id {args.env_id}; it has NameNoFrameskip-v4 and ALE/Name-v5")
    if args.filter not in ("influence", "random", "none"):
        with one_line(f"--filter {args.filter}: not influence, random, none or an importable module:function"):
            need(callable(pkgutil.resolve_name(args.filter)), f"--filter {args.filter} is no function; give module:function")


def snapshot_rounds(args):
    """The rounds that --snapshot-rounds names."""
    text, rounds = args.snapshot_rounds, range(args.num_iterations)
    if every := re.fullmatch(r"all|every:0*([1-9]\d*)", text):
        return rounds[:: int(every[1] or 1)]
    with one_line(f"--snapshot-rounds {text}: give rounds from 0 to {rounds[-1]} like 2,5,10, or all, or every:10"):
        return [rounds.index(int(k)) for k in text.split(",")] if text else []


def parse_args():
    """The arguments of the command line, with --resume on top of those of the checkpoint. Returns them with the checkpoint."""
    booleans = "|".join(field.name.replace("_", "[-_]") for field in fields(Args) if field.type is bool)
    words = [re.sub(rf"^--({booleans})=[Tt]rue$", r"--\1", word) for word in sys.argv[1:]]  # so W&B's sweeps write them
    words = [re.sub(rf"^--({booleans})=[Ff]alse$", r"--no-\1", word) for word in words]
    args, checkpoint = tyro.cli(Args, args=words), None
    if args.resume:
        with one_line(f"--resume {args.resume} is not a whole checkpoint of {SCRIPT}"):
            checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
            need(checkpoint["script"] == SCRIPT, f"--resume {args.resume} is a checkpoint of {checkpoint['script']}")
            saved = Args(**checkpoint["args"])
        args, done = tyro.cli(Args, args=words, default=saved), checkpoint["iteration"]
        free = "resume total_timesteps torch_threads cuda track wandb_project_name wandb_entity capture_video save_model"
        for name, value in asdict(saved).items():
            same = getattr(args, name) == value or name in f"{free} vectorization snapshot_rounds eval_episodes".split()
            need(same, f"--resume goes on with the run's own --{name.replace('_', '-')} {value}; leave it out")
        need(done < args.num_iterations, f"--resume {args.resume}: {done} rounds are done; raise --total-timesteps to go on")
    check_args(args)
    return args, checkpoint


def make_env(args, video_folder=None):
    """One environment, as the agent sees it. Raises TypeError if this script cannot learn it."""
    kwargs = {"frameskip": 1} if args.env_id.startswith("ALE/") else {}  # the wrappers skip
    kwargs |= {"render_mode": "rgb_array"} if args.capture_video else {}
    env = gym.make(args.env_id, **kwargs | json.loads(args.env_kwargs))
    if not isinstance(env.unwrapped, ale_py.AtariEnv):
        raise TypeError("it is not an Atari game")
    if not isinstance(env.action_space, gym.spaces.Discrete) or len(env.observation_space.shape) != 3:
        raise TypeError("it needs pixels and discrete actions; leave obs_type and continuous out")
    if env.unwrapped._frameskip != 1:
        raise TypeError("it skips frames itself, and the wrappers would again; use its NoFrameskip-v4 or ALE/ name")
    if video_folder:
        env = gym.wrappers.RecordVideo(env, video_folder)
    env = gym.wrappers.RecordEpisodeStatistics(env, stats_key=STATISTICS)  # inside: raw rewards, whole games
    # no-ops, skip 4 with the max of the last 2, life loss ends an episode, fire, 84x84 grey, sign of the reward
    env = AtariWrapper(env)
    env = gym.wrappers.TransformObservation(env, lambda frame: frame[..., 0], gym.spaces.Box(0, 255, (84, 84), np.uint8))
    return gym.wrappers.FrameStackObservation(env, 4)


def check_env(args):
    """Refuse an environment that cannot be used, after a reset and a step in one that is not trained in."""
    given = f"--env-id {args.env_id} --env-kwargs '{args.env_kwargs}'{' --capture-video' if args.capture_video else ''}"
    with one_line(given, WHICH):
        env = make_env(args)
    with one_line(given, "it has to follow Gymnasium's present API of spaces, reset, step and render"):
        env.action_space.seed(args.seed)
        first, _ = env.reset(seed=args.seed)
        second, reward, _, _, _ = env.step(env.action_space.sample())
        space, frame = env.observation_space, env.render() if args.capture_video else np.empty(0)
        for obs in map(np.asarray, (first, second)):
            fits = obs.shape == space.shape and np.can_cast(obs.dtype, space.dtype, "same_kind")
            need(fits, f"{given}: observations are {obs.dtype} {obs.shape}, declared as {space}; make them agree")
        need(np.ndim(reward) == 0, f"{given}: rewards have the shape {np.shape(reward)}; they must be numbers")
        need(isinstance(frame, np.ndarray), f"{given}: render returns no picture; leave out --capture-video")
        env.close()


def game(env_id):
    """The name of an Atari id's game in envpool, or None."""
    import envpool

    name = re.fullmatch(r"ALE/(\w+)-v5|(\w+)NoFrameskip-v4", env_id)
    name = name and f"{name[1] or name[2]}-v5"
    return name if name in envpool.list_all_envs() else None


class EnvPool(gym.vector.VectorEnv):
    """envpool's games as make_envs gives them. By itself it resets in the step after an end, a row that nobody acted in."""

    def __init__(self, args):
        self.args, self.num_envs, self.pool = args, args.num_envs, None
        self.sticky = gym.spec(args.env_id).kwargs["repeat_action_probability"]
        self.reset(seed=args.seed)
        self.single_observation_space, self.single_action_space = self.pool.observation_space, self.pool.action_space

    def reset(self, *, seed=None, options=None):
        import envpool

        self.close()  # it takes a seed only where it makes its games, and game i has seed + i
        sizes = {"num_envs": self.num_envs, "num_threads": min(self.num_envs, os.cpu_count())}
        rules = {"episodic_life": True, "use_fire_reset": True, "repeat_action_probability": self.sticky}
        rules["max_episode_steps"] = EVAL_STEPS  # the 108,000 frames of the ids
        self.pool = envpool.make_gymnasium(game(self.args.env_id), seed=derive_seed(seed) % 2**31, **sizes, **rules)
        self.returns = np.zeros(self.num_envs)
        return self.pool.reset()[0], {}

    def step(self, actions):
        obs, reward, terminations, truncations, info = self.pool.step(actions.astype(np.int32))
        self.returns += info["reward"]
        game_over = info["terminated"] == 1  # a lost life is not, and a game that ends at its time limit is
        terminations = terminations | game_over
        done, infos = terminations | truncations, {}
        if done.any():
            ended, inds = game_over | truncations, np.flatnonzero(done)
            whole = {"r": self.returns.copy(), "l": 4 * info["elapsed_step"]}
            infos = {"final_obs": obs.copy(), "_final_obs": done, "_final_info": done}
            infos["final_info"] = {STATISTICS: whole, f"_{STATISTICS}": ended}
            # That step at once, its actions unused. (pool.reset would begin a new game where only a life was lost.)
            obs[inds] = self.pool.step(np.zeros(len(inds), np.int32), inds.astype(np.int32))[0]
            self.returns[ended] = 0
        return obs, np.sign(reward), terminations, truncations, infos

    def set_attr(self, name, values):
        """Nothing: reset begins new games anyway."""

    def close(self, **kwargs):
        if self.pool is not None:
            self.pool.close()


def make_envs(args, run_name):
    if args.envpool:
        return EnvPool(args)
    # SAME_STEP: the row after an episode's end is the first of a new one. (Gymnasium's default, NEXT_STEP, puts a row into the
    # batch that nobody acted in, and a filter would earn credit for dropping it.)
    video, mode = f"videos/{run_name}" if args.capture_video else None, gym.vector.AutoresetMode.SAME_STEP
    thunks = [partial(make_env, args, None if i else video) for i in range(args.num_envs)]
    kind = {"sync": gym.vector.SyncVectorEnv, "async": gym.vector.AsyncVectorEnv}[args.vectorization]
    return kind(thunks, copy=False, autoreset_mode=mode)


def make_eval_envs(args):
    return [make_env(args) for _ in range(min(args.eval_episodes, 32))]


def derive_seed(*key):
    """A seed for each key of integers from 0 to 2**32 - 1, for independent streams. (Zeros at its end make no difference.)"""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def random_streams(seed, k):
    """The random numbers of round k, begun anew so that a checkpoint needs none: for actions, shuffles and the filter apart."""
    libraries = derive_seed(seed, 7, k)  # for environments and filters that draw from these
    random.seed(libraries)
    np.random.seed(libraries)
    torch.manual_seed(libraries)
    shuffles, filters = (torch.Generator().manual_seed(derive_seed(seed, purpose, k)) for purpose in (1, 2))
    return np.random.default_rng(derive_seed(seed, 0, k)), shuffles, filters


def save(path, args, run, agent, optimizer, **more):
    """Write a checkpoint whole or not at all: a kill in the middle leaves the one before."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    state = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), **more}
    temporary = f"{path}.{os.getpid()}.tmp"  # of this process alone: a checkpoint may have been resumed twice
    torch.save({"script": SCRIPT, "args": asdict(args), **vars(run), **state}, temporary)
    os.replace(temporary, path)


def check_finite(batch):
    for name, x in batch.items():
        bad = (~x.reshape(len(x), -1).isfinite().all(1)).nonzero().flatten() if x.is_floating_point() else ()
        if len(bad):
            where = f"in {len(bad)} of {len(x)} records, the first in record {bad[0]}"
            raise ValueError(f"{name} not finite {where}: the environment's fault, or --learning-rate is too high")


def start_logging(args, run):
    """The run's SummaryWriter and, with --track, its run of W&B, which gets what the writer writes.

    A resumed run goes on as the same one of W&B, unless W&B is offline or was: uploaded under one id, a later part would
    overwrite the first. So it is a run of its own then, of the same name and group.
    """
    if args.track:
        os.environ.setdefault("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", "1")  # seconds that a kill takes from an offline run
        offline = wandb.setup().settings.mode in ("offline", "dryrun")
        names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run.run_name}
        names |= {"group": run.run_name} if offline else {"id": run.wandb_id, "resume": run.wandb_id and "allow"}
        wandb.init(**names, config=asdict(args), sync_tensorboard=True, save_code=True)
        wandb.define_metric("*", step_metric="global_step")
        run.wandb_id = None if offline else wandb.run.id
    writer = SummaryWriter(f"runs/{run.run_name}", purge_step=run.global_step + 1 if run.iteration else None)
    table = "\n".join(f"|{key}|{value}|" for key, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
    return writer


def log_round(writer, args, run, episodes, numbers):
    """Log the round that has just been done: its finished episodes, and {name: number}."""
    for n, (t, _, episodic_return, episodic_length) in enumerate(episodes, start=1):
        # The last episode is logged at the end of the round, so that it shares a row with the histogram of scores.
        step = run.global_step if n == len(episodes) else run.global_step - args.batch_size + (t + 1) * args.num_envs
        print(f"global_step={step}, episodic_return={episodic_return}")
        writer.add_scalar("charts/episodic_return", episodic_return, step)
        writer.add_scalar("charts/episodic_length", episodic_length, step)
    for name, value in numbers.items():
        writer.add_scalar(name, value, run.global_step)
    seconds = (args.num_iterations * args.batch_size - run.global_step) / max(1, numbers["charts/SPS"])
    left = f"({run.iteration} of {args.num_iterations} rounds, {timedelta(seconds=int(seconds))} left)"
    print("SPS:", numbers["charts/SPS"], *([left] if sys.stdout.isatty() else []))


def log_evaluation(writer, args, run, agent, envs):
    """Evaluate the current policy, and log it at the steps that it has learned from."""
    returns = evaluate(agent, envs, args.eval_episodes, derive_seed(args.seed, 3, run.iteration))
    print(f"round={run.iteration}, eval_episodic_return={returns.mean():.3f}")
    writer.add_scalar("eval/episodic_return", returns.mean(), run.global_step)
    writer.add_scalar("eval/episodic_return_std", returns.std(), run.global_step)
    writer.flush()


def show(obs):
    """An observation, for a cell of a table of W&B: its last frame."""
    return wandb.Image(obs[-1])


def log_media(run, batch, videos, records):
    """Send to W&B the videos that are new to the set `videos`, and a table of the records of lowest and highest scores."""
    for path in sorted(set(Path(f"videos/{run.run_name}").rglob("*.mp4")) - videos):
        videos.add(path)
        wandb.log({"videos": wandb.Video(str(path)), "global_step": run.global_step})
    if records:
        order, columns = batch["scores"].argsort().tolist(), [name for name in batch if name != "obs"]
        ends = order[:20] + order[20:][-20:]
        rows = [[i, show(batch["obs"][i].cpu().numpy()), *(batch[name][i].tolist() for name in columns)] for i in ends]
        table = wandb.Table(["record", "obs", *columns], rows)
        wandb.log({"influence/records": table, "global_step": run.global_step})


if __name__ == "__main__":
    args, checkpoint = parse_args()
    check_env(args)
    if args.track:
        import wandb

    torch.set_num_threads(args.torch_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")

    run_name = f"{args.env_id.split(':')[-1]}__{args.exp_name}__{args.seed}__{time.time_ns()}"
    run = SimpleNamespace(run_name=run_name, wandb_id=None, iteration=0, global_step=0, optimizer_steps=0, skipped_updates=0)
    if checkpoint:
        vars(run).update({name: checkpoint[name] for name in vars(run)})
    part = f"/from_round_{run.iteration}" if checkpoint else ""  # or its videos would overwrite those of the first part
    envs, eval_envs = make_envs(args, run.run_name + part), make_eval_envs(args)
    agent = Agent(envs).to(device)
    optimizer_class = {"sgd": torch.optim.SGD, "adam": partial(torch.optim.Adam, eps=1e-5)}[args.optimizer]
    optimizer = optimizer_class(agent.parameters(), lr=args.learning_rate, fused=True)
    if checkpoint:
        with one_line(f"--resume {args.resume} holds another network than {SCRIPT} has for --env-id {args.env_id}"):
            agent.load_state_dict(checkpoint["agent"])
            optimizer.load_state_dict(checkpoint["optimizer"])

    writer = start_logging(args, run)
    folder, snapshots = f"runs/{run.run_name}", snapshot_rounds(args)
    packages = {p.name: p.version for p in importlib.metadata.distributions()} if snapshots else {}
    videos = set(Path(f"videos/{run.run_name}").rglob("*.mp4"))  # those that W&B has
    start_time, start_step, next_obs = time.time(), run.global_step, None
    if args.eval_episodes and not checkpoint:
        log_evaluation(writer, args, run, agent, eval_envs)
    while run.iteration < args.num_iterations:
        k = run.iteration
        rollout_rng, shuffle_rng, filter_rng = random_streams(args.seed, k)
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = (1 - k / args.num_iterations) * args.learning_rate
        # What is inside an environment cannot be saved, so every checkpoint begins fresh episodes, in a run that goes on, too.
        if next_obs is None or (args.save_every and k % args.save_every == 0):
            env_seed = derive_seed(args.seed, 4, k) % 2**31 if k else args.seed
            envs.set_attr("was_real_done", True)  # or a reset would be a no-op in the game that is on
            next_obs, _ = envs.reset(seed=env_seed)
            played = []  # the actions since, so that a snapshot's round can be played again

        times = [time.perf_counter()]
        batch, episodes, next_obs = rollout(agent, envs, next_obs, args.num_steps, rollout_rng, device)
        batch = {name: x.flatten(0, 1) for name, x in gae(batch, args.gamma, args.gae_lambda).items()}
        batch["obs"] = batch["obs"].contiguous(memory_format=torch.channels_last)  # once, not in every minibatch
        times.append(time.perf_counter())

        with one_line(f"round {k}", kind=ValueError):
            check_finite(batch)
            if args.filter != "none":
                batch["scores"] = score(agent, batch, args, filter_rng)
        filtered = args.filter != "none" and tells_apart(batch, episodes, args)
        selection = select(batch, args, filter_rng) if filtered else torch.arange(args.batch_size)
        times.append(time.perf_counter())

        if snapshots:
            played.append(batch["actions"].cpu())
        if k in snapshots:
            snapshot = {"batch": batch, "selection": selection, "env_seed": env_seed, "played": torch.cat(played)}
            save(f"{folder}/snapshots/round_{k:06d}.pt", args, run, agent, optimizer, packages=packages, **snapshot)
        times.append(time.perf_counter())

        losses, steps = update(agent, optimizer, batch, selection, args, shuffle_rng)
        finite = all(p.isfinite().all() for p in agent.parameters())
        need(finite, f"round {k}: the update has made the weights not finite; lower --learning-rate {args.learning_rate}")
        times.append(time.perf_counter())

        run.iteration += 1
        run.global_step += args.batch_size
        run.optimizer_steps += steps
        run.skipped_updates += steps == 0
        numbers = {f"losses/{name}": value for name, value in losses.items()}
        numbers |= zip(("time/rollout", "time/scoring", "time/update"), np.diff(times)[[0, 1, 3]])  # [2]: the snapshot
        numbers |= {"charts/learning_rate": optimizer.param_groups[0]["lr"], "charts/round": k}
        numbers |= {"charts/optimizer_steps": run.optimizer_steps, "charts/skipped_updates": run.skipped_updates}
        numbers["charts/SPS"] = int((run.global_step - start_step) / (time.time() - start_time))
        log_round(writer, args, run, episodes, numbers)
        if "scores" in batch:
            scores, advantages = batch["scores"], batch["advantages"]
            log_influence(writer, scores, selection, run.global_step, advantages=advantages, filtered=filtered)
        writer.flush()
        if args.track:
            log_media(run, batch, videos, records=k in snapshots and "scores" in batch)
        if args.eval_episodes:
            log_evaluation(writer, args, run, agent, eval_envs)
        if args.save_every and run.iteration % args.save_every == 0:
            save(f"{folder}/checkpoint.pt", args, run, agent, optimizer)

    envs.close()
    if args.save_model:
        save(f"{folder}/{args.exp_name}.cleanrl_model", args, run, agent, optimizer)
        print(f"model saved to {folder}/{args.exp_name}.cleanrl_model")
    writer.close()
    print(f"results are in {folder}; to look at them: tensorboard --logdir {folder}")
    if args.track:
        log_media(run, batch, videos, records=False)
        place = wandb.run.url or f"wandb sync {Path(wandb.run.dir).parent}"
        wandb.finish()
        print(f"in W&B: {place}")
