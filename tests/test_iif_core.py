"""iif_core against independent truth: a plain autograd loop over single records, central differences, brute force, paper."""

import contextlib
import copy
import itertools
import math
import pathlib
import random
import statistics
import sys
import threading
import warnings
from collections.abc import Callable
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributions import Categorical, Normal
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.tensorboard import SummaryWriter

import iif_core
from iif_core import action_influence, filter_bottom, influence_scores, log_influence, return_influence, target_gradient

torch.set_num_threads(1)
slowly = pytest.mark.usefixtures("the_way_of_last_resort")  # expected here, and an error elsewhere
both_modes = pytest.mark.parametrize("forward_mode", [False, True], ids=["reverse", "forward"])
N, OBS, ACTIONS = 12, 5, 3  # records, size of an observation, number of actions


@pytest.fixture
def the_way_of_last_resort():
    pass


@pytest.fixture(autouse=True)
def float64_and_a_seed(request):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        expected = "the_way_of_last_resort" in request.fixturenames
        warnings.filterwarnings("ignore" if expected else "error", "the scores are computed slowly")
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        yield
    torch.set_default_dtype(torch.float32)


# ---- truth


def trainable(agent):
    return {name: p for name, p in agent.named_parameters() if p.requires_grad}


def flat(agent, tensors):
    return torch.cat([tensors[name].detach().flatten() for name in trainable(agent)])


def record_gradients(agent, fn, n):
    """[n, parameters]: the gradient of fn for each record, by one ordinary backward pass a record."""
    params = trainable(agent)
    rows = []
    for i in range(n):
        grads = torch.autograd.grad(fn(torch.tensor([i])).sum(), list(params.values()), allow_unused=True)
        rows.append(flat(agent, {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(params.items(), grads)}))
    return torch.stack(rows)


def normalized_by_hand(advantages, minibatch_size, inds):
    """Normalise within minibatches, in plain Python."""
    n = len(advantages)
    size = n if minibatch_size is None else minibatch_size
    minibatches = [inds[start : start + size] for start in range(0, n, size)]
    if size > 1 and len(minibatches) > 1 and len(minibatches[-1]) == 1:
        last = minibatches.pop()
        minibatches[-1] = minibatches[-1] + last
    out = list(advantages)
    for minibatch in minibatches:
        if len(minibatch) > 1:
            a = [advantages[i] for i in minibatch]
            for i in minibatch:
                out[i] = (advantages[i] - statistics.fmean(a)) / (statistics.stdev(a) + 1e-8)
    return torch.tensor(out)


def return_scores_by_hand(agent, logprob, advantages, minibatch_size=None, inds=None):
    n = len(advantages)
    inds = list(range(n)) if inds is None else list(inds)
    grads = record_gradients(agent, logprob, n)
    direction = advantages @ grads / n
    return normalized_by_hand(advantages.tolist(), minibatch_size, inds) * (grads @ direction)


def random_direction(agent):
    return {name: torch.randn_like(p) for name, p in trainable(agent).items()}


def assert_equal(scores, truth, tolerance=1e-10):
    """Equal up to `tolerance` of the largest."""
    assert scores.shape == truth.shape and not scores.requires_grad
    assert (scores - truth).abs().max() <= tolerance * truth.abs().max() != 0


def check_influence_scores(agent, losses, n=None, **kwargs):
    """That they are those of the loop, against a random direction."""
    n, direction = n or N, random_direction(agent)
    scores = influence_scores(agent, losses, direction, n, **kwargs)
    assert_equal(scores, -record_gradients(agent, losses, n) @ flat(agent, direction))


def check_return_influence(agent, logprob, n=None, minibatch_size=None, inds=None, **kwargs):
    """That it is that of the loop, with random advantages."""
    advantages = torch.randn(n or N) + 1
    scores = return_influence(agent, logprob, advantages, minibatch_size=minibatch_size, inds=inds, **kwargs)
    inds = inds if inds is None else inds.tolist()
    assert_equal(scores, return_scores_by_hand(agent, logprob, advantages, minibatch_size, inds))


# ---- networks


class Case(NamedTuple):
    agent: nn.Module
    logprob: Callable  # logprob(inds) -> [len(inds)]
    n: int = N


class Net(nn.Module):
    """The given modules and parameters, with run(self, x) as the forward pass."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def log_pi(logits, actions):
    return torch.log_softmax(logits, -1).gather(-1, actions[..., None])[..., 0]


def discrete(agent, obs=None, run=None):
    """An agent, and log pi of random actions; run(obs) -> logits, by default agent(obs)."""
    obs, actions, run = torch.randn(N, OBS) if obs is None else obs, torch.randint(ACTIONS, (N,)), run or agent
    return Case(agent, lambda inds: log_pi(run(obs[inds]), actions[inds]))


def mlp_net():
    return nn.Sequential(nn.Linear(OBS, 8), nn.Tanh(), nn.Linear(8, ACTIONS))


def mlp():
    return discrete(mlp_net())


def conv():
    agent = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2, dilation=2, padding=2, padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, ACTIONS),
    )
    return discrete(agent, torch.randn(N, 4, 7, 7))


class Gaussian(nn.Module):
    """A continuous agent as CleanRL has it: no forward, and a bare parameter."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(OBS, 8), nn.Tanh(), nn.Linear(8, 2))
        self.critic = nn.Linear(OBS, 1)
        self.actor_logstd = nn.Parameter(torch.randn(1, 2) / 4)

    def get_action_and_value(self, x, action):
        mean = self.actor(x)
        probs = Normal(mean, self.actor_logstd.expand_as(mean).exp())
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)


def gaussian():
    agent, obs, actions = Gaussian(), torch.randn(N, OBS), torch.randn(N, 2)
    return Case(agent, lambda inds: agent.get_action_and_value(obs[inds], actions[inds])[1])


def tied():
    agent = Net(lambda m, x: m.decode(m.encode(x).tanh()), encode=nn.Linear(OBS, OBS), decode=nn.Linear(OBS, OBS))
    agent.decode.weight = agent.encode.weight
    return discrete(agent)


def used_twice():
    run = lambda m, x: m.out(m.hidden(m.hidden(x).tanh()).tanh())
    return discrete(Net(run, hidden=nn.Linear(OBS, OBS), out=nn.Linear(OBS, ACTIONS)))


def in_place():
    def run(m, x):
        h = m.hidden(x)
        h += 1
        h[:, 0] = x[:, 0]
        h.mul_(2)
        return m.out(m.relu(h))

    return discrete(Net(run, hidden=nn.Linear(OBS, 8), relu=nn.ReLU(inplace=True), out=nn.Linear(8, ACTIONS)))


def norms():
    norm = nn.Sequential(nn.Linear(OBS, 8), nn.LayerNorm(8), nn.Unflatten(1, (4, 2)), nn.GroupNorm(2, 4), nn.Flatten())
    for p in norm.parameters():
        nn.init.normal_(p)
    return discrete(nn.Sequential(norm, nn.Tanh(), nn.Linear(8, ACTIONS)))


def embedding():
    return discrete(nn.Sequential(nn.Embedding(4, 8), nn.Tanh(), nn.Linear(8, ACTIONS)), torch.randint(4, (N,)))


def lstm_cell():
    """Three environments, four steps each, folded into one dimension; an episode ends within the rollout."""
    agent = Net(None, cell=nn.LSTMCell(OBS, 6), out=nn.Linear(6, ACTIONS))
    obs, actions = torch.randn(4, 3, OBS), torch.randint(ACTIONS, (N,))
    done = torch.zeros(4, 3, 1)
    done[2, 1] = 1

    def logprob(inds):
        h = c = torch.zeros(3, 6)
        out = []
        for x, d in zip(obs, done):
            h, c = agent.cell(x, (h * (1 - d), c * (1 - d)))
            out.append(agent.out(h))
        return log_pi(torch.stack(out).flatten(0, 1), actions)[inds]

    return Case(agent, logprob)


def recurrent(rnn):
    agent = Net(lambda m, x: m.out(m.rnn(x)[0]).flatten(0, 1), rnn=rnn, out=nn.Linear(6, ACTIONS))
    obs, actions = torch.randn(4, 3, OBS), torch.randint(ACTIONS, (N,))
    return Case(agent, lambda inds: log_pi(agent(obs.to(agent.out.bias.dtype)), actions)[inds])


def gru():
    return recurrent(nn.GRU(OBS, 6, num_layers=2))


def lstm():
    return recurrent(nn.LSTM(OBS, 6, num_layers=2))


def attend(m, x):
    """x: [records, tokens, 8], two heads."""
    q, k, v = m.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    return m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(1))


def sdpa():
    return discrete(Net(attend, qkv=nn.Linear(8, 24), out=nn.Linear(24, ACTIONS)), torch.randn(N, 3, 8))


def multihead_attention():
    run = lambda m, x: m.out(m.attention(x, x, x, need_weights=False)[0][:, -1])
    parts = {"attention": nn.MultiheadAttention(8, 2, batch_first=True), "out": nn.Linear(8, ACTIONS)}
    return discrete(Net(run, **parts), torch.randn(N, 3, 8))


def transformer_layer():
    """In evaluation mode, torch has a fused path of its own for this layer."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return discrete(nn.Sequential(layer, nn.Flatten(), nn.Linear(24, ACTIONS)).eval(), torch.randn(N, 3, 8))


def weight_normed():
    return discrete(nn.Sequential(weight_norm(nn.Linear(OBS, 8)), nn.Tanh(), weight_norm(nn.Linear(8, ACTIONS))))


def weight_normed_sdpa():
    parts = {"qkv": weight_norm(nn.Linear(8, 24)), "out": weight_norm(nn.Linear(24, ACTIONS))}
    return discrete(Net(attend, **parts), torch.randn(N, 3, 8))


def batch_norm():
    agent = nn.Sequential(nn.Linear(OBS, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, ACTIONS))
    agent(3 * torch.randn(64, OBS) + 1)  # running statistics of their own
    return discrete(agent.eval())


def prelu():
    return discrete(nn.Sequential(nn.Linear(OBS, 8), nn.PReLU(8), nn.Linear(8, ACTIONS)))


def frozen():
    agent = mlp_net()
    agent[0].weight.requires_grad_(False)
    agent[2].bias.requires_grad_(False)
    return discrete(agent)


SEQUENCES = [lstm_cell, gru, lstm]
SINGLES = [mlp, conv, gaussian, tied, used_twice, in_place, norms, embedding, sdpa, multihead_attention, transformer_layer]
SINGLES += [weight_normed, weight_normed_sdpa, batch_norm, prelu, frozen]
every_network = pytest.mark.parametrize("network", SINGLES + SEQUENCES)


# ---- scores


@both_modes
@every_network
def test_influence_scores_equal_the_loop(network, forward_mode):
    agent, logprob, n = network()
    advantages = torch.randn(n)
    check_influence_scores(agent, lambda inds: -advantages[inds] * logprob(inds), n, forward_mode=forward_mode)


@both_modes
@pytest.mark.parametrize("chunk_size", [None, 5, 100])
@every_network
def test_return_influence_equals_the_loop(network, chunk_size, forward_mode):
    check_return_influence(*network(), minibatch_size=5, chunk_size=chunk_size, forward_mode=forward_mode)


@every_network
def test_target_gradient_equals_backward(network):
    agent, logprob, n = network()
    weights = torch.randn(n)
    truth = weights @ record_gradients(agent, logprob, n)
    whole = target_gradient(agent, lambda: weights @ logprob(torch.arange(n)))
    shares = target_gradient(agent, lambda inds: weights[inds] @ logprob(inds), n, chunk_size=5)
    for gradient in (whole, shares):
        assert {k: v.shape for k, v in gradient.items()} == {k: p.shape for k, p in trainable(agent).items()}
        assert_equal(flat(agent, gradient), truth)


@pytest.mark.parametrize("network", [mlp, weight_normed])
def test_direction_of_another_precision_that_requires_gradients(network):
    agent, logprob, n = network()
    direction = {name: v.float().requires_grad_() for name, v in random_direction(agent).items()}
    truth = -record_gradients(agent, logprob, n) @ flat(agent, direction).double()
    assert_equal(influence_scores(agent, logprob, direction, n), truth)


def test_unused_parameters_have_zero_gradient():
    agent, logprob, n = gaussian()
    gradient = target_gradient(agent, lambda: logprob(torch.arange(n)).sum())
    assert not gradient["critic.weight"].any() and gradient["actor_logstd"].all()


def test_central_difference():
    """A check that shares no automatic differentiation with what it checks."""
    agent, logprob, n = mlp()
    direction, step, inds = random_direction(agent), 1e-5, torch.arange(n)
    scores = influence_scores(agent, lambda i: -logprob(i), direction, n)
    values = []
    with torch.no_grad():
        for shift in (step, -2 * step):  # to theta + step * v, then to theta - step * v
            for name, p in agent.named_parameters():
                p += shift * direction[name]
            values.append(logprob(inds))
    assert_equal(scores, (values[0] - values[1]) / (2 * step), 1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mode", [True, False])
def test_fused_lstm_in_float32(mode, dropout):
    agent, logprob, n = recurrent(nn.LSTM(OBS, 6, num_layers=2, dropout=dropout))
    advantages = torch.randn(n) + 1
    agent.float().train(mode)
    scores = return_influence(agent, logprob, advantages.float())
    assert scores.dtype == torch.float32
    agent.double().eval()
    assert_equal(scores.double(), return_scores_by_hand(agent, logprob, advantages), 1e-5)


def ppo_case():
    """CleanRL's agent and its whole clipped loss, record by record, at the snapshot: every max() in it is a tie."""
    agent = Net(None, shared=nn.Linear(OBS, 8), actor=nn.Linear(8, ACTIONS), critic=nn.Linear(8, 1))
    obs, actions, advantages, returns = torch.randn(N, OBS), torch.randint(ACTIONS, (N,)), torch.randn(N), torch.randn(N)

    def evaluate(inds):
        hidden = agent.shared(obs[inds]).tanh()
        probs = Categorical(logits=agent.actor(hidden))
        return probs.log_prob(actions[inds]), probs.entropy(), agent.critic(hidden).view(-1)

    with torch.no_grad():
        old_logprob, _, old_value = evaluate(torch.arange(N))

    def losses(inds):
        logprob, entropy, value = evaluate(inds)
        ratio = (logprob - old_logprob[inds]).exp()
        pg_loss = torch.max(-advantages[inds] * ratio, -advantages[inds] * torch.clamp(ratio, 0.8, 1.2))
        clipped = old_value[inds] + torch.clamp(value - old_value[inds], -0.2, 0.2)
        v_loss = 0.5 * torch.max((value - returns[inds]) ** 2, (clipped - returns[inds]) ** 2)
        if len(inds) == N:
            assert (ratio == 1).all() and (value == old_value).all()
        return pg_loss - 0.01 * entropy + 0.5 * v_loss

    return Case(agent, losses)


def test_whole_ppo_loss_at_the_snapshot():
    check_influence_scores(*ppo_case())


def test_action_influence_equals_the_loop():
    agent, logprob, n = mlp()
    advantages, state, action = torch.randn(n), torch.randn(OBS), torch.tensor(2)
    losses = lambda inds: -advantages[inds] * logprob(inds)
    f_action = lambda: log_pi(agent(state), action)
    direction = record_gradients(agent, lambda _: f_action(), 1)[0]
    assert_equal(action_influence(agent, f_action, losses, n), -record_gradients(agent, losses, n) @ direction)


def test_action_influence_on_paper():
    """Logits (ln 3, 0), so pi = (3/4, 1/4), grad log pi(0) = (1/4, -1/4) = direction, grad log pi(1) = (-3/4, 3/4).

    A record (action, A) has the gradient -A grad log pi(action), and so the score A <grad log pi(action), direction>.
    """
    agent = nn.Linear(1, 2, bias=False)
    agent.weight.data = torch.tensor([[math.log(3)], [0.0]])
    actions, advantages = torch.tensor([0, 1, 1, 0]), torch.tensor([2.0, 2.0, -1.0, -4.0])
    logits = lambda count: agent(torch.ones(count, 1))
    losses = lambda inds: -advantages[inds] * log_pi(logits(len(inds)), actions[inds])
    scores = action_influence(agent, lambda: log_pi(logits(1), actions[:1]), losses, 4)
    torch.testing.assert_close(scores, torch.tensor([2 / 8, -2 * 3 / 8, 3 / 8, -4 / 8]))


# ---- a round scored by the authors' own code


@pytest.fixture(scope="module")
def official():
    data = np.load(pathlib.Path(__file__).parent / "data" / "lunarlander_round.npz")
    agent = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).float()
    layers = {0: "mlp_extractor.policy_net.0", 2: "mlp_extractor.policy_net.2", 4: "action_net"}
    agent.load_state_dict(
        {
            f"{i}.{kind}": torch.tensor(data[f"weights/{name}.{kind}"])
            for i, name in layers.items()
            for kind in ("weight", "bias")
        }
    )
    obs, actions = torch.tensor(data["observations"]), torch.tensor(data["actions"])
    logprob = lambda inds: log_pi(agent(obs[inds]), actions[inds])
    return agent, logprob, torch.tensor(data["advantages"]), torch.tensor(data["scores"])


@pytest.mark.parametrize("chunk_size", [None, 500])
def test_official_scores(official, chunk_size):
    agent, logprob, advantages, truth = official
    scores = return_influence(agent, logprob, advantages, minibatch_size=64, chunk_size=chunk_size)
    assert_equal(scores, truth, 1e-6)
    assert torch.equal(scores < 0, truth < 0) and (scores < 0).sum() == 896
    kept = filter_bottom(scores, 12.5)
    assert len(kept) == 2048 - 112 and (scores[kept] < 0).sum() == 896 - 112


# ---- normalisation


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("minibatch_size", [None, 1, 2, 4, 12, 50])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 9, 10])
def test_advantages_are_normalised_in_minibatches(n, minibatch_size, shuffle):
    agent, logprob, _ = mlp()
    check_return_influence(agent, logprob, n, minibatch_size, torch.randperm(n) if shuffle else None)


def test_equal_advantages_normalise_to_zero():
    agent, logprob, n = mlp()
    assert not return_influence(agent, logprob, torch.ones(n)).any()


@pytest.mark.parametrize("convert", [list, tuple, np.array, lambda p: np.array(p, np.int32), lambda p: np.array(p, np.uint8)])
def test_inds_of_any_integer_type(convert):
    agent, logprob, n = mlp()
    advantages, perm = torch.randn(n), torch.randperm(n)
    scores = return_influence(agent, logprob, advantages, minibatch_size=4, inds=convert(perm.tolist()))
    assert_equal(scores, return_influence(agent, logprob, advantages, minibatch_size=4, inds=perm))


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, torch.Tensor.tolist, lambda a: a.clone().requires_grad_()])
def test_advantages_of_any_float_type(convert):
    agent, logprob, n = mlp()
    advantages = torch.randn(n)
    assert_equal(return_influence(agent, logprob, convert(advantages)), return_influence(agent, logprob, advantages))


@pytest.mark.parametrize(
    "layers", [mlp_net, lambda: nn.Sequential(weight_norm(nn.Linear(OBS, 64)), nn.Tanh(), nn.Linear(64, 3))]
)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_agents_of_lower_precision(dtype, tolerance, layers):
    agent, obs, actions, advantages = layers().to(dtype), torch.randn(N, OBS).to(dtype), torch.randint(3, (N,)), torch.randn(N)
    logprob = lambda inds: log_pi(agent(obs[inds].to(agent[2].bias.dtype)).double(), actions[inds])
    scores = return_influence(agent, logprob, advantages)
    agent.double()
    assert_equal(scores, return_scores_by_hand(agent, logprob, advantages), tolerance)


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 7, N])
def test_the_whole_call_under_autocast(forward_mode, chunk_size):
    """By the fast ways, as the error is that of bfloat16, and not record by record."""
    agent, obs, actions, advantages = mlp_net(), torch.randn(N, OBS), torch.randint(3, (N,)), torch.randn(N)
    logprob = lambda inds: log_pi(agent(obs[inds]).to(advantages.dtype), actions[inds])
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        scores = return_influence(agent, logprob, advantages, chunk_size=chunk_size, forward_mode=forward_mode)
    agent, obs, advantages = agent.double(), obs.double(), advantages.double()
    assert_equal(scores, return_scores_by_hand(agent, logprob, advantages), 0.05)


# ---- ways to compute


class OldSine(torch.autograd.Function):
    """A custom function as most are written: one forward with ctx, a differentiable backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class SineOnceWithJvp(Sine):
    backward = staticmethod(once_differentiable(Sine.backward))

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0].cos()


@both_modes
@pytest.mark.parametrize("kind", ["zero", "of an unused parameter"])
def test_a_direction_without_a_part_in_the_losses(kind, forward_mode):
    agent, obs = nn.ModuleDict({"used": nn.Linear(OBS, 3), "unused": nn.Linear(2, 2)}), torch.randn(N, OBS)
    direction = {name: torch.zeros_like(p) for name, p in agent.named_parameters()}
    if kind != "zero":
        direction["unused.weight"] += 1
    losses = lambda inds: Sine.apply(agent["used"](obs[inds])).sum(1)
    assert torch.equal(influence_scores(agent, losses, direction, N, forward_mode=forward_mode), torch.zeros(N))


class SineOnce(Sine):
    backward = staticmethod(once_differentiable(Sine.backward))


class SineWrongJvp(SineOnce):
    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 0.97 * ctx.saved_tensors[0].cos()


class OldSineOnce(OldSine):
    backward = staticmethod(once_differentiable(OldSine.backward))


class SineBackwardInNumpy(OldSine):
    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(grad.detach().numpy() * ctx.saved_tensors[0].detach().cos().numpy())


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


@torch.library.custom_op("iif_core_tests::sine", mutates_args=())
def sine_op(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def _sine_backward(ctx, grad):
    return grad * ctx.saved_tensors[0].cos()


sine_op.register_autograd(_sine_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

PLACES = {
    "inside": lambda net, custom, x: net[2](custom(net[0](x))),
    "last": lambda net, custom, x: custom(net(x)),
    "beside": lambda net, custom, x: net[2](custom(net[0](x))) + net[2](net[0](x).cos()),
    "on a parameter": lambda net, custom, x: net[2](F.linear(x, custom(net[0].weight)).tanh()),
}
custom_function = lambda *functions: pytest.mark.parametrize(
    "custom", functions, ids=lambda f: getattr(f, "__name__", "custom_op")
)


def custom_case(custom, place):
    net, custom, obs = mlp_net(), getattr(custom, "apply", custom), torch.randn(N, OBS)
    return net, lambda inds: PLACES[place](net, custom, obs[inds]).sin().sum(1)


@both_modes
@custom_function(OldSine, Sine, StraightThrough, sine_op)
@pytest.mark.parametrize("place", PLACES)
def test_custom_functions(custom, place, forward_mode):
    check_influence_scores(*custom_case(custom, place), forward_mode=forward_mode)


@slowly
@both_modes
@custom_function(SineOnce, SineOnceWithJvp, SineWrongJvp, OldSineOnce, SineBackwardInNumpy)
@pytest.mark.parametrize("place", PLACES)
def test_functions_without_second_derivatives(custom, place, forward_mode):
    net, losses = custom_case(custom, place)
    check_influence_scores(net, losses, forward_mode=forward_mode)
    actions = torch.randint(ACTIONS, (N,))
    logprob = lambda inds: log_pi(losses(inds)[:, None] * torch.arange(ACTIONS), actions[inds])
    check_return_influence(net, logprob, forward_mode=forward_mode)


def test_the_slow_way_says_why():
    agent = nn.Sequential(nn.EmbeddingBag(9, 8), nn.Tanh(), nn.Linear(8, ACTIONS))
    with pytest.warns(UserWarning, match="record by record.*_embedding_bag_backward"):
        check_return_influence(*discrete(agent, torch.randint(9, (N, 4))))


# ---- what forward mode does not see


def _hooked(agent, hook):
    """A closure that runs hook(hidden activations) on its way."""
    return lambda x: agent[2](hook(agent[0](x).tanh()))


def _scaled_by_a_hook(h):
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 0.5)
    return h


@torch.jit.script
def _script_no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x.sin()
    return x * y


def padded_embedding():
    agent = nn.Sequential(nn.Embedding(4, 8, padding_idx=1), nn.Tanh(), nn.Linear(8, ACTIONS))
    return agent, agent, torch.randint(4, (N,))


def tied_padded_embedding():
    agent = nn.ModuleDict({"embed": nn.Embedding(4, OBS, padding_idx=1)})
    return agent, lambda x: agent["embed"](x) @ agent["embed"].weight.T, torch.randint(4, (N,))


def module_hook():
    agent = mlp_net()
    agent[0].register_full_backward_hook(lambda module, grad_in, grad_out: tuple(g and g * 0.5 for g in grad_in))
    agent[2].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))
    return agent, agent, torch.randn(N, OBS)


def parameter_hook():
    agent = mlp_net()
    agent[0].weight.register_hook(lambda grad: grad * 0.5)
    return agent, agent, torch.randn(N, OBS)


def hook_where_gradients_are():
    agent = mlp_net()
    return agent, _hooked(agent, _scaled_by_a_hook), torch.randn(N, OBS)


def no_grad_in_torchscript():
    agent = mlp_net()
    return agent, _hooked(agent, _script_no_grad), torch.randn(N, OBS)


def cholesky_inverse():
    agent = nn.Sequential(nn.Linear(OBS, 9), nn.Tanh(), nn.Linear(9, ACTIONS))

    def run(x):
        factor = agent[0](x).view(-1, 3, 3).tril() + 2 * torch.eye(3)
        return agent[2](torch.cholesky_inverse(factor).flatten(1))

    return agent, run, torch.randn(N, OBS)


UNSEEN = [padded_embedding, tied_padded_embedding, module_hook, parameter_hook, hook_where_gradients_are]
UNSEEN += [no_grad_in_torchscript, cholesky_inverse]


@both_modes
@pytest.mark.parametrize("case", UNSEEN)
def test_what_forward_mode_does_not_see(case, forward_mode):
    agent, run, obs = case()
    agent, logprob, _ = discrete(agent, obs, run)
    check_influence_scores(agent, logprob, forward_mode=forward_mode)
    check_return_influence(agent, logprob, forward_mode=forward_mode)


@both_modes
def test_attention_with_a_boolean_mask(forward_mode):
    agent = nn.ModuleDict({"qkv": nn.Linear(8, 24), "out": nn.Linear(24, ACTIONS)})
    obs, actions = torch.randn(N, 3, 8), torch.randint(ACTIONS, (N,))
    mask = torch.ones(N, 1, 1, 3, dtype=torch.bool)
    mask[: N // 2, ..., 2] = False

    def logprob(inds):
        q, k, v = agent["qkv"](obs[inds]).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[inds])
        return log_pi(agent["out"](h.transpose(1, 2).flatten(1)), actions[inds])

    check_return_influence(agent, logprob, forward_mode=forward_mode)


class Detached(OldSine):
    """Right for training, and without a second derivative that autograd knows of."""

    @staticmethod
    def backward(ctx, grad):
        return grad.detach() * ctx.saved_tensors[0].cos()


@slowly
@both_modes
def test_losses_whose_gradients_cancel(forward_mode):
    """Their sum is zero whatever the single ones are, so that it can check nothing."""
    agent, obs = mlp_net(), torch.randn(N // 2, OBS).repeat(2, 1)
    sign = torch.ones(N)
    sign[N // 2 :] = -1
    losses = lambda inds: sign[inds] * agent[2](Detached.apply(agent[0](obs[inds]))).sin().sum(1)
    check_influence_scores(agent, losses, forward_mode=forward_mode)


@both_modes
def test_sparse_gradients(forward_mode):
    sparse, dense = (nn.Sequential(nn.Embedding(4, 8, sparse=s), nn.Tanh(), nn.Linear(8, ACTIONS)) for s in (True, False))
    dense.load_state_dict(sparse.state_dict())
    obs, actions, advantages = torch.randint(4, (N,)), torch.randint(ACTIONS, (N,)), torch.randn(N)
    logprob = lambda agent: lambda inds: log_pi(agent(obs[inds]), actions[inds])
    scores = return_influence(sparse, logprob(sparse), advantages, forward_mode=forward_mode)
    assert_equal(scores, return_scores_by_hand(dense, logprob(dense), advantages))


def test_a_direction_along_which_nothing_moves():
    """All logits up by one: the products are rounding errors, and no reason for the slow way."""
    agent, logprob, n = discrete(mlp_net().float(), torch.randn(N, OBS).float())
    direction = {name: torch.zeros_like(p) for name, p in agent.named_parameters()}
    direction["2.bias"] += 1
    assert influence_scores(agent, logprob, direction, n).abs().max() < 1e-6


@pytest.mark.parametrize("weights, network", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)])
def test_advantages_of_another_precision_than_the_network(weights, network):
    agent, obs, actions = mlp_net().to(network), torch.randn(N, OBS).to(network), torch.randint(ACTIONS, (N,))
    advantages = torch.randn(N).to(weights)
    logprob = lambda inds: log_pi(agent(obs[inds]), actions[inds])
    scores = return_influence(agent, logprob, advantages).double()
    agent, obs = agent.double(), obs.double()
    assert_equal(scores, return_scores_by_hand(agent, logprob, advantages.double()), 1e-5)


@both_modes
def test_complex_parameters(forward_mode):
    agent = Net(None, inner=nn.Linear(OBS, 8, dtype=torch.complex128), out=nn.Linear(16, ACTIONS))
    run = lambda x: agent.out(torch.view_as_real(agent.inner(x.to(torch.complex128)).tanh()).flatten(1))
    obs, actions, advantages = torch.randn(N, OBS), torch.randint(ACTIONS, (N,)), torch.randn(N)
    logprob = lambda inds: log_pi(run(obs[inds]), actions[inds])
    grads = record_gradients(agent, logprob, N)  # of complex numbers, as a step along it moves them
    truth = advantages * (grads.conj() @ (advantages.to(grads.dtype) @ grads / N)).real
    assert_equal(return_influence(agent, logprob, advantages, minibatch_size=1, forward_mode=forward_mode), truth)


# ---- nearly deterministic policies


def confident(gap, dtype=torch.float32):
    """2048 records of a policy that took action 0, whose logit is `gap` above the others'."""
    torch.manual_seed(0)
    agent = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    agent[2].bias.data = torch.tensor([float(gap), 0, 0, 0])
    obs, advantages = torch.randn(2048, 8), torch.randn(2048)
    agent, obs = agent.float().to(dtype), obs.float().to(dtype)
    return agent, lambda inds: log_pi(agent(obs[inds]), torch.zeros(len(inds), dtype=torch.int64)), advantages.to(dtype)


@both_modes
@pytest.mark.parametrize("gap, tolerance", [(4, 1e-5), (8, 1e-3), (12, 0.02), (14, 0.1)])
def test_scores_of_a_confident_policy(gap, tolerance, forward_mode):
    """Exact up to what float32 keeps of 1 - p."""
    scores = return_influence(*confident(gap), minibatch_size=64, forward_mode=forward_mode)
    truth = return_influence(*confident(gap, torch.float64), minibatch_size=64)
    assert_equal(scores.double(), truth, tolerance)


@both_modes
@pytest.mark.parametrize("gap", [16, 25, 60, 200])
def test_scores_that_would_be_rounding_errors_are_zero(gap, forward_mode):
    scores = return_influence(*confident(gap), minibatch_size=64, forward_mode=forward_mode)
    assert scores.shape == (2048,) and not scores.any()
    assert len(filter_bottom(scores, 100)) == 2048
    assert logged(scores)["filtered_round"] == 0


def test_a_few_uncertain_records_among_confident_ones():
    """What is told apart from zero is the round, not the record."""
    agent, logprob, advantages = confident(20)
    agent[2].weight.data[1:] += 20 * torch.randn(3, 64).float()
    scores = return_influence(agent, logprob, advantages)
    agent64, logprob64, advantages64 = confident(20, torch.float64)
    agent64.load_state_dict(agent.state_dict())
    assert_equal(scores.double(), return_influence(agent64, logprob64, advantages64), 1e-4)


def test_a_density_of_one_is_not_a_certain_action():
    """A Beta(1, 1) policy, as it is initialised: log pi is zero everywhere, its gradient is not."""
    agent = nn.Linear(OBS, 2)
    nn.init.zeros_(agent.weight), nn.init.constant_(agent.bias, math.log(math.e - 1))  # softplus of it is 1
    obs, actions, advantages = torch.randn(N, OBS), torch.rand(N), torch.randn(N)
    logprob = lambda inds: torch.distributions.Beta(*F.softplus(agent(obs[inds])).T).log_prob(actions[inds])
    assert logprob(torch.arange(N)).abs().max() < 1e-12
    assert_equal(return_influence(agent, logprob, advantages), return_scores_by_hand(agent, logprob, advantages))


def test_a_confident_float32_policy_with_float64_log_probs():
    agent, logprob, advantages = confident(20)
    assert not return_influence(agent, lambda inds: logprob(inds).double(), advantages.double()).any()


@slowly
def test_losses_of_a_confident_policy():
    """Other losses than log pi: whatever happens, no error."""
    agent, logprob, advantages = confident(25)
    losses = lambda inds: -advantages[inds] * logprob(inds)
    direction = target_gradient(agent, lambda: (advantages * logprob(torch.arange(2048))).mean())
    assert influence_scores(agent, losses, direction, 2048).isfinite().all()


# ---- how much the round can teach


def test_agreement():
    agent, logprob, n = mlp()
    advantages = torch.randn(n) + 1
    weighted = advantages[:, None] * record_gradients(agent, logprob, n)
    early, late = weighted[: n // 2].mean(0), weighted[n // 2 :].mean(0)
    agreement = return_influence(agent, logprob, advantages).agreement
    assert agreement == pytest.approx(float(early @ late / early.norm() / late.norm()), rel=1e-9)


def test_noise_scale_on_paper():
    """Gradients (2, 1, 0), (2, -1, 0), (2, 0, 1), (2, 0, -1): random halves of two records, one of the first two in each, have the
    means (2, +-1/2, +-1/2) and, with other signs, (2, -+1/2, -+1/2). So |G|^2 is 4 - 1/2, and tr(Cov) = 2 / (1/2 + 1/2) = 2.
    """
    agent, x = nn.Linear(3, 1, bias=False), torch.tensor([[2.0, 1, 0], [2, -1, 0], [2, 0, 1], [2, 0, -1]])
    scores = return_influence(agent, lambda inds: agent(x[inds])[:, 0], torch.ones(4))
    assert scores.noise_scale == pytest.approx(2 / 3.5) and scores.agreement == pytest.approx(1)


def test_noise_scale_of_known_noise():
    """The gradient of record i is x_i ~ N(mean, 1) in 4000 dimensions: tr(Cov) = 4000, |G|^2 = 4000 mean^2."""
    agent, n, mean = nn.Linear(4000, 1, bias=False), 400, 0.5
    x = torch.randn(n, 4000) + mean
    scores = return_influence(agent, lambda inds: agent(x[inds])[:, 0], torch.ones(n))
    assert scores.noise_scale == pytest.approx(1 / mean**2, rel=0.1) and scores.agreement > 0.9


def test_agreement_of_opposite_halves():
    agent, x = nn.Linear(1, 1, bias=False), torch.ones(N, 1)
    advantages = torch.ones(N)
    advantages[N // 2 :] = -1
    scores = return_influence(agent, lambda inds: agent(x[inds])[:, 0], advantages)
    assert scores.agreement == pytest.approx(-1)
    row = logged(scores)
    assert row["agreement"] == pytest.approx(-1)


def test_a_noise_scale_that_cannot_be_told_is_counted():
    scores = torch.tensor([1.0, -1.0])
    scores.agreement, scores.noise_scale = 0.25, math.inf
    row = logged(scores)
    assert row["noise_scale_infinite"] == 1 and "noise_scale" not in row and row["agreement"] == 0.25
    scores.noise_scale = 300.0
    row = logged(scores)
    assert row["noise_scale_infinite"] == 0 and row["noise_scale"] == 300
    assert not {"agreement", "noise_scale", "noise_scale_infinite"} & set(logged(torch.tensor([1.0, -1.0])))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_small_rounds(n):
    agent, logprob, _ = mlp()
    scores = return_influence(agent, logprob, torch.randn(n))
    assert math.isnan(scores.agreement) == (n < 4)


# ---- stopped gradients, and parameters that do not come through the agent


def _no_grad(h):
    with torch.no_grad():
        return h.sin()


def _enable_within_no_grad(h):
    with torch.no_grad():
        with torch.enable_grad():
            inner = h.sin()
        return inner * h.cos().detach() + h.cos()


def _inference_mode(h):
    with torch.inference_mode():
        stopped = h.sin()
    return stopped.clone()


def _in_place_within_no_grad(h):
    h = h * 1
    with torch.no_grad():
        h.mul_(2)
    return h


STOPS = {
    "detach": lambda h: h.sin().detach(),
    "detach_": lambda h: h.sin().detach_(),
    "data": lambda h: h.sin().data,
    "no_grad": _no_grad,
    "no_grad decorator": torch.no_grad()(torch.sin),
    "enable_grad within no_grad": _enable_within_no_grad,
    "inference_mode": _inference_mode,
    "in place within no_grad": _in_place_within_no_grad,
    "numpy": lambda h: torch.from_numpy(np.sin(h.detach().numpy())),
    "tolist": lambda h: torch.tensor(h.tolist()),
}


@both_modes
@pytest.mark.parametrize("stop", STOPS)
def test_stopped_gradients(stop, forward_mode):
    agent, obs = mlp_net(), torch.randn(N, OBS)
    losses = lambda inds: (agent(obs[inds]) * STOPS[stop](agent(obs[inds]))).sum(1)
    check_influence_scores(agent, losses, forward_mode=forward_mode)


CAPTURES = {
    "parameter": lambda agent: (lambda raw: lambda x: F.linear(x, raw))(agent[0].weight),
    "its data": lambda agent: (lambda raw: lambda x: F.linear(x, raw))(agent[0].weight.data),
    "view of a parameter": lambda agent: (lambda raw: lambda x: x @ raw)(agent[0].weight.T),
    "list of parameters": lambda agent: (lambda ps: lambda x: sum(p.square().sum() for p in ps))(list(agent.parameters())),
    "parameters read at each call": lambda agent: lambda x: sum(p.square().sum() for p in agent.parameters()),
    "part of the agent": lambda agent: agent[:2],
    "another network": lambda agent: mlp_net(),
    "another network with a tied weight": lambda agent: _tie(nn.Linear(OBS, 8), agent[0]),
}


def _tie(module, to):
    module.weight = to.weight
    return module


@both_modes
@pytest.mark.parametrize("only", [True, False])
@pytest.mark.parametrize("capture", CAPTURES)
def test_what_the_closure_captures(capture, only, forward_mode):
    agent, obs = mlp_net(), torch.randn(N, OBS)
    captured = CAPTURES[capture](agent)
    losses = lambda i: (captured(obs[i]) + torch.zeros(len(i), 1)).sin().sum(1) + (0 if only else agent(obs[i]).sin().sum(1))
    nothing = only and capture in ("its data", "another network")
    with pytest.raises(ValueError, match="record_losses") if nothing else contextlib.nullcontext():
        check_influence_scores(agent, losses, chunk_size=5, forward_mode=forward_mode)


# ---- evaluation mode, random numbers, buffers


@pytest.mark.parametrize("mixed", [False, True])
def test_scores_in_evaluation_mode(mixed):
    agent = nn.Sequential(nn.Linear(OBS, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, ACTIONS))
    agent(torch.randn(64, OBS))
    agent[1].train(not mixed)
    modes = [m.training for m in agent.modules()]
    case = discrete(agent)
    advantages = torch.randn(N)
    scores = return_influence(*case[:2], advantages)
    assert [m.training for m in agent.modules()] == modes
    agent.eval()
    assert_equal(scores, return_scores_by_hand(*case[:2], advantages))


def test_dropout_that_stays_on_is_refused():
    agent, obs = mlp_net(), torch.randn(N, OBS)
    losses = lambda inds: F.dropout(agent(obs[inds]), 0.5, training=True).sum(1)
    direction = random_direction(agent)
    with pytest.raises(ValueError, match="another value at each call"):
        influence_scores(agent, losses, direction, N)
    with pytest.raises(ValueError, match="another value at each call"):
        target_gradient(agent, lambda: losses(torch.arange(N)).sum())


def test_a_sample_that_the_value_does_not_use_is_fine():
    """CleanRL's get_action_and_value draws an action where none is given."""
    agent, logprob, n = mlp()
    direction = random_direction(agent)

    def losses(inds):
        Categorical(logits=agent(torch.ones(1, OBS))).sample()
        return logprob(inds)

    assert_equal(influence_scores(agent, losses, direction, n), influence_scores(agent, logprob, direction, n))


def test_a_forward_that_counts_is_refused():
    def run(m, x):
        m.calls += 1
        return m.net(x) * m.calls

    agent, logprob, n = discrete(Net(run, net=mlp_net(), calls=0))
    with pytest.raises(ValueError, match="attribute that it updates"):
        return_influence(agent, logprob, torch.randn(n))
    assert agent.calls == 0


def _copy_(m, mean):
    with torch.no_grad():
        m.mean.copy_(mean)


def _replace(m, mean):
    m.mean = mean


def _replace_data(m, mean):
    m.mean.data = mean


BUFFER_UPDATES = {
    "in place": _copy_,
    "replace": _replace,
    "data": _replace_data,
    "data in place": lambda m, b: m.mean.data.copy_(b),
}


@pytest.mark.parametrize("update", BUFFER_UPDATES)
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_a_forward_that_updates_a_buffer_is_refused(update, chunk_size):
    def run(m, x):
        BUFFER_UPDATES[update](m, 0.9 * m.mean + 0.1 * x.mean(0))
        return m.net(x - m.mean)

    agent = Net(run, net=mlp_net())
    agent.register_buffer("mean", torch.ones(OBS))
    buffer, case, direction = agent.mean, discrete(agent), random_direction(agent)
    with pytest.raises(ValueError, match="buffer"):
        influence_scores(*case[:2], direction, N, chunk_size=chunk_size)
    with pytest.raises(ValueError, match="buffer"):
        target_gradient(agent, lambda inds: case.logprob(inds).sum(), N, chunk_size=chunk_size)
    assert agent.mean is buffer and torch.equal(agent.mean, torch.ones(OBS))


# ---- nothing left behind


def snapshot(agent):
    """All that scoring must leave as it was."""

    def exact(tensor):
        return None if tensor is None else (id(tensor), tensor.detach().numpy().tobytes(), tensor.requires_grad)

    modules = dict(agent.named_modules())
    return {
        "parameters": {name: (exact(p), exact(p.grad)) for name, p in agent.named_parameters()},
        "buffers": {name: exact(b) for name, b in agent.named_buffers()},
        "modes": {name: m.training for name, m in modules.items()},
        "attributes": {name: sorted(vars(m)) for name, m in modules.items()},
        "hooks": {(name, k): list(v) for name, m in modules.items() for k, v in vars(m).items() if k.endswith("_hooks")},
        "tensor hooks": [p._backward_hooks for p in agent.parameters()],
        "random numbers": torch.get_rng_state().numpy().tobytes(),
        "modes of autograd": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_fwd_grad_enabled()),
        "kernels": (torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled),
        "functions of torch": {(m, name): id(f) for m in (torch._C, F) for name, f in vars(m).items() if callable(f)},
        "stance of torch.compile": torch._dynamo.eval_frame._stance.stance,
        "level of forward mode": torch.autograd.forward_ad._current_level,
        "attention": [
            getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in ("flash", "mem_efficient", "math", "cudnn")
        ],
    }


def busy_agent(kind):
    """Something of everything that could be left changed."""

    def run(m, x):
        h = m.drop(m.norm(m.hidden(x)))
        if kind == "sdpa":
            h = F.scaled_dot_product_attention(*[h.view(-1, 2, 2, 2)] * 3).flatten(1)
        return m.out(h.tanh())

    out = nn.Linear(8, ACTIONS)
    agent = Net(
        run,
        hidden=nn.Linear(OBS, 8),
        norm=nn.BatchNorm1d(8),
        drop=nn.Dropout(0.5),
        out=weight_norm(out) if kind == "weight_norm" else out,
    )
    agent.norm.eval()
    agent.hidden.weight.grad = torch.ones(8, OBS)
    agent.out.bias.requires_grad_(False)
    agent.register_forward_hook(lambda module, inputs, output: output * 2)
    agent.out.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    return agent


CALLS = {
    "target_gradient": lambda agent, fn, _: target_gradient(agent, lambda inds: fn(inds).sum(), N, chunk_size=5),
    "influence_scores": lambda agent, fn, direction: influence_scores(agent, fn, direction, N, chunk_size=5),
    "forward mode": lambda agent, fn, v: influence_scores(agent, fn, v, N, chunk_size=5, forward_mode=True),
    "return_influence": lambda agent, fn, _: return_influence(agent, fn, torch.linspace(-1, 1, N)),
    "action_influence": lambda agent, fn, _: action_influence(agent, lambda: fn(torch.tensor([3]))[0], fn, N, chunk_size=5),
}


def _raise(error):
    raise error


FAULTS = {
    "none": None,
    "error": lambda losses: _raise(KeyError("fault")),
    "error that looks like a missing derivative": lambda losses: _raise(NotImplementedError("fault")),
    "not finite": lambda losses: losses * float("nan"),
    "wrong shape": lambda losses: losses[:, None],
    "no gradient": lambda losses: losses.detach(),
    "random": lambda losses: losses * torch.rand(()),
}


@slowly
@pytest.mark.parametrize("kind", ["plain", "sdpa", "weight_norm"])
@pytest.mark.parametrize("function", CALLS)
def test_leaves_nothing_behind(function, kind):
    for fault, from_call in [("none", 1), *itertools.product(set(FAULTS) - {"none"}, (1, 4))]:
        agent = busy_agent(kind)
        logprob, count = discrete(agent).logprob, itertools.count(1)

        def closure(inds):
            torch.rand(3)  # moves the random number generator
            losses = logprob(inds)
            return losses if fault == "none" or next(count) < from_call else FAULTS[fault](losses)

        direction = random_direction(agent)
        before = snapshot(agent)
        with contextlib.nullcontext() if fault == "none" else contextlib.suppress(KeyError, RuntimeError, ValueError):
            CALLS[function](agent, closure, direction)
        after = snapshot(agent)
        for what in before:
            assert after[what] == before[what], (what, fault, from_call)


@pytest.mark.parametrize("forward_mode", [False, True])
def test_an_interrupt_leaves_nothing_behind(forward_mode):
    """Ctrl-C at every line of the module that a scoring runs through, one after the other."""
    agent = busy_agent("plain")
    logprob, direction = discrete(agent).logprob, random_direction(agent)
    before = snapshot(agent)

    def interrupted(line):
        """Whether a scoring has as many lines."""
        count = itertools.count()

        def trace(frame, event, arg):
            if frame.f_code.co_filename != iif_core.__file__:
                return None
            if event == "line" and next(count) == line:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            influence_scores(agent, logprob, direction, N, forward_mode=forward_mode)
            return False
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)

    line = 0
    while interrupted(line):
        after = snapshot(agent)
        for what in before:
            assert after[what] == before[what], (what, line)
        line += 1
    assert line > 100


def test_other_threads_are_not_disturbed():
    """A thread that trains with no_grad blocks and convolutions while others score finds torch as it is."""
    agent, logprob, n = conv()
    advantages, stop, wrong = torch.randn(n), threading.Event(), []

    def bystander():
        net, x = nn.Conv1d(1, 2, 3), torch.randn(4, 1, 9)
        functions = [torch._C._set_grad_enabled, F.conv1d, F.conv2d]
        while not stop.is_set():
            with torch.no_grad():
                net(x)
            y = net(x).square().sum()
            y.backward()
            if not torch._C._is_fwd_grad_enabled() or functions != [torch._C._set_grad_enabled, F.conv1d, F.conv2d]:
                wrong.append(1)

    threads = [threading.Thread(target=bystander)]
    results = []
    score = lambda mode: [results.append(return_influence(agent, logprob, advantages, forward_mode=mode)) for _ in range(20)]
    threads[0].start()
    score(True)
    score(False)
    stop.set()
    threads[0].join()
    assert not wrong
    truth = return_scores_by_hand(agent, logprob, advantages)
    for scores in results:
        assert_equal(scores, truth)


def test_threads_that_score_at_once():
    """Each gets its own scores, and all is as it was."""
    agents = [discrete(nn.Sequential(nn.Linear(OBS, 8), nn.Dropout(0.5), nn.Linear(8, ACTIONS))) for _ in range(2)]
    advantages, found = torch.randn(N), {0: [], 1: [], 2: []}

    def score(thread):
        agent, logprob, _ = agents[thread % 2]  # two of them share one
        for i in range(20):
            found[thread].append(return_influence(agent, logprob, advantages, forward_mode=i % 2 == 0))

    threads = [threading.Thread(target=score, args=[i]) for i in found]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert all(m.training for case in agents for m in case.agent.modules())
    assert torch._dynamo.eval_frame._stance.stance == "default"
    for thread, results in found.items():
        agent, logprob, _ = agents[thread % 2]
        truth = return_scores_by_hand(agent.eval(), logprob, advantages)
        assert len(results) == 20
        for scores in results:
            assert_equal(scores, truth)


@pytest.mark.parametrize("cache", ["parametrize.cached", "of its own"])
def test_training_goes_on_within_a_cache(cache):
    """Tensors that are cached while scoring hang on a graph that is gone."""

    def run(m, x):
        if cache == "of its own" and m.kept is None:
            m.kept = m.hidden.weight * 2
        return m.out((x @ (m.hidden.weight if cache != "of its own" else m.kept).T).tanh())

    hidden = weight_norm(nn.Linear(OBS, 8, bias=False)) if cache != "of its own" else nn.Linear(OBS, 8, bias=False)
    agent = Net(run, hidden=hidden, out=nn.Linear(8, ACTIONS), kept=None)
    agent, logprob, n = discrete(agent)
    with torch.nn.utils.parametrize.cached():
        return_influence(agent, logprob, torch.randn(n), chunk_size=n)
        logprob(torch.arange(n)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in agent.parameters())


def test_a_sparse_buffer():
    """A graph's adjacency."""
    agent = Net(lambda m, x: m.out(torch.sparse.mm(m.adjacency, x.T).T.tanh()), out=nn.Linear(OBS, ACTIONS))
    agent.register_buffer("adjacency", torch.eye(OBS).roll(1, 0).to_sparse())
    agent, logprob, n = discrete(agent)
    advantages = torch.randn(n)
    torch.manual_seed(3)
    sampling = lambda inds: (torch.rand(1), logprob(inds))[1]  # so that the buffers are looked at
    assert_equal(return_influence(agent, sampling, advantages), return_scores_by_hand(agent, logprob, advantages))


@both_modes
def test_a_module_registered_twice(forward_mode):
    agent = mlp_net()
    agent.add_module("again", agent[0])
    case, advantages = discrete(agent, run=lambda x: agent[2](agent.again(x).tanh())), torch.randn(N)
    before = snapshot(agent)
    scores = return_influence(*case[:2], advantages, forward_mode=forward_mode)
    assert snapshot(agent) == before
    assert_equal(scores, return_scores_by_hand(*case[:2], advantages))


@pytest.mark.parametrize("switch", [True, False])
def test_a_closure_that_switches_the_mode(switch):
    agent, logprob, n = gru()
    agent.out.eval()
    modes = [m.training for m in agent.modules()]

    def closure(inds):
        agent.train(switch)
        return logprob(inds)

    return_influence(agent, closure, torch.randn(n))
    assert [m.training for m in agent.modules()] == modes


@pytest.mark.parametrize("network", [mlp, sdpa, weight_normed, batch_norm])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_off(mode, network):
    agent, logprob, n = network()
    advantages = torch.randn(n)
    truth = return_influence(agent, logprob, advantages)
    with mode():
        scores = return_influence(agent, logprob, advantages.clone())
        assert not torch.is_grad_enabled()
    assert_equal(scores, truth, 1e-12)


@every_network
def test_training_goes_on_as_if_nothing_had_been_scored(network):
    agent, logprob, n = network()
    advantages = torch.randn(n)

    def train():
        optimizer = torch.optim.Adam(trainable(agent).values())
        for _ in range(2):
            optimizer.zero_grad()
            (-advantages * logprob(torch.arange(n))).mean().backward()
            optimizer.step()
        return flat(agent, trainable(agent)).clone()

    start = copy.deepcopy(agent.state_dict())
    untouched = train()
    agent.load_state_dict(start)
    return_influence(agent, logprob, advantages)
    assert torch.equal(train(), untouched)


# ---- chunks


def test_a_default_device_that_is_not_the_cpu():
    agent, logprob, n = mlp()
    advantages = torch.randn(n)
    scores = return_influence(agent, logprob, advantages, minibatch_size=5)
    with torch.device("meta"):
        assert torch.equal(return_influence(agent, logprob, advantages, minibatch_size=5), scores)


@every_network
def test_chunks_do_not_change_the_scores(network):
    agent, logprob, n = network()
    advantages, direction = torch.randn(n), random_direction(agent)
    for function in (
        lambda size: influence_scores(agent, logprob, direction, n, chunk_size=size),
        lambda size: return_influence(agent, logprob, advantages, minibatch_size=5, chunk_size=size),
    ):
        whole = function(None)
        for size in (1, 7, 100):
            assert_equal(function(size), whole, 1e-12)


@both_modes
@pytest.mark.parametrize("chunk_size", [None, 2, 5, N, 100])
def test_closures_get_each_record_once_a_pass(chunk_size, forward_mode):
    """In order, no more than chunk_size at once; and all in one call where so many fit, as a recurrent policy needs them."""
    agent, logprob, n = mlp()
    seen = []

    def recording(inds):
        seen.append(inds)
        return logprob(inds)

    kwargs = {"inds": torch.randperm(n), "chunk_size": chunk_size, "forward_mode": forward_mode}
    return_influence(agent, recording, torch.randn(n), **kwargs)
    whole = chunk_size is not None and chunk_size >= n
    passes = 1 if not forward_mode and (whole or chunk_size is None) else 2  # one where the scores share the target's graph
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(n).repeat_interleave(passes))
    assert all(len(inds) <= (chunk_size or n) and (inds.diff() > 0).all() and inds.dtype == torch.int64 for inds in seen)
    assert not whole or [len(inds) for inds in seen] == [n] * passes


# ---- compiled agents


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_agents(backend, warm):
    agent = nn.Sequential(nn.Linear(OBS, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, ACTIONS))
    compiled = torch.compile(agent, backend=backend)
    obs, actions, advantages = torch.randn(N, OBS), torch.randint(ACTIONS, (N,)), torch.randn(N)
    if warm:
        compiled(obs).sum().backward()
    scores = [
        return_influence(given, lambda inds: log_pi(held(obs[inds]), actions[inds]), advantages)
        for given, held in itertools.product([agent, compiled], repeat=2)
    ]
    assert agent.training and compiled.training
    gradient = target_gradient(compiled, lambda: compiled(obs).sum())
    assert set(gradient) == set(trainable(agent))  # so that it serves as a direction for either
    agent.eval()
    truth = return_scores_by_hand(agent, lambda inds: log_pi(agent(obs[inds]), actions[inds]), advantages)
    for s in scores:
        assert_equal(s, truth)
    torch._dynamo.reset()


# ---- the filter


def filter_by_brute_force(scores, percent, of):
    candidates = [i for i, s in enumerate(scores) if s < 0 or of == "all"]
    drop = math.floor(Decimal(str(percent)) * len(candidates) / 100)
    dropped = sorted(candidates, key=lambda i: (scores[i], i))[:drop]
    return [i for i in range(len(scores)) if i not in dropped]


@pytest.mark.parametrize("of", ["negative", "all"])
@pytest.mark.parametrize("percent", [0, 0.57, 5, 12.5, 33.3, 50, 99.9, 100])
def test_filter_equals_brute_force(percent, of):
    rng = random.Random(f"{percent} {of}")
    for _ in range(30):
        levels = rng.choice([3, 1000])  # few levels make many ties
        scores = [rng.randint(-levels, levels) / 7 for _ in range(rng.randint(1, 60))]
        kept = filter_bottom(torch.tensor(scores), percent, of=of)
        assert kept.dtype == torch.int64 and kept.tolist() == filter_by_brute_force(scores, percent, of)


@pytest.mark.parametrize(
    "scores, percent, of, kept",
    [
        ([-1.0, 2.0, -3.0, -2.0], 34, "negative", [0, 1, 3]),
        ([-1.0, 2.0, -3.0, -2.0], 33, "negative", [0, 1, 2, 3]),
        ([-1.0, 2.0, -3.0, -2.0], 50, "all", [0, 1]),
        ([-1.0, 2.0, -3.0, 0.0], 100, "negative", [1, 3]),
        ([-1.0, 2.0, -3.0, 0.0], 100, "all", []),
        ([-1.0, -1.0, -1.0, -1.0], 50, "negative", [2, 3]),
        ([-1.0, -2.0], 100, "negative", []),
        ([1.0, 0.0, 3.0], 100, "negative", [0, 1, 2]),
        ([-0.0, -1.0], 100, "negative", [0]),
        ([-1.0], 100, "negative", []),
        ([-1.0], 99.9, "negative", [0]),
        ([1.0], 100, "negative", [0]),
        ([-1e-45, 1.0], 100, "negative", [1]),
    ],
)
def test_filter_by_hand(scores, percent, of, kept):
    assert filter_bottom(torch.tensor(scores), percent, of=of).tolist() == kept
    assert filter_bottom(np.array(scores), percent, of=of).tolist() == kept


@pytest.mark.parametrize("percent, dropped", [(0.57, 57), (0.29, 29), (1.13, 113), (33.3, 3330), (12.5, 1250), (0.009, 0)])
def test_filter_counts_in_decimals(percent, dropped):
    scores = -torch.rand(10000) - 1
    assert 10000 - len(filter_bottom(scores, percent)) == dropped


# ---- logging

SCALARS = {"negative_fraction", "dropped_fraction", "records_kept", "filtered_round", "nonfinite"}
SCALARS |= {"score_mean", "score_std", "score_min", "score_max"}
COUNTS = {"dropped_fraction", "records_kept", "filtered_round", "nonfinite"}
ROUNDS = {
    "ordinary": [0.5, -2.0, 1.0, -0.25, 3.0, -1.5],
    "negative": [-3.0, -1.0],
    "all equal": [2.0] * 4,
    "all zero": [0.0] * 4,
    "empty": [],
    "one record": [-1.0],
    "huge": [1e30, -1e30, 3e29, 0.0],
    "huge, all equal": [1e30] * 3,
    "tiny": [1e-30, -1e-30, 2e-30],
    "tiny among large": [-1e-30, 1e6, 1e-30],
    "rounds to below the lowest edge": [7.0, -35 / 3, 0.12],
    "far from zero": [1e8, 1e8 + 1, 1e8 + 2],
    "not finite": [1.0, math.nan, -1.0, math.inf, -math.inf],
    "nothing finite": [math.nan, math.inf],
}


class RecordingWriter:
    def __init__(self):
        self.scalars, self.histograms = {}, {}

    def add_scalar(self, tag, value, step):
        self.scalars[tag] = (value, step)

    def add_histogram(self, tag, values, step, bins):
        self.histograms[tag] = (np.histogram(values, bins), step)


@pytest.mark.parametrize("round_", ROUNDS)
def test_logged_rows(round_, tmp_path):
    scores = ROUNDS[round_]
    finite = [s for s in scores if math.isfinite(s)]
    advantages = torch.arange(float(len(scores)))
    kept = torch.arange(len(scores))[1:]
    expected = set(SCALARS) if finite else set(COUNTS)
    if len(set(finite)) > 1:
        expected.add("advantage_correlation")

    recording = RecordingWriter()
    log_influence(recording, torch.tensor(scores), kept, 7, advantages=advantages)
    assert set(recording.scalars) == {f"influence/{name}" for name in expected}
    assert set(recording.histograms) == ({"influence/scores"} if finite else set())
    assert all(type(value) is float and math.isfinite(value) and step == 7 for value, step in recording.scalars.values())
    row = {tag.removeprefix("influence/"): value for tag, (value, _) in recording.scalars.items()}
    assert row["records_kept"] == len(kept) and row["nonfinite"] == len(scores) - len(finite)
    assert row["filtered_round"] == any(scores)  # where all are zero there was nothing to filter by
    assert row["dropped_fraction"] == (pytest.approx(1 / len(scores)) if scores else 0)
    if finite:
        assert row["negative_fraction"] == sum(s < 0 for s in finite) / len(finite)
        assert row["score_min"] == min(finite) and row["score_max"] == max(finite)
        assert row["score_mean"] == pytest.approx(statistics.fmean(finite), rel=1e-12, abs=1e-12 * max(map(abs, finite)))
        assert row["score_std"] == pytest.approx(np.std(finite))
        (counts, edges), step = recording.histograms["influence/scores"]
        assert step == 7 and counts.sum() == len(finite) and (np.diff(edges) > 0).all() and len(counts) <= 66

    with SummaryWriter(tmp_path) as writer:
        log_influence(writer, torch.tensor(scores), kept, 7, advantages=advantages)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(recording.scalars)
    for tag, (value, step) in recording.scalars.items():
        (event,) = events.Scalars(tag)
        assert event.step == step and event.value == pytest.approx(value, rel=1e-6)
    assert events.Tags()["histograms"] == list(recording.histograms)
    if finite:
        (event,) = events.Histograms("influence/scores")
        limits, buckets = np.array(event.histogram_value.bucket_limit), np.array(event.histogram_value.bucket)
        assert buckets.sum() == len(finite) and np.isfinite(limits).all()
        if min(finite) < 0 < max(finite):
            assert 0.0 in limits and buckets[limits <= 0].sum() == sum(s < 0 for s in finite)


def logged(scores, **kwargs):
    writer = RecordingWriter()
    log_influence(writer, scores, torch.arange(len(scores)), 0, **kwargs)
    return {tag.removeprefix("influence/"): value for tag, (value, _) in writer.scalars.items()}


@pytest.mark.parametrize(
    "scores, advantages, correlation",
    [
        ([1.0, 2.0, 3.0], [1.0, 10.0, 100.0], 1.0),
        ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], -1.0),
        ([1.0, 2.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0], math.sqrt(0.9)),  # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4
        ([3.0, 1.0, 2.0], [10.0, 20.0, 30.0], -0.5),
        ([math.nan, 1.0, 2.0, 3.0], [9.0, 1.0, 2.0, 3.0], 1.0),  # the score that is not finite takes its advantage with it
        ([1.0, 1.0], [1.0, 2.0], None),
        ([1.0, 2.0], [1.0, 1.0], None),
        ([1.0], [1.0], None),
    ],
)
def test_spearman_correlation(scores, advantages, correlation):
    row = logged(torch.tensor(scores), advantages=torch.tensor(advantages))
    assert row.get("advantage_correlation") == (None if correlation is None else pytest.approx(correlation, abs=1e-12))


def test_logs_an_unfiltered_round_of_float32_scores_that_require_gradients():
    row = logged(torch.tensor([1.0, -1.0], dtype=torch.float32, requires_grad=True), filtered=False)
    assert row["filtered_round"] == 0 and row["dropped_fraction"] == 0 and "advantage_correlation" not in row


# ---- clear errors


def bad(**kwargs):
    """return_influence of a small round, with the given arguments in place of its own."""
    agent, logprob, n = mlp()
    arguments = {"agent": agent, "logprob": logprob, "advantages": torch.randn(n)} | kwargs
    if "change" in arguments:
        arguments["logprob"] = lambda inds, change=arguments.pop("change"): change(logprob(inds))
    return_influence(**arguments)


def bad_losses(change=lambda losses: losses, direction=lambda d: d, num_records=N, **kwargs):
    agent, logprob, _ = mlp()
    fn = lambda inds: change(logprob(inds))
    influence_scores(agent, fn, direction(random_direction(agent)), num_records, **kwargs)


def bad_target(change, **kwargs):
    agent, logprob, n = mlp()
    target_gradient(agent, lambda: change(logprob(torch.arange(n))), **kwargs)


def without(direction, name):
    return {k: v for k, v in direction.items() if k != name}


def with_nonfinite(*values):
    advantages = torch.zeros(N)
    advantages[3 : 3 + len(values)] = torch.tensor(values)
    return advantages


def another_copy():
    agent, logprob, n = mlp()
    return_influence(copy.deepcopy(agent), logprob, torch.randn(n))


def frozen_agent():
    agent, logprob, n = mlp()
    return_influence(agent.requires_grad_(False), logprob, torch.randn(n))


def log_bad_advantages():
    log_influence(RecordingWriter(), torch.randn(4), torch.arange(4), 0, advantages=torch.randn(3))


def bad_action(value):
    agent, logprob, n = mlp()
    action_influence(agent, lambda: value(logprob(torch.arange(n))), logprob, n)


ERRORS = {
    "advantages: fewer than logprob returns": (
        lambda: bad(logprob=lambda i: mlp().logprob(torch.arange(9))),
        r"logprob.*\[3\].*\[9\]",
    ),
    "advantages: empty": (lambda: bad(advantages=torch.zeros(0)), "advantages"),
    "advantages: two dimensions": (lambda: bad(advantages=torch.zeros(N, 1)), r"advantages.*\[12, 1\]"),
    "advantages: scalar": (lambda: bad(advantages=torch.tensor(1.0)), "advantages"),
    "advantages: integers": (lambda: bad(advantages=torch.arange(N)), "advantages.*int64"),
    "advantages: nan": (lambda: bad(advantages=with_nonfinite(math.nan)), "advantages: 1 of 12 .* index 3"),
    "advantages: two infinite": (
        lambda: bad(advantages=with_nonfinite(math.inf, -math.inf)),
        "advantages: 2 of 12 .* index 3",
    ),
    "logprob: column": (lambda: bad(change=lambda x: x[:, None]), r"logprob.*\[3, 1\]"),
    "logprob: scalar": (lambda: bad(change=torch.sum), "logprob"),
    "logprob: list": (lambda: bad(change=lambda x: x.tolist()), "logprob.*list"),
    "logprob: detached": (lambda: bad(change=torch.Tensor.detach), "logprob"),
    "logprob: of another copy of the agent": (another_copy, "logprob"),
    "logprob: not finite": (lambda: bad(change=lambda x: x / 0), "logprob: 3 of 3 are not finite"),
    "inds: too short": (lambda: bad(inds=torch.arange(N - 1)), "inds"),
    "inds: repeated": (lambda: bad(inds=torch.zeros(N, dtype=torch.int64)), "inds"),
    "inds: from one": (lambda: bad(inds=torch.arange(N) + 1), "inds"),
    "inds: negative": (lambda: bad(inds=-torch.arange(N)), "inds"),
    "inds: floats": (lambda: bad(inds=torch.arange(float(N))), "inds"),
    "inds: two dimensions": (lambda: bad(inds=torch.arange(N)[None]), "inds"),
    "advantages: text": (lambda: bad(advantages="x"), "advantages must be a tensor"),
    "inds: text": (lambda: bad(inds="x"), "inds must be a tensor"),
    "agent: lazy": (lambda: bad(agent=nn.LazyLinear(3)), "not initialised.*weight"),
    "inds: mask": (lambda: bad(inds=torch.ones(N, dtype=torch.bool)), "inds"),
    "minibatch_size: zero": (lambda: bad(minibatch_size=0), "minibatch_size"),
    "minibatch_size: negative": (lambda: bad(minibatch_size=-4), "minibatch_size"),
    "minibatch_size: fraction": (lambda: bad(minibatch_size=2.5), "minibatch_size"),
    "minibatch_size: nan": (lambda: bad(minibatch_size=math.nan), "minibatch_size"),
    "chunk_size: zero": (lambda: bad(chunk_size=0), "chunk_size"),
    "chunk_size: bool": (lambda: bad(chunk_size=True), "chunk_size"),
    "chunk_size: word": (lambda: bad_losses(chunk_size="all"), "chunk_size"),
    "chunk_size: infinite": (lambda: bad_losses(chunk_size=math.inf), "chunk_size"),
    "num_records: zero": (lambda: bad_losses(num_records=0), "num_records"),
    "num_records: missing": (lambda: bad_losses(num_records=None), "num_records"),
    "agent: nothing to train": (frozen_agent, "agent has no trainable parameters"),
    "agent: no module": (lambda: bad(agent=None), "agent"),
    "agent: list of parameters": (lambda: bad(agent=list(mlp_net().parameters())), "agent"),
    "record_losses: scalar": (lambda: bad_losses(torch.sum), "record_losses"),
    "record_losses: column": (lambda: bad_losses(lambda x: x[:, None]), r"record_losses.*\[12, 1\]"),
    "record_losses: too many": (lambda: bad_losses(lambda x: x.repeat(2)), r"record_losses.*\[12\].*\[24\]"),
    "record_losses: integers": (lambda: bad_losses(lambda x: x.long()), "record_losses.*int64"),
    "record_losses: list": (lambda: bad_losses(lambda x: list(x)), "record_losses.*list"),
    "record_losses: None": (lambda: bad_losses(lambda x: None), "record_losses.*None"),
    "record_losses: detached": (lambda: bad_losses(torch.Tensor.detach), "record_losses"),
    "record_losses: one nan": (lambda: bad_losses(lambda x: x * with_nonfinite(math.nan)), "scores: 1 of 12 .* index 3"),
    "direction: missing a key": (lambda: bad_losses(direction=lambda d: without(d, "2.bias")), "direction.*2.bias"),
    "direction: one key too many": (lambda: bad_losses(direction=lambda d: d | {"3.bias": d["2.bias"]}), "direction.*3.bias"),
    "direction: wrong shape": (lambda: bad_losses(direction=lambda d: d | {"2.bias": d["0.bias"]}), "direction.*2.bias"),
    "direction: no tensor": (lambda: bad_losses(direction=lambda d: d | {"2.bias": None}), "direction.*2.bias"),
    "direction: no dictionary": (lambda: bad_losses(direction=lambda d: list(d.values())), "direction"),
    "target: vector": (lambda: bad_target(lambda x: x), r"target.*\[12\]"),
    "target: number": (lambda: bad_target(lambda x: x.sum().item()), "target.*float"),
    "target: nan": (lambda: bad_target(lambda x: x.sum() * math.nan), "target.*nan"),
    "target: detached": (lambda: bad_target(lambda x: x.sum().detach()), "target"),
    "logprob_of_action: vector": (lambda: bad_action(lambda x: x), "logprob_of_action"),
    "logprob_of_action: detached": (lambda: bad_action(lambda x: x[0].detach()), "logprob_of_action"),
    "scores: empty": (lambda: filter_bottom(torch.zeros(0), 10), "scores"),
    "scores: two dimensions": (lambda: filter_bottom(torch.zeros(3, 1), 10), r"scores.*\[3, 1\]"),
    "scores: nan": (lambda: filter_bottom(torch.tensor([1.0, math.nan, math.nan]), 10), "scores: 2 of 3 .* index 1"),
    "scores: infinite": (lambda: filter_bottom(torch.tensor([1.0, -math.inf]), 10), "scores: 1 of 2 .* index 1"),
    "percent: negative": (lambda: filter_bottom(torch.zeros(3), -0.1), "percent"),
    "percent: above 100": (lambda: filter_bottom(torch.zeros(3), 100.1), "percent"),
    "percent: nan": (lambda: filter_bottom(torch.zeros(3), math.nan), "percent"),
    "percent: text": (lambda: filter_bottom(torch.zeros(3), "12.5"), "percent"),
    "percent: bool": (lambda: filter_bottom(torch.zeros(3), True), "percent"),
    "percent: list": (lambda: filter_bottom(torch.zeros(3), [10]), "percent"),
    "scores: text": (lambda: filter_bottom("x", 10), "scores must be a tensor"),
    "percent: missing": (lambda: filter_bottom(torch.zeros(3), None), "percent"),
    "of: unknown": (lambda: filter_bottom(torch.zeros(3), 10, of="positive"), "of must be"),
    "advantages to log: another length": (log_bad_advantages, "advantages"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_argument(case):
    call, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        call()
