"""Where a step of HalfCheetah-v5 goes: `python -m benchmarks.cost.halfcheetah --cleanrl PATH` (a checkout of CleanRL).

CleanRL's ppo_continuous_action.py (see benchmarks/cost/cleanrl.py) and ppo_iif_continuous.py with its settings run in one process,
a thread each, of which one at a time works: a round of each in turn, then the parts of our environment's step, `--turns` times.
All is CPU time divided by the steps, so that other jobs take little part in the ratios, which are taken within a turn. MuJoCo's own
time is a bound for every script that plays this environment on one core.
"""

import contextlib
import io
import os
import runpy
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import mujoco
import numpy as np
import torch
import tyro
from gymnasium import wrappers
from torch.utils.tensorboard import SummaryWriter

from benchmarks import files
from benchmarks.cost import cleanrl
from benchmarks.cost.throughput import MUJOCO

sys.path.insert(0, str(files.ROOT))
import ppo_iif_continuous as ours  # noqa: E402

ENV_ID, STEPS, WARMUP = "HalfCheetah-v5", 2048, 2
ARMS = {  # ours: in words, flags
    "none": ("ours, `--filter none`", f"{MUJOCO} --filter none"),
    "influence": ("ours, IIF", MUJOCO),
    "compiled": ("ours, IIF, `--compile`", f"{MUJOCO} --compile"),
}
PARTS = ("simulation", "environment", "clipped", "normalized", "vector", "policy", "Gymnasium's wrappers")
STAGES = ("rollout", "scoring", "update")
PATH = files.RESULTS / "cost" / "halfcheetah.csv"
COLUMNS = ("turn", "what", "part", "microseconds_per_step")


@dataclass
class Args:
    cleanrl: Path
    """a checkout of https://github.com/vwxyzjn/cleanrl"""
    turns: int = 7
    """rounds of each script, after two that are left out"""
    output: Path = PATH
    """the CSV to write, one row per turn and part"""


class Run(threading.Thread):
    """A training script, one round at a time."""

    def __init__(self, path, arguments):
        super().__init__(daemon=True)
        self.path, self.argv = path, [str(path), *arguments]
        self.go, self.done, self.stages = threading.Semaphore(0), threading.Semaphore(0), {}
        self.over = False
        self.start()

    def run(self):
        self.go.acquire()
        sys.argv = self.argv
        try:
            runpy.run_path(str(self.path), run_name="__main__")
        finally:
            self.over = True
            self.done.release()

    def round(self):
        """CPU seconds of its next round, and of its stages, if it logs them."""
        start = time.process_time()
        self.go.release()
        self.done.acquire()
        if self.over:
            sys.exit(f"{self.path} ended before its time")
        return time.process_time() - start, dict(self.stages)


def pause_after_rounds():
    """Let every script's thread wait for its turn where it logs its speed, once a round; what it times is CPU time."""
    add_scalar, time.perf_counter = SummaryWriter.add_scalar, time.process_time

    def added(self, tag, value, *args, **kwargs):
        add_scalar(self, tag, value, *args, **kwargs)
        run = threading.current_thread()
        if tag.startswith("time/"):
            run.stages[tag.removeprefix("time/")] = value
        if tag == "charts/SPS":
            run.done.release()
            run.go.acquire()

    SummaryWriter.add_scalar = added


class Parts:
    """Our environment, each layer's step to be timed apart, and the same with Gymnasium's own wrappers."""

    def __init__(self):
        self.args = tyro.cli(ours.Args, args=["--env-id", ENV_ID, *MUJOCO.split()])
        self.envs, self.rng = ours.make_envs(self.args, ""), np.random.default_rng(1)
        self.agent, normalized = ours.Agent(self.envs), self.envs.envs[0]
        # gymnasium.make's environment; with statistics of episodes and clipped actions; normalised
        self.layers = [normalized.env.env.env, normalized.env, normalized]
        theirs = wrappers.NormalizeObservation(ours.make_env(replace(self.args, norm_obs=False, norm_reward=False)))
        theirs = wrappers.TransformObservation(theirs, lambda obs: np.clip(obs, -10, 10), theirs.observation_space)
        theirs = wrappers.NormalizeReward(theirs, gamma=self.args.gamma)
        self.theirs = wrappers.TransformReward(theirs, lambda reward: np.clip(reward, -10, 10))

    def seconds(self, count=500):
        """{part: CPU seconds of a step}; each but the last is within the next."""
        actions = self.rng.uniform(-1, 1, (count, *self.envs.single_action_space.shape)).astype(np.float32)
        game, found = self.layers[0].unwrapped, {}

        def simulate(action):
            game.data.ctrl[:] = action
            mujoco.mj_step(game.model, game.data, nstep=game.frame_skip)

        obs, act = self.envs.reset()[0], self.agent.numpy_policy(self.rng)
        self.theirs.reset()
        steps = [simulate, *(layer.step for layer in self.layers), lambda action: self.envs.step(action[None])]
        for part, step in zip(PARTS, [*steps, lambda _: act(obs), self.theirs.step]):
            self.envs.reset()
            start = time.process_time()
            for action in actions:
                step(action)
            found[part] = (time.process_time() - start) / count
        return found


def table(path=PATH):
    """What a step takes, by part, and how many times CleanRL's speed ours is or could be, as Markdown from the CSV alone."""
    turns = {}
    for row in files.read_csv(path):
        turns.setdefault(row["turn"], {})[row["what"], row["part"]] = float(row["microseconds_per_step"])
    turns = list(turns.values())

    def line(name, value, times=False):
        """value: (turn) -> microseconds. times: say how many of it CleanRL's step is, too."""
        whole = [value(turn) for turn in turns]
        low, mid, high = np.percentile([turn["CleanRL", "round"] / us for turn, us in zip(turns, whole)], [25, 50, 75])
        return [name, f"{median(whole):.0f}", f"{mid:.1f} [{low:.1f}, {high:.1f}]" if times else ""]

    def within(inner, outer):
        return lambda turn: turn["parts", outer] - turn["parts", inner]

    simulation, bare, clipped, normalized, vector, policy, theirs = PARTS
    lines = [line("CleanRL's `ppo_continuous_action.py`", lambda turn: turn["CleanRL", "round"])]
    for arm, name in ARMS.items():
        lines.append(line(f"**{name[0]}**", lambda turn: turn[arm, "round"], times=True))
        lines += [line(f"- {stage}", lambda turn: turn[arm, stage]) for stage in STAGES if (arm, stage) != ("none", "scoring")]
    lines.append(line("**a rollout's step**: MuJoCo's `mj_step`", lambda turn: turn["parts", simulation]))
    lines.append(line("- the rest of `gymnasium.make`'s environment", within(simulation, bare)))
    lines.append(line("- wrappers: statistics of episodes, `ClipAction`", within(bare, clipped)))
    lines.append(line("- normalising and clipping observations and rewards", within(clipped, normalized)))
    lines.append(line("- - the same by Gymnasium's four wrappers", within(clipped, theirs)))
    lines.append(line("- `SyncVectorEnv`", within(normalized, vector)))
    lines.append(line("- the policy, in numpy", lambda turn: turn["parts", policy]))
    for arm, name in ARMS.items():
        bound = f"**bound**: {name[0]}, if its rollout were `gymnasium.make`'s environment alone"
        lines.append(line(bound, lambda turn: turn[arm, "round"] - turn[arm, "rollout"] + turn["parts", bare], times=True))
    return files.table(["", "CPU µs a step", "CleanRL / this, median [quartiles]"], lines)


if __name__ == "__main__":
    args, rows = tyro.cli(Args), []
    torch.set_num_threads(1)
    cleanrl.mend()
    pause_after_rounds()
    total = ["--env-id", ENV_ID, "--total-timesteps", str((args.turns + WARMUP + 1) * STEPS)]
    checkout, output = args.cleanrl.resolve(), args.output.resolve()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        runs = {"CleanRL": Run(checkout / "cleanrl" / "ppo_continuous_action.py", total)}
        runs |= {arm: Run(files.ROOT / "ppo_iif_continuous.py", total + flags.split()) for arm, (_, flags) in ARMS.items()}
        parts = Parts()
        for turn in files.progress(range(-WARMUP, args.turns), "turn"):
            found = {}
            for what, run in runs.items():
                found[what, "round"], stages = run.round()
                found |= {(what, stage): seconds for stage, seconds in stages.items()}
            found = {key: seconds / STEPS for key, seconds in found.items()}
            found |= {("parts", part): seconds for part, seconds in parts.seconds().items()}
            rows += [[turn, *key, 1e6 * seconds] for key, seconds in found.items()] * (turn >= 0)
            files.write_csv(output, COLUMNS, rows)
        os.chdir(files.ROOT)
    print(table(output))
