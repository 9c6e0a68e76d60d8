"""The lines that add IIF to a script, tried on CleanRL's own: `python -m benchmarks.plugin CHECKOUT`.

CHECKOUT is a clone of CleanRL's repository; its scripts are read there and changed in a temporary folder. Each one is changed as the
README or docs/cleanrl.md shows, trained for a few rounds with its own settings, and its scores are compared with a loop of autograd
in float64 over single records. Writes benchmarks/results/plugin/scripts.csv.

The scripts were written for Gymnasium 0.29 (and gym); `gymnasium_of_then` gives them its names in today's.
"""

import contextlib
import functools
import multiprocessing
import re
import runpy
import sys
import tempfile
import time
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import gymnasium as gym
import numpy as np
import pandas as pd
import torch
import tyro

import iif_core
from benchmarks.files import progress, say

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "plugin" / "scripts.csv"
# Script: where its lines stand, environment, further arguments, records compared in a round (None: all).
SCRIPTS = {
    "ppo.py": ("README.md", "CartPole-v1", [], None),
    "ppo_continuous_action.py": ("docs/cleanrl.md", "HalfCheetah-v4", [], None),
    "ppo_atari.py": ("README.md", "BreakoutNoFrameskip-v4", [], 64),
    "ppo_atari_lstm.py": ("docs/cleanrl.md", "BreakoutNoFrameskip-v4", [], 32),
    "ppo_procgen.py": ("README.md", "random pictures", ["--num-envs", "8", "--num-steps", "32"], 32),
}


def changes(text, script=None):
    """The changes that a document's diff shows: [(old line or None, new lines)], all stripped of their indentation.

    script: of several diffs, the one below the heading that names it. A change is what stands between two lines ` ...`; old is its
    line that starts with a space or a minus sign, None if all are new, which is where the imports are.
    """
    if script:
        text = text.partition(f"## `{script}`")[2]
    diff = re.search(r"```diff\n(.*?)```", text, re.DOTALL)
    if not diff:
        raise ValueError(f"there is no diff for {script}")
    found = []
    for block in re.split(r"^ \.\.\.$", diff[1], flags=re.MULTILINE):
        lines = block.strip("\n").splitlines()
        (old,) = [line[1:].strip() for line in lines if line[0] in " -"] or [None]
        found.append((old, [line[1:].strip() for line in lines if line[0] in " +"]))
    return found


def apply(changes, source):
    """The source of a script, changed. Raises ValueError if a line to change is not there exactly once."""
    lines = source.splitlines()
    for old, new in changes:
        at = [
            i for i, line in enumerate(lines) if (line.startswith("import gymnasium") if old is None else line.strip() == old)
        ]
        at = at or [i for i, line in enumerate(lines) if old is None and line.startswith("import gym")]
        if len(at) != 1:
            raise ValueError(f"{len(at)} lines read {old or 'import gymnasium'!r}, not one")
        indent = re.match(" *", lines[at[0]])[0]
        lines[at[0] : at[0] + 1] = [lines[at[0]]] * (old is None) + [indent + line for line in new]
    return "\n".join(lines) + "\n"


# ---- the environments of then


class SyncVectorEnv(gym.vector.SyncVectorEnv):
    """As in Gymnasium 0.29: an ended episode is followed by the first step of the next one, and final_info is a list."""

    def __init__(self, env_fns):
        super().__init__(env_fns, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

    def step(self, actions):
        *result, infos = super().step(actions)
        if "final_info" in infos:
            episode, whole = (infos["final_info"].get(key, {}) for key in ("episode", "_episode"))
            infos["final_info"] = [
                {"episode": {k: v[i] for k, v in episode.items()}} if len(whole) and whole[i] else {} if ended else None
                for i, ended in enumerate(infos["_final_info"])
            ]
        return *result, infos


class RandomPictures:
    """In place of Procgen, which has no build for current Pythons: pictures of its size, an action that is worth something."""

    def __init__(self, num_envs, **kwargs):
        self.num_envs, self.rng = num_envs, np.random.default_rng(1)
        self.observation_space = {"rgb": gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)}
        self.action_space = gym.spaces.Discrete(15)

    def reset(self):
        return self.rng.integers(0, 256, (self.num_envs, 64, 64, 3), dtype=np.uint8)

    def step(self, actions):
        ended = self.rng.random(self.num_envs) < 0.05
        return self.reset(), (actions == 3).astype(np.float32), ended, [{} for _ in ended]

    def close(self):
        pass


def gymnasium_of_then():
    """Give this process what the scripts import: names of Gymnasium 0.29 and, for Procgen's, a stand-in for gym."""
    import ale_py

    gym.register_envs(ale_py)
    gym.vector.SyncVectorEnv = SyncVectorEnv
    gym.wrappers.TransformObservation = functools.partial(gym.wrappers.TransformObservation, observation_space=None)
    gym.wrappers.GrayScaleObservation = gym.wrappers.GrayscaleObservation
    gym.wrappers.FrameStack = gym.wrappers.FrameStackObservation
    old, procgen = types.ModuleType("gym"), types.ModuleType("procgen")
    wrappers = ("TransformObservation", "RecordEpisodeStatistics", "RecordVideo", "NormalizeReward", "TransformReward")
    old.spaces, old.wrappers = gym.spaces, types.SimpleNamespace(**{name: lambda env, *_, **__: env for name in wrappers})
    procgen.ProcgenEnv = RandomPictures
    sys.modules |= {"gym": old, "procgen": procgen}


# ---- the comparison


@contextlib.contextmanager
def in_float64(agent, function):
    """Let `function` of a script see its agent and its global tensors in float64."""

    def double(x):
        if isinstance(x, tuple):
            return tuple(double(y) for y in x)
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    names = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    try:
        agent.double()
        function.__globals__.update({name: double(x) for name, x in names.items() if x is not agent})
        yield
    finally:
        agent.float()
        function.__globals__.update(names)


def loop(agent, logprob, advantages, minibatch_size, inds, records):
    """Scores [len(records)] of those records, by the definition: the gradient of each one's own log-probability, in float64."""
    advantages, inds = advantages.double(), torch.as_tensor(inds)
    normalized = torch.empty_like(advantages)
    for part in inds.split(minibatch_size):
        normalized[part] = (advantages[part] - advantages[part].mean()) / (advantages[part].std() + 1e-8)
    with in_float64(agent, logprob):
        params, n = list(agent.parameters()), len(advantages)
        direction = [torch.zeros_like(p) for p in params]
        for part in torch.arange(n).split(256):
            share = (advantages[part] * logprob(part)).sum() / n
            for total, grad in zip(direction, torch.autograd.grad(share, params, allow_unused=True)):
                if grad is not None:
                    total += grad
        scores = []
        for part in records.split(32):
            for value in (logprobs := logprob(part)):
                grads = torch.autograd.grad(value, params, retain_graph=True, allow_unused=True)
                scores.append(sum((g * d).sum() for g, d in zip(grads, direction) if g is not None))
            del logprobs
    return normalized[records] * torch.stack(scores)


def train(checkout, script, rounds):
    """Train the changed script for some rounds; returns its row of the table. Needs a process of its own."""
    document, env_id, arguments, compared = SCRIPTS[script]
    source = (checkout / "cleanrl" / script).read_text(encoding="utf-8")
    text = (ROOT / document).read_text(encoding="utf-8")
    source = apply(changes(text, None if document == "README.md" else script), source)
    measured, ended = [], None
    return_influence = iif_core.return_influence

    def recorded(agent, logprob, advantages, *, minibatch_size, inds, **options):
        nonlocal ended
        start = time.perf_counter()
        scores = return_influence(agent, logprob, advantages, minibatch_size=minibatch_size, inds=inds, **options)
        scored = time.perf_counter()
        n = len(scores)
        records = (
            torch.arange(n) if compared is None else torch.randperm(n, generator=torch.Generator().manual_seed(n))[:compared]
        )
        truth = loop(agent, logprob, advantages, minibatch_size, inds, records)
        error = ((scores[records] - truth).abs().max() / truth.abs().max()).item()
        measured.append((n, len(records), error, scored - start, scored - ended if ended else np.nan))
        ended = time.perf_counter()
        return scores

    iif_core.return_influence = recorded
    gymnasium_of_then()
    sys.path[:0] = [str(ROOT), str(checkout)]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(None):
        Path(script).write_text(source, encoding="utf-8")
        sys.argv = [script, "--total-timesteps", str(10**7), *arguments]
        defaults = runpy.run_path(script)["Args"]()  # without running it
        for flag, value in zip(arguments[::2], arguments[1::2]):
            setattr(defaults, flag[2:].replace("-", "_"), int(value))
        sys.argv[2] = str(rounds * defaults.num_envs * defaults.num_steps)
        agent = runpy.run_path(script, run_name="__main__")["agent"]
    assert len(measured) == rounds and all(p.isfinite().all() for p in agent.parameters())
    n, records, error, scoring, whole = map(np.array, zip(*measured))
    return {
        "script": script,
        "environment": env_id,
        "parameters": sum(p.numel() for p in agent.parameters()),
        "rounds": rounds,
        "records": n[0],
        "compared": records[0],
        "error": error.max(),
        "scoring": np.median(scoring[1:]),
        "round": np.median(whole[1:]),
    }


def table():
    """The measured rows as a table in Markdown."""
    lines = [
        "| script | environment | parameters | records of a round | compared with the loop | largest error | scoring, s | whole round, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in pd.read_csv(RESULTS).itertuples():
        lines.append(
            f"| `{row.script}` | {row.environment} | {row.parameters:,} | {row.records} | {row.rounds} x {row.compared}"
            f" | {row.error:.1e} | {row.scoring:.3g} | {row.round:.3g} |"
        )
    return "\n".join(lines)


def main(checkout: tyro.conf.Positional[Path], rounds: int = 3, only: str = ""):
    """Try the lines on CleanRL's scripts.

    Args:
        checkout: a clone of CleanRL's repository.
        rounds: rounds to train each for, at least 2.
        only: one of the scripts; nothing is written then.
    """
    checkout = checkout.resolve()
    if not (checkout / "cleanrl" / "ppo.py").exists():
        sys.exit(f"{checkout} is no checkout of CleanRL: there is no cleanrl/ppo.py in it")
    rows = []
    for script in progress([only] if only else SCRIPTS, "script"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            rows.append(pool.submit(train, checkout, script, rounds).result())
        say("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
    if not only:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_csv(RESULTS, index=False, float_format="%.4g")
        print(table())


if __name__ == "__main__":
    tyro.cli(main)
