"""What influence scores cost, and how exact they are, beside the other ways to compute them.

    python -m benchmarks.scoring            measure, print the tables, write results/scoring.csv
    python -m benchmarks.scoring --table    print the tables of an earlier run as markdown

Time is quoted as a ratio to one ordinary forward+backward of the policy loss over the same records in the same chunks (the actor's
parameters only), which is 1.00. All methods run in one process with one thread, in turn: a ratio is taken within a round of turns
and the median over the rounds is quoted, in CPU time, which other load on the machine disturbs least (wall-clock ratios are in the
CSV). Every method is charged for everything from the round to the scores, the gradient of the target included. A slow method
scores the first records only, the count is in its row, and its time is scaled up to the round.

Memory is what one call adds at its peak, each in a process of its own (VmHWM after - VmRSS before; Linux only).

The rounds are synthetic and always the same: states that drift as in an episode, weights after the usual orthogonal
initialisation but for the last layer, which has gain 1 as a policy that has learned something (at the 0.01 of a fresh one, the last
layer's gradient is nearly all there is), actions drawn from the policy, and advantages that depend on state, action and chance.
"""

import csv
import gc
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.func import functional_call, grad, vmap

import iif_core


@dataclass
class Args:
    rounds: int = 7
    """rounds of turns, over which the median is taken"""
    output: Path = Path(__file__).parent / "results" / "scoring.csv"
    """the CSV to write (with --table: to read)"""
    table: bool = False
    """print the tables of the CSV as markdown and measure nothing"""
    memory: Optional[str] = None
    """print the peak memory in MB of NETWORK:METHOD and measure nothing else (the run starts itself so for every row)"""


# ---- the three networks and their rounds


def layer(module, gain=np.sqrt(2)):
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def mlp(inputs, outputs, gain):
    sizes = ((inputs, 64, np.sqrt(2)), (64, 64, np.sqrt(2)), (64, outputs, gain))
    return nn.Sequential(*[m for i, o, g in sizes for m in (layer(nn.Linear(i, o), g), nn.Tanh())][:-1])


class Agent(nn.Module):
    """An actor and a critic, perhaps on a trunk that they share. obs / scale is what the network sees."""

    def __init__(self, trunk, actor, critic, scale):
        super().__init__()
        self.trunk, self.actor, self.critic, self.scale = trunk, actor, critic, scale

    def features(self, obs):
        return self.trunk(obs.to(self.actor[-1].weight.dtype) / self.scale)

    def forward(self, obs, actions):
        """log pi(a|s), [n], of the actions, [n], in obs, [n, ...]."""
        log_probs = F.log_softmax(self.actor(self.features(obs)), -1)
        return log_probs.gather(1, actions[:, None])[:, 0]


def vector_obs(state):
    return 0.5 * state


def grid_obs(state):
    """Codes of object, colour and state of 7 x 7 cells, [N, 3, 7, 7] uint8, as MiniGrid has them: mostly empty, some walls."""
    cells = (state @ torch.randn(8, 49) / 8**0.5).view(-1, 7, 7)
    wall, thing = cells > 0.5, cells > 1.5
    return torch.stack([1 + wall.int() + 6 * thing, 5 * wall.int() - 2 * thing, (cells > 2).int()], 1).to(torch.uint8)


def frame_obs(state):
    """A ball, a paddle and a wall of bricks, the last four frames of each step: [N, 4, 84, 84] uint8."""
    x, y, paddle = (42 + 16 * state[:, :3].T.clamp(-2.4, 2.4)).round()
    near = [(torch.arange(84) - at[:, None]).abs() <= size for at, size in ((x, 1), (y, 1), (paddle, 7))]
    frames = torch.zeros(len(state), 84, 84, dtype=torch.uint8)
    frames[:, 20:30] = torch.arange(90, 190, 10, dtype=torch.uint8)[:, None]
    frames[:, 78:80] = 200 * near[2][:, None].to(torch.uint8)
    frames[near[1][:, :, None] & near[0][:, None, :]] = 255
    return torch.stack([frames[(torch.arange(len(state)) - k).clamp(min=0)] for k in (3, 2, 1, 0)], 1)


def vector_agent():
    return Agent(nn.Identity(), mlp(8, 4, 1.0), mlp(8, 1, 1.0), 1.0)


def grid_agent():
    convolutions = [layer(nn.Conv2d(3, 16, 3)), nn.ReLU(), layer(nn.Conv2d(16, 32, 3)), nn.ReLU(), nn.Flatten()]
    trunk = nn.Sequential(*convolutions, layer(nn.Linear(288, 64)), nn.ReLU())
    return Agent(trunk, mlp(64, 7, 1.0), mlp(64, 1, 1.0), 10.0)


def frame_agent():
    shapes = ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
    convolutions = [m for i, o, kernel, stride in shapes for m in (layer(nn.Conv2d(i, o, kernel, stride)), nn.ReLU())]
    trunk = nn.Sequential(*convolutions, nn.Flatten(), layer(nn.Linear(3136, 512)), nn.ReLU())
    return Agent(trunk, nn.Sequential(layer(nn.Linear(512, 6), 1.0)), nn.Sequential(layer(nn.Linear(512, 1), 1.0)), 255.0)


@dataclass
class Network:
    title: str
    make_agent: callable
    make_obs: callable
    num_records: int
    minibatch_size: int
    chunk_size: Optional[int]
    subset: dict  # method: records that it scores, where not all


TRUTH_RECORDS = 32  # of each round, scored in float64 by the loop
NETWORKS = {
    "mlp": Network("64-64 tanh MLP", vector_agent, vector_obs, 2048, 64, None, {"loop": 32}),
    "minigrid": Network("MiniGrid CNN", grid_agent, grid_obs, 2048, 64, None, {"loop": 32}),
    "atari": Network("Atari NatureCNN", frame_agent, frame_obs, 1024, 256, 128, {"loop": 32, "vmap": 256, "ghost": 256}),
}


class Round:
    """N records of a policy: obs [N, ...], actions [N], advantages [N] and, as the losses take them, normalized [N]."""

    def __init__(self, network, dtype=torch.float32):
        torch.manual_seed(1)
        self.network, n = network, network.num_records
        self.agent = network.make_agent()
        state, noise = torch.randn(n, 8), torch.randn(n)
        for t in range(1, n):  # unit variance, and a correlation over some thirty steps
            state[t] = 0.97 * state[t - 1] + (1 - 0.97**2) ** 0.5 * state[t]
        self.obs = network.make_obs(state)
        with torch.no_grad():
            logits = torch.cat([self.agent.actor(self.agent.features(obs)) for obs in self.obs.split(128)])
        self.actions = torch.multinomial(logits.softmax(-1), 1)[:, 0]
        taste = (state @ torch.randn(8, logits.shape[1])).gather(1, self.actions[:, None])[:, 0]
        self.advantages = (10 * (state[:, 0] + 0.5 * taste + noise) - 5).to(dtype)
        self.agent.to(dtype)
        self.order = torch.randperm(n)  # of the minibatches within which the advantages are normalised
        self.normalized = torch.empty(n, dtype=dtype)
        for inds in self.order.split(network.minibatch_size):
            a = self.advantages[inds]
            self.normalized[inds] = (a - a.mean()) / (a.std() + 1e-8)

    def params(self):
        return {name: p for name, p in self.agent.named_parameters() if not name.startswith("critic")}

    def chunks(self, n):
        return torch.arange(n).split(self.network.chunk_size or n)

    def logprob(self, inds):
        return self.agent(self.obs[inds], self.actions[inds])

    def losses(self, inds):
        """At the policy that collected the round every ratio is 1, and the PPO policy loss has the gradient of this one."""
        return -self.normalized[inds] * self.logprob(inds)

    def target(self, inds):
        return (self.advantages[inds] * self.logprob(inds)).sum() / len(self.advantages)


# ---- the methods: each takes a round, the direction (gradient of the target) if it needs one, and how many records to take


def forward_backward(r, direction, n):
    total = None
    for inds in r.chunks(n):
        grads = torch.autograd.grad(r.losses(inds).sum() / n, list(r.params().values()))
        total = grads if total is None else [t.add_(g) for t, g in zip(total, grads)]
    return total


def target(r, direction, n):
    return iif_core.target_gradient(r.agent, r.target, n, chunk_size=r.network.chunk_size)


def forward_mode(r, direction, n):
    return iif_core.influence_scores(r.agent, r.losses, direction, n, chunk_size=r.network.chunk_size)


def return_influence(r, direction, n):
    sizes = dict(minibatch_size=r.network.minibatch_size, chunk_size=r.network.chunk_size)
    return iif_core.return_influence(r.agent, r.logprob, r.advantages[:n], inds=r.order[r.order < n], **sizes)


def double_backward(r, direction, n):
    closure, params = iif_core._Closure(r.agent, r.losses), dict(r.agent.named_parameters())
    return torch.cat([-iif_core._double_backward(closure, params, direction, inds) for inds in r.chunks(n)])


def loop(r, direction, n):
    """One backward pass a record."""
    params = r.params()
    grads = (torch.autograd.grad(r.losses(inds).sum(), list(params.values())) for inds in torch.arange(n).split(1))
    return -torch.stack([sum((g * direction[name]).sum() for name, g in zip(params, gs)) for gs in grads])


def per_record_grads(r, direction, n):
    """torch.func: the gradients of all records of a chunk at once."""
    params = {name: p.detach() for name, p in r.params().items()}

    def loss(p, obs, action, advantage):
        return -advantage * functional_call(r.agent, p, (obs[None], action[None]))[0]

    scores = []
    for i in r.chunks(n):
        grads = vmap(grad(loss), (None, 0, 0, 0))(params, r.obs[i], r.actions[i], r.normalized[i])
        scores.append(-sum(g.flatten(1) @ direction[name].flatten() for name, g in grads.items()))
    return torch.cat(scores)


def hooked(r, loss, inds):
    """Backward pass of loss(inds) with hooks: layer name, input [n, in, L], gradient of the output [n, out, L]; L = places."""
    inputs, grads, handles = {}, {}, []

    def hook(name):
        def forward(module, args, out):
            x = args[0].detach()
            conv = isinstance(module, nn.Conv2d)
            inputs[name] = F.unfold(x, module.kernel_size, stride=module.stride) if conv else x[:, :, None]
            out.register_hook(lambda g: grads.update({name: g.flatten(2) if conv else g[:, :, None]}))

        return forward

    for name, module in r.agent.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and not name.startswith("critic"):
            handles.append(module.register_forward_hook(hook(name)))
    try:
        torch.autograd.grad(loss(inds).sum(), list(r.params().values()))
    finally:
        for handle in handles:
            handle.remove()
    return [(name, inputs[name], grads[name]) for name in inputs]


def ghost_target(r, direction, n):
    total = {}
    for inds in r.chunks(n):
        for name, x, g in hooked(r, r.target, inds):
            for key, value in ((f"{name}.weight", torch.einsum("nol,nil->oi", g, x)), (f"{name}.bias", g.sum((0, 2)))):
                total[key] = total[key] + value if key in total else value
    return total


def ghost(r, direction, n):
    """The weight gradient of each record, [n, out, in], layer by layer."""
    scores = []
    for inds in r.chunks(n):
        s = torch.zeros(len(inds))
        for name, x, g in hooked(r, r.losses, inds):
            weight_grads = torch.bmm(g, x.mT)
            s -= (weight_grads * direction[f"{name}.weight"].flatten(1)).sum((1, 2)) + g.sum(2) @ direction[f"{name}.bias"]
        scores.append(s)
    return torch.cat(scores)


def last_layer(r, direction, n):
    """Target and scores of the last layer's parameters alone: one forward pass, the rest is known in closed form."""
    head, hidden, slopes = r.agent.actor[-1], [], []
    with torch.no_grad():
        for inds in r.chunks(n):
            hidden.append(r.agent.actor[:-1](r.agent.features(r.obs[inds])))
            slopes.append(F.one_hot(r.actions[inds], head.out_features) - head(hidden[-1]).softmax(-1))
        h, d = torch.cat(hidden), torch.cat(slopes)  # [n, in]; [n, out], the gradient of log pi with respect to the logits
        weighted = r.advantages[:n, None] / len(r.advantages) * d
        return r.normalized[:n] * (d * (h @ (weighted.T @ h).T + weighted.sum(0))).sum(1)


PARTS = dict(yardstick=forward_backward, target=target, forward=forward_mode, return_influence=return_influence, loop=loop)
PARTS |= dict(double=double_backward, vmap=per_record_grads, ghost_target=ghost_target, ghost=ghost, last=last_layer)
METHODS = {  # a row of the tables: what it shows, and the parts that it runs one after the other
    "yardstick": ("forward+backward of the policy loss", ["yardstick"]),
    "target": ("gradient of the target alone", ["target"]),
    "forward": ("scores alone, direction given", ["forward"]),
    "return_influence": ("**target and scores: `return_influence`**", ["return_influence"]),
    "double": ("double backward", ["target", "double"]),
    "loop": ("autograd loop over single records", ["target", "loop"]),
    "vmap": ("`torch.func` vmap(grad), then dot", ["target", "vmap"]),
    "ghost": ("hooks, per-record weight gradients (the paper's code)", ["ghost_target", "ghost"]),
    "last": ("gradient of the last layer only", ["last"]),
}


# ---- the measurements


def records(network, part):
    return network.subset.get(part, network.num_records)


def run(r, method, direction, limit=None):
    """All parts of a method in turn; returns what the last one does: the scores."""
    for part in METHODS[method][1]:
        result = PARTS[part](r, direction, limit or records(r.network, part))
        direction = result if "target" in part else direction
    return result


def peak_memory(network, method):
    """MB that a call adds at its peak to what the process holds before."""
    r = Round(network)
    direction = target(r, None, 2)
    run(r, method, direction, limit=2)  # what a first call loads
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark down to what is held now
    before = memory_status("VmRSS")
    result = run(r, method, direction)  # noqa: F841  (held, as a caller would)
    return (memory_status("VmHWM") - before) / 1024


def memory_status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))


def peak_memory_of_fresh_process(name, method):
    # blocks above 64 KB go back to the system when freed, so that the process holds what is alive and no more
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "benchmarks.scoring", "--memory", f"{name}:{method}"]
    return float(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def times(r, rounds):
    """{part: [rounds, 2]}, seconds of CPU and of wall clock for the whole round (scaled up, where a part takes fewer records)."""
    direction = target(r, None, r.network.num_records)

    def measure(part):
        start = np.array([time.process_time(), time.perf_counter()])
        PARTS[part](r, direction, records(r.network, part))
        return np.array([time.process_time(), time.perf_counter()]) - start

    for fn in PARTS.values():
        fn(r, direction, 2)  # what a first call loads
    repeats = {part: int(np.clip(0.1 / measure(part)[0], 1, 10)) for part in PARTS}  # in a round, of what is quick
    result = {part: np.zeros((rounds, 2)) for part in PARTS}
    for i in range(rounds):
        for turn in range(10):
            for part in PARTS:
                if turn < repeats[part]:
                    result[part][i] += measure(part) / repeats[part] * r.network.num_records / records(r.network, part)
    return result


def accuracy(scores, truth, reference):
    """truth: the first scores, by the loop in float64; reference: all of them, by return_influence in float64."""
    reference = reference[: len(scores)]
    return {
        "max_relative_error": ((scores[: len(truth)] - truth).abs().max() / truth.abs().max()).item(),
        "spearman": np.corrcoef(iif_core._ranks(scores.numpy()), iif_core._ranks(reference.numpy()))[0, 1],
        "sign_flips": ((scores < 0) != (reference < 0)).double().mean().item(),
    }


def measure(name, rounds):
    """The rows of one network."""
    network = NETWORKS[name]
    r, exact = Round(network), Round(network, torch.float64)
    truth = loop(exact, target(exact, None, network.num_records), TRUTH_RECORDS)
    reference = return_influence(exact, None, network.num_records)
    direction = target(r, None, network.num_records)
    seconds = times(r, rounds)
    memory = {method: peak_memory_of_fresh_process(name, method) for method in METHODS}
    for method, (label, parts) in METHODS.items():
        ratios = sum(seconds[part] for part in parts) / seconds["yardstick"]  # [rounds, 2]
        row = {"network": network.title, "method": label, "records": min(records(network, part) for part in parts)}
        row |= {"round_records": network.num_records, "chunk": network.chunk_size}
        row |= {f"time_ratio_{f.__name__}": f(ratios[:, 0]) for f in (np.median, np.min, np.max)}
        row |= {"wall_ratio_median": np.median(ratios[:, 1]), "cpu_ms": 1e3 * np.median(sum(seconds[p] for p in parts)[:, 0])}
        row |= {"memory_mb": memory[method], "memory_ratio": memory[method] / memory["yardstick"]}
        scores = run(r, method, direction)
        row |= accuracy(scores, truth, reference) if isinstance(scores, torch.Tensor) else {}
        yield row | {"rounds": rounds, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}


# ---- the tables


def table(csv_path):
    """The CSV as markdown, one table a network."""
    lines = []
    with open(csv_path, newline="") as file:
        for row in csv.DictReader(file):
            if row["method"] == METHODS["yardstick"][0]:
                chunks = f"in chunks of {row['chunk']}" if row["chunk"] else "in one piece"
                lines += [
                    "",
                    f"**{row['network']}**, {row['records']} records {chunks}; 1.00 = {float(row['cpu_ms']):.1f} ms",
                    "",
                ]
                lines += ["| method | time | memory, MB | memory | max. relative error | Spearman | wrong signs |"]
                lines += ["|---|---|---|---|---|---|---|"]
            few = "" if row["records"] == row["round_records"] else f" ({row['records']} records)"
            cells = [row["method"] + few] + [f"{float(row[f]):.{d}f}" for f, d in NUMBERS.items()]
            if row["spearman"]:
                error, flips = float(row["max_relative_error"]), float(row["sign_flips"])
                cells += [f"{error:.0e}", f"{float(row['spearman']):.4f}", f"{flips:.2%}" if flips else "0"]
            lines.append("| " + " | ".join(cells + [""] * (7 - len(cells))) + " |")
    return "\n".join(lines[1:])


NUMBERS = {"time_ratio_median": 2, "memory_mb": 1, "memory_ratio": 2}


if __name__ == "__main__":
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    if args.memory:
        name, method = args.memory.split(":")
        print(peak_memory(NETWORKS[name], method))
    elif args.table:
        print(table(args.output))
    else:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        rows = []
        for name in NETWORKS:
            rows += measure(name, args.rounds)
            with open(
                args.output, "w", newline=""
            ) as file:  # after each network, so that a run that is killed leaves its part
                writer = csv.DictWriter(file, fieldnames=list(max(rows, key=len)))
                writer.writeheader()
                writer.writerows(rows)
        print(table(args.output))
