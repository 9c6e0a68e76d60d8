"""examples/: each runs as it is called from the repository's root, and scores as the loop of autograd does."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from torch import nn
from torch.distributions import Categorical

import ppo_iif
from iif_core import filter_bottom, influence_scores, return_influence

ROOT = Path(__file__).resolve().parent.parent
torch.set_num_threads(1)


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dqn, sb3 = example("dqn_iif"), example("sb3_ppo_iif")


def run(name, *flags, cwd):
    done = subprocess.run([sys.executable, str(ROOT / "examples" / name), *flags], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def gradient(value, module):
    grads = torch.autograd.grad(value, list(module.parameters()), allow_unused=True)
    return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(module.parameters(), grads)])


# ---- DQN


def transitions(n, seed):
    generator = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, n, 4, generator=generator)
    actions, rewards = torch.randint(2, (n,), generator=generator), torch.randn(n, generator=generator)
    return obs, actions, rewards, next_obs, (torch.rand(n, generator=generator) < 0.2).float()


def test_dqn_scores_against_the_loop_of_autograd():
    torch.manual_seed(0)
    env = gym.make("CartPole-v1")
    q, target = dqn.QNetwork(env), dqn.QNetwork(env)
    batch, fresh = transitions(16, 1), transitions(12, 2)

    def error(record):
        obs, action, reward, next_obs, termination = record
        return (reward + 0.9 * (1 - termination) * target(next_obs).detach().max() - q(obs)[action]) ** 2

    direction = -sum(gradient(error(record), q) for record in zip(*fresh)) / 12
    expected = torch.stack([-(gradient(error(record), q) @ direction) for record in zip(*batch)])
    torch.testing.assert_close(dqn.score(q, target, batch, fresh, 0.9), expected, rtol=1e-4, atol=1e-5)


def test_a_step_on_what_dqn_keeps_lowers_the_fresh_error_most():
    """To first order the change is the sum of the scores: over the helpful transitions it must be better than over all."""
    torch.manual_seed(0)
    env = gym.make("CartPole-v1")
    q, target = dqn.QNetwork(env).double(), dqn.QNetwork(env).double()
    batch, fresh = (tuple(x.double() if x.is_floating_point() else x for x in transitions(64, seed)) for seed in (1, 2))
    scores = dqn.score(q, target, batch, fresh, 0.9)
    kept = filter_bottom(scores, 100)
    assert 0 < len(kept) < 64
    start = {name: p.clone() for name, p in q.state_dict().items()}

    def after(inds, lr=1e-5):
        q.load_state_dict(start)
        loss = dqn.bellman_errors(q, target, tuple(x[inds] for x in batch), 0.9).sum()
        for p, g in zip(q.parameters(), torch.autograd.grad(loss, list(q.parameters()))):
            p.data -= lr * g
        return dqn.bellman_errors(q, target, fresh, 0.9).mean().item()

    before = dqn.bellman_errors(q, target, fresh, 0.9).mean().item()
    assert after(kept) < after(torch.arange(64))
    assert before - after(kept) == pytest.approx(1e-5 * scores[kept].sum().item(), rel=0.02)


SHORT = ("--total-timesteps", "1500", "--learning-starts", "500", "--fresh-frequency", "250", "--eval-episodes", "2")


def test_dqn_runs_and_counts_its_fresh_transitions(tmp_path):
    last = {}
    for arm in ("influence", "random", "none"):
        out = run("dqn_iif.py", "--filter", arm, *SHORT, cwd=tmp_path)
        steps = [tuple(map(int, found)) for found in re.findall(r"global_step=(\d+), environment_steps=(\d+)", out)]
        assert len(steps) == 10
        last[arm] = steps[-1]
    # fresh sets at the steps 500, 750, ..., 1500
    assert last == {"influence": (1500, 1500 + 5 * 128), "random": (1500, 1500 + 5 * 128), "none": (1500, 1500)}
    assert run("dqn_iif.py", "--filter", "influence", *SHORT, cwd=tmp_path) == run(
        "dqn_iif.py", "--filter", "influence", *SHORT, cwd=tmp_path
    )


def test_dqn_refuses_to_train_before_it_has_fresh_transitions(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "dqn_iif.py"), "--learning-starts", "100"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "--learning-starts 100" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


# ---- stable-baselines3


@pytest.fixture(scope="module")
def model():
    """One whose first round is collected and scored."""
    found = {}

    class Kept(sb3.PPOIIF):
        def score(self):
            found["scores"] = super().score()
            self.found = found
            names = ("observations", "actions", "advantages")
            found["data"] = SimpleNamespace(**{name: self.rollout_buffer.column(name) for name in names})
            found["policy"] = {name: p.clone() for name, p in self.policy.state_dict().items()}
            return found["scores"]

    return Kept(
        "MlpPolicy", "CartPole-v1", n_steps=128, batch_size=32, n_epochs=2, seed=3, device="cpu", filter_percent=50
    ).learn(128)


def our_agent(weights):
    """ppo_iif.py's network with the weights of stable-baselines3's."""
    space = SimpleNamespace(single_observation_space=SimpleNamespace(shape=(4,)), single_action_space=SimpleNamespace(n=2))
    agent = ppo_iif.Agent(space)
    names = {
        "actor": ("mlp_extractor.policy_net.0", "mlp_extractor.policy_net.2", "action_net"),
        "critic": ("mlp_extractor.value_net.0", "mlp_extractor.value_net.2", "value_net"),
    }
    for part, theirs in names.items():
        for layer, name in zip((0, 2, 4), theirs):
            for kind in ("weight", "bias"):
                getattr(getattr(agent, part)[layer], kind).data.copy_(weights[f"{name}.{kind}"])
    return agent


def test_sb3_scores_are_those_of_our_script_and_of_autograd(model):
    data, scores = model.found["data"], model.found["scores"]
    agent = our_agent(model.found["policy"])
    batch = {"obs": data.observations, "actions": data.actions.long().flatten(), "advantages": data.advantages.flatten()}
    args = SimpleNamespace(minibatch_size=32, norm_adv=True, batch_size=128)
    generator = torch.Generator().manual_seed(3)
    torch.testing.assert_close(ppo_iif.score(agent, batch, args, generator), scores, rtol=1e-4, atol=1e-7)

    order, a = torch.randperm(128, generator=torch.Generator().manual_seed(3)), batch["advantages"]
    normalized = torch.empty(128)
    for part in order.split(32):
        normalized[part] = (a[part] - a[part].mean()) / (a[part].std() + 1e-8)
    grads = torch.stack(
        [gradient(Categorical(logits=agent.actor(o)).log_prob(x), agent) for o, x in zip(batch["obs"], batch["actions"])]
    )
    torch.testing.assert_close(scores, normalized * (grads @ (a @ grads / 128)), rtol=1e-3, atol=1e-6)


def test_sb3_trains_on_what_is_kept(model):
    buffer, kept = model.rollout_buffer, model.rollout_buffer.kept
    assert kept.tolist() == filter_bottom(model.found["scores"], 50).tolist() and len(kept) < 128
    minibatches = list(buffer.get(32))
    assert [len(mb.actions) for mb in minibatches] == [32] * (len(kept) // 32)
    rows = {tuple(row) for row in model.found["data"].observations[kept].tolist()}
    seen = [tuple(row) for mb in minibatches for row in mb.observations.tolist()]
    assert set(seen) <= rows and len(set(seen)) == len(seen)


def test_sb3_with_nothing_to_drop_is_their_ppo():
    options = {"n_steps": 64, "batch_size": 32, "n_epochs": 2, "seed": 1, "device": "cpu"}
    ours = sb3.PPOIIF("MlpPolicy", "CartPole-v1", filter_percent=0, **options).learn(192)
    theirs = PPO("MlpPolicy", "CartPole-v1", **options).learn(192)
    for p, q in zip(ours.policy.parameters(), theirs.policy.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_sb3_saves_and_runs(tmp_path):
    model = sb3.PPOIIF("MlpPolicy", "Pendulum-v1", n_steps=64, seed=1, device="cpu").learn(64)
    model.save(tmp_path / "model")
    again = PPO.load(tmp_path / "model", device="cpu")
    obs = np.zeros((1, 3), dtype=np.float32)
    assert np.array_equal(model.predict(obs, deterministic=True)[0], again.predict(obs, deterministic=True)[0])
    assert "influence/" in run("sb3_ppo_iif.py", "--env-id", "CartPole-v1", "--total-timesteps", "4096", cwd=tmp_path)


# ---- A2C, as arguments of ppo_iif.py (docs/attribution.md)


def test_ppo_with_one_epoch_and_one_minibatch_is_a2c():
    flags = re.search(r"python ppo_iif\.py (--num-envs 8 .*)", (ROOT / "docs" / "attribution.md").read_text())[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ppo_iif.py", *flags.split()])
        args, _ = ppo_iif.parse_args()
    torch.manual_seed(0)
    envs = ppo_iif.make_envs(args, None)
    agent = ppo_iif.Agent(envs)
    obs, _ = envs.reset(seed=1)
    batch, *_ = ppo_iif.rollout(agent, envs, obs, args.num_steps, np.random.default_rng(1))
    batch = {name: x.flatten(0, 1) for name, x in ppo_iif.gae(batch, args.gamma, args.gae_lambda).items()}

    # A2C by hand: one step of SGD on - A log pi + vf (V - R)^2 - ent H over all records, clipped by its norm
    scores = ppo_iif.score(agent, batch, args, torch.Generator().manual_seed(0))
    distribution = Categorical(logits=agent.actor(batch["obs"]))
    logprob, advantages = distribution.log_prob(batch["actions"]), batch["returns"] - batch["values"]
    loss = (
        -(advantages * logprob).mean() + args.vf_coef * (agent.critic(batch["obs"])[:, 0] - batch["returns"]).square().mean()
    )
    loss = loss - args.ent_coef * distribution.entropy().mean()
    grad = gradient(loss, agent)
    step = args.learning_rate * grad * min(1.0, args.max_grad_norm / grad.norm().item())
    before = nn.utils.parameters_to_vector(agent.parameters()).detach()
    optimizer = torch.optim.SGD(agent.parameters(), lr=args.learning_rate)
    _, steps = ppo_iif.update(agent, optimizer, batch, torch.arange(args.batch_size), args, torch.Generator().manual_seed(0))
    after = nn.utils.parameters_to_vector(agent.parameters()).detach()
    assert steps == 1
    torch.testing.assert_close(before - after, step, rtol=1e-3, atol=1e-7)

    # and its record's loss is - A log pi with the advantage as it is
    nn.utils.vector_to_parameters(before, agent.parameters())
    grads = torch.stack(
        [gradient(Categorical(logits=agent.actor(o)).log_prob(a), agent) for o, a in zip(batch["obs"], batch["actions"])]
    )
    weighted = advantages.unsqueeze(1) * grads
    torch.testing.assert_close(scores, weighted @ weighted.mean(0), rtol=1e-3, atol=1e-6)


# ---- recurrent agents (docs/attribution.md)


class Recurrent(nn.Module):
    """In the manner of CleanRL's ppo_atari_lstm.py: the state begins anew where an episode does."""

    def __init__(self):
        super().__init__()
        self.lstm, self.actor = nn.LSTM(3, 8), nn.Linear(8, 2)

    def logprob(self, obs, actions, dones, envs):
        """obs [T, E, 3] of the environments `envs`, from their first step on -> log pi(a|s) [T, E]."""
        hidden, state = [], tuple(torch.zeros(1, len(envs), 8) for _ in range(2))
        for t in range(len(obs)):
            kept = (~dones[t, envs]).float().view(1, -1, 1)
            out, state = self.lstm(obs[t : t + 1, envs], tuple(kept * s for s in state))
            hidden.append(out[0])
        logits = self.actor(torch.stack(hidden))
        return -nn.functional.cross_entropy(logits.flatten(0, 1), actions[:, envs].flatten(), reduction="none").view(
            len(obs), -1
        )


def test_a_recurrent_agent_is_scored_in_whole_sequences():
    torch.manual_seed(0)
    steps, num_envs = 6, 3
    agent, n = Recurrent(), 18
    obs, actions = torch.randn(steps, num_envs, 3), torch.randint(2, (steps, num_envs))
    dones, advantages = torch.rand(steps, num_envs) < 0.3, torch.randn(steps, num_envs)
    everyone = torch.arange(num_envs)

    def logprob(inds):
        return agent.logprob(obs, actions, dones, everyone).flatten()[inds]

    scores = return_influence(agent, logprob, advantages.flatten(), chunk_size=n)
    a = (advantages.flatten() - advantages.mean()) / (advantages.std() + 1e-8)
    grads = torch.stack([gradient(logprob(torch.tensor([i]))[0], agent) for i in range(n)])
    torch.testing.assert_close(scores, a * (grads @ (advantages.flatten() @ grads / n)), rtol=1e-3, atol=1e-6)

    # a whole environment's sequence as one record: its score is the sum of its steps'
    direction = gradient((advantages.flatten() * logprob(torch.arange(n))).mean(), agent)
    names, sizes = zip(*[(name, p.numel()) for name, p in agent.named_parameters()])
    direction = {m: v.view_as(p) for m, v, p in zip(names, direction.split(sizes), agent.parameters())}
    whole = influence_scores(
        agent,
        lambda envs: -(a.view(steps, num_envs)[:, envs] * agent.logprob(obs, actions, dones, envs)).sum(0),
        direction,
        num_envs,
        chunk_size=1,
    )
    torch.testing.assert_close(whole, scores.view(steps, num_envs).sum(0), rtol=1e-3, atol=1e-6)
