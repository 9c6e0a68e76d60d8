"""Snapshots of rounds, and the commands that explain them."""

import csv
import dataclasses
import json
import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_scripts import SCRIPTS, assert_same, assert_same_end, model, refusal, train

from benchmarks.explain import behaviour, intervene, local_check, records, snapshots
from iif_core import filter_bottom

# Without holes: whatever the seed, each round reaches the goal, though not in all episodes, and so can tell good from bad.
MAP = ["SFFF", "FFFF", "FFFF", "FFFG"]
FROZEN_LAKE = "--env-id FrozenLake-v1 --no-cuda --num-steps 512 --num-minibatches 16"
FROZEN_LAKE += f""" --env-kwargs '{json.dumps({"is_slippery": False, "desc": MAP})}'"""


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    """The folder of a run of four rounds on FrozenLake."""
    flags = f"{FROZEN_LAKE} --total-timesteps 2048 --learning-rate 0.05 --filter-percent 50 --snapshot-rounds all --save-model"
    return train(SCRIPTS[0], flags, tmp_path_factory.mktemp("lake"), own=False).folder


@pytest.fixture(scope="module", params=SCRIPTS, ids=str)
def saved(request, tmp_path_factory):
    """A script and the folder of its run with snapshots of all its rounds, the environments reset before the third."""
    flags = "--snapshot-rounds all --save-every 2 --save-model"
    return request.param, train(request.param, flags, tmp_path_factory.mktemp("saved")).folder


def table(path):
    with open(path) as file:
        return list(csv.DictReader(file))


# ---- snapshots


def test_snapshots_change_nothing(saved, tmp_path):
    script, folder = saved
    without = train(script, "--save-every 2 --save-model", tmp_path).folder
    assert not (without / "snapshots").exists()
    assert_same_end(model(folder), model(without))


def test_a_snapshot_repeats_its_round(saved):
    """From it alone: the scores' policy, theta(k+1) to the bit, and the records by playing the environments again."""
    script, folder = saved
    assert snapshots.rounds(folder) == [0, 1, 2, 3]
    ends = [snapshots.load(folder, k).data["agent"] for k in (1, 2, 3)] + [model(folder)["agent"]]
    for k, end in enumerate(ends):
        snapshot = snapshots.load(folder, k)
        batch = snapshot.batch
        assert len(batch["scores"]) == script.batch and snapshot.data["iteration"] == snapshot.round == k
        logprobs = snapshot.agent().get_logprob(batch["obs"], batch["actions"])
        torch.testing.assert_close(logprobs.detach(), batch["logprobs"], rtol=1e-4, atol=1e-5)
        assert torch.equal(snapshot.selection, filter_bottom(batch["scores"], snapshot.args.filter_percent)) or k == 0
        assert_same(dict(snapshot.update(snapshot.selection).state_dict()), dict(end))
        steps = []
        assert_same(dict(snapshot.update(snapshot.selection, lambda _, inds: steps.append(inds)).state_dict()), dict(end))
        assert all(set(inds.tolist()) <= set(snapshot.selection.tolist()) for inds in steps)
        assert sum(1 for _ in snapshot.replay()) == snapshot.args.num_steps  # it compares observations and rewards itself
    assert snapshot.data["packages"]["gymnasium"] == gym.__version__


def test_replay_refuses_other_records(saved, monkeypatch):
    script, folder = saved
    snapshot = snapshots.load(folder, 1)
    rewards = snapshot.batch.get("raw_rewards", snapshot.batch["rewards"])
    rewards[snapshot.args.num_envs * 7] += 1
    with pytest.raises(SystemExit, match="step 7 shows another"):
        list(snapshot.replay())


def test_snapshot_of_a_resumed_run(tmp_path):
    begun, script = tmp_path / "begun", SCRIPTS[1]  # whose running statistics go on, too
    begun.mkdir()
    folder = train(script, f"--save-every 2 --total-timesteps {2 * script.batch}", begun).folder
    more = f"--total-timesteps {4 * script.batch} --snapshot-rounds 3"
    train(script, f"--resume {folder}/checkpoint.pt {more}", begun, own=False)
    straight = train(script, f"--save-every 2 {more}", tmp_path).folder
    a, b = (snapshots.load(run, 3) for run in (folder, straight))
    assert_same(a.batch, b.batch)
    assert sum(1 for _ in a.replay()) == a.args.num_steps


@pytest.mark.parametrize("rounds, expected", [("1,3", [1, 3]), ("every:3", [0, 3]), ("0", [0])])
def test_which_rounds(rounds, expected, tmp_path):
    folder = train(SCRIPTS[0], f"--snapshot-rounds {rounds} --filter none", tmp_path).folder
    assert snapshots.rounds(folder) == expected
    batch = torch.load(folder / "snapshots" / f"round_{expected[-1]:06d}.pt", weights_only=True)["batch"]
    assert "scores" not in batch  # plain PPO does not score; explaining it does
    assert len(snapshots.load(folder, expected[-1]).batch["scores"]) == 128


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
@pytest.mark.parametrize("rounds", ["4", "1,4", "-1", "1;2", "every:0", "every:x", "some", "1,"])
def test_rounds_that_cannot_be_saved(script, rounds, tmp_path):
    assert f"--snapshot-rounds {rounds}" in refusal(script, f"--snapshot-rounds={rounds}", tmp_path)


def test_what_cannot_be_opened(lake, tmp_path):
    def refused(text, folder=tmp_path / "run", k=1, **kwargs):
        with pytest.raises(SystemExit) as error:
            snapshots.load(folder, k, **kwargs)
        assert text in str(error.value) and "\n" not in str(error.value)

    refused("no such run folder")
    (tmp_path / "run").mkdir()
    refused("no snapshots in it")
    shutil.copytree(lake / "snapshots", tmp_path / "run" / "snapshots")
    refused("round 7 was not saved; there are 0, 1, 2, 3", k=7)
    path = tmp_path / "run" / "snapshots" / "round_000001.pt"
    whole = path.read_bytes()
    data = torch.load(path, weights_only=True)
    for part in (whole[: len(whole) // 2], b"", b"not a file of torch"):
        path.write_bytes(part)
        refused("round_000001.pt is corrupt or half-written")
    torch.save(model(lake), path)
    refused("round_000001.pt is no snapshot")
    torch.save({**data, "packages": data["packages"] | {"gymnasium": "0.1"}}, path)
    refused(f"saved with gymnasium 0.1, here is {gym.__version__}")
    assert snapshots.load(tmp_path / "run", 1, any_version=True).round == 1
    torch.save({**data, "args": {**data["args"], "env_id": "no_such_package:Lake-v1"}}, path)
    refused("--env-id no_such_package:Lake-v1", any_version=True)


# ---- diagnosis


def test_mc_advantages_by_hand():
    """Two environments side by side; states 0 and 1, gamma 0.5."""
    state = torch.tensor([[0, 0], [1, 0], [0, 1]])
    action = torch.tensor([[0, 1], [0, 0], [0, 0]])
    reward = torch.tensor([[1.0, 2.0], [4.0, 0.0], [2.0, 8.0]])
    done = torch.tensor([[False, True], [True, False], [False, False]])
    # returns: of environment 0: 1 + 0.5 * 4 = 3, 4, 2; of environment 1: 2, 0 + 0.5 * 8 = 4, 8
    v = {0: (3 + 2 + 2 + 4) / 4, 1: (4 + 8) / 2}
    q = {(0, 0): (3 + 2 + 4) / 3, (0, 1): 2, (1, 0): (4 + 8) / 2}
    batch = {"obs": torch.nn.functional.one_hot(state.flatten(), 2).float(), "actions": action.flatten()}
    batch |= {"rewards": reward.flatten(), "dones": done.flatten()}
    expected = [q[s, a] - v[s] for s, a in zip(state.flatten().tolist(), action.flatten().tolist())]
    assert records.mc_advantages(batch, 0.5, num_envs=2).tolist() == pytest.approx(expected)


def test_advantages_from_the_simulator(lake):
    """Against the exact ones of the policy, from the transitions of FrozenLake."""
    snapshot = snapshots.load(lake, 3)
    snapshot.args.gamma = 0.5  # so that actions differ: who can wait gets to the goal anyway
    transitions, gamma = snapshot.envs.envs[0].unwrapped.P, snapshot.args.gamma
    with torch.no_grad():
        policy = torch.softmax(snapshot.agent().actor(torch.eye(16)), -1).double().numpy()
    v = np.zeros(16)
    for _ in range(100):  # the time limit
        q = np.array(
            [[sum(p * (r + gamma * v[s] * (not d)) for p, s, r, d in transitions[i][a]) for a in range(4)] for i in range(16)]
        )
        v = (policy * q).sum(1)
    state, action = snapshot.batch["obs"].argmax(1), snapshot.batch["actions"]
    asked = [int(r) for s in (0, 14) for a in range(4) for r in ((state == s) & (action == a)).nonzero()[:1]]
    estimates = records.replayed_advantages(snapshot, 1500, asked)
    assert sorted(estimates) == sorted(asked) and {int(state[r]) for r in asked} == {0, 14}
    for r in asked:
        assert estimates[r] == pytest.approx(q[state[r], action[r]] - v[state[r]], abs=0.03)
    assert max(abs(x) for x in estimates.values()) > 0.2


def test_a_simulator_is_reset_to_the_state(tmp_path):
    """Where nothing is left to chance: of one step, so that the return is the reward of a record whose episode ends there."""
    for script in (SCRIPTS[0], SCRIPTS[2]):  # by the state of CartPole; by a copy of MiniGrid
        folder = train(script, "--snapshot-rounds 1 --filter-when always", tmp_path).folder
        snapshot = snapshots.load(folder, 1)
        seen, attribute = [], records.simulator_state(snapshot.envs.envs[0])
        with pytest.MonkeyPatch.context() as patch:
            returns = records.simulated_returns

            def first_step(envs, act, obs, gamma, first_action=None):
                if first_action is not None:
                    seen.append((envs[0].step(first_action)[0].copy(), attribute))
                return np.zeros(len(envs))

            patch.setattr(records, "simulated_returns", first_step)
            records.replayed_advantages(snapshot, 1, range(20))
        assert returns is records.simulated_returns and len(seen) >= 20
        after = [snapshot.batch["obs"][r + 1].numpy() for r in range(20) if not snapshot.batch["dones"][r]]
        reached = [obs for r, (obs, _) in enumerate(seen[:20]) if not snapshot.batch["dones"][r]]
        assert len(after) > 10 and all(np.allclose(a, b, atol=1e-6) for a, b in zip(after, reached))


def test_sign_of_the_rank_correlation():
    rank = np.arange(1, 6)
    assert snapshots.spearman(rank, [9.0, 7.0, 5.0, 3.0, 1.0]) == pytest.approx(-1)
    assert snapshots.spearman(rank, [1.0, 2.0, 3.0, 5.0, 4.0]) == pytest.approx(0.9)
    assert np.isnan(snapshots.spearman(rank, np.ones(5)))


def test_explain(lake, tmp_path, capsys):
    records.main(records.Args(run=str(lake), round=3, records=10, out=str(tmp_path)))
    printed = capsys.readouterr().out
    snapshot = snapshots.load(lake, 3)
    scores = snapshot.batch["scores"]
    rows = table(tmp_path / "round_000003_records.csv")
    assert [row["side"] for row in rows] == ["bottom"] * 10 + ["top"] * 10
    assert float(rows[0]["score"]) == pytest.approx(float(scores.min()), rel=1e-5)
    assert float(rows[10]["score"]) == pytest.approx(float(scores.max()), rel=1e-5)
    for row in rows:
        r = int(row["record"])
        x, y = map(int, row["place"].split())
        assert 4 * y + x == int(snapshot.batch["obs"][r].argmax())
        assert row["action"] == ["left", "down", "right", "up"][snapshot.batch["actions"][r]]
        assert int(row["kept"]) == (r in snapshot.selection.tolist())
    ranks = table(tmp_path / "round_000003_ranks.csv")
    column = {name: np.array([float(row[name]) for row in ranks]) for name in ranks[0]}
    assert (np.diff(column["score"]) <= 0).all()  # decreasing influence
    a_true = records.mc_advantages(snapshot.batch, 0.99).numpy()
    np.testing.assert_allclose(column["a_true"], a_true[column["record"].astype(int)], rtol=1e-4, atol=1e-6)
    rho = snapshots.spearman(column["rank"], column["a_true"] * column["advantage"])
    assert f"A_true * A: {rho:+.3f}" in printed and rho < 0
    assert all((tmp_path / f"round_000003_{name}.png").stat().st_size > 5000 for name in ("grid", "ranks"))


def test_pictures_of_other_environments(saved, tmp_path, capsys):
    """Frames of every script's records; rewards and observations are compared on the way."""
    script, folder = saved
    records.main(records.Args(run=str(folder), round=3, records=3, out=str(tmp_path)))
    assert (tmp_path / "round_000003_frames.png").stat().st_size > 5000
    assert (tmp_path / "round_000003_grid.png").exists() == ("minigrid" in script.name)
    if script.env == "Pendulum-v1":
        with pytest.raises(SystemExit, match="normalised"):
            records.main(records.Args(run=str(folder), round=3, advantages="replay", frames=False, out=str(tmp_path)))
    if "atari" in script.name:
        with pytest.raises(SystemExit, match="cannot be reset to a state"):
            records.main(records.Args(run=str(folder), round=3, advantages="replay", out=str(tmp_path)))


# ---- interventions


def test_intervene(lake, tmp_path, capsys):
    args = intervene.Args(runs=(str(lake),), episodes=20, rounds=(1, 2, 3), out=str(tmp_path))
    intervene.main(args)
    rows = table(tmp_path / "interventions.csv")
    assert [(row["round"], row["arm"]) for row in rows] == [(k, arm) for k in "123" for arm in intervene.ARMS]
    # a round in which the whole round can go as far as the filtered one
    k = next(int(row["round"]) for row in rows if row["arm"] == "as far" and row["kl"])
    snapshot = snapshots.load(lake, k)
    negative = int((snapshot.batch["scores"] < 0).sum())
    whole, filtered, random, far = rows[4 * k - 4 : 4 * k]
    counts = [int(row["records"]) for row in (whole, filtered, random, far)]
    assert 0 < negative < 512 and counts == [512, 512 - negative, 512 - negative, 512]
    # the policy after the whole round, on the seeds that all share
    agent, optimizer, generator = snapshot.start()
    snapshot.script.update(agent, optimizer, snapshot.batch, torch.arange(512), snapshot.args, generator)
    seed = snapshot.script.derive_seed(snapshot.args.seed, 6, k)
    returns = snapshot.script.evaluate(agent, snapshot.eval_envs(20), 20, seed)
    assert float(whole["return"]) == pytest.approx(returns.mean())
    with torch.no_grad():
        new = agent.actor(snapshot.batch["obs"]).log_softmax(1)
        old = snapshot.agent().actor(snapshot.batch["obs"]).log_softmax(1)
    exact = (old.exp() * (old - new)).sum(1).mean().item()  # the command has an estimate from the actions taken
    assert float(whole["kl"]) == pytest.approx(exact, rel=0.3)
    # the whole round with another learning rate, which goes as far as the filtered one
    assert float(far["kl"]) == pytest.approx(float(filtered["kl"]), rel=0.11) != pytest.approx(float(whole["kl"]), rel=0.2)
    agent, optimizer, generator = snapshot.start()
    optimizer.param_groups[0]["lr"] *= float(far["lr_factor"])
    snapshot.script.update(agent, optimizer, snapshot.batch, torch.arange(512), snapshot.args, generator)
    assert intervene.divergence(snapshot, agent) == pytest.approx(float(far["kl"]), rel=1e-3)
    assert (tmp_path / "interventions_FrozenLake-v1.png").exists() and (tmp_path / "agreement.png").exists()
    logged = EventAccumulator(str(lake)).Reload()  # what the run itself said of its rounds
    for name in ("agreement", "noise_scale"):
        values = {x.step: x.value for x in logged.Scalars(f"influence/{name}")}
        for row in rows:
            assert float(row[name]) == pytest.approx(values.get(512 * (int(row["round"]) + 1), np.inf), rel=1e-4)
    before = (tmp_path / "interventions.csv").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervene, "intervene", None)  # what is there is not done again
        intervene.main(args)
    assert (tmp_path / "interventions.csv").read_text() == before


def test_interventions_that_cannot_be(lake, tmp_path):
    for run, rounds, text in ((lake, (9,), "round 9 was not saved"), (tmp_path / "none", (), "no such run folder")):
        with pytest.raises(SystemExit, match=text):
            intervene.main(intervene.Args(runs=(str(lake), str(run)), rounds=rounds))
    assert not (tmp_path / "none").exists()


def test_what_is_dropped():
    scores = torch.tensor([1.0, -1.0, 0.0, -2.0, 3.0])
    for percent, filtered in ((100, [0, 2, 4]), (50, [0, 1, 2, 4])):
        chosen = intervene.selections({"scores": scores}, percent, torch.Generator().manual_seed(1))
        assert chosen["whole round"].tolist() == [0, 1, 2, 3, 4] and chosen["filtered"].tolist() == filtered
        assert len(set(chosen["random"].tolist())) == len(filtered)


def test_table_of_interventions_by_hand(tmp_path):
    # (seed, round): of the four policies, of which the last need not be there
    returns = {("1", 0): (10, 13, 9, 11), ("1", 1): (20, 19, 20, 26), ("2", 0): (0, 4, 1, None)}
    kl = {("1", 0): (1, 1.3, 0.9, 1.1), ("1", 1): (2, 1.9, 2, 2.6), ("2", 0): (1, 4, 1, None)}
    lines = ["run,env,seed,round,arm,return,stderr,records,episodes,kl,lr_factor"]
    for (seed, k), values in returns.items():
        for arm, x, far in zip(intervene.ARMS, values, kl[seed, k]):
            lines.append(f"r{seed},Lake-v1,{seed},{k},{arm}," + (f"{x},1,8,20,{far},1" if x is not None else ",,8,20,,"))
    (tmp_path / "interventions_12.5.csv").write_text("\n".join(lines))
    assert intervene.table(tmp_path).splitlines()[2:] == [
        "| Lake-v1 | 12.5% of the negative dropped | 2 | 3 | +3 | +1 ± 2, +4 | 67% | 1.3 |",
        "| Lake-v1 | as many random dropped | 2 | 3 | +0 | -0.5 ± 0.5, +1 | 33% | 1 |",
        "| Lake-v1 | none dropped, moved as far | 2 | 2 | +3.5 | +3.5 ± 2.5, – | 100% | 1.2 |",
        "| Lake-v1 | 12.5% of the negative dropped, on the rounds above | 2 | 2 | +1 | +1 ± 2, – | 50% | 1.1 |",
        "| Lake-v1 | 12.5% of the negative dropped, on the other rounds | 2 | 1 | +4 | –, +4 | 100% | 4 |",
    ]


def test_changes_against_agreement_by_hand(tmp_path):
    """Six rounds whose gain by filtering grows with agreement, and one without agreement, which does not count."""
    lines = ["run,env,seed,round,arm,return,stderr,records,episodes,kl,lr_factor,agreement,noise_scale"]
    for k, agreement in enumerate((-0.5, 0.0, 0.2, 0.5, 0.8, 0.9, "nan")):
        for arm, gain in zip(intervene.ARMS, (0, k, -1, None if k else 5)):
            values = f"{10 + gain},1,8,20,1,1" if gain is not None else ",,8,20,,"
            lines.append(f"r,Lake-v1,1,{k},{arm},{values},{agreement},3")
    (tmp_path / "interventions.csv").write_text("\n".join(lines))
    assert intervene.agreement_table(tmp_path).splitlines()[2:] == [
        "| Lake-v1 | 100% of the negative dropped | 6 | +1.00 [+1.00, +1.00] | +1 ± 0.58 (3) | +3 (1) | +4.5 ± 0.5 (2) |",
        "| Lake-v1 | as many random dropped | 6 |  | -1 ± 0 (3) | -1 (1) | -1 ± 0 (2) |",
        "| Lake-v1 | none dropped, moved as far | 1 |  | +5 (1) |  |  |",
    ]


def test_no_learning_rate_goes_as_far(lake):
    snapshot = snapshots.load(lake, 3)
    assert intervene.as_far(snapshot, torch.arange(0), 0.1) == (None, None)  # an update over nothing


# ---- the scores against what they predict


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_scores_predict_one_step(number, lake, tmp_path):
    """The test of the method: what one SGD step does to f_return without a set of records is what their scores say."""
    script = SCRIPTS[number]
    folder = train(script, "--snapshot-rounds 1 --filter-when always", tmp_path).folder if number else lake
    local = local_check.Local(snapshots.load(folder, snapshots.rounds(folder)[-1]))
    sets = local_check.random_sets(local.n, local.n // 8, 20)
    sets += [local.scores.argsort()[: local.n // 8], local.scores.argsort()[-local.n // 8 :]]
    lr = 1e-3 * local.args.learning_rate
    predicted, measured = local_check.differences(local, sets, [torch.arange(local.n)], lr, [1])
    slope, correlation = local_check.agreement(predicted[:, 0], measured[:, 0])
    assert slope == pytest.approx(1, abs=0.01) and correlation > 0.999
    assert predicted[-2] > 0 > predicted[-1]  # without the harmful records the step raises f_return more


def test_local_check(lake, tmp_path, capsys):
    local_check.main(local_check.Args(run=str(lake), round=3, sets=4, learning_rates=(1e-4,), out=str(tmp_path)))
    rows = table(tmp_path / "round_000003_local.csv")
    assert rows[0]["step_on"] == "round" and float(rows[0]["slope"]) == pytest.approx(1, abs=0.01)
    assert [int(row["steps"]) for row in rows[1:]] == [1, 2, 4, 8, 16, 32, 64, 128, 160]
    assert float(rows[1]["slope"]) == pytest.approx(1, abs=0.01)  # one minibatch of the 160 is a step like any other
    assert (tmp_path / "round_000003_local.png").exists()


# ---- behaviour


def small_steps(snapshot, lr, **changes):
    snapshot.args = dataclasses.replace(snapshot.args, **changes)
    snapshot.data["optimizer"]["param_groups"][0]["lr"] = lr
    return snapshot


def test_influence_on_an_action_against_autograd(lake):
    """One step on the whole round: every record's inner product, by a loop."""
    snapshot = small_steps(snapshots.load(lake, 3), 1e-3, update_epochs=1, num_minibatches=1)
    batch, agent = snapshot.batch, snapshot.agent()
    snapshot.selection = torch.arange(512)
    state, action = batch["obs"][5], torch.tensor(2)
    scores = behaviour.round_influence(snapshot, state, action)

    def gradient(value):
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(agent.actor.parameters()))])

    target = gradient(agent.get_logprob(state[None], action[None])[0])
    normalized = (batch["advantages"] - batch["advantages"].mean()) / batch["advantages"].std()
    for r in range(0, 512, 16):
        grad = gradient(normalized[r] * agent.get_logprob(batch["obs"][r : r + 1], batch["actions"][r : r + 1])[0])
        assert float(scores[r]) == pytest.approx(float(target @ grad), rel=1e-3, abs=1e-4)


def test_influences_add_up_to_what_the_round_did(lake):
    """To first order, each step moves log pi(a|s) by lr / minibatch size * sum of its records' terms."""
    snapshot = small_steps(snapshots.load(lake, 3), 1e-5)
    state, action = snapshot.batch["obs"][5], torch.tensor(2)
    total = behaviour.round_influence(snapshot, state, action)
    agents = snapshot.agent(), snapshot.update(snapshot.selection)
    with torch.no_grad():
        before, after = (agent.double().get_logprob(state[None].double(), action[None]) for agent in agents)
    assert float(after - before) == pytest.approx(1e-5 / snapshot.args.minibatch_size * float(total.sum()), rel=0.01)
    dropped = torch.ones(512, dtype=torch.bool)
    dropped[snapshot.selection] = False
    assert dropped.any() and not total[dropped].any()


def test_roughness_by_hand():
    """States at 0, 1 and 3 on a line: the distances are 1, 2 and 3; each one's nearest makes two edges."""
    influence, embeddings = torch.tensor([4.0, 2.0, 1.0]), torch.tensor([[0.0], [1.0], [3.0]])
    w01, w12, w02 = np.exp(-1 / 4), np.exp(-4 / 4), np.exp(-9 / 4)
    expected = (w01 * 0.5**2 + w12 * 0.25**2) / (w01 + w12)
    assert behaviour.roughness(influence, embeddings, 1) == pytest.approx(expected)
    expected = (w01 * 0.5**2 + w12 * 0.25**2 + w02 * 0.75**2) / (w01 + w12 + w02)
    assert behaviour.roughness(influence, embeddings, 50) == pytest.approx(expected)
    assert behaviour.roughness(torch.ones(4), torch.zeros(4, 2), 2) == 0  # equal states, equal influences
    assert np.isnan(behaviour.roughness(torch.ones(1), torch.zeros(1, 2), 2))


def test_embedding_is_the_last_hidden_layer(saved):
    script, folder = saved
    snapshot = snapshots.load(folder, 0)
    agent, obs, actions = snapshot.agent(), snapshot.batch["obs"][:5], snapshot.batch["actions"][:5]
    embeddings = snapshots.embed(agent, obs, actions)
    actor = getattr(agent, "actor_mean", None) or agent.actor
    last = actor if isinstance(actor, torch.nn.Linear) else actor[-1]
    policy = script.policy(agent, obs)
    output = policy.base_dist.mean if "continuous" in script.name else policy.logits
    expected = last(embeddings) if "continuous" in script.name else torch.log_softmax(last(embeddings), -1)
    torch.testing.assert_close(output, expected)


def test_behaviour(lake, tmp_path, capsys):
    behaviour.main(behaviour.Args(run=str(lake), find=True, out=str(tmp_path)))
    found = table(tmp_path / "candidates_round_000003.csv")
    first = found[0]
    assert float(first["p_end"]) > float(first["p_0"]) and int(first["falls"]) == 0
    behaviour.main(behaviour.Args(run=str(lake), state=first["state"], out=str(tmp_path)))
    (path,) = tmp_path.glob("behaviour_*record*[0-9].csv")
    rows = table(path)
    assert [row["round"] for row in rows] == list("0123")
    assert [float(row["probability"]) for row in rows] == pytest.approx([float(first[f"p_{k}"]) for k in range(4)], rel=1e-4)
    assert all(float(row["roughness"]) >= 0 for row in rows) and path.with_suffix(".png").exists()
    # the same pair, by the number of its cell
    cell = int(snapshots.load(lake, 3).batch["obs"][int(first["state"].partition(":")[2])].argmax())
    args = behaviour.Args(run=str(lake), state=str(cell), action=first["action"], rounds=(3,), out=str(tmp_path))
    behaviour.main(args)
    assert table(tmp_path / f"behaviour_{cell}_action_{first['action']}.csv")[0] == rows[3]


@pytest.mark.parametrize(
    "state, action, text",
    [
        ("16", "1", "--state 16: outside the observation space Discrete(16)"),
        ("1.5", "1", "--state 1.5: outside"),
        ("1,0", "1", "--state 1,0: outside"),
        (",".join(["2"] * 16), "1", "outside the observation space Box"),
        ("a", "1", "--state a: give numbers"),
        ("record:512", None, "records 0 to 511"),
        ("3", None, "--action is needed"),
        ("3", "4", "--action 4: the actions are 0 to 3"),
        ("3", "x", "--action x: the actions are 0 to 3"),
    ],
)
def test_behaviours_that_there_are_not(state, action, text, lake):
    with pytest.raises(SystemExit) as error:
        behaviour.main(behaviour.Args(run=str(lake), state=state, action=action))
    assert text in str(error.value) and "\n" not in str(error.value)


def test_states_and_actions_of_other_spaces(saved):
    script, folder = saved
    snapshot = snapshots.load(folder, 0)
    obs = snapshot.batch["obs"][3]
    state, taken = behaviour.parse_state("record:3", snapshot)
    assert torch.equal(state, obs) and torch.equal(taken, snapshot.batch["actions"][3])
    if obs.numel() < 1000:
        given, _ = behaviour.parse_state(",".join(map(repr, obs.flatten().tolist())), snapshot)
        assert torch.equal(given, obs)
    action = behaviour.parse_action("0", None, snapshot)
    assert action.shape == taken.shape and action.dtype == taken.dtype
    with pytest.raises(SystemExit, match="--action"):
        behaviour.parse_action("0,0,0", None, snapshot)
