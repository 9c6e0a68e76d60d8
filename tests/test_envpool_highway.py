"""The fast Highway of benchmarks/variants/envpool_highway.py is highway-v0, and shows no step that nobody took."""

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("envpool")

from benchmarks.variants import envpool_highway as highway  # noqa: E402


@pytest.fixture
def twin():
    env = gym.make("benchmarks.variants.envpool_highway:EnvpoolHighway-v0", vehicles_count=10)
    yield env
    env.close()


def episodes(env, number, seed, action=None):
    """[(observations, rewards, terminated, truncated)] of the first episodes after a reset with the seed."""
    rng, played = np.random.default_rng(seed), []
    for k in range(number):
        obs, rewards, over = [env.reset(seed=None if k else seed)[0]], [], False
        while not over:
            o, reward, terminated, truncated, _ = env.step(rng.integers(5) if action is None else action)
            obs.append(o)
            rewards.append(reward)
            over = terminated or truncated
        played.append((np.array(obs), rewards, terminated, truncated))
    return played


def test_its_spaces_are_those_of_highway_env(twin):
    python = highway.highway_env()
    assert twin.observation_space == python.observation_space and twin.action_space == python.action_space
    assert twin.reset(seed=1)[0] in twin.observation_space
    names = [python.action_type.actions[a] for a in range(5)]
    assert names == ["LANE_LEFT", "IDLE", "LANE_RIGHT", "FASTER", "SLOWER"]  # as highway.MIRRORED swaps them


def test_from_one_start_it_plays_as_highway_env(twin):
    python, rng = highway.highway_env(), np.random.default_rng(0)
    python.reset(seed=0)
    twin.reset(seed=5)  # in two of these episodes a car could change to either side
    for name in ("random", "SLOWER"):
        steps, equal, whole = highway.same_start(twin.unwrapped, python, highway.POLICIES[name], 4, rng)
        assert steps == equal > 20 and whole == 4


def test_a_seed_determines_the_episodes_and_each_is_another(twin):
    first, second, other = episodes(twin, 5, 7), episodes(twin, 5, 7), episodes(twin, 5, 8)
    for a, b in zip(first, second):
        assert np.array_equal(a[0], b[0]) and a[1:] == b[1:]
    starts = [obs[0].tobytes() for obs, *_ in (*first, *other)]
    assert len(set(starts)) == len(starts)


def test_an_episode_begins_with_a_reset_and_ends_as_in_highway_env(twin):
    vector = gym.vector.SyncVectorEnv([lambda: twin], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    vector.reset(seed=3)
    rng, length, lengths = np.random.default_rng(3), 0, []
    for _ in range(600):
        obs, _, terminated, truncated, info = vector.step(rng.integers(5, size=1))
        length += 1
        over = terminated[0] or truncated[0]
        # right after a reset nobody has changed speed or heading; a swallowed row would show the same start twice
        assert not over or np.allclose(obs[0, 0, [3, 4]], [25 / 80, 0]) and twin.unwrapped.pool.debug_states([0])[0].time == 0
        assert over or twin.unwrapped.pool.debug_states([0])[0].elapsed_step == length
        if over:
            lengths.append(length)
            length = 0
    assert sum(lengths) + length == 600 and min(lengths) < 40 and max(lengths) <= 40

    slow = episodes(twin, 3, 1, action=4)  # who brakes survives
    assert [len(rewards) for _, rewards, *_ in slow] == [40] * 3
    assert all((terminated, truncated) == (False, True) for *_, terminated, truncated in slow)


def test_it_names_what_is_missing(monkeypatch):
    monkeypatch.setattr(highway, "find_spec", lambda name: None)
    with pytest.raises(gym.error.DependencyNotInstalled, match="requirements-benchmarks.txt"):
        gym.make("EnvpoolHighway-v0")
