"""What makes the training scripts faster changes nothing that they compute: --compile up to rounding, --vectorization not a bit."""

import copy
import shutil
import warnings

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
            first |= {f"{i} {name}": x for i, values in enumerate(statistics) for name, x in values.items()}
            assert "0 obs_rms.mean" in first and "1 discounted_reward" in first
        second, more, _ = s.rollout(next_obs)
        s.envs.close()
        rounds[kind] = first | {f"second {name}": x for name, x in second.items()}, episodes + more
    (sync, episodes), (side_by_side, same) = rounds.values()
    assert episodes == same and sync.keys() == side_by_side.keys()
    assert [name for name in sync if not torch.equal(sync[name], side_by_side[name])] == []


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
