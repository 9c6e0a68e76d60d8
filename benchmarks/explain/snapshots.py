"""Rounds that a training script saved with `--snapshot-rounds`, opened: what the commands of this room share. On the CPU."""

import copy
import importlib
import importlib.metadata
import json
import re
import sys
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from benchmarks import files
from iif_core import _ranks

SCRIPTS = ("ppo_iif.py", "ppo_iif_continuous.py", "ppo_iif_minigrid.py", "ppo_iif_atari.py")


@dataclass
class Snapshot:
    """One saved round: the flat batch {name: Tensor[batch_size, ...]}, scores included, and what collected it."""

    path: Path
    round: int  # charts/round
    script: Any  # the training script as a module
    args: Any  # its Args
    data: dict  # the file's other contents
    batch: dict
    selection: torch.Tensor
    envs: Any  # the training environments, anew

    def agent(self):
        """A new agent at theta(k)."""
        agent = self.script.Agent(self.envs, *([self.args.obs_scale] if hasattr(self.args, "obs_scale") else []))
        agent.load_state_dict(self.data["agent"])
        return agent

    def start(self):
        """What the update of this round began with: a new agent at theta(k), its optimizer, the generator of the shuffles."""
        agent, lr = self.agent(), self.args.learning_rate
        if self.args.optimizer == "sgd":
            optimizer = torch.optim.SGD(agent.parameters(), lr=lr, fused=True)
        else:
            optimizer = torch.optim.Adam(agent.parameters(), lr=lr, eps=1e-5, fused=True)
        optimizer.load_state_dict(copy.deepcopy(self.data["optimizer"]))  # or its steps would change the snapshot's
        _, shuffles, _ = self.script.random_streams(self.args.seed, self.round)
        return agent, optimizer, shuffles

    def score(self):
        """The round's scores, computed anew from theta(k): with their agreement and noise scale, which a file does not hold."""
        _, _, filters = self.script.random_streams(self.args.seed, self.round)
        return self.script.score(self.agent(), self.batch, self.args, filters)

    def eval_envs(self, num_episodes):
        """The environments for the script's evaluate of so many episodes, with the statistics of this round."""
        envs = self.script.make_eval_envs(replace(self.args, eval_episodes=num_episodes))
        if hasattr(self.script, "freeze_statistics"):
            self.script.freeze_statistics(envs, self.envs, self.args)
        return envs

    def update(self, selection, on_step=None, lr_factor=1.0):
        """The script's own update from theta(k), over the records of `selection`. Returns the agent at its end.

        lr_factor: what the round's learning rate is multiplied by. on_step(agent, inds) is called before each optimizer step, with the records of its minibatch.
        """
        agent, optimizer, generator = self.start()
        for group in optimizer.param_groups:
            group["lr"] *= lr_factor
        queue, minibatches = deque(), self.script.minibatches

        def noted(*args):
            queue.extend(mbs := minibatches(*args))
            return mbs

        if on_step:
            optimizer.register_step_pre_hook(lambda *_: on_step(agent, queue.popleft()))
        with mock.patch.object(self.script, "minibatches", noted):
            self.script.update(agent, optimizer, self.batch, selection, self.args, generator)
        return agent

    def replay(self, render=False):
        """Play the round again, from the seed of the last reset and the actions since: every run can, whatever its
        environment, if that is determined by its seed.

        Yields the environments before each of the round's num_steps steps; refuses to go on where they show another
        observation or reward than the records hold. (render: they can be rendered.)
        """
        args, kwargs = replace(self.args, capture_video=False), json.loads(self.args.env_kwargs)
        if render:
            args.env_kwargs = json.dumps({**kwargs, "render_mode": "rgb_array"})
        normalised = getattr(args, "norm_obs", False)
        if normalised or getattr(args, "norm_reward", False):  # as they are: the statistics at the reset are not known
            args.norm_obs = args.norm_reward = False
        envs = self.script.make_envs(args, None)
        num_envs = envs.num_envs
        actions = self.data["played"].unflatten(0, (-1, num_envs)).numpy()
        recorded = self.batch["obs"].unflatten(0, (-1, num_envs)).numpy()
        rewards = self.batch.get("raw_rewards", self.batch["rewards"]).unflatten(0, (-1, num_envs)).numpy()
        obs, _ = envs.reset(seed=self.data["env_seed"])
        for t, action in enumerate(actions, start=args.num_steps - len(actions)):
            same = t < 0 or normalised or np.array_equal(obs.astype(recorded.dtype), recorded[t])
            if t >= 0 and same:
                yield envs
            obs, reward, *_ = envs.step(action)
            if not same or t >= 0 and not np.array_equal(reward.astype(rewards.dtype), rewards[t]):
                sys.exit(
                    f"{self.path}: played again, step {t} shows another observation or reward than its record; --env-id"
                    f" {args.env_id} is not determined by its seed, so this needs what the snapshot does not hold"
                )
        envs.close()

    def record(self, t, i=0):
        """Index in the batch of what environment i did in step t."""
        return t * self.args.num_envs + i


def rounds(run):
    """The rounds saved in a run's folder, ascending."""
    if not Path(run).is_dir():
        sys.exit(f"{run}: there is no such run folder")
    names = [re.fullmatch(r"round_(\d{6,})\.pt", path.name) for path in Path(run).glob("snapshots/*.pt")]
    saved = sorted(int(name[1]) for name in names if name)
    if not saved:
        sys.exit(f"{run}: no snapshots in it; train with --snapshot-rounds")
    return saved


def chosen(run, ks):
    """Those of a run's saved rounds that the user asked for, `ks`, or all."""
    saved = rounds(run)
    for k in ks:
        if k not in saved:
            sys.exit(f"{run}: round {k} was not saved; there are {', '.join(map(str, saved))}")
    return ks or saved


def read(path):
    """A file of the training scripts; refused if it is not whole."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:120]
        sys.exit(f"{path} is corrupt or half-written ({type(error).__name__}: {reason})")


def load(run, k, any_version=False):
    """The snapshot of round k of a run's folder, its scores computed if the run had no use for them.

    any_version: open it also where the packages of its environment have other versions than when it was saved.
    """
    chosen(run, [k])
    path = Path(run) / "snapshots" / f"round_{k:06d}.pt"
    data = read(path)
    wanted = {"script", "args", "agent", "optimizer", "batch", "selection", "env_seed", "played", "packages"}
    if not isinstance(data, dict) or not wanted <= data.keys() or data["script"] not in SCRIPTS:
        sys.exit(f"{path} is no snapshot of a round")
    try:
        script = importlib.import_module(data["script"].removesuffix(".py"))
        args = script.Args(**data["args"])
    except (ImportError, TypeError) as error:
        sys.exit(f"{path}: {data['script']} cannot be used with it ({error})")
    args.capture_video = args.cuda = args.track = args.compile = False
    args.vectorization = "sync"
    torch.set_num_threads(args.torch_threads)
    script.check_env(args)
    envs = script.make_envs(args, None)
    for name in packages_of(envs):
        installed, saved = importlib.metadata.version(name), data["packages"].get(name)
        if installed != saved and not any_version:
            sys.exit(f"{path} was saved with {name} {saved}, here is {installed}: install that, or give --any-version")
    snapshot = Snapshot(path, k, script, args, data, data.pop("batch"), data.pop("selection"), envs)
    if "statistics" in data:
        script.set_statistics(envs, args, data["statistics"])
    try:
        snapshot.agent()
    except RuntimeError:
        sys.exit(f"{path} holds another network than {data['script']} has for --env-id {args.env_id}")
    if "scores" not in snapshot.batch:  # --filter none
        snapshot.batch["scores"] = snapshot.score()
    return snapshot


def packages_of(envs):
    """The installed packages that decide how the environments behave: their own, Gymnasium, the physics."""
    own = type(envs.envs[0].unwrapped).__module__.partition(".")[0]
    loaded = {own, "gymnasium", "Box2D", "mujoco", "ale_py"} & set(sys.modules)
    distributions = importlib.metadata.packages_distributions()
    return sorted({name for module in loaded for name in distributions.get(module, ())})


def final_agent(run, snapshot):
    """The agent at the end of the run if `--save-model` saved it, else that of the last saved round."""
    path = Path(run) / f"{snapshot.args.exp_name}.cleanrl_model"
    if not path.exists():
        path = Path(run) / "snapshots" / f"round_{rounds(run)[-1]:06d}.pt"
        print(f"without --save-model the last agent there is: {path.name}")
    agent = snapshot.agent()
    agent.load_state_dict(read(path)["agent"])
    return agent


def policy(agent, rng):
    """observations [n, ...] (numpy) -> sampled actions [n, ...], for every script's agent."""
    if hasattr(agent, "numpy_policy"):
        return agent.numpy_policy(rng)
    act = agent.policy(rng)
    return lambda obs: act(obs)[0]


@torch.no_grad()
def embed(agent, obs, actions):
    """The policy's last hidden layer [n, width] at observations [n, ...]."""
    actor = agent.actor_mean if hasattr(agent, "actor_mean") else agent.actor
    last = [m for m in actor.modules() if isinstance(m, nn.Linear)][-1]
    hidden = []
    hook = last.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    agent.get_logprob(obs, actions)
    hook.remove()
    return hidden[0]


def spearman(x, y):
    """Spearman's rank correlation of two vectors, equal values sharing their mean rank; NaN if one is constant."""
    x, y = _ranks(np.asarray(x)), _ranks(np.asarray(y))
    return float(np.corrcoef(x, y)[0, 1]) if x.std() > 0 and y.std() > 0 else float("nan")


def folder(run, out):
    """Where a command writes to: RUN/explain/, or the folder that the user names."""
    path = Path(out) if out else Path(run) / "explain"
    if path.exists() and not path.is_dir():
        sys.exit(f"--out {path} is a file; name a folder")
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_csv(path, columns, rows, quiet=False):
    files.write_csv(path, columns, rows)
    if not quiet:
        print(f"written to {path}", flush=True)


def save_figure(fig, path):
    files.save_small(fig, path)
    print(f"written to {path}", flush=True)
