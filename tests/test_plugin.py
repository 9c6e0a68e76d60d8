"""The lines for CleanRL's scripts, tried on a script of their shape; the scripts themselves: python -m benchmarks.plugin."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn

from benchmarks import plugin
from iif_core import return_influence

ROOT = Path(__file__).resolve().parent.parent
SHAPED = (ROOT / "tests" / "cleanrl_shaped.py").read_text()


def test_the_table_is_that_of_the_data():
    assert plugin.table() in (ROOT / "docs" / "cleanrl.md").read_text()
    assert len(plugin.table().splitlines()) == 2 + len(plugin.SCRIPTS)


def test_the_readmes_lines_go_where_they_belong():
    changed = plugin.apply(plugin.changes((ROOT / "README.md").read_text()), SHAPED).splitlines()
    added = [line.strip() for line in changed if line not in SHAPED.splitlines()]
    assert len(added) == 5 and len(changed) == len(SHAPED.splitlines()) + 3
    compile("\n".join(changed), "script", "exec")


@pytest.mark.parametrize("script", ["ppo_continuous_action.py", "ppo_atari_lstm.py"])
def test_the_documented_lines_are_five(script):
    found = plugin.changes((ROOT / "docs" / "cleanrl.md").read_text(), script)
    added = [line for old, new in found for line in new if line != old]
    assert len(found) == 3 and found[0][0] is None and len(added) == 5


def test_a_line_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="0 lines read 'b_inds = x'"):
        plugin.apply([("b_inds = x", ["y"])], SHAPED)


@pytest.mark.parametrize("fault", [0.0, 1e-3])
def test_the_loop_agrees_with_right_scores_and_sees_wrong_ones(fault):
    torch.manual_seed(1)
    agent, obs, advantages = nn.Linear(3, 2), torch.randn(12, 3), torch.randn(12)
    inds, before = np.random.default_rng(1).permutation(12), agent.weight.detach().clone()
    names = {"agent": agent, "obs": obs}
    logprob = eval("lambda i: agent(obs[i]).log_softmax(-1)[:, 0]", names)
    scores = return_influence(agent, logprob, advantages, minibatch_size=4, inds=inds)
    scores = scores + fault * scores.abs().max()
    truth = plugin.loop(agent, logprob, advantages, 4, inds, torch.tensor([0, 5, 11]))
    error = (scores[[0, 5, 11]] - truth).abs().max() / scores.abs().max()
    assert truth.dtype == torch.float64 and (error < 1e-5 if fault == 0 else error > 5e-4)
    assert agent.weight.dtype == torch.float32 and torch.equal(agent.weight, before) and names["obs"] is obs


class Lives(gym.Env):
    """Ends every second step; only every second end is that of a whole episode, as with Atari's lives."""

    observation_space, action_space = gym.spaces.Box(0, 9, (1,)), gym.spaces.Discrete(2)

    def __init__(self):
        self.ends = 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        info, self.ends = {}, self.ends + (self.t == 2)
        if self.t == 2 and self.ends % 2 == 0:
            info["episode"] = {"r": 4.0, "l": 4, "t": 0.1}
        return np.full(1, self.t, np.float32), 1.0, self.t == 2, False, info


def test_episodes_end_as_they_did_then():
    envs = plugin.SyncVectorEnv([Lives, Lives])
    envs.reset(seed=1)
    seen = [envs.step(np.zeros(2, int)) for _ in range(4)]
    assert [obs[:, 0].tolist() for obs, *_ in seen] == [[1, 1], [0, 0], [1, 1], [0, 0]]  # the next episode's first
    assert ["final_info" in infos for *_, infos in seen] == [False, True, False, True]
    assert seen[1][-1]["final_info"] == [{}, {}]  # a life
    assert [info["episode"]["r"] for info in seen[3][-1]["final_info"]] == [4, 4]


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no checkout of CleanRL"):
        plugin.main(tmp_path)
