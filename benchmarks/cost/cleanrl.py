"""Run a script of CleanRL's own under today's Gymnasium: `python -m benchmarks.cost.cleanrl CHECKOUT SCRIPT [ITS ARGUMENTS]`.

CleanRL (https://github.com/vwxyzjn/cleanrl) is written for Gymnasium 0.29. What has changed since, and is mended here: two wrappers
have other names, TransformObservation wants the space of what it returns, and Atari's games are registered by importing ale_py.
The script itself is run as it is. (Gymnasium's present autoreset gives it a row of no meaning after each episode and leaves its
lines about episodes unprinted: that changes what it learns, not the work that it does.)
"""

import runpy
import sys
from pathlib import Path

import gymnasium as gym
from gymnasium import wrappers


def mend():
    """Let Gymnasium answer to the calls of 0.29 that CleanRL's PPO scripts make."""
    import ale_py  # registers Atari's games

    gym.register_envs(ale_py)
    transform = wrappers.TransformObservation
    wrappers.TransformObservation = lambda env, func, space=None: transform(env, func, space or env.observation_space)
    wrappers.GrayScaleObservation = wrappers.GrayscaleObservation
    wrappers.FrameStack = wrappers.FrameStackObservation


if __name__ == "__main__":
    checkout, script, *arguments = sys.argv[1:]
    path = Path(checkout) / "cleanrl" / f"{script}.py"
    if not path.exists():
        sys.exit(f"{path} is not there: give the path of a checkout of https://github.com/vwxyzjn/cleanrl")
    mend()
    sys.path.insert(0, str(Path(checkout)))
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")
