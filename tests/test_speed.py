"""What makes the training scripts faster changes nothing that they compute: --compile up to rounding, all else not a bit."""

import copy
import dataclasses
import json
import shutil
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_scripts import SCRIPTS, generator, stage, weights

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")


def updated(s, batch, selection, compile):
    """The weights after an update, and its losses."""
    agent, args = copy.deepcopy(s.agent), copy.copy(s.args)
    args.compile = compile
    optimizer = torch.optim.SGD(agent.parameters(), lr=1e-2)
    losses, steps = s.stages.update(agent, optimizer, batch, selection, args, generator())
    assert steps > 1
    return weights(agent), losses


@needs_compiler
@pytest.mark.parametrize("script", SCRIPTS[:2], ids=str)
def test_a_compiled_update_is_the_eager_one_but_for_rounding(script):
    """Over whole updates, with clipping of gradients and values, an entropy bonus, and minibatches of another size."""
    s = stage(script, "--max-grad-norm 0.5 --clip-vloss --ent-coef 0.01 --num-minibatches 8").moved()
    batch = s.round()
    for selection in (torch.arange(s.args.batch_size), torch.arange(s.args.batch_size - 10)):
        (eager, losses), (compiled, same) = (updated(s, batch, selection, compile) for compile in (False, True))
        moved = max((eager[name] - p).abs().max() for name, p in s.agent.named_parameters())
        assert max((eager[name] - compiled[name]).abs().max() for name in eager) < 1e-4 * moved
        assert same == pytest.approx(losses, rel=1e-3, abs=1e-5)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # it was compiled


def test_without_a_compiler_the_steps_stay_eager(monkeypatch, capsys):
    s = stage(SCRIPTS[0])
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: failing)
    s.stages.compiled_gradients.cache_clear()
    try:
        assert s.stages.compiled_gradients() is s.stages.loss_gradients
        out = capsys.readouterr().out
        assert out.startswith("--compile: ") and "no compiler" in out and out.count("\n") == 1
    finally:
        s.stages.compiled_gradients.cache_clear()


def failing(*args):
    raise RuntimeError("no compiler\nand more")


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_environments_side_by_side_give_the_same_rounds(script):
    """To the bit, over two rounds, and with what normalising wrappers gather."""
    normalising, rounds = "--norm-obs --norm-reward" * hasattr(script.stages, "get_statistics"), {}
    for kind in ("sync", "async"):
        s = stage(script, f"--num-envs 2 --num-steps 64 --vectorization {kind} {normalising}")
        first, episodes, next_obs = s.rollout()
        if normalising:
            statistics = s.stages.get_statistics(s.envs, s.args)
            s.stages.set_statistics(s.envs, s.args, copy.deepcopy(statistics))
            for i, own in enumerate(statistics):
                first |= {f"{i} {name} {k}": x for name, values in own.items() for k, x in enumerate(values)}
            assert first["0 obs 2"] > 64 and first["1 return 2"] > 64  # their counts
        second, more, _ = s.rollout(next_obs)
        s.envs.close()
        rounds[kind] = first | {f"second {name}": x for name, x in second.items()}, episodes + more
    (sync, episodes), (side_by_side, same) = rounds.values()
    assert episodes == same and sync.keys() == side_by_side.keys()
    assert [name for name in sync if not torch.equal(sync[name], side_by_side[name])] == []


@pytest.mark.parametrize("env_id, kwargs", [("HalfCheetah-v5", {"max_episode_steps": 60}), ("toy_envs:Continuous-v0", {})])
def test_normalising_is_gymnasiums_to_the_bit(env_id, kwargs):
    """Observations of float64 and of float32; episodes that are cut, and that end."""
    s = SCRIPTS[1].stages
    args = s.Args(env_id=env_id, env_kwargs=json.dumps(kwargs), norm_obs=True, norm_reward=True, gamma=0.9)
    ours, theirs = s.make_env(args), s.make_env(dataclasses.replace(args, norm_obs=False, norm_reward=False))
    theirs = observations = gym.wrappers.NormalizeObservation(theirs)
    theirs = gym.wrappers.TransformObservation(theirs, lambda obs: np.clip(obs, -10, 10), theirs.observation_space)
    theirs = returns = gym.wrappers.NormalizeReward(theirs, gamma=args.gamma)
    theirs = gym.wrappers.TransformReward(theirs, lambda reward: np.clip(reward, -10, 10))
    assert ours.observation_space == theirs.observation_space
    rng, over, rewards = np.random.default_rng(0), True, set()
    for step in range(400):
        if over:
            (obs, _), (same, _) = (env.reset(seed=step) for env in (ours, theirs))
        else:
            action = rng.normal(size=ours.action_space.shape).astype(np.float32)
            (obs, *rest, _), (same, *others, _) = (env.step(action) for env in (ours, theirs))
            assert rest == others
            rewards.add(rest[0])
        over = not over and any(rest[1:])
        assert obs.dtype == same.dtype == np.float32 and np.array_equal(obs, same)
        mean, var, count = ours.statistics["obs"]
        assert mean.dtype == observations.obs_rms.mean.dtype and np.array_equal(mean, observations.obs_rms.mean)
        assert np.array_equal(var, observations.obs_rms.var) and count == observations.obs_rms.count
        gathered = returns.return_rms.mean, returns.return_rms.var, returns.return_rms.count
        assert ours.statistics["return"] == gathered and ours.statistics["discounted"] == tuple(returns.discounted_reward)
    assert len(rewards) > 50


def test_evaluation_uses_the_statistics_of_all_environments_and_leaves_them():
    """Two environments whose observations differ: a mean of both, weighed by their counts."""
    s = stage(SCRIPTS[1], "--env-id toy_envs:Continuous-v0 --num-envs 2 --norm-obs --eval-episodes 1")
    one, other = s.envs.envs
    for env, steps in ((one, 5), (other, 20)):
        env.reset()
        for action in np.zeros((steps, 2), np.float32):
            env.step(action)
    counts = [own["obs"][2] for own in s.envs.get_attr("statistics")]
    (env,) = s.stages.make_eval_envs(s.args)
    s.stages.freeze_statistics([env], s.envs, s.args)
    (mean_one, _, n_one), (mean_other, _, n_other) = (own["obs"] for own in s.envs.get_attr("statistics"))
    mean, var, count = env.statistics["obs"]
    assert count == pytest.approx(n_one + n_other) and n_other > 3 * n_one and mean_one[0] != mean_other[0]
    np.testing.assert_allclose(mean, (n_one * mean_one + n_other * mean_other) / count, rtol=1e-6)
    obs, _ = env.reset()
    np.testing.assert_allclose(obs, ((env.env.unwrapped.observe() - mean) / np.sqrt(var + 1e-8)).clip(-10, 10), rtol=1e-6)
    env.step(np.zeros(2, np.float32))
    assert env.statistics["obs"][2] == count and [own["obs"][2] for own in s.envs.get_attr("statistics")] == counts


def test_scores_in_bfloat16():
    """By the same fast way, with the error of bfloat16."""
    s = stage(SCRIPTS[3]).moved()
    batch, scores = s.round(), []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for s.args.score_bfloat16 in (False, True):
            scores.append(s.stages.score(s.agent, batch, s.args, generator()))
    exact, coarse = scores
    assert 0 < (exact - coarse).abs().max() < 0.05 * exact.abs().max()
