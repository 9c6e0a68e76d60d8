# PPO with influence-based filtering (IIF), MiniGrid's symbolic images. Needs iif_core.py beside it and nothing else
# of its project. Method: Hu et al., "A Snapshot of Influence", NeurIPS 2025, arXiv 2505.19281.
import importlib
import importlib.metadata
import json
import os
import random
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Literal

import gymnasium as gym
import minigrid
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import tyro
from minigrid.core.constants import OBJECT_TO_IDX
from minigrid.core.grid import Grid
from minigrid.wrappers import FullyObsWrapper, ImgObsWrapper
from torch.utils.tensorboard import SummaryWriter

from iif_core import filter_bottom, log_influence, return_influence

gym.register_envs(minigrid)

SCRIPT = "ppo_iif_minigrid.py"


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment; fixes everything on the CPU"""
    torch_deterministic: bool = True
    """sets `torch.backends.cudnn.deterministic`"""
    cuda: bool = True
    """if toggled, cuda will be used where there is one"""
    torch_threads: int = 1
    """CPU threads of torch; small networks are several times slower with more than one"""
    track: bool = False
    """if toggled, this experiment will be tracked with Weights and Biases"""
    wandb_project_name: str = "ppo-iif"
    """the wandb's project name"""
    wandb_entity: str | None = None
    """the entity (team) of wandb's project"""
    capture_video: bool = False
    """whether to capture videos of the agent (in `videos/{run_name}`, and in W&B if tracked)"""
    save_model: bool = False
    """whether to save the agent at the end into `runs/{run_name}/{exp_name}.cleanrl_model`"""
    save_every: int = 0
    """save `runs/{run_name}/checkpoint.pt` every so many rounds (0: never); the next round then begins with fresh episodes"""
    resume: str | None = None
    """path of a checkpoint to go on from, with its arguments"""
    snapshot_rounds: str = ""
    """rounds to save whole, as charts/round counts them, into `runs/{run_name}/snapshots/`, to be explained by benchmarks/:
    `2,5,10`, `every:10` (0, 10, 20, ...) or `all`; training stays the same. With track, their records of the lowest and
    highest scores go to W&B as a table"""

    # Algorithm specific arguments
    env_id: str = "MiniGrid-Empty-8x8-v0"
    """the id of the environment; `module:Name-v0` imports the module first"""
    env_kwargs: str = "{}"
    """arguments of the environment, as JSON, e.g. '{"max_steps": 100}'"""
    fully_observable: bool = False
    """observe the whole grid instead of the agent's view"""
    obs_scale: float = 255.0
    """what the symbols of the image (0 to 10) are divided by; 255 is the paper's"""
    total_timesteps: int = 81_920
    """total timesteps of the experiment (rounded down to whole rounds)"""
    learning_rate: float = 5e-3
    """the learning rate of the optimizer"""
    optimizer: Literal["adam", "sgd"] = "sgd"
    """plain SGD, or Adam with eps 1e-5; scores are computed as if it were SGD"""
    num_envs: int = 1
    """the number of parallel game environments"""
    num_steps: int = 2048
    """the number of steps to run in each environment per round"""
    anneal_lr: bool = False
    """toggle learning rate annealing"""
    gamma: float = 0.99
    """the discount factor gamma"""
    gae_lambda: float = 0.95
    """the lambda for the general advantage estimation"""
    num_minibatches: int = 32
    """the number of mini-batches of a whole round"""
    update_epochs: int = 10
    """the K epochs to update the policy"""
    norm_adv: bool = True
    """toggles advantages normalization (per minibatch)"""
    clip_coef: float = 0.2
    """the surrogate clipping coefficient"""
    clip_vloss: bool = False
    """toggles whether or not to use a clipped loss for the value function"""
    ent_coef: float = 0.0
    """coefficient of the entropy"""
    vf_coef: float = 0.5
    """coefficient of the value loss mean((V - R)^2): 0.25 here is what CleanRL's 0.5 means"""
    max_grad_norm: float = 0.0
    """the maximum norm for the gradient clipping; 0 turns it off, as the paper's SGD results need"""
    target_kl: float | None = None
    """the target KL divergence threshold"""

    # Influence-based filtering
    filter: str = "influence"
    """influence (IIF), none (plain PPO), random (as many dropped as IIF would, at random), or `module:function`: gets the
    round (a dict of its tensors, scores included), returns the indices to keep, or a sampling weight per record"""
    filter_percent: float = 12.5
    """percentage of the records with a negative score (see filter_of) to drop, the most negative first"""
    filter_of: Literal["negative", "all"] = "negative"
    """what filter_percent counts: the records with a negative score, or all"""
    filter_when: Literal["signal", "always"] = "signal"
    """signal leaves a round whole if all its rewards are equal and so are the returns of its episodes; always is the paper's
    rule"""
    eval_episodes: int = 0
    """evaluate the policy of every round over so many episodes of sampled actions, in environments of their own (0: never)"""

    # to be filled in runtime
    batch_size: int = field(init=False)
    minibatch_size: int = field(init=False)
    num_iterations: int = field(init=False)

    def __post_init__(self):
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // max(self.num_minibatches, 1)
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)


def check_args(args):
    """Refuse arguments that cannot work, before anything is started."""
    if "/" in args.exp_name:
        sys.exit(f"--exp-name {args.exp_name}: a slash would make folders of it")
    for name in ("num_envs", "num_steps", "num_minibatches", "update_epochs", "torch_threads"):
        if getattr(args, name) < 1:
            sys.exit(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for name in ("seed", "save_every", "eval_episodes", "clip_coef", "max_grad_norm"):
        if not getattr(args, name) >= 0:
            sys.exit(f"--{name.replace('_', '-')} must not be negative, got {getattr(args, name)}")
    for name in ("vf_coef", "ent_coef", "target_kl"):
        if not np.isfinite(getattr(args, name) or 0):
            sys.exit(f"--{name.replace('_', '-')} must be finite, got {getattr(args, name)}")
    if args.seed >= 2**32:
        sys.exit(f"--seed must be less than 2**32, got {args.seed}")
    for name in ("gamma", "gae_lambda"):
        if not 0 <= getattr(args, name) <= 1:
            sys.exit(f"--{name.replace('_', '-')} must lie in [0, 1], got {getattr(args, name)}")
    for name in ("learning_rate", "obs_scale"):
        if not 0 < getattr(args, name) < float("inf"):
            sys.exit(f"--{name.replace('_', '-')} must be positive and finite, got {getattr(args, name)}")
    if not 0 <= args.filter_percent <= 100:
        sys.exit(f"--filter-percent must lie in [0, 100], got {args.filter_percent}")
    if args.batch_size % args.num_minibatches:
        sys.exit(
            f"--num-minibatches {args.num_minibatches} does not divide the round of num_envs * num_steps = {args.batch_size}"
            " records: choose a divisor"
        )
    if args.num_iterations < 1:
        sys.exit(
            f"--total-timesteps {args.total_timesteps} is less than one round of {args.batch_size}: nothing would be trained"
        )
    if not re.fullmatch(r"(all|every:0*[1-9][0-9]*|[0-9]+(,[0-9]+)*)?", args.snapshot_rounds):
        sys.exit(f"--snapshot-rounds {args.snapshot_rounds}: give rounds like 2,5,10, or all, or every:10")
    beyond = max(snapshot_rounds(args), default=0)
    if beyond >= args.num_iterations:
        sys.exit(
            f"--snapshot-rounds {args.snapshot_rounds}: there is no round {beyond}, they are 0 to {args.num_iterations - 1}"
        )
    if args.filter not in ("influence", "random", "none"):
        module, _, function = args.filter.partition(":")
        try:
            if not callable(getattr(importlib.import_module(module), function)):
                raise TypeError(f"{function} is not a function")
        except Exception as error:
            sys.exit(f"--filter {args.filter}: not influence, random, none or an importable module:function ({error})")
    try:
        is_object = isinstance(json.loads(args.env_kwargs), dict)
    except json.JSONDecodeError:
        is_object = False
    if not is_object:
        sys.exit(f"""--env-kwargs must be a JSON object like '{{"is_slippery": false}}', got {args.env_kwargs}""")


def snapshot_rounds(args):
    """The rounds that --snapshot-rounds names."""
    kind, _, step = args.snapshot_rounds.partition(":")
    if kind in ("all", "every"):
        return range(0, args.num_iterations, int(step or 1))
    return [int(k) for k in kind.split(",") if k]


def derive_seed(*key):
    """A seed for each key of integers from 0 to 2**32 - 1, for independent streams. (Zeros at its end make no difference.)"""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def make_env(env_id, idx, capture_video, run_name, env_kwargs, fully_observable):
    def thunk():
        video = capture_video and idx == 0
        env = gym.make(env_id, **(env_kwargs | ({"render_mode": "rgb_array"} if video else {})))
        if video:
            env = gym.wrappers.RecordVideo(env, f"videos/{run_name}")
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if fully_observable:
            env = FullyObsWrapper(env)
        return ImgObsWrapper(env)  # without the mission's text and the direction, which the agent's view implies

    return thunk


def check_env(args):
    """Refuse an environment that this script cannot learn, with one line that says which can."""
    try:
        env = gym.make(args.env_id, **json.loads(args.env_kwargs))
    except Exception as error:
        sys.exit(f"--env-id {args.env_id} --env-kwargs '{args.env_kwargs}': {error} (the id of another package is module:id)")
    if not isinstance(env.unwrapped, minigrid.minigrid_env.MiniGridEnv):
        sys.exit(f"--env-id {args.env_id} is not of MiniGrid; use ppo_iif.py, ppo_iif_continuous.py or ppo_iif_atari.py")
    size = min((env.unwrapped.width, env.unwrapped.height) if args.fully_observable else (env.unwrapped.agent_view_size,))
    if size < 5:
        sys.exit(f"--env-id {args.env_id}: images of {size} cells are too small for two 3x3 convolutions; they need 5")
    env.close()


def make_envs(args, run_name):
    # SAME_STEP: the row after an episode's end is the first of a new one. (Gymnasium's default, NEXT_STEP, puts a row into the
    # batch that nobody acted in, and a filter would earn credit for dropping it.)
    return gym.vector.SyncVectorEnv(
        [
            make_env(args.env_id, i, args.capture_video, run_name, json.loads(args.env_kwargs), args.fully_observable)
            for i in range(args.num_envs)
        ],
        copy=False,
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )


def make_eval_envs(args):
    """The environments that evaluation plays in, apart from training's."""
    thunk = make_env(args.env_id, 0, False, None, json.loads(args.env_kwargs), args.fully_observable)
    return [thunk() for _ in range(min(args.eval_episodes, 32))]


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, envs, obs_scale=255.0):
        super().__init__()
        width, height, channels = envs.single_observation_space.shape
        self.obs_scale = obs_scale
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(channels, 16, 3)),
            nn.ReLU(),
            layer_init(nn.Conv2d(16, 32, 3)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(32 * (width - 4) * (height - 4), 64)),
            nn.ReLU(),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, int(envs.single_action_space.n)), std=0.01),
        )
        self.critic = nn.Sequential(
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )

    def features(self, x):
        return self.network(x.permute(0, 3, 1, 2) / self.obs_scale)

    def get_value(self, x):
        return self.critic(self.features(x))

    def get_logprob(self, x, action):
        return -F.cross_entropy(self.actor(self.features(x)), action, reduction="none")

    def get_logits_and_value(self, x):
        hidden = self.features(x)
        return self.actor(hidden), self.critic(hidden)

    def get_action_and_value(self, x, action=None):
        logits, value = self.get_logits_and_value(x)
        logprobs = F.log_softmax(logits, dim=-1)
        if action is None:
            action = torch.multinomial(logprobs.exp(), 1).squeeze(-1)
        entropy = torch.special.entr(logprobs.exp()).sum(-1)
        return action, logprobs.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy, value

    def policy(self, rng):
        """The sampling policy as a function of numpy images [n, width, height, 3], drawing from `rng`.

        It returns actions [n], their log-probs [n] and values [n]: the trunk is shared, so one pass gives all three. A grid
        shows few different images, and the agent stays the same, so each is computed once.
        """
        device = next(self.parameters()).device
        seen = {}

        def act(x):
            keys = [image.tobytes() for image in x]
            new = {key: i for i, key in enumerate(keys) if key not in seen}
            if new:
                with torch.no_grad():
                    logits, values = self.get_logits_and_value(torch.from_numpy(x[list(new.values())]).to(device))
                    logprobs = F.log_softmax(logits, dim=-1)
                seen.update(zip(new, zip(logprobs.cpu().numpy(), values.squeeze(-1).cpu().numpy())))
            logprobs, values = (np.array(column) for column in zip(*(seen[key] for key in keys)))
            action = (logprobs + rng.gumbel(size=logprobs.shape)).argmax(-1)  # Gumbel-max: a sample of softmax(logits)
            return action, logprobs[np.arange(len(action)), action], values

        return act


def rollout(agent, envs, next_obs, num_steps, rng, device="cpu"):
    """Collect one round with the agent's current policy, theta(k).

    Returns the round, a dict of tensors [num_steps, num_envs, ...] on `device`; its finished episodes, a list of (step, env,
    return, length); and the observations [num_envs, width, height, 3] to begin the next round with.
    """
    num_envs = envs.num_envs
    obs = np.empty((num_steps + 1, num_envs, *envs.single_observation_space.shape), dtype=np.uint8)
    actions = np.empty((num_steps, num_envs), dtype=np.int64)
    logprobs, rewards = (np.empty((num_steps, num_envs), dtype=np.float32) for _ in range(2))
    values = np.empty((num_steps + 1, num_envs), dtype=np.float32)
    terminations, truncations = (np.empty((num_steps, num_envs), dtype=bool) for _ in range(2))
    cut, episodes = [], []
    act = agent.policy(rng)

    obs[0] = next_obs
    for t in range(num_steps):
        actions[t], logprobs[t], values[t] = act(obs[t])
        obs[t + 1], rewards[t], terminations[t], truncations[t], infos = envs.step(actions[t])
        if "final_info" in infos:
            episode = infos["final_info"]["episode"]
            for i in np.flatnonzero(infos["_final_info"]):
                episodes.append((t, int(i), float(episode["r"][i]), int(episode["l"][i])))
                if truncations[t, i] and not terminations[t, i]:
                    cut.append((t, i, infos["final_obs"][i]))
    values[-1] = act(obs[-1])[2]

    batch = {
        "obs": obs[:-1],
        "actions": actions,
        "logprobs": logprobs,
        "rewards": rewards,
        "values": values[:-1],
        "next_values": values[1:].copy(),
        "terminations": terminations,
        "dones": terminations | truncations,
    }
    if cut:  # a truncated episode goes on, only unseen: its last value is that of its final observation
        t, i, final_obs = zip(*cut)
        batch["next_values"][t, i] = act(np.stack(final_obs))[2]
    return {name: torch.from_numpy(x).to(device) for name, x in batch.items()}, episodes, obs[-1].copy()


def gae(batch, gamma, gae_lambda):
    """Add generalised advantage estimates and returns to a round, [num_steps, num_envs] each.

    A termination ends the future, so nothing is bootstrapped; any end of an episode ends the sum over its steps.
    """
    deltas = batch["rewards"] + gamma * batch["next_values"] * ~batch["terminations"] - batch["values"]
    deltas, carry = deltas.cpu().numpy(), gamma * gae_lambda * (~batch["dones"]).float().cpu().numpy()
    advantages = np.empty_like(deltas)
    lastgaelam = np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = lastgaelam = deltas[t] + carry[t] * lastgaelam
    batch["advantages"] = torch.from_numpy(advantages).to(batch["values"].device)
    batch["returns"] = batch["advantages"] + batch["values"]
    return batch


def score(agent, batch, args, generator):
    """Influence [batch_size] of the records of a flat round on its return, advantages normalised as training does it."""
    return return_influence(
        agent,
        lambda inds: agent.get_logprob(batch["obs"][inds], batch["actions"][inds]),
        batch["advantages"],
        minibatch_size=args.minibatch_size if args.norm_adv else 1,  # alone in its minibatch, a record is not normalised
        inds=torch.randperm(args.batch_size, generator=generator),
    )


def select(batch, args, generator):
    """What to train on: indices of the records to keep, or a sampling weight [batch_size] per record."""
    if args.filter in ("influence", "random"):
        kept = filter_bottom(batch["scores"].cpu(), args.filter_percent, of=args.filter_of)
        if args.filter == "random":
            kept = torch.randperm(args.batch_size, generator=generator)[: len(kept)].sort().values
        return kept
    module, function = args.filter.split(":")
    chosen = torch.as_tensor(getattr(importlib.import_module(module), function)(batch)).cpu()
    if not chosen.numel():
        chosen = chosen.long()
    if chosen.is_floating_point():
        good = chosen.shape == (args.batch_size,) and torch.isfinite(chosen).all() and (chosen >= 0).all() and chosen.sum() > 0
    else:
        good = chosen.dim() == 1 and not ((chosen < 0) | (chosen >= args.batch_size)).any()
        good = good and chosen.dtype in (torch.int32, torch.int64)
    if not good:
        sys.exit(
            f"--filter {args.filter} must return indices of records, or one finite non-negative weight for each of the"
            f" {args.batch_size} records, not all zero; got {chosen.dtype} {list(chosen.shape)}"
        )
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


def update(agent, optimizer, batch, selection, args, generator):
    """PPO's epochs over the selected records of a flat round. Returns the losses to log and the number of optimizer steps."""
    steps, ratios = 0, []
    for epoch in range(args.update_epochs):
        mbs = minibatches(selection, args, generator)
        if not mbs:
            return {}, 0
        inds, sizes = torch.cat(mbs), [len(mb_inds) for mb_inds in mbs]
        columns = ("obs", "actions", "logprobs", "advantages", "returns", "values")
        for mb_obs, mb_actions, mb_logprobs, mb_advantages, mb_returns, mb_values in zip(
            *(batch[column][inds].split(sizes) for column in columns)
        ):
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(mb_obs, mb_actions)
            logratio = newlogprob - mb_logprobs
            ratio = logratio.exp()

            if args.norm_adv and len(mb_advantages) > 1:
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

            # Policy loss
            pg_loss1 = -mb_advantages * ratio
            pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
            pg_loss = torch.max(pg_loss1, pg_loss2).mean()

            # Value loss
            newvalue = newvalue.view(-1)
            v_loss = (newvalue - mb_returns).square()
            if args.clip_vloss:
                v_clipped = mb_values + torch.clamp(newvalue - mb_values, -args.clip_coef, args.clip_coef)
                v_loss = torch.max(v_loss, (v_clipped - mb_returns).square())
            v_loss = v_loss.mean()

            loss = pg_loss + args.vf_coef * v_loss
            if args.ent_coef:
                loss = loss - args.ent_coef * entropy.mean()

            optimizer.zero_grad()
            loss.backward()
            if args.max_grad_norm:
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            steps += 1
            ratios.append(ratio.detach())

        if args.target_kl is not None:
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
            if approx_kl > args.target_kl:
                break

    with torch.no_grad():  # as CleanRL logs them: of the last minibatch, but clipfrac and explained_variance
        losses = {
            "value_loss": v_loss.item(),
            "policy_loss": pg_loss.item(),
            "entropy": entropy.mean().item(),
            "old_approx_kl": (-logratio).mean().item(),
            "approx_kl": ((ratio - 1) - logratio).mean().item(),
            "clipfrac": ((torch.cat(ratios) - 1).abs() > args.clip_coef).float().mean().item(),
        }
    return losses, steps


def evaluate(agent, envs, num_episodes, seed):
    """Returns [num_episodes] of episodes with sampled actions, played side by side in the list `envs`; all randomness from
    `seed`."""
    rng = np.random.default_rng(seed)
    act = agent.policy(rng)
    seeds = rng.integers(2**31, size=num_episodes).tolist()
    returns, obs, playing = np.zeros(num_episodes), {}, {}  # playing: environment -> its episode
    started = 0
    while started < num_episodes or playing:
        # An episode that has begun is always finished, so that short ones get no favour.
        for i in sorted(set(range(len(envs))) - set(playing)):
            if started < num_episodes:
                obs[i], _ = envs[i].reset(seed=seeds[started])
                playing[i] = started
                started += 1
        order = list(playing)
        actions, _, _ = act(np.stack([obs[i] for i in order]))
        for i, action in zip(order, actions):
            obs[i], _, _, _, info = envs[i].step(action)
            if "episode" in info:
                returns[playing.pop(i)] = info["episode"]["r"]
    return returns


def new_run_name(args):
    """A name of CleanRL's form whose folder in runs/ is new, also when several runs start within a second."""
    started = int(time.time())
    while True:
        run_name = f"{args.env_id.split(':')[-1]}__{args.exp_name}__{args.seed}__{started}"
        try:
            os.makedirs(f"runs/{run_name}")
            return run_name
        except FileExistsError:
            started += 1


def save(path, state):
    """Write a checkpoint whole or not at all: a kill in the middle leaves the one before."""
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def picture(obs):
    """An observation [width, height, 3] of symbols, drawn: [pixels, pixels, 3]."""
    grid, seen = Grid.decode(obs)
    position, direction = (grid.width // 2, grid.height - 1), 3  # in its own view the agent looks up from the middle below
    for position in np.argwhere(obs[..., 0] == OBJECT_TO_IDX["agent"]):  # the whole grid shows it
        direction = obs[tuple(position)][2]
    return grid.render(16, position, direction, seen)


def package_versions(envs):
    """{distribution: version} of what decides how the environments behave: their own package, Gymnasium, the physics."""
    own = type(envs.envs[0].unwrapped).__module__.partition(".")[0]
    loaded = {own, "gymnasium", "Box2D", "mujoco", "ale_py"} & set(sys.modules)
    distributions = importlib.metadata.packages_distributions()
    names = {name for module in loaded for name in distributions.get(module, ())}
    return {name: importlib.metadata.version(name) for name in sorted(names)}


def parse_args():
    """The arguments of the command line; with --resume, on top of those of the checkpoint. Returns them with the
    checkpoint."""
    args, checkpoint = tyro.cli(Args), None
    if args.resume:
        try:
            checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
            saved = Args(**checkpoint["args"])
            if checkpoint["script"] != SCRIPT:
                raise ValueError(f"it is of {checkpoint['script']}")
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0][:160]
            sys.exit(f"--resume {args.resume} is not a whole checkpoint of {SCRIPT} ({type(error).__name__}: {reason})")
        args = tyro.cli(Args, default=saved)
        args.__post_init__()  # tyro copies the fields that are filled in
        free = {"resume", "total_timesteps", "torch_threads", "cuda", "track", "wandb_project_name", "wandb_entity"}
        free |= {"capture_video", "save_model", "snapshot_rounds", "num_iterations"}
        free |= {"eval_episodes"} if args.eval_episodes else set()
        changed = [k for k, v in asdict(args).items() if k not in free and v != getattr(saved, k)]
        if changed:
            flag, value = changed[0].replace("_", "-"), getattr(saved, changed[0])
            sys.exit(f"--resume goes on with the run's own --{flag} {value}; leave it out")
        if checkpoint["iteration"] >= args.num_iterations:
            sys.exit(f"--resume {args.resume}: all {args.num_iterations} rounds are done; raise --total-timesteps to go on")
    check_args(args)
    return args, checkpoint


if __name__ == "__main__":
    args, checkpoint = parse_args()
    torch.set_num_threads(args.torch_threads)
    check_env(args)
    run_name = checkpoint["run_name"] if checkpoint else new_run_name(args)

    # TRY NOT TO MODIFY: seeding
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    rollout_rng = np.random.default_rng(derive_seed(args.seed, 0))
    shuffle_rng = torch.Generator().manual_seed(derive_seed(args.seed, 1))
    filter_rng = torch.Generator().manual_seed(derive_seed(args.seed, 2))

    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")

    # env setup
    envs = make_envs(args, run_name)
    eval_envs = make_eval_envs(args)

    agent = Agent(envs, args.obs_scale).to(device)
    if args.optimizer == "sgd":
        optimizer = optim.SGD(agent.parameters(), lr=args.learning_rate, fused=True)
    else:
        optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)

    # the counters of a run
    iteration, global_step, optimizer_steps, skipped_updates = 0, 0, 0, 0
    if checkpoint:
        try:
            agent.load_state_dict(checkpoint["agent"])
        except RuntimeError:
            sys.exit(f"--resume {args.resume} holds another network than {SCRIPT} has for --env-id {args.env_id}")
        optimizer.load_state_dict(checkpoint["optimizer"])
        iteration, global_step = checkpoint["iteration"], checkpoint["global_step"]
        optimizer_steps, skipped_updates = checkpoint["optimizer_steps"], checkpoint["skipped_updates"]
        python_state, (name, keys, *rest) = checkpoint["rng"]["python"], checkpoint["rng"]["numpy"]
        random.setstate((python_state[0], tuple(python_state[1]), python_state[2]))
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(checkpoint["rng"]["torch"])
        rollout_rng.bit_generator.state = checkpoint["rng"]["rollout"]
        shuffle_rng.set_state(checkpoint["rng"]["shuffle"])
        filter_rng.set_state(checkpoint["rng"]["filter"])

    if args.track:
        import wandb

        wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            sync_tensorboard=True,
            config=asdict(args),
            name=run_name,
            id=checkpoint["wandb_id"] if checkpoint else None,
            resume="allow" if checkpoint and checkpoint["wandb_id"] else None,
            save_code=True,
        )
    writer = SummaryWriter(f"runs/{run_name}", purge_step=global_step + 1 if checkpoint else None)
    writer.add_text(
        "hyperparameters",
        "|param|value|\n|-|-|\n%s" % ("\n".join([f"|{key}|{value}|" for key, value in asdict(args).items()])),
    )
    videos = set()

    def state():
        numpy_state = np.random.get_state()
        return {
            "script": SCRIPT,
            "agent": agent.state_dict(),
            "optimizer": optimizer.state_dict(),
            "args": {k: v for k, v in asdict(args).items() if k not in ("batch_size", "minibatch_size", "num_iterations")},
            "run_name": run_name,
            "wandb_id": wandb.run.id if args.track else checkpoint and checkpoint["wandb_id"],
            "iteration": iteration,
            "global_step": global_step,
            "optimizer_steps": optimizer_steps,
            "skipped_updates": skipped_updates,
            "rng": {
                "python": random.getstate(),
                "numpy": (numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]),
                "torch": torch.get_rng_state(),
                "rollout": rollout_rng.bit_generator.state,
                "shuffle": shuffle_rng.get_state(),
                "filter": filter_rng.get_state(),
            },
        }

    def log_records():
        """The records with the lowest and the highest scores, as a table of W&B."""
        order = batch["scores"].argsort().tolist()
        columns = ("scores", "advantages", "returns", "values", "rewards", "logprobs", "dones")
        rows = [
            [i, wandb.Image(picture(batch["obs"][i].cpu().numpy())), str(batch["actions"][i].tolist())]
            + [batch[column][i].item() for column in columns]
            for i in order[:20] + order[20:][-20:]
        ]
        table = wandb.Table(columns=["record", "observation", "action", *columns], data=rows)
        wandb.log({"influence/records": table, "global_step": global_step})

    def log_evaluation():
        returns = evaluate(agent, eval_envs, args.eval_episodes, derive_seed(args.seed, 3, iteration))
        print(f"round={iteration}, eval_episodic_return={returns.mean():.3f}")
        writer.add_scalar("eval/episodic_return", returns.mean(), global_step)
        writer.add_scalar("eval/episodic_return_std", returns.std(), global_step)

    def log_videos():
        if args.track and args.capture_video and os.path.isdir(f"videos/{run_name}"):
            for video in sorted(set(os.listdir(f"videos/{run_name}")) - videos):
                videos.add(video)
                if video.endswith(".mp4"):
                    wandb.log({"videos": wandb.Video(f"videos/{run_name}/{video}", format="mp4"), "global_step": global_step})

    # TRY NOT TO MODIFY: start the game
    start_time = time.time()
    first_step = global_step
    next_obs = None
    snapshots = snapshot_rounds(args)
    if args.eval_episodes and not checkpoint:
        log_evaluation()
    while iteration < args.num_iterations:
        if args.anneal_lr:
            frac = 1.0 - iteration / args.num_iterations
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate

        # What is inside an environment cannot be saved, so every checkpoint begins fresh episodes, in a run that goes on as
        # well.
        if next_obs is None or (args.save_every and iteration % args.save_every == 0):
            env_seed = derive_seed(args.seed, 4, iteration) % 2**31 if iteration else args.seed
            next_obs, _ = envs.reset(seed=env_seed)
            played = []  # the actions since, so that a snapshot's round can be played again

        times = [time.perf_counter()]
        batch, episodes, next_obs = rollout(agent, envs, next_obs, args.num_steps, rollout_rng, device)
        batch = {name: x.flatten(0, 1) for name, x in gae(batch, args.gamma, args.gae_lambda).items()}
        for name in ("rewards", "values", "advantages"):
            bad = (~batch[name].reshape(args.batch_size, -1).isfinite().all(1)).nonzero().flatten()
            if len(bad):
                writer.close()
                sys.exit(
                    f"round {iteration}: {name} not finite in {len(bad)} of {args.batch_size} records, the first in record"
                    f" {bad[0]}: the environment's fault, or the networks have diverged (lower --learning-rate)"
                )

        times.append(time.perf_counter())
        if snapshots:
            played.append(batch["actions"].cpu())

        filtered = args.filter != "none"
        if filtered:
            try:
                batch["scores"] = score(agent, batch, args, filter_rng)
            except ValueError as error:
                writer.close()
                sys.exit(f"round {iteration}: {error}")
            if args.filter_when == "signal":
                returns = {episode_return for _, _, episode_return, _ in episodes}
                filtered = len(returns) > 1 or bool((batch["rewards"] != batch["rewards"][0]).any())
        selection = select(batch, args, filter_rng) if filtered else torch.arange(args.batch_size)
        times.append(time.perf_counter())

        if iteration in snapshots:
            os.makedirs(f"runs/{run_name}/snapshots", exist_ok=True)
            replay = {"env_seed": env_seed, "played": torch.cat(played), "packages": package_versions(envs)}
            save(
                f"runs/{run_name}/snapshots/round_{iteration:06d}.pt",
                state() | {"batch": batch, "selection": selection} | replay,
            )
            times = [t + time.perf_counter() - times[-1] for t in times]  # this is no part of them

        losses, steps = update(agent, optimizer, batch, selection, args, shuffle_rng)
        times.append(time.perf_counter())
        if not all(p.isfinite().all() for p in agent.parameters()):
            writer.close()
            sys.exit(
                f"round {iteration}: the update has made the weights not finite; lower --learning-rate {args.learning_rate}"
            )

        # TRY NOT TO MODIFY: record everything for plotting purposes
        for n, (t, i, episodic_return, episodic_length) in enumerate(episodes, start=1):
            # The last episode is logged at the end of the round, so that it shares a row with the histogram of scores.
            step = global_step + (args.batch_size if n == len(episodes) else (t + 1) * args.num_envs)
            print(f"global_step={step}, episodic_return={episodic_return}")
            writer.add_scalar("charts/episodic_return", episodic_return, step)
            writer.add_scalar("charts/episodic_length", episodic_length, step)

        iteration += 1
        global_step += args.batch_size
        optimizer_steps += steps
        skipped_updates += steps == 0
        if "scores" in batch:
            kept = torch.arange(args.batch_size) if selection.is_floating_point() else selection
            log_influence(writer, batch["scores"], kept, global_step, advantages=batch["advantages"], filtered=filtered)
            if args.track and iteration - 1 in snapshots:
                log_records()
        if losses:
            var_y = batch["returns"].var(correction=0).item()
            residual = (batch["returns"] - batch["values"]).var(correction=0).item()
            losses["explained_variance"] = np.nan if var_y == 0 else 1 - residual / var_y
        for name, value in losses.items():
            writer.add_scalar(f"losses/{name}", value, global_step)
        for name, seconds in zip(("time/rollout", "time/scoring", "time/update"), np.diff(times)):
            writer.add_scalar(name, seconds, global_step)
        sps = int((global_step - first_step) / (time.time() - start_time))
        print("SPS:", sps)
        writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], global_step)
        writer.add_scalar("charts/SPS", sps, global_step)
        writer.add_scalar("charts/round", iteration - 1, global_step)
        writer.add_scalar("charts/optimizer_steps", optimizer_steps, global_step)
        writer.add_scalar("charts/skipped_updates", skipped_updates, global_step)
        log_videos()
        if args.eval_episodes:
            log_evaluation()
        writer.flush()
        if args.save_every and iteration % args.save_every == 0:
            save(f"runs/{run_name}/checkpoint.pt", state())

    if args.save_model:
        model_path = f"runs/{run_name}/{args.exp_name}.cleanrl_model"
        save(model_path, state())
        print(f"model saved to {model_path}")

    envs.close()
    log_videos()
    writer.close()
    if args.track:
        wandb.finish()
