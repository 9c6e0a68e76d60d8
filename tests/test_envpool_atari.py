"""--envpool of ppo_iif_atari.py: its games are ALE's, step for step, and its rows are the steps that were taken."""

import subprocess
import sys
import time

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch

envpool = pytest.importorskip("envpool")

import test_scripts  # noqa: E402

import ppo_iif_atari as script  # noqa: E402


def frame(last):
    """84x84 of ALE's last grey frames."""
    return cv2.resize(np.max(last, axis=0), (84, 84), interpolation=cv2.INTER_AREA)


def pool(env_id="BreakoutNoFrameskip-v4", num_envs=1, seed=5):
    envs = script.make_envs(script.Args(env_id=env_id, num_envs=num_envs, envpool=True), "")
    return envs, envs.reset(seed=seed)[0]


@pytest.mark.parametrize("name, unused", [("Breakout", "a life is lost"), ("Pong", "the game ends")])
def test_it_plays_as_ale_does(name, unused):
    """From a reset (no-ops of one frame, then FIRE for one) to the first end, and where a life was lost on from there."""
    ale = gym.make(f"{name}NoFrameskip-v4").unwrapped
    actions, core = ale.ale.getMinimalActionSet(), ale.ale
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


def test_sticky_actions_are_ales():
    """ALE/ ids: from a reset to the first end, every frame that ALE shows if its own generator, of the pool's seed, draws them."""
    envs, first = pool("ALE/Breakout-v5", num_envs=2)
    assert envs.sticky == 0.25
    rng, actions, shown, ended = np.random.default_rng(0), [], [], np.zeros(2, bool)
    while not ended.any():
        actions.append(rng.integers(4, size=2))
        obs, _, ended, _, infos = envs.step(actions[-1])
        shown.append(infos["final_obs"] if ended.any() else obs.copy())

    def play(i, noops, sticky):
        """How many steps ALE shows what game i of the pool did."""
        ale = ale_py.ALEInterface()
        ale.setInt("random_seed", script.derive_seed(5) % 2**31 + i)
        ale.setFloat("repeat_action_probability", sticky)
        ale.loadROM(ale_py.roms.get_rom_path("breakout"))
        for action in [0] * noops + [1]:
            ale.act(action)
        for t, row in enumerate(actions):
            last = []
            for _ in range(4):
                ale.act(ale.getMinimalActionSet()[row[i]])
                last = [*last[-1:], ale.getScreenGrayscale()]
            if not np.array_equal(frame(last), shown[t][i, 3]):
                return t
        return len(actions)

    for i in range(2):
        noops = max(range(31), key=lambda noops: play(i, noops, 0.25))
        assert play(i, noops, 0.25) == len(actions) > 20 and play(i, noops, 0.0) < len(actions)


def test_a_game_cut_by_its_time_limit_goes_on_unseen(monkeypatch):
    """The row of the cut is bootstrapped from the game's next observation, which the same game without a limit shows."""
    whole, first = pool()
    monkeypatch.setattr(script, "EVAL_STEPS", 12)
    envs, same = pool()
    assert np.array_equal(first, same)
    torch.manual_seed(0)
    agent = script.Agent(envs)
    batch, episodes, _ = script.rollout(agent, envs, first, 20, np.random.default_rng(0))
    played = [whole.step(action) for action in batch["actions"][:12].numpy()]
    assert not any(step[2][0] or step[3][0] for step in played)
    for t in range(11):
        assert np.array_equal(batch["obs"][t + 1, 0], played[t][0][0])
    unseen = torch.from_numpy(played[11][0])
    assert not torch.equal(batch["obs"][12], unseen)
    assert batch["dones"][:, 0].tolist() == [t == 11 for t in range(20)] and not batch["terminations"].any()
    assert batch["next_values"][11] == pytest.approx(agent.get_value(unseen).item(), abs=1e-6)
    assert batch["next_values"][11] != pytest.approx(batch["values"][12].item(), abs=1e-6)
    assert episodes == [(11, 0, sum(step[1].item() for step in played), 48)]
    delta = batch["rewards"][11] + 0.99 * batch["next_values"][11] - batch["values"][11]
    assert script.gae(batch, 0.99, 0.95)["advantages"][11] == pytest.approx(delta.item(), abs=1e-6)
    assert envs.pool.step(np.zeros(1, np.int32))[4]["elapsed_step"][0] == 9  # of a new game: 8 of the rollout, and this one


def test_a_game_that_ends_at_its_time_limit_has_no_future(monkeypatch):
    envs, _ = pool()
    rng, actions, over = np.random.default_rng(0), [], False
    while not over:
        actions.append(rng.integers(4, size=1))
        infos = envs.step(actions[-1])[4]
        over = bool(infos) and infos["final_info"][f"_{script.STATISTICS}"][0]
    monkeypatch.setattr(script, "EVAL_STEPS", len(actions))
    envs, _ = pool()
    rows = [envs.step(action) for action in actions]
    _, _, terminated, truncated, infos = rows[-1]
    assert terminated[0] and truncated[0] and infos["final_info"][f"_{script.STATISTICS}"][0]
    assert not any(row[3][0] for row in rows[:-1]) and infos["final_info"][script.STATISTICS]["l"][0] == 4 * len(actions)


def test_the_time_limit_is_the_ids_own():
    """108,000 frames, of a game that goes on for as long as nobody moves."""
    assert gym.spec("MontezumaRevengeNoFrameskip-v4").kwargs["max_num_frames_per_episode"] == 4 * script.EVAL_STEPS
    envs, _ = pool("MontezumaRevengeNoFrameskip-v4")
    for step in range(1, script.EVAL_STEPS + 1):
        _, _, terminated, truncated, infos = envs.step(np.zeros(1, np.int64))
        assert not terminated[0] and truncated[0] == (step == 27_000)
    assert infos["final_info"][script.STATISTICS]["l"][0] == 108_000


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


def test_a_killed_run_ends_as_one_that_was_not(tmp_path, monkeypatch):
    """And is refused in one line where envpool is missing."""
    row = test_scripts.SCRIPTS[3]
    flags = "--envpool --env-kwargs {} --save-every 2 --save-model --filter toy_filters:first_half_or_death"
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    command, environment = test_scripts.command(row, flags), test_scripts.environment(DEATH_IN_ROUND="3")
    dead = subprocess.run([sys.executable, *command], cwd=killed, env=environment)
    assert dead.returncode < 0
    (checkpoint,) = killed.glob("runs/**/checkpoint.pt")
    assert torch.load(checkpoint, weights_only=True)["iteration"] == 2

    monkeypatch.setattr(sys, "argv", ["ppo_iif_atari.py", "--resume", str(checkpoint)])
    with monkeypatch.context() as patch:
        patch.setattr(script, "find_spec", lambda name: None)
        with pytest.raises(SystemExit, match="--envpool: it is not installed"):
            script.parse_args()
    time.sleep(1.1)  # TensorBoard reads event files in the order of their seconds
    test_scripts.train(row, f"--resume {checkpoint}", killed, own=False)
    straight = test_scripts.train(row, flags, whole).folder
    test_scripts.assert_same_end(test_scripts.model(checkpoint.parent), test_scripts.model(straight))
    resumed, same = (test_scripts.scalars(folder) for folder in (checkpoint.parent, straight))
    assert test_scripts.repeatable(resumed) == test_scripts.repeatable(same)
