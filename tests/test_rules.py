"""The rules of benchmarks/variants/rules.py, on a round of CartPole."""

import copy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ppo_iif
from benchmarks.variants import rules


@pytest.fixture
def round_of():
    """A round k of an agent as at the beginning: (agent, batch, args, optimizer, generator)."""
    args = ppo_iif.Args(env_id="CartPole-v1", num_steps=128, num_minibatches=4, optimizer="adam", learning_rate=1e-2)
    envs = ppo_iif.make_envs(args, None)
    torch.manual_seed(1)
    agent = ppo_iif.Agent(envs)
    obs, _ = envs.reset(seed=1)

    def play(k):
        rng, shuffles, filters = ppo_iif.random_streams(1, k)
        batch, _, _ = ppo_iif.rollout(agent, envs, obs, args.num_steps, rng)
        batch = {name: x.flatten(0, 1) for name, x in ppo_iif.gae(batch, args.gamma, args.gae_lambda).items()}
        batch["scores"] = ppo_iif.score(agent, batch, args, filters)
        return batch, shuffles, filters

    return SimpleNamespace(play=play, agent=agent, args=args, optimizer=torch.optim.Adam(agent.parameters(), lr=1e-2))


def test_agreeing_filters_only_above_its_threshold(round_of):
    batch, _, filters = round_of.play(0)
    select = rules.RULES["agreeing"]["select"](ppo_iif)
    batch["scores"].agreement = rules.AGREEING - 0.01
    assert len(select(batch, round_of.args, filters)) == 128
    batch["scores"].agreement = rules.AGREEING + 0.01
    assert torch.equal(select(batch, round_of.args, filters), ppo_iif.select(batch, round_of.args, filters))


def test_scaled_takes_the_learning_rate_times_the_agreement(round_of):
    batch, shuffles, _ = round_of.play(0)
    batch["scores"].agreement, seen = 0.5, []
    script = SimpleNamespace(update=lambda agent, optimizer, *rest: seen.append(optimizer.param_groups[0]["lr"]))
    for agreement, factor in ((0.5, 0.5), (-0.3, rules.LEAST), (np.nan, 1.0)):
        batch["scores"].agreement = agreement
        rules.scaled(script)(round_of.agent, round_of.optimizer, batch, torch.arange(128), round_of.args, shuffles)
        assert seen[-1] == pytest.approx(1e-2 * factor)
        assert round_of.optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("rule", ["previous", "average"])
def test_directions_come_from_the_rounds_before(round_of, rule):
    score = rules.RULES[rule]["score"](ppo_iif)
    agent, args, seen, parameters = round_of.agent, round_of.args, [], list(round_of.agent.actor.parameters())
    directions = []  # gradients, at theta(k), of the surrogate return of the round before
    for k in range(3):
        batch, _, _ = round_of.play(k)
        if seen:
            old = seen[-1][0]
            ratio = (agent.get_logprob(old["obs"], old["actions"]) - old["logprobs"]).exp()
            directions.append(torch.autograd.grad((ratio * old["advantages"]).mean(), parameters))
        seen.append((batch, score(agent, batch, args, ppo_iif.random_streams(1, k)[2])))
        if k < 2:
            with torch.no_grad():
                for p in agent.parameters():
                    p.add_(0.01 * torch.randn_like(p))
    assert torch.equal(seen[0][1], seen[0][0]["scores"])

    share = 1.0 if rule == "previous" else 1 - rules.DECAY
    direction = [share * new + (1 - share) * old for old, new in zip(*directions)]
    batch, scores = seen[2]
    normalized, truth = torch.empty(128), []
    for inds in torch.randperm(128, generator=ppo_iif.random_streams(1, 2)[2]).split(32):  # four minibatches
        mine = batch["advantages"][inds]
        normalized[inds] = (mine - mine.mean()) / (mine.std() + 1e-8)
    for i in range(128):
        logprob = agent.get_logprob(batch["obs"][i : i + 1], batch["actions"][i : i + 1])[0]
        grads = torch.autograd.grad(normalized[i] * logprob, parameters)
        truth.append(sum((g * v).sum() for g, v in zip(grads, direction)))
    truth = torch.stack(truth)
    assert (scores - truth).abs().max() < 1e-4 * truth.abs().max()


def test_as_far_moves_the_policy_no_further_than_the_whole_round(round_of):
    batch, shuffles, _ = round_of.play(0)
    agent, before = round_of.agent, copy.deepcopy(round_of.agent.state_dict())
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.05)

    def step(agent, optimizer, batch, selection, args, generator):  # one way, three times as far when filtered
        torch.manual_seed(1)
        with torch.no_grad():
            for p in agent.parameters():
                p.add_(torch.randn_like(p), alpha=optimizer.param_groups[0]["lr"] * (1 if len(selection) == 128 else 3))

    def distance(update, n):
        agent.load_state_dict(before)
        update(agent, optimizer, batch, torch.arange(n), round_of.args, shuffles)
        return rules.moved(agent, batch)

    whole, filtered = distance(step, 128), distance(step, 64)
    shortened = distance(rules.no_further(SimpleNamespace(update=step)), 64)
    assert filtered > whole >= shortened > 0.3 * whole  # the learning rate goes down by the root of two at a time
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("rule, column", [("least-score", "scores"), ("least-advantage", "advantages")])
def test_least_drops_the_half_that_says_least(round_of, rule, column):
    batch, _, filters = round_of.play(0)
    kept = rules.RULES[rule]["select"](ppo_iif)(batch, round_of.args, filters)
    size = batch[column].abs()
    dropped = np.setdiff1d(np.arange(128), kept)
    assert len(kept) == 64 and size[kept].min() >= size[dropped].max()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
