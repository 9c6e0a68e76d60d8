"""How an action at a state came about: `python -m benchmarks.explain.behaviour RUN --state record:120 --action 1`.

For every saved round of a run (`--snapshot-rounds all --save-model`): the influence of its records on log pi(a|s), as the sum
over the optimizer steps of the round's update, which is done once more for it; pi(a|s); and the roughness of the influence
over the graph of similar states. This is the paper's section 4.2 (figures 4, 10), which sees three phases: records of the
same action with positive advantage (or another, with a negative) help wherever they are, and roughness is high; then only
those in similar states, and it falls sharply; then the scores are about zero.

The second picture shows the first two phases in the hundred records of the highest influence: the share of them with this
action and A > 0 or another and A < 0, and the median distance of their states to this one, in that of all the round's records
(distances in the last hidden layer of the policy at the end of training).

`--find` lists pairs of a state and an action whose probability rises over the rounds. Writes to RUN/explain/.
"""

import sys
import zlib
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro

from benchmarks import files
from benchmarks.explain import snapshots
from benchmarks.explain.snapshots import save_figure, write_csv
from iif_core import action_influence


@dataclass
class Args:
    run: tyro.conf.Positional[str]
    """the folder of a run"""
    state: str | None = None
    """the observation: numbers with commas between them (of a discrete space: its number), or record:K, that of record K"""
    action: str | None = None
    """the action, counted from 0, or numbers with commas between them (default: that of record K)"""
    round: int | None = None
    """which round record:K and --find mean (default: the last saved one)"""
    rounds: tuple[int, ...] = ()
    """saved rounds to do (default: all)"""
    find: bool = False
    """list pairs of a state and an action whose probability rises over the rounds, and stop"""
    neighbours: int = 50
    """u: edges of the roughness graph from each record to so many nearest ones (the paper: 20 to 100)"""
    any_version: bool = False
    """open snapshots also where the environment's packages have other versions"""
    out: str | None = None
    """the folder to write to (default: RUN/explain/)"""


# ---- the state and the action


def numbers(flag, text, dtype):
    try:
        return np.array([float(x) for x in text.split(",")]).astype(dtype)
    except ValueError:
        sys.exit(f"{flag} {text}: give numbers with commas between them" + (", or record:K" * (flag == "--state")))


def parse_state(text, snapshot):
    """The observation [*shape] that --state names, and its record's action or None; refused outside the observation space."""
    batch, space = snapshot.batch, snapshot.envs.single_observation_space
    kind, _, k = text.partition(":")
    if kind == "record":
        if not k.isdigit() or int(k) >= len(batch["obs"]):
            sys.exit(f"--state {text}: round {snapshot.round} has the records 0 to {len(batch['obs']) - 1}")
        return batch["obs"][int(k)], batch["actions"][int(k)]
    values = numbers("--state", text, np.float64)
    raw = snapshot.envs.envs[0].unwrapped.observation_space
    if isinstance(raw, gym.spaces.Discrete) and len(values) == 1:
        if values[0] % 1 or not raw.contains(int(values[0])):
            sys.exit(f"--state {text}: outside the observation space {raw}")
        values = gym.spaces.flatten(raw, int(values[0]))
    state = np.asarray(values)
    if state.size != np.prod(space.shape) or not space.contains(state.reshape(space.shape).astype(space.dtype)):
        sys.exit(f"--state {text}: outside the observation space {space}")
    return torch.from_numpy(state.reshape(space.shape)).to(batch["obs"].dtype), None


def parse_action(text, default, snapshot):
    space, dtype = snapshot.envs.single_action_space, snapshot.batch["actions"].dtype
    if text is None:
        if default is None:
            sys.exit(f"--action is needed: one of {space}, counted from 0")
        return default
    if isinstance(space, gym.spaces.Discrete):
        if not text.isdigit() or int(text) >= space.n:
            sys.exit(f"--action {text}: the actions are 0 to {space.n - 1}")
        return torch.tensor(int(text))
    values = numbers("--action", text, np.float32)
    if values.shape != space.shape or not np.isfinite(values).all():
        sys.exit(f"--action {text}: an action is {space.shape[0]} numbers")
    return torch.from_numpy(values).to(dtype)


# ---- influence, probability, roughness


def round_influence(snapshot, state, action):
    """Influence [batch_size] of a round's records on log pi(action|state), over its whole update (TracIn; paper, section 3.1).

    The sum, over the optimizer steps of the round, of < grad log pi(a|s), grad L_i > at the parameters before that step, L_i
    the (to be maximised) clipped policy loss of the records in its minibatch, advantages normalised in it. Records that were
    not trained on have none.
    """
    args, batch = snapshot.args, snapshot.batch
    scores = torch.zeros(args.batch_size)

    def on_step(agent, inds):
        obs, actions, old, advantages = (batch[name][inds] for name in ("obs", "actions", "logprobs", "advantages"))
        if args.norm_adv and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        def losses(i):
            ratio = (agent.get_logprob(obs[i], actions[i]) - old[i]).exp()
            return torch.max(-advantages[i] * ratio, -advantages[i] * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef))

        def logprob():
            return agent.get_logprob(state[None], action[None]).squeeze(0)

        scores.index_add_(0, inds, action_influence(agent, logprob, losses, len(inds), chunk_size=256))

    snapshot.update(snapshot.selection, on_step)
    return scores


def roughness(influence, embeddings, neighbours):
    """How much the positive influences differ between similar states (paper, section 4.2).

        sum over edges of w_ij (I_i - I_j)^2 / sum over edges of w_ij,    w_ij = exp(-|e_i - e_j|^2 / sigma^2)

    influence: [n], the positive ones, here divided by their largest; embeddings: [n, width]; sigma: the median distance of all
    pairs; edges: pairs of which one is among the `neighbours` nearest of the other. NaN for fewer than two.
    """
    n = len(influence)
    if n < 2:
        return float("nan")
    influence, embeddings = influence.double() / influence.max(), embeddings.double()
    distance = torch.cdist(embeddings, embeddings, compute_mode="donot_use_mm_for_euclid_dist")
    i, j = torch.triu_indices(n, n, offset=1)
    sigma = max(float(np.median(distance[i, j])), 1e-12)  # zero where most states are one: then only equal ones are similar
    nearest = distance.clone().fill_diagonal_(float("inf"))
    edges = torch.zeros(n, n, dtype=torch.bool)
    edges.scatter_(1, nearest.topk(min(neighbours, n - 1), largest=False).indices, True)
    edges = (edges | edges.T)[i, j]
    weights = torch.exp(-((distance[i, j] / sigma) ** 2)) * edges
    return float((weights * (influence[i] - influence[j]) ** 2).sum() / weights.sum())


@torch.no_grad()
def probabilities(agent, obs, actions):
    """pi(a|s) [n]; the density where actions are continuous."""
    return agent.get_logprob(obs, actions).exp()


# ---- the command


def find(args, saved, snapshot, out):
    """List pairs of the snapshot's round whose probability rises from each saved round to the next, the highest rise first."""
    obs, actions = snapshot.batch["obs"], snapshot.batch["actions"]
    agents = [snapshots.load(args.run, k, args.any_version).agent() for k in files.progress(saved, "round")]
    p = torch.stack([probabilities(agent, obs, actions) for agent in (*agents, snapshots.final_agent(args.run, snapshot))])
    falls, rise = (p.diff(dim=0) < 0).sum(0), p[-1] - p[0]
    pairs = {}  # identical ones once
    for r in np.lexsort((-rise.numpy(), falls.numpy())).tolist():
        if rise[r] > 0:
            pairs.setdefault((obs[r].numpy().tobytes(), actions[r].numpy().tobytes()), r)
    rows = []
    for r in list(pairs.values())[:20]:
        action = " ".join(f"{x:.4g}" for x in actions[r].reshape(-1).tolist())
        rows.append([f"record:{r}", action, float(snapshot.batch["advantages"][r]), int(falls[r]), *p[:, r].tolist()])
        print(
            f"--round {snapshot.round} --state record:{r} (action {action}): " + " ".join(f"{x:.3f}" for x in p[:, r].tolist())
        )
    columns = ["state", "action", "advantage", "falls", *(f"p_{k}" for k in saved), "p_end"]
    write_csv(out / f"candidates_round_{snapshot.round:06d}.csv", columns, rows)


def plot(path, title, rows):
    plt = files.pyplot()
    columns = {name: np.array([row[i] for row in rows]) for i, name in enumerate(COLUMNS)}
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.6), dpi=110)
    for ax, left, right in ((axes[0], "probability", "roughness"), (axes[1], "association", "distance")):
        ax.plot(columns["round"], columns[left], "o-", color="black", ms=3)
        ax.set(xlabel="round", ylabel=LABELS[left])
        ax.xaxis.get_major_locator().set_params(integer=True)
        other = ax.twinx()
        other.plot(columns["round"], columns[right], "s-", color="tab:red", ms=3)
        other.set_ylabel(LABELS[right], color="tab:red")
        ax.spines["top"].set_visible(False)
        other.spines["top"].set_visible(False)
    fig.suptitle(title)
    fig.tight_layout()
    save_figure(fig, path)
    plt.close(fig)


COLUMNS = ("round", "probability", "roughness", "positive", "negative", "largest", "association", "distance")
LABELS = {
    "probability": "pi(a|s)",
    "roughness": "roughness",
    "association": "associated share of the top 100",
    "distance": "relative distance of the top 100",
}


def main(args):
    saved = snapshots.chosen(args.run, args.rounds)
    source = snapshots.load(args.run, saved[-1] if args.round is None else args.round, args.any_version)
    out = snapshots.folder(args.run, args.out)
    if args.find:
        return find(args, saved, source, out)
    state, action = parse_state(args.state, source)
    action = parse_action(args.action, action, source)
    final = snapshots.final_agent(args.run, source)
    here = snapshots.embed(final, state[None], action[None])
    rows, records = [], []
    for k in files.progress(saved, "round"):
        snapshot = snapshots.load(args.run, k, args.any_version)
        batch = snapshot.batch
        influence = round_influence(snapshot, state, action)
        embeddings = snapshots.embed(final, batch["obs"], batch["actions"])
        positive, top = influence > 0, influence.argsort(descending=True)[:100]
        distance = (embeddings - here).norm(dim=1)
        associated = float("nan")  # what another action is, discrete ones alone say
        if action.dim() == 0:
            associated = ((batch["actions"] == action) == (batch["advantages"] > 0))[top].double().mean()
        row = [k, float(probabilities(snapshot.agent(), state[None], action[None]))]
        row += [roughness(influence[positive], embeddings[positive], args.neighbours), int(positive.sum())]
        row += [int((influence < 0).sum()), float(influence.max()), float(associated)]
        usual = distance.median()  # about zero where most records share this state: then a ratio to it says nothing
        rows.append(
            row + [float(distance[top].median() / usual) if usual > 1e-5 * embeddings.norm(dim=1).mean() else float("nan")]
        )
        files.say(", ".join(f"{name} {x:.4g}" for name, x in zip(COLUMNS, rows[-1])))
        for r in [*top[:20].tolist(), *influence.argsort()[:20].tolist()]:
            taken = " ".join(f"{x:.4g}" for x in batch["actions"][r].reshape(-1).tolist())
            records.append([k, r, *map(float, (influence[r], batch["advantages"][r], distance[r])), taken])
    name = "_".join(["behaviour", str(args.state), *(["action", args.action] if args.action else [])])
    name = "".join(c if c.isalnum() or c in "_-." else "-" for c in name)
    name = name if len(name) < 80 else f"behaviour_state_{zlib.crc32(name.encode()):08x}"
    write_csv(out / f"{name}.csv", COLUMNS, rows)
    write_csv(out / f"{name}_records.csv", ("round", "record", "influence", "advantage", "distance", "action"), records)
    shown = " ".join(f"{x:.3g}" for x in action.reshape(-1).tolist())
    where = f"state of {args.state}, round {source.round}" if args.state.startswith("record") else f"state {args.state[:40]}"
    plot(out / f"{name}.png", f"{source.args.env_id}, seed {source.args.seed}: action {shown} at {where}", rows)


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.neighbours < 1:
        sys.exit(f"--neighbours must be at least 1, got {args.neighbours}")
    if (args.state is None) != args.find:
        sys.exit("which behaviour? give --state (and --action), or --find to list some")
    main(args)
