"""ppo_iif.py, whose every rollout begins with a reset to the same seed and draws its actions from the same random numbers.

So do the rounds of influence-based filtering in the authors' code, where each is a process of its own with the run's seed; their
standard runs go on from round to round. Arguments and results are those of ppo_iif.py.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AS_IS = "rollout(agent, envs, next_obs, args.num_steps, rollout_rng, device)"
RESTARTED = "rollout(agent, envs, envs.reset(seed=args.seed)[0], args.num_steps, np.random.default_rng(derive_seed(args.seed, 0)), device)"


def source():
    """The text of ppo_iif.py with this one change."""
    text = (ROOT / "ppo_iif.py").read_text()
    if text.count(AS_IS) != 1:
        sys.exit(f"ppo_iif.py has not one {AS_IS} to change, but {text.count(AS_IS)}")
    return text.replace(AS_IS, RESTARTED)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    exec(compile(source(), str(ROOT / "ppo_iif.py"), "exec"))
