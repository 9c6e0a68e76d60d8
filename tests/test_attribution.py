"""Attribution methods against independent truth, and the measure of how true they are."""

import copy
import csv
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from test_scripts import SCRIPTS, train
from torch import nn

from benchmarks.explain import attribution, methods, snapshots
from iif_core import return_influence

N, SIZE = 24, 6
ARGS = {"clip_coef": 0.2, "clip_vloss": True, "vf_coef": 0.5, "ent_coef": 0.01, "norm_adv": True, "max_grad_norm": 0.0}


class Agent(nn.Module):
    """Actor and critic on a layer that they share, in float64."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        self.actor, self.critic = nn.Linear(5, 4), nn.Linear(5, 1)
        self.double()

    def get_logprob(self, x, action):
        return self.get_logprob_entropy_value(x, action)[0]

    def get_logprob_entropy_value(self, x, action):
        hidden = self.body(x)
        logprobs = self.actor(hidden).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy, self.critic(hidden)


@pytest.fixture
def round_():
    """agent, batch of N records, minibatches of three epochs."""
    torch.manual_seed(0)
    agent = Agent()
    batch = {"obs": torch.randn(N, 3).double(), "actions": torch.randint(4, (N,)), "advantages": torch.randn(N).double() + 0.3}
    batch |= {"returns": torch.randn(N).double(), "values": torch.randn(N).double()}
    batch["logprobs"] = agent.get_logprob(batch["obs"], batch["actions"]).detach()
    return agent, batch, [inds for _ in range(3) for inds in torch.randperm(N).split(SIZE)]


def flat(grads, agent):
    return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zip(grads, agent.parameters())])


def gradient(value, agent):
    return flat(torch.autograd.grad(value, list(agent.parameters()), allow_unused=True, retain_graph=True), agent)


def logprob_gradients(agent, batch):
    """[N, parameters], record by record."""
    rows = zip(batch["obs"], batch["actions"])
    return torch.stack([gradient(agent.get_logprob(o.unsqueeze(0), a.unsqueeze(0))[0], agent) for o, a in rows])


def by_hand(agent, batch, minibatches, args, lr, weights, optimizer="sgd", state=None):
    """The end of PPO's update with torch's own optimizer, records weighted."""
    agent = copy.deepcopy(agent)
    if optimizer == "sgd":
        optimizer = torch.optim.SGD(agent.parameters(), lr=lr)
    else:
        optimizer = torch.optim.Adam(agent.parameters(), lr=lr, eps=1e-5)
        if state:
            optimizer.load_state_dict(copy.deepcopy(state))
    for inds in minibatches:
        mb = {name: x[inds] for name, x in batch.items()}
        logprob, entropy, value = agent.get_logprob_entropy_value(mb["obs"], mb["actions"])
        ratio, value = (logprob - mb["logprobs"]).exp(), value[:, 0]
        a = (mb["advantages"] - mb["advantages"].mean()) / (mb["advantages"].std() + 1e-8)
        policy = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        clipped = mb["values"] + (value - mb["values"]).clamp(-0.2, 0.2)
        v = torch.maximum((value - mb["returns"]) ** 2, (clipped - mb["returns"]) ** 2)
        optimizer.zero_grad()
        (weights[inds] * (policy + args.vf_coef * v - args.ent_coef * entropy)).mean().backward()
        if args.max_grad_norm:
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
    return agent, optimizer


# ---- at theta(k)


def test_targets_by_hand(round_):
    agent, batch, _ = round_
    other = copy.deepcopy(agent)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.5)
    ratios = (other.get_logprob(batch["obs"], batch["actions"]) - batch["logprobs"]).exp().tolist()
    a = batch["advantages"].tolist()
    assert any(not 0.8 < r < 1.2 for r in ratios)
    expected = sum(min(r * x, min(max(r, 0.8), 1.2) * x) for r, x in zip(ratios, a)) / N
    assert methods.surrogate(batch, 0.2)(other).item() == pytest.approx(expected)
    logprobs = other.get_logprob(batch["obs"], batch["actions"]).tolist()
    assert methods.f_return(batch)(other).item() == pytest.approx(sum(x * y for x, y in zip(a, logprobs)) / N)


@pytest.fixture
def scored(round_):
    """What the methods at theta(k) are called with, and the gradients [N, parameters] of the losses and of log pi."""
    agent, batch, minibatches = round_
    normalized = methods.normalize(batch["advantages"], minibatches[: N // SIZE])
    logprobs = logprob_gradients(agent, batch)
    losses = methods.policy_losses(agent, batch, normalized)
    return agent, batch, losses, methods.f_return(batch), -normalized.unsqueeze(1) * logprobs, logprobs


def test_tracin_is_the_loop_of_autograd_and_the_cores(round_, scored):
    agent, batch, losses, target, grads, _ = scored
    scores = methods.tracin(agent, losses, target, N)
    torch.testing.assert_close(scores, -grads @ gradient(target(agent), agent))
    order = torch.cat(round_[2][: N // SIZE])

    def logprob(inds):
        return agent.get_logprob(batch["obs"][inds], batch["actions"][inds])

    core = return_influence(agent, logprob, batch["advantages"], minibatch_size=SIZE, inds=order)
    torch.testing.assert_close(scores, torch.as_tensor(core))


def test_last_layer(scored):
    agent, _, losses, target, grads, _ = scored
    last = torch.cat([torch.full((p.numel(),), name.startswith("actor.")) for name, p in agent.named_parameters()])
    expected = -grads[:, last] @ gradient(target(agent), agent)[last]
    torch.testing.assert_close(methods.last_layer(agent, losses, target, N), expected)


def test_cross_fitted_leaves_a_record_out_of_its_own_target(scored):
    agent, batch, losses, _, grads, logprobs = scored
    halves = [(batch["advantages"].unsqueeze(1) * logprobs)[part].mean(0) for part in (slice(N // 2), slice(N // 2, N))]
    expected = torch.cat([-grads[: N // 2] @ halves[1], -grads[N // 2 :] @ halves[0]])

    def share(inds):
        return (batch["advantages"][inds] * agent.get_logprob(batch["obs"][inds], batch["actions"][inds])).mean()

    torch.testing.assert_close(methods.cross_fitted(agent, losses, share, N), expected)


def test_influence_functions_against_the_dense_solve(scored):
    agent, batch, losses, target, grads, logprobs = scored

    def logprob(inds):
        return agent.get_logprob(batch["obs"][inds], batch["actions"][inds])

    fisher, g = logprobs.T @ logprobs / N, gradient(target(agent), agent)
    damping = 0.1 * (g @ fisher @ g) / (g @ g)
    expected = -grads @ torch.linalg.solve(fisher + damping * torch.eye(len(g)).double(), g)
    scores = methods.influence_functions(agent, losses, target, N, logprob, iterations=60, tolerance=1e-9)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-8)


def test_adam_scaled_predicts_adams_own_step(round_, scored):
    """The scaled direction is what one record more adds to the target, to first order, with the second moments as they are."""
    agent, batch, losses, target, grads, _ = scored
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
    start = copy.deepcopy(agent.state_dict())
    for inds in round_[2][:4]:  # moments that are not zero
        optimizer.zero_grad()
        target(agent).backward()
        optimizer.step()
    agent.load_state_dict(start)
    agent.zero_grad()
    moments = [optimizer.state[p]["exp_avg_sq"] / (1 - 0.999**4) for p in agent.actor.parameters()]
    scale = torch.cat([1 / (v.sqrt() + 1e-5).flatten() for v in moments])
    last = torch.cat([torch.full((p.numel(),), name.startswith("actor.")) for name, p in agent.named_parameters()])
    body = torch.cat(
        [1 / ((optimizer.state[p]["exp_avg_sq"] / (1 - 0.999**4)).sqrt() + 1e-5).flatten() for p in agent.body.parameters()]
    )
    g = gradient(target(agent), agent)
    g[last] *= scale
    g[: len(body)] *= body  # the layer that both share comes first
    torch.testing.assert_close(methods.adam_scaled(agent, losses, target, N, optimizer), -grads @ g)


# ---- along the update


CASES = [("sgd", 0.05, 0.0), ("sgd", 0.05, 0.5), ("adam", 0.01, 0.0), ("adam", 0.01, 0.5)]


def updated(round_, kind, lr, max_grad_norm, warm=True):
    """An Update, and a function of the weights that gives the agent at its end by hand."""
    agent, batch, minibatches = round_
    args = SimpleNamespace(**ARGS | {"max_grad_norm": max_grad_norm})
    state = None
    if kind == "adam":
        optimizer = torch.optim.Adam(agent.parameters(), lr=lr, eps=1e-5)
        if warm:  # a round before this one
            _, before = by_hand(agent, batch, minibatches[:5], args, lr, torch.ones(N).double(), "adam")
            state = before.state_dict()
            optimizer.load_state_dict(copy.deepcopy(state))
    else:
        optimizer = torch.optim.SGD(agent.parameters(), lr=lr)
    update = methods.Update(agent, optimizer, batch, minibatches, args)
    return update, lambda weights: by_hand(agent, batch, minibatches, args, lr, weights, kind, state)[0]


@pytest.mark.parametrize("kind, lr, norm", CASES)
def test_update_ends_where_torchs_own_does(round_, kind, lr, norm):
    update, end = updated(round_, kind, lr, norm)
    weights = torch.stack([torch.ones(N), (torch.rand(N) < 0.5).float(), torch.rand(N)]).double()
    ends = update.ends(weights)
    for i, row in enumerate(weights):
        for (name, p), q in zip(end(row).named_parameters(), update.at({k: x[i] for k, x in ends.items()}).parameters()):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11, msg=name)
    for p, q in zip(end(weights[0]).parameters(), update.at(update.path()[-1][0]).parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind, lr, norm", CASES)
@pytest.mark.parametrize("name", ["f_return", "surrogate"])
def test_sgd_influence_is_the_derivative_of_the_updates_end(round_, kind, lr, norm, name):
    """Against central differences in every record's weight."""
    update, end = updated(round_, kind, lr, norm)
    target = methods.f_return(round_[1]) if name == "f_return" else methods.surrogate(round_[1], 0.2)
    scores = methods.sgd_influence(update, target, N)
    differences = []
    for i in range(N):
        values = []
        for sign in (1, -1):
            weights = torch.ones(N).double()
            weights[i] += sign * 1e-6
            values.append(target(end(weights)).item())
        differences.append((values[0] - values[1]) / 2e-6)
    torch.testing.assert_close(scores, torch.tensor(differences).double(), rtol=1e-4, atol=1e-8)


def test_sgd_influence_of_a_first_adam_step_with_idle_parameters(round_):
    """No moments yet, and parameters (the critic's, without a value loss) that never have a gradient: finite scores."""
    agent, batch, minibatches = round_
    args = SimpleNamespace(**ARGS | {"vf_coef": 0.0})
    update = methods.Update(agent, torch.optim.Adam(agent.parameters(), lr=0.01, eps=1e-5), batch, minibatches, args)
    scores = methods.sgd_influence(update, methods.f_return(batch), N)
    assert scores.isfinite().all() and scores.std() > 0


def test_tracin_along_is_the_sum_over_the_steps(round_):
    agent, batch, minibatches = round_
    update, _ = updated(round_, "sgd", 0.05, 0.0)
    expected, args = torch.zeros(N).double(), SimpleNamespace(**ARGS)
    for t, inds in enumerate(minibatches):
        now, _ = by_hand(agent, batch, minibatches[:t], args, 0.05, torch.ones(N).double())
        direction = gradient(methods.f_return(batch)(now), now)
        a = (batch["advantages"][inds] - batch["advantages"][inds].mean()) / (batch["advantages"][inds].std() + 1e-8)
        ratio = (now.get_logprob(batch["obs"][inds], batch["actions"][inds]) - batch["logprobs"][inds]).exp()
        losses = -torch.minimum(a * ratio, a * ratio.clamp(0.8, 1.2))
        for i, loss in zip(inds, losses):
            expected[i] -= gradient(loss, now) @ direction
    torch.testing.assert_close(methods.tracin_along(update, methods.f_return(batch), N), expected)


# ---- the measure


@pytest.fixture(scope="module", params=SCRIPTS[:3], ids=str)
def run(request, tmp_path_factory):
    flags = "--optimizer sgd --learning-rate 0.0001 --snapshot-rounds 2 --filter none --max-grad-norm 0"
    return train(request.param, flags, tmp_path_factory.mktemp("attribution")).folder


def read(folder):
    with open(folder / "attribution.csv") as file:
        return {row["method"]: row for row in csv.DictReader(file)}


def test_where_the_update_is_linear_a_derivative_is_the_truth(run, tmp_path):
    """At a small learning rate SGD-influence orders the halves as they are, and TracIn along the update nearly so."""
    attribution.main(attribution.Args((str(run),), halves=20, out=str(tmp_path)))
    rows = read(tmp_path)
    assert float(rows["SGD-influence"]["fixed f_return round"]) > 0.99
    assert float(rows["TracIn along the update"]["fixed f_return round"]) > 0.95
    assert (tmp_path / "attribution.png").exists() and "| SGD-influence |" in attribution.tables(tmp_path)
    before = (tmp_path / "attribution.csv").read_bytes()
    attribution.main(attribution.Args((str(run),), halves=20, out=str(tmp_path)))  # seconds would differ
    assert (tmp_path / "attribution.csv").read_bytes() == before


def test_scores_and_truths_are_those_of_the_scripts_own_update(run):
    snapshot = snapshots.load(run, 2)
    whole = torch.arange(len(snapshot.batch["advantages"]))
    table, update = attribution.table_of_methods(snapshot, snapshot.batch, snapshot.batch, 0)
    for (name, p), q in zip(snapshot.update(whole).named_parameters(), update.at(update.path()[-1][0]).parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=name)

    weights = torch.zeros(4, len(whole))
    for i, row in enumerate(weights):
        row[i :: 2 + i] = 1
    held_out = attribution.another_round(snapshot, snapshot.agent(), 0)
    found, reliability = attribution.truths(snapshot, snapshot.batch, held_out, update, weights, 3)
    envs = snapshot.eval_envs(3)
    for i, row in enumerate(weights):
        agent = snapshot.update(row.nonzero().flatten())
        logprob = agent.get_logprob(held_out["obs"], held_out["actions"])
        assert found["renormalised f_return held-out"][i] == pytest.approx(
            (held_out["advantages"] * logprob).mean().item(), rel=1e-4
        )
        seed = snapshot.script.derive_seed(snapshot.args.seed, 6, 2)
        assert found["renormalised return"][i] == pytest.approx(snapshot.script.evaluate(agent, envs, 3, seed).mean())
    chance = table["chance"]()
    for row in attribution.attribute(run, snapshot, 5, 0):
        if row[8] == "chance":  # its scores are known, so that its row can be made by hand
            generator = torch.Generator().manual_seed(snapshot.script.derive_seed(snapshot.args.seed, 8, 3))
            halves = [torch.randperm(len(whole), generator=generator)[: len(whole) // 2] for _ in range(5)]
            drawn = torch.rand(len(whole), generator=torch.Generator().manual_seed(generator.initial_seed() + 1))
            ends = [snapshot.update(half.sort().values) for half in halves]
            truth = [methods.f_return(snapshot.batch)(agent).item() for agent in ends]
            expected = stats.spearmanr([drawn[half].sum().item() for half in halves], truth)[0]
            assert row[attribution.COLUMNS.index("renormalised f_return round")] == pytest.approx(expected)
    assert chance.shape == (len(whole),)


def test_exact_return_is_the_mean_of_many_episodes(tmp_path):
    flags = "--env-id FrozenLake-v1 --env-kwargs {} --learning-rate 0.05 --snapshot-rounds 3 --filter none"
    snapshot = snapshots.load(train(SCRIPTS[0], flags, tmp_path).folder, 3)
    agent = snapshot.agent()
    with torch.no_grad():
        agent.actor[-1].bias += torch.tensor([0.0, 1.0, 1.0, 0.0])  # towards the goal, on slippery ice
        exact = attribution.exact_return(snapshot, agent)
    returns = snapshot.script.evaluate(agent, snapshot.eval_envs(4000), 4000, 1)
    assert exact == pytest.approx(returns.mean(), abs=4 * returns.std() / 4000**0.5) and exact > 0.01


def test_another_round_is_another_and_the_policys_own(run):
    snapshot = snapshots.load(run, 2)
    agent = snapshot.agent()
    one, two, again = (attribution.another_round(snapshot, agent, i) for i in (0, 1, 0))
    assert torch.equal(one["obs"], again["obs"]) and not torch.equal(one["obs"], two["obs"])
    assert not torch.equal(one["obs"], snapshot.batch["obs"])
    logprobs = agent.get_logprob(one["obs"], one["actions"])
    torch.testing.assert_close(logprobs.detach(), one["logprobs"], rtol=1e-4, atol=1e-5)


def test_interval_by_hand():
    mean, half = attribution.interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.303 / np.sqrt(3), rel=1e-3)  # t of two degrees of freedom


def test_differences_to_tracin_are_paired_by_round_and_averaged_by_run():
    def row(run, k, method, value):
        return {"run": run, "round": str(k), "method": method} | dict.fromkeys(attribution.TRUTHS, value)

    # run a: +0.1 and +0.3, so +0.2; run b: 0, and a round that says nothing; x in one run only has no interval
    rows = [
        row("a", 1, "TracIn", "0.5"),
        row("a", 2, "TracIn", "0.1"),
        row("b", 1, "TracIn", "0.2"),
        row("b", 2, "TracIn", ""),
    ]
    rows += [row("a", 1, "m", "0.6"), row("a", 2, "m", "0.4"), row("b", 1, "m", "0.2"), row("b", 2, "m", "nan")]
    lines = attribution.against_tracin([*rows, row("a", 1, "x", "0.9")]).splitlines()
    half = 12.706 * np.std([0.2, 0.0], ddof=1) / np.sqrt(2)  # t of one degree of freedom
    assert lines[2:] == ["| m |" + f" +0.10 ± {half:.2f} (2) |" * 4, "| x |" + " – (1) |" * 4]


def test_turns_times_every_method_beside_the_update(run, tmp_path):
    attribution.main(attribution.Args((str(run),), turns=2, out=str(tmp_path)))
    with open(tmp_path / "seconds.csv") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    snapshot = snapshots.load(run, 2)
    names, _ = attribution.table_of_methods(snapshot, snapshot.batch, snapshot.batch, 0)
    assert list(rows) == ["the update", *names] and float(rows["the update"]["updates"]) == 1
    assert all(float(row["seconds"]) >= 0 and row["turns"] == "2" for row in rows.values())
    assert not (tmp_path / "attribution.csv").exists()
    attribution.main(attribution.Args((str(run),), turns=1, out=str(tmp_path)))  # again: in place of those
    with open(tmp_path / "seconds.csv") as file:
        assert {row["turns"] for row in csv.DictReader(file)} == {"1"}
    attribution.main(attribution.Args((str(run),), halves=5, out=str(tmp_path)))
    assert "| CPU seconds | in updates |" in attribution.tables(tmp_path)
