"""What influence scores cost, and how exact they are, beside the other ways to compute them.

    python -m benchmarks.cost.scoring            measure, print the tables, write results/cost/scoring.csv
    python -m benchmarks.cost.scoring --table    print the tables of an earlier run

Time is a ratio to one ordinary forward+backward of PPO's policy loss over the same records in the same chunks (the gradient of
the actor's parameters only), which is 1.00. All methods run in one process with one thread and take turns; ratios are taken
within a round of turns, and their median over the rounds is quoted, in CPU time, which other load disturbs least (those in
wall-clock time are in the CSV). Every method is charged for all that lies between the round and its scores, the gradient of
the target included; return_influence also for its checks and the normalisation of the advantages. Its default, exact for any network,
takes the round in one piece and holds its graph; `forward_mode=True` goes by the chunks. A slow method scores the
first records only, and its time is scaled up to the round. The process keeps the memory that it frees: the methods that need
much of it would otherwise spend most of their time in page faults. What the cheap ones cost as a program finds them, under the
allocator's defaults, is measured too, in a process of its own.

Memory is what one call adds at its peak, in a fresh process for each (VmHWM after it - VmRSS before it; Linux with glibc).

The rounds are synthetic and always the same: states that drift as in an episode; weights as initialised, but for the last
layer, which has gain 1 as if it had learned something (at a fresh policy's 0.01 its own gradient is nearly all there is);
actions drawn from the policy; advantages that depend on state, action and chance.
"""

import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.func import functional_call, grad, vmap

import iif_core
from benchmarks import files


@dataclass
class Args:
    rounds: int = 7
    """rounds of turns, over which the median is taken"""
    output: Path = files.RESULTS / "cost" / "scoring.csv"
    """the CSV to write (with --table: to read)"""
    table: bool = False
    """print the tables of the CSV as markdown and measure nothing"""
    default_allocator: str | None = None
    """print the seconds of the cheap parts on NETWORK under the allocator's defaults, and do nothing else (as below)"""
    memory: str | None = None
    """print the peak memory in MB of NETWORK:METHOD and do nothing else (the run starts itself so for each row)"""


# ---- the networks and their rounds


class Agent(nn.Module):
    """CleanRL's agents: an actor and a critic, perhaps on a trunk that they share, which sees obs / scale."""

    def __init__(self, trunk, actor, critic, scale=1.0):
        super().__init__()
        self.trunk, self.actor, self.critic, self.scale = trunk, actor, critic, scale

    def features(self, obs):
        return self.trunk(obs.to(self.actor[-1].weight.dtype) / self.scale)

    def forward(self, obs, actions):
        """log pi(a|s), [n], of the actions, [n], taken at obs, [n, ...]."""
        return F.log_softmax(self.actor(self.features(obs)), -1).gather(1, actions[:, None])[:, 0]

    def act(self, obs):
        """Actions, [n], drawn from the policy."""
        logprobs = torch.cat([self.actor(self.features(part)) for part in obs.split(128)]).log_softmax(-1)
        return torch.multinomial(logprobs.exp(), 1)[:, 0]


class Block(nn.Module):
    """A layer of a transformer, as GPT-2's: causal attention, then a perceptron, each on what is normalised before it."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        n, t, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        x = x + self.out((weights.softmax(-1) @ v).transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A small language model: a record is a prompt, [n, T], with the answer to it, [n, T']."""

    def __init__(self, vocabulary=512, width=128, layers=2, heads=4, context=32, answer=24):
        super().__init__()
        self.answer, self.tokens, self.places = answer, nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.actor = nn.Linear(width, vocabulary, bias=False)

    def forward(self, obs, actions):
        """log pi(answer|prompt), [n]: the sum over the tokens of the answer."""
        tokens = torch.cat([obs, actions], 1)[:, :-1]
        hidden = self.blocks(self.tokens(tokens) + self.places.weight[: tokens.shape[1]])
        logprobs = F.log_softmax(self.actor(hidden[:, -self.answer :]), -1)
        return logprobs.gather(2, actions[:, :, None]).sum((1, 2))

    def act(self, obs):
        return torch.randint(self.actor.out_features, (len(obs), self.answer))


def init(module, gain=np.sqrt(2)):
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def head(inputs, outputs, *hidden):
    sizes = (inputs, *hidden)
    layers = [m for i, o in zip(sizes, hidden) for m in (init(nn.Linear(i, o)), nn.Tanh())]
    return nn.Sequential(*layers, init(nn.Linear(sizes[-1], outputs), 1.0))


def cnn(*convolutions, inputs, outputs):
    layers = [m for conv in convolutions for m in (init(nn.Conv2d(*conv)), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), init(nn.Linear(inputs, outputs)), nn.ReLU())


def mlp_agent():
    return Agent(nn.Identity(), head(8, 4, 64, 64), head(8, 1, 64, 64))


def minigrid_agent():
    return Agent(cnn((3, 16, 3), (16, 32, 3), inputs=288, outputs=64), head(64, 7, 64, 64), head(64, 1, 64, 64), 10.0)


def atari_agent():
    trunk = cnn((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1), inputs=3136, outputs=512)
    return Agent(trunk, head(512, 6), head(512, 1), 255.0)


def grids(state):
    """[N, 3, 7, 7] uint8, the codes of object, colour and state in a field of view: mostly empty, some walls, a few things."""
    cells = (state @ torch.randn(8, 49) / 8**0.5).view(-1, 7, 7)
    wall, thing = (cells > 0.5).byte(), (cells > 1.5).byte()
    return torch.stack([1 + wall + 6 * thing, 5 * wall - thing, thing], 1)


def frames(state):
    """[N, 4, 84, 84] uint8, the last four frames of a game: a ball, a paddle and a wall of bricks."""
    x, y, paddle = (42 + 16 * state[:, :3].T.clamp(-2.4, 2.4)).round()[:, :, None]
    pixel = torch.arange(84)
    frame = torch.zeros(len(state), 84, 84, dtype=torch.uint8)
    frame[:, 20:30] = torch.arange(90, 190, 10, dtype=torch.uint8)[:, None]
    frame[:, 78:80] = 200 * ((pixel - paddle).abs() < 8).byte()[:, None]
    frame[((pixel - y).abs() < 2)[:, :, None] & ((pixel - x).abs() < 2)[:, None, :]] = 255
    return torch.stack([frame[(torch.arange(len(state)) - back).clamp(min=0)] for back in (3, 2, 1, 0)], 1)


def prompts(state):
    """[N, 8] tokens, those of a prompt next to each other in the vocabulary."""
    return (256 + 100 * state[:, :1]).long().clamp(0, 500) + torch.arange(8)


class Network(NamedTuple):
    title: str
    agent: Callable
    obs: Callable  # of the states, [N, 8]
    records: int
    minibatch_size: int
    chunk_size: int | None
    slow: dict  # {part: how many records it takes}, see PARTS


NETWORKS = {
    "mlp": Network("64-64 tanh MLP", mlp_agent, lambda state: 0.5 * state, 2048, 64, None, {"loop": 32}),
    "minigrid": Network("MiniGrid CNN", minigrid_agent, grids, 2048, 64, None, {"loop": 32}),
    "gpt": Network("GPT of two layers", GPT, prompts, 128, 4, None, {"loop": 32}),
    "atari": Network("Atari NatureCNN", atari_agent, frames, 1024, 256, 128, {"loop": 32, "vmap": 256, "ghost": 256}),
}


class Round:
    """N records at the policy that collected them: obs [N, ...]; actions, logprobs, advantages, normalized [N]."""

    def __init__(self, network, dtype=torch.float32):
        torch.manual_seed(1)
        self.network, n = network, network.records
        self.agent = network.agent()
        state, noise = torch.randn(n, 8), torch.randn(n)
        for t in range(1, n):  # unit variance, correlated over some thirty steps
            state[t] = 0.97 * state[t - 1] + (1 - 0.97**2) ** 0.5 * state[t]
        self.obs = network.obs(state)
        with torch.no_grad():
            self.actions = self.agent.act(self.obs)
            self.logprobs = torch.cat([self.logprob(inds) for inds in torch.arange(n).split(128)]).to(dtype)
        first = self.actions.view(n, -1)[:, :1]
        taste = (state @ torch.randn(8, int(first.max()) + 1)).gather(1, first)[:, 0]
        self.advantages = (10 * (state[:, 0] + 0.5 * taste + noise) - 5).to(dtype)
        self.order = torch.randperm(n)  # of the minibatches in which the advantages are normalised
        self.normalized = torch.empty(n, dtype=dtype)
        for inds in self.order.split(network.minibatch_size):
            a = self.advantages[inds]
            self.normalized[inds] = (a - a.mean()) / (a.std() + 1e-8)
        self.agent.to(dtype)
        self.params = {name: p for name, p in self.agent.named_parameters() if not name.startswith("critic")}

    def chunks(self, n):
        return torch.arange(n).split(self.network.chunk_size or n)

    def logprob(self, inds):
        return self.agent(self.obs[inds], self.actions[inds])

    def losses(self, inds):
        """The PPO policy loss of each record up to a constant: at this policy every ratio is 1."""
        return -self.normalized[inds] * self.logprob(inds)

    def target(self, inds):
        return (self.advantages[inds] * self.logprob(inds)).sum() / len(self.advantages)


# ---- the methods, in parts: each part takes a round, the direction (the gradient of the target), and how many records to do


def yardstick(r, direction, n):
    total = [torch.zeros_like(p) for p in r.params.values()] if r.network.chunk_size else None
    for inds in r.chunks(n):
        ratio, advantages = (r.logprob(inds) - r.logprobs[inds]).exp(), r.normalized[inds]
        losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - 0.2, 1 + 0.2))
        grads = torch.autograd.grad(losses.sum() / n, list(r.params.values()))
        total = [t.add_(g) for t, g in zip(total, grads)] if total else grads
    return total


def plain(r, direction, n):
    for inds in r.chunks(n):
        torch.autograd.grad(r.losses(inds).sum() / n, list(r.params.values()))


def target(r, direction, n):
    return iif_core.target_gradient(r.agent, r.target, n, chunk_size=r.network.chunk_size)


def exact_scores(r, direction, n, forward_mode=False):
    sizes = {"chunk_size": r.network.chunk_size, "forward_mode": forward_mode}
    return iif_core.influence_scores(r.agent, r.losses, direction, n, **sizes)


def fast_scores(r, direction, n):
    return exact_scores(r, direction, n, forward_mode=True)


def exact(r, direction, n, forward_mode=False, chunk_size=None):
    # in one piece the exact way shares the graph of the target with the scores
    sizes = {"chunk_size": r.network.chunk_size if forward_mode else chunk_size, "forward_mode": forward_mode}
    sizes["minibatch_size"] = r.network.minibatch_size
    return iif_core.return_influence(r.agent, r.logprob, r.advantages[:n], inds=r.order[r.order < n], **sizes)


def one_call(r, direction, n):
    return exact(r, direction, n, chunk_size=n)


def fast(r, direction, n):
    return exact(r, direction, n, forward_mode=True)


def loop(r, direction, n):
    grads = (torch.autograd.grad(r.losses(inds).sum(), list(r.params.values())) for inds in torch.arange(n).split(1))
    return -torch.stack([sum((g * direction[name]).sum() for name, g in zip(r.params, gs)) for gs in grads])


def vmap_grad(r, direction, n):
    def loss(p, obs, action, advantage):
        return -advantage * functional_call(r.agent, p, (obs[None], action[None]))[0]

    params, scores = {name: p.detach() for name, p in r.params.items()}, []
    for i in r.chunks(n):
        grads = vmap(grad(loss), (None, 0, 0, 0))(params, r.obs[i], r.actions[i], r.normalized[i])
        scores.append(-sum(g.flatten(1) @ direction[name].flatten() for name, g in grads.items()))
    return torch.cat(scores)


def hooked_backward(r, loss, inds):
    """Of each layer: name, inputs [n, in, L] and gradient of the outputs [n, out, L], at L places of an image (Linear: 1)."""
    inputs, grads, handles = {}, {}, []

    def hook(name, module, args, output):
        conv = isinstance(module, nn.Conv2d)
        x = args[0].detach()
        inputs[name] = F.unfold(x, module.kernel_size, stride=module.stride) if conv else x[:, :, None]
        output.register_hook(lambda g: grads.update({name: g.flatten(2) if conv else g[:, :, None]}))

    for name, module in r.agent.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            handles.append(module.register_forward_hook(lambda *args, name=name: hook(name, *args)))
    torch.autograd.grad(loss(inds).sum(), list(r.params.values()))
    for handle in handles:
        handle.remove()
    return [(name, x, grads[name]) for name, x in inputs.items()]


def ghost_target(r, direction, n):
    total = {name: 0 for name in r.params}
    for inds in r.chunks(n):
        for name, x, g in hooked_backward(r, r.target, inds):
            total[f"{name}.weight"] += torch.einsum("nol,nil->oi", g, x)
            total[f"{name}.bias"] += g.sum((0, 2))
    return total


def ghost(r, direction, n):
    scores = torch.zeros(n)
    for inds in r.chunks(n):
        for name, x, g in hooked_backward(r, r.losses, inds):
            weight_grads = g @ x.mT  # [n, out, in], of each record
            scores[inds] -= (weight_grads * direction[f"{name}.weight"].flatten(1)).sum((1, 2))
            scores[inds] -= g.sum(2) @ direction[f"{name}.bias"]
    return scores


def last_layer(r, direction, n):
    last, hidden, slopes = r.agent.actor[-1], [], []
    with torch.no_grad():
        for inds in r.chunks(n):
            hidden.append(r.agent.actor[:-1](r.agent.features(r.obs[inds])))
            slopes.append(F.one_hot(r.actions[inds], last.out_features) - last(hidden[-1]).softmax(-1))
        h, d = torch.cat(hidden), torch.cat(slopes)  # [n, in]; [n, out], the gradient of log pi in the logits
        weighted = r.advantages[:n, None] / n * d
        return r.normalized[:n] * (d * (h @ (weighted.T @ h).T + weighted.sum(0))).sum(1)


PARTS = {
    f.__name__: f
    for f in (yardstick, plain, target, exact_scores, fast_scores, exact, one_call, fast, loop, ghost_target, ghost)
}
PARTS |= {"vmap": vmap_grad, "last": last_layer}
CHEAP = ("yardstick", "plain", "target", "exact_scores", "fast_scores", "exact", "one_call", "fast")
# written for one action a record, and for linear and convolutional layers
NOT_OF_A_GPT = {"vmap", "ghost_target", "ghost", "last"}
METHODS = {  # a row of the tables: its label, and the parts that it runs one after the other
    "yardstick": ("forward+backward of the policy loss", ["yardstick"]),
    "plain": ("the same with the loss -A log pi, without ratio and clipping", ["plain"]),
    "target": ("gradient of the target only", ["target"]),
    "exact_scores": ("scores only, the direction given", ["exact_scores"]),
    "fast_scores": ("scores only, `forward_mode=True`", ["fast_scores"]),
    "exact": ("**target and scores: `return_influence`**", ["exact"]),
    "one_call": ("the same with `chunk_size=N`: no agreement, no noise scale", ["one_call"]),
    "fast": ("**target and scores: `return_influence(forward_mode=True)`**", ["fast"]),
    "loop": ("autograd, one record at a time", ["target", "loop"]),
    "vmap": ("`torch.func`: vmap of grad, then dot", ["target", "vmap"]),
    "ghost": ("hooks, weight gradients [N, out, in], as the paper's code", ["ghost_target", "ghost"]),
    "last": ("the last layer's gradient only", ["last"]),
}


# ---- what is measured


def records(network, part):
    return network.slow.get(part, network.records)


def run(r, method, direction=None, n=None):
    """The parts of a method in turn, on n records or as many as each takes. Returns what the last one does: the scores."""
    for part in METHODS[method][1]:
        result = PARTS[part](r, direction, n or records(r.network, part))
        direction = result if "target" in part else direction
    return result


def allocator(keep):
    """Have glibc keep what is freed (no page faults), or else give it back at once (the process holds what is alive only)."""
    if sys.platform != "linux":
        sys.exit("benchmarks.cost sets glibc's allocator and reads memory from /proc: it needs Linux")
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
    options = {M_TRIM_THRESHOLD: 2**31 - 1, M_MMAP_MAX: 0} if keep else {M_TRIM_THRESHOLD: 0, M_MMAP_THRESHOLD: 2**16}
    for option, value in options.items():
        ctypes.CDLL(None).mallopt(option, value)


def peak_memory(network, method):
    """MB that a method adds at its peak to what its process holds before."""

    def status(field):
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

    allocator(keep=False)
    r = Round(network)
    direction = target(r, None, 2)
    run(r, method, direction, 2)  # loads what a first call loads
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # takes the high-water mark down to what is held now
    before = status("VmRSS")
    run(r, method, direction)
    return (status("VmHWM") - before) / 1024


def times(r, rounds, names=tuple(PARTS)):
    """{part: [rounds, 2]}, seconds of CPU and of wall clock, scaled up to the round where a part takes fewer records."""
    names = [name for name in names if name not in NOT_OF_A_GPT or not isinstance(r.agent, GPT)]
    direction = target(r, None, r.network.records)

    def clock(part):
        start = np.array([time.process_time(), time.perf_counter()])
        PARTS[part](r, direction, records(r.network, part))
        return (time.process_time(), time.perf_counter()) - start

    for part in names:
        PARTS[part](r, direction, 2)
    repeats = {part: int(np.clip(0.1 / clock(part)[0], 1, 10)) for part in names}  # in each round, of what is quick
    seconds = {part: np.zeros((rounds, 2)) for part in names}
    for i in range(rounds):
        for turn in range(max(repeats.values())):
            for part in names:
                if turn < repeats[part]:
                    seconds[part][i] += clock(part) / repeats[part] * r.network.records / records(r.network, part)
    return seconds


def accuracy(scores, truth, reference):
    """truth: the first scores, from the loop in float64. reference: all of them, from return_influence in float64."""
    reference = reference[: len(scores)]
    return {
        "max_relative_error": ((scores[: len(truth)] - truth).abs().max() / truth.abs().max()).item(),
        "spearman": np.corrcoef(iif_core._ranks(scores.numpy()), iif_core._ranks(reference.numpy()))[0, 1],
        "sign_flips": ((scores < 0) != (reference < 0)).double().mean().item(),
    }


def measure(name, rounds):
    """The rows of one network."""
    network = NETWORKS[name]
    exact, r = Round(network, torch.float64), Round(network)
    truth, reference = run(exact, "loop"), run(exact, "exact")
    seconds, direction, rows = times(r, rounds), target(r, None, network.records), []

    def apart(*flags):
        command = [sys.executable, "-m", "benchmarks.cost.scoring", *flags]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)

    default = {part: np.array(x) for part, x in apart("--default-allocator", name, "--rounds", str(rounds)).items()}
    for method, (label, parts) in METHODS.items():
        if not seconds.keys() >= set(parts):
            continue
        memory = apart("--memory", f"{name}:{method}")
        ratios = sum(seconds[part] for part in parts) / seconds["yardstick"]  # [rounds, 2]
        row = {"network": network.title, "method": label, "round_records": network.records, "chunk": network.chunk_size or ""}
        row |= {"records": min(records(network, part) for part in parts), "rounds": rounds}
        row |= {f"time_ratio_{f.__name__}": f(ratios[:, 0]) for f in (np.median, np.min, np.max)}
        row |= {"wall_ratio_median": np.median(ratios[:, 1]), "cpu_ms": 1e3 * np.median(sum(seconds[p][:, 0] for p in parts))}
        if set(parts) <= set(CHEAP):
            row["default_allocator_time_ratio"] = np.median(sum(default[part] for part in parts) / default["yardstick"])
        row |= {"memory_mb": memory, "memory_ratio": memory / (rows[0]["memory_mb"] if rows else memory)}
        scored = parts[-1] not in ("yardstick", "plain", "target")
        row |= accuracy(run(r, method, direction), truth, reference) if scored else {}
        rows.append(row | {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")})
    return rows


# ---- the tables


def table(path):
    """The CSV as markdown, a table for each network. In parentheses: how many records were scored, where not all."""
    networks = {}
    for row in files.read_csv(path):
        networks.setdefault(row["network"], []).append(row)
    header = "method|time|time, default allocator|memory|memory, MB|max. relative error|Spearman|wrong signs".split("|")
    formats = {"time_ratio_median": ".2f", "default_allocator_time_ratio": ".2f", "memory_ratio": ".2f", "memory_mb": ".1f"}
    formats |= {"max_relative_error": ".0e", "spearman": ".4f", "sign_flips": ".2%"}
    parts = []
    for network, rows in networks.items():
        first, lines = rows[0], []
        size = f"{first['records']} records in " + (f"chunks of {first['chunk']}" if first["chunk"] else "one piece")
        for row in rows:
            few = "" if row["records"] == row["round_records"] else f" ({row['records']})"
            cells = [format(float(row[name]), how) if row[name] else "" for name, how in formats.items()]
            lines.append([row["method"] + few, *cells])
        parts += [f"**{network}**, {size}, 1.00 = {float(first['cpu_ms']):.1f} ms", files.table(header, lines)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    if args.memory:
        network, method = args.memory.split(":")
        print(peak_memory(NETWORKS[network], method))
    elif args.default_allocator:
        seconds = times(Round(NETWORKS[args.default_allocator]), args.rounds, CHEAP)
        print(json.dumps({part: x[:, 0].tolist() for part, x in seconds.items()}))
    elif args.table:
        print(table(args.output))
    else:
        allocator(keep=True)
        rows = [row for name in NETWORKS for row in measure(name, args.rounds)]
        columns = list(max(rows, key=len))
        lines = [[f"{x:.5g}" if isinstance(x := row.get(c), float) else x for c in columns] for row in rows]
        files.write_csv(args.output, columns, lines)
        print(table(args.output))
