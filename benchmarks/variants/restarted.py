"""ppo_iif.py, whose every rollout begins with a reset to the same seed and draws its actions from the same random numbers.

So do the rounds of influence-based filtering in the authors' code, where each is a process of its own with the run's seed; their
standard runs go on from round to round.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_iif  # noqa: E402
from benchmarks.variants.loop import train  # noqa: E402

if __name__ == "__main__":
    train(ppo_iif, "restarted", restarted=True)
