"""--envpool of ppo_iif_atari.py: its games are ALE's, step for step, and its rows are the steps that were taken."""

import sys

import cv2
import gymnasium as gym
import numpy as np
import pytest

envpool = pytest.importorskip("envpool")

import ppo_iif_atari as script  # noqa: E402


def pool(env_id="BreakoutNoFrameskip-v4", num_envs=1, seed=5):
    envs = script.make_envs(script.Args(env_id=env_id, num_envs=num_envs, envpool=True), "")
    return envs, envs.reset(seed=seed)[0]


@pytest.mark.parametrize("name, unused", [("Breakout", "a life is lost"), ("Pong", "the game ends")])
def test_it_plays_as_ale_does(name, unused):
    """From a reset (no-ops of one frame, then FIRE for one) to the first end, and where a life was lost on from there."""
    ale = gym.make(f"{name}NoFrameskip-v4").unwrapped
    actions, core = ale.ale.getMinimalActionSet(), ale.ale

    def frame(last):
        return cv2.resize(np.max(last, axis=0), (84, 84), interpolation=cv2.INTER_AREA)

    envs, first = pool(f"{name}NoFrameskip-v4")
    assert all(np.array_equal(first[0, 3], earlier) for earlier in first[0])  # the stack repeats the first frame
    rng, steps, over = np.random.default_rng(0), [], [False]
    while not over[0]:
        action = rng.integers(len(actions), size=1)
        obs, reward, over, cut, infos = envs.step(action)
        assert not cut[0]
        shown = infos["final_obs"] if over[0] else obs
        steps.append((action[0], shown[0, 3].copy(), reward[0]))

    def play(noops):
        """The return and the last frames, if ALE after so many no-ops shows what the pool did; else None."""
        ale.reset(seed=1)
        for _ in range(noops):
            core.act(0)
        core.act(1)
        if not np.array_equal(frame([core.getScreenGrayscale()]), first[0, 3]):
            return None
        total = 0
        for action, pixels, reward in steps:
            raw, last = 0, []
            for k in range(4):
                raw += core.act(actions[action])
                last += [core.getScreenGrayscale()] if k >= 2 else []
                if core.game_over():
                    break
            total += raw
            if reward != np.sign(raw) or not core.game_over() and not np.array_equal(pixels, frame(last)):
                return None
        return total, last

    total, last = next(end for noops in range(31) if (end := play(noops)))
    game_over = infos["final_info"][f"_{script.STATISTICS}"][0]
    assert over[0] and game_over == core.game_over() == (name == "Pong")
    if game_over:
        assert infos["final_info"][script.STATISTICS]["r"][0] == total
    else:
        assert np.array_equal(infos["final_obs"][0, 3], frame(last))
        assert core.lives() == 4 and envs.pool.step(np.zeros(1, np.int32))[4]["lives"][0] == 4  # the game goes on


def test_a_game_of_five_lives_is_one_return():
    envs, _ = pool(num_envs=3)
    rng, returns, ends, summed = np.random.default_rng(1), [], np.zeros(3, int), np.zeros(3)
    for _ in range(700):
        _, reward, over, cut, infos = envs.step(rng.integers(4, size=3))
        summed += reward  # random play reaches the rows worth 1 alone, so that the sign is the reward
        ends += over
        for i in np.flatnonzero(over | cut):
            if infos["final_info"][f"_{script.STATISTICS}"][i]:
                returns.append(infos["final_info"][script.STATISTICS]["r"][i])
                assert ends[i] == 5 and returns[-1] == summed[i]
                ends[i] = summed[i] = 0
    assert len(returns) >= 6


def test_a_seed_determines_the_games_and_each_is_another():
    def played(seed):
        envs, obs = pool(num_envs=4, seed=seed)
        rng = np.random.default_rng(0)
        return np.stack([obs, *(envs.step(np.full(4, rng.integers(4)))[0] for _ in range(200))])

    first = played(7)
    assert np.array_equal(first, played(7)) and not np.array_equal(first, played(8))
    assert len({first[:, i].tobytes() for i in range(4)}) > 1


@pytest.mark.parametrize(
    "flags", ['--env-kwargs {"mode":0}', "--capture-video", "--vectorization async", "--snapshot-rounds 0", "--env-id Pong-v4"]
)
def test_what_it_refuses(flags, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ppo_iif_atari.py", "--envpool", *flags.split()])
    with pytest.raises(SystemExit, match=flags.split()[0]):
        script.parse_args()
