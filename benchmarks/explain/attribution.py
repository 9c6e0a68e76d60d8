"""How true each attribution method is: `python -m benchmarks.explain.attribution RUN [RUN ...] --round 5`.

The linear datamodeling score (Park et al. 2023, TRAK): over random halves of a saved round, the Spearman correlation between
the sum of the scores of what is left and what the target really is at the end of the round's update without the others. The
update

    fixed          in the minibatches of the whole round, with the advantages normalised over all of each: the others have the
                   weight zero. This is the function of which SGD-influence is the derivative.
    renormalised   as a filter does it: the script's own update of the half, with minibatches and normalisation of its own.

and the target is f_return or PPO's clipped surrogate, on the round itself, on a held-out round of the same policy theta(k),
and (--episodes) the mean return of fresh episodes, the same seeds for every half; on FrozenLake the exact expectation.
`reliability` is the Spearman correlation of that return over every other episode with that over the rest: near zero, the
return cannot tell the halves apart, and nor can any score. Writes attribution.csv, one row a method and round, and
attribution.png, in the folder of --out (default: explain/ in the first run); rounds that are in the CSV are not done again.

With --turns it times instead: in each turn the round's own update and every method once, as called, with nothing shared, in
seconds of this process on the CPU (what else runs on the machine counts little). Writes seconds.csv: medians over the turns,
and of the ratio to the update of the same turn.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

from benchmarks.explain import methods, snapshots
from benchmarks.explain.snapshots import save_figure, spearman
from benchmarks.files import progress, pyplot, read_csv, say, table, write_csv
from benchmarks.reproduce import metrics
from iif_core import target_gradient

TRUTHS = (
    "fixed f_return round",
    "fixed f_return held-out",
    "fixed surrogate round",
    "fixed surrogate held-out",
    "renormalised f_return round",
    "renormalised f_return held-out",
    "renormalised surrogate round",
    "renormalised surrogate held-out",
    "renormalised return",
)
SHOWN = {  # those in the tables
    "fixed f_return round": "fixed: f_return, round",
    "fixed f_return held-out": "f_return, held-out",
    "fixed surrogate held-out": "surrogate, held-out",
    "renormalised f_return round": "renormalised: f_return, round",
    "renormalised f_return held-out": "f_return, held-out",
    "renormalised surrogate held-out": "surrogate, held-out",
    "renormalised return": "return",
}
COLUMNS = ("run", "env", "seed", "round", "halves", "episodes", "agreement", "reliability", "method", *TRUTHS)
COSTS = ("run", "env", "round", "turns", "method", "seconds", "updates")


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """folders of runs"""
    round: tuple[int, ...] = ()
    """saved rounds to do (default: all)"""
    halves: int = 50
    """random halves of the round to train on"""
    episodes: int = 0
    """estimate the return after each half's update by so many fresh episodes (0: not at all); on FrozenLake it is exact"""
    turns: int = 0
    """time the methods in so many turns, instead of asking how true they are"""
    any_version: bool = False
    """open snapshots also where the environment's packages have other versions"""
    out: str | None = None
    """the folder to write to (default: explain/ in the first run)"""
    plot: bool = False
    """only draw the picture and print the tables, from the CSV in the folder to write to"""


def another_round(snapshot, agent, number):
    """A flat round of theta(k) from fresh episodes, for number = 0, 1, ...; the snapshot's records have no part in it."""
    args, script = snapshot.args, snapshot.script
    seed = script.derive_seed(args.seed, 7, snapshot.round, number + 1)
    envs = script.make_envs(args, None)
    if hasattr(script, "freeze_statistics"):
        script.freeze_statistics(envs.envs, snapshot.envs, args)
    obs, _ = envs.reset(seed=seed % 2**31)
    batch, *_ = script.rollout(agent, envs, obs, args.num_steps, np.random.default_rng(seed))
    envs.close()
    return {name: x.flatten(0, 1) for name, x in script.gae(batch, args.gamma, args.gae_lambda).items()}


def exact_return(snapshot, agent):
    """The expected return of the sampling policy where the environment knows its transitions (FrozenLake); elsewhere None."""
    env = snapshot.envs.envs[0]
    transitions = getattr(env.unwrapped, "P", None)
    if transitions is None:
        return None
    policy = agent.actor(torch.eye(len(transitions))).softmax(-1).double().numpy()
    goes_on, reward = np.zeros((len(transitions), len(transitions))), np.zeros(len(transitions))
    for s, actions in transitions.items():
        for a, outcomes in actions.items():
            for p, to, r, terminated in outcomes:
                reward[s] += policy[s, a] * p * r
                goes_on[s, to] += policy[s, a] * p * (not terminated)
    at, total = np.array(env.unwrapped.initial_state_distrib), 0.0
    for _ in range(env.spec.max_episode_steps):
        total, at = total + at @ reward, at @ goes_on
    return total


def table_of_methods(snapshot, batch, fresh, seed):
    """{name: a function without arguments that returns scores [N]} of a round; `fresh` is another round of the policy."""
    args, agent, n = snapshot.args, snapshot.agent(), len(batch["advantages"])
    _, optimizer, generator = snapshot.start()
    whole = torch.arange(n)
    steps = [mb for _ in range(args.update_epochs) for mb in snapshot.script.minibatches(whole, args, generator)]
    shuffle = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    normalized = batch["advantages"]
    if args.norm_adv:
        normalized = methods.normalize(normalized, shuffle.split(args.minibatch_size))
    losses = methods.policy_losses(agent, batch, normalized)
    target, clipped = methods.f_return(batch), methods.surrogate(batch, args.clip_coef)

    def logprob(inds):
        return agent.get_logprob(batch["obs"][inds], batch["actions"][inds])

    def share(inds):
        return (batch["advantages"][inds] * logprob(inds)).mean()

    def update():
        theta, optimizer, _ = snapshot.start()
        return methods.Update(theta, optimizer, batch, steps, args)

    found = {
        "TracIn": lambda: methods.tracin(agent, losses, target, n),
        "TracIn, cross-fitted": lambda: methods.cross_fitted(agent, losses, share, n),
        "TracIn, fresh round": lambda: methods.tracin(agent, losses, methods.f_return(fresh), n),
        "TracIn, last layer": lambda: methods.last_layer(agent, losses, target, n),
        "TracIn along the update": lambda: methods.tracin_along(update(), target, n),
        "influence functions": lambda: methods.influence_functions(agent, losses, target, n, logprob),
        "SGD-influence": lambda: methods.sgd_influence(update(), target, n),
        "SGD-influence, surrogate": lambda: methods.sgd_influence(update(), clipped, n),
        "SGD-influence, fresh round": lambda: methods.sgd_influence(update(), methods.surrogate(fresh, args.clip_coef), n),
        "advantage": lambda: batch["advantages"].clone(),
        "|advantage|": lambda: batch["advantages"].abs(),
        "chance": lambda: torch.rand(n, generator=torch.Generator().manual_seed(seed + 1)),
    }
    if args.optimizer == "adam":
        theta, optimizer, _ = snapshot.start()
        scaled = methods.policy_losses(theta, batch, normalized)
        found["TracIn, Adam's scale"] = lambda: methods.adam_scaled(theta, scaled, target, n, optimizer)
    return found, update()


@torch.no_grad()
def truths(snapshot, batch, held_out, update, weights, episodes):
    """{column of TRUTHS: what the target is after the update over each half [K]}, and the reliability of the return."""
    args, script, k = snapshot.args, snapshot.script, len(weights)
    targets = {}
    for where, records in (("round", batch), ("held-out", held_out)):
        targets[f"f_return {where}"] = methods.f_return(records)
        targets[f"surrogate {where}"] = methods.surrogate(records, args.clip_coef)
    found = {column: [] for column in TRUTHS}
    ends = update.ends(weights)
    for i in progress(range(k), "half"):
        agent = update.at({name: x[i] for name, x in ends.items()})
        for name, target in targets.items():
            found[f"fixed {name}"].append(target(agent).item())
    envs = snapshot.eval_envs(episodes) if episodes else []
    returns = []
    for i in progress(range(k), "half"):
        with torch.enable_grad():
            agent = snapshot.update(weights[i].nonzero().flatten())
        for name, target in targets.items():
            found[f"renormalised {name}"].append(target(agent).item())
        exact = exact_return(snapshot, agent)
        if exact is not None:
            found["renormalised return"].append(exact)
        elif episodes:
            returns.append(script.evaluate(agent, envs, episodes, script.derive_seed(args.seed, 6, snapshot.round)))
    if found["renormalised return"]:
        return found, 1.0
    if not episodes:
        return found | {"renormalised return": None}, ""
    returns = np.array(returns)  # [K, episodes]
    return found | {"renormalised return": returns.mean(1)}, spearman(returns[:, ::2].mean(1), returns[:, 1::2].mean(1))


def agreement(agent, batch):
    """Cosine of f_return's gradients over the first and the second half of the round in time."""
    halves = [{name: x[part] for name, x in batch.items()} for part in torch.arange(len(batch["obs"])).tensor_split(2)]
    a, b = (
        torch.cat([v.flatten() for v in target_gradient(agent, lambda: methods.f_return(half)(agent)).values()])
        for half in halves
    )
    return torch.nn.functional.cosine_similarity(a, b, dim=0).item()


def round_and_others(snapshot):
    """The round and two others of its policy, of which the first is for the methods and the second is held out."""
    columns = ("obs", "actions", "logprobs", "advantages", "returns", "values")
    found = (snapshot.batch, *(another_round(snapshot, snapshot.agent(), i) for i in range(2)))
    return [{name: batch[name] for name in columns} for batch in found]


def environment(args):
    return args.env_id + (", Adam" if args.optimizer == "adam" else "")


def costs(run, snapshot, turns):
    """Rows of seconds.csv: what each method takes, all of them and the update taking turns."""
    batch, fresh, _ = round_and_others(snapshot)
    ways, _ = table_of_methods(snapshot, batch, fresh, 0)
    ways = {"the update": lambda: snapshot.update(torch.arange(len(batch["obs"])))} | ways
    seconds = {name: [] for name in ways}
    for _ in progress(range(turns), "turn"):
        for name, method in ways.items():
            before = time.process_time()
            method()
            seconds[name].append(time.process_time() - before)
    for name, mine in seconds.items():
        ratio = np.median(np.array(mine) / np.array(seconds["the update"]))
        about = (Path(run).name, environment(snapshot.args), snapshot.round, turns, name)
        yield [*map(str, about), f"{np.median(mine):.3g}", f"{ratio:.3g}"]


def attribute(run, snapshot, halves, episodes):
    """Rows of one round, one a method."""
    args, agent, derive_seed = snapshot.args, snapshot.agent(), snapshot.script.derive_seed
    batch, fresh, held_out = round_and_others(snapshot)
    seed, n = derive_seed(args.seed, 8, snapshot.round + 1), len(batch["advantages"])
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(halves, n)
    for row in weights:
        row[torch.randperm(n, generator=generator)[: n // 2]] = 1
    ways, update = table_of_methods(snapshot, batch, fresh, seed)
    truth, reliability = truths(snapshot, batch, held_out, update, weights, episodes)
    about = (
        Path(run).name,
        environment(args),
        args.seed,
        snapshot.round,
        halves,
        episodes,
        agreement(agent, batch),
        reliability,
    )
    for name, method in progress(ways.items(), "method"):
        sums = (weights.double() @ method().detach().double()).numpy()
        yield (*about, name, *("" if truth[c] is None else spearman(sums, truth[c]) for c in TRUTHS))


def interval(x):
    """Mean and half the width of its 95% t interval."""
    mean, _, half = metrics.t_interval(x)
    return mean, half


def environments(rows):
    """{name: its rows}."""
    return {env: [row for row in rows if row["env"] == env] for env in dict.fromkeys(row["env"] for row in rows)}


def values(rows, method, column):
    return [float(row[column]) for row in rows if row["method"] == method and row[column] not in ("", "nan")]


def against_tracin(rows):
    """Markdown: how much truer than TracIn each method is. Differences in the same round; their mean in each run, as rounds of
    a run are not independent; over the runs of all environments, mean and 95% interval."""
    shown = ("renormalised f_return round", "renormalised f_return held-out", "renormalised surrogate held-out")
    shown += ("renormalised return",)
    tracin, lines = {(row["run"], row["round"]): row for row in rows if row["method"] == "TracIn"}, []
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for column in shown:
            found = {}
            for row in rows:
                other = tracin[row["run"], row["round"]]
                if row["method"] == method and not {row[column], other[column]} & {"", "nan"}:
                    found.setdefault(row["run"], []).append(float(row[column]) - float(other[column]))
            if len(found) < 2:
                cells.append(f"– ({len(found)})")
                continue
            mean, half = interval([np.mean(x) for x in found.values()])
            cells.append(f"{mean:+.2f} ± {half:.2f} ({len(found)})")
        if method != "TracIn":
            lines.append([method.replace("|", "\\|"), *cells])
    header = ["method minus TracIn (runs)", "f_return, round", "f_return, held-out", "surrogate, held-out", "return"]
    return table(header, lines)


def tables(folder):
    """Markdown, from the CSVs: a table an environment, of means and 95% intervals over the rounds of all seeds; then one of the
    differences to TracIn over all, and what each method costs."""
    rows, text = read_csv(Path(folder) / "attribution.csv"), []
    for env, mine in environments(rows).items():
        pairs = sorted({(int(row["seed"]), int(row["round"])) for row in mine})
        shown = [c for c in SHOWN if any(row[c] for row in mine)]
        one = [row for row in mine if row["method"] == "TracIn"]
        seeds = [f"{s} (rounds {', '.join(str(k) for of, k in pairs if of == s)})" for s in sorted({s for s, _ in pairs})]
        about = f"{env}: seeds {', '.join(seeds)}; {mine[0]['halves']} halves."
        about += f" Agreement of the rounds' halves {np.mean([float(row['agreement']) for row in one]):.2f}"
        reliable = [float(row["reliability"]) for row in one if row["reliability"] not in ("", "nan")]
        if reliable:
            episodes = int(one[0]["episodes"])
            about += (
                f"; reliability of the return over {episodes} episodes {np.mean(reliable):.2f}"
                if episodes
                else "; exact return"
            )
        lines = []
        for method in dict.fromkeys(row["method"] for row in mine):
            cells = []
            for column in shown:
                mean, half = interval(values(mine, method, column)) if values(mine, method, column) else (np.nan, np.nan)
                cells.append(f"{mean:.2f}" + (f" ± {half:.2f}" if half == half else ""))
            lines.append([method.replace("|", "\\|"), *cells])
        text.append(f"**{about}.**\n\n" + table(["method", *(SHOWN[c] for c in shown)], lines))
    text.append("**Truer than TracIn?** All environments, the script's own update.\n\n" + against_tracin(rows))
    spent = read_csv(Path(folder) / "seconds.csv")
    for env, mine in environments(spent).items():
        about = f"**What each costs, {env}, round {mine[0]['round']}, {mine[0]['turns']} turns.**"
        lines = [[row["method"].replace("|", "\\|"), row["seconds"], row["updates"]] for row in mine]
        text.append(f"{about}\n\n" + table(["method", "CPU seconds", "in updates"], lines))
    one = [row for row in rows if row["method"] == "TracIn"]
    foretold = spearman(*([float(row[c]) for row in one] for c in ("agreement", "renormalised f_return held-out")))
    text.append(
        f"Does the agreement of a round's halves foretell TracIn's score on the held-out round? Spearman {foretold:.2f}"
    )
    text[-1] += f" over the {len(one)} rounds."
    return "\n\n".join(text)


def plot(folder):
    plt, rows = pyplot(), read_csv(Path(folder) / "attribution.csv")
    envs = environments(rows)
    fig, axes = plt.subplots(1, len(envs), figsize=(3.4 + 3.1 * len(envs), 4.2), dpi=110, sharey=True, squeeze=False)
    shown = (
        ("renormalised f_return round", "f_return of the round itself", "tab:blue"),
        ("renormalised f_return held-out", "f_return of a held-out round", "tab:orange"),
        ("renormalised return", "return of fresh episodes", "tab:green"),
    )
    for ax, (env, mine) in zip(axes[0], envs.items()):
        names = list(dict.fromkeys(row["method"] for row in mine))
        for j, (column, label, colour) in enumerate(shown):
            for i, name in enumerate(names):
                x = values(mine, name, column)
                if x:
                    ax.scatter(x, [i + 0.22 * (j - 1)] * len(x), s=7, color=colour, alpha=0.45, lw=0)
                    ax.scatter(
                        [np.mean(x)], [i + 0.22 * (j - 1)], s=42, marker="|", color=colour, label=label if i == 0 else None
                    )
        ax.axvline(0, color="black", lw=0.7)
        ax.set(yticks=range(len(names)), yticklabels=names, xlim=(-1.05, 1.05), title=env.rpartition(":")[2])
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].invert_yaxis()
    fig.supxlabel("linear datamodeling score, dots: rounds; bars: means", fontsize=9)
    handles, names = axes[0][0].get_legend_handles_labels()
    fig.legend(handles, names, frameon=False, fontsize=8, ncol=3, loc="upper center")
    fig.tight_layout(rect=(0, 0, 1, 0.95))
    save_figure(fig, Path(folder) / "attribution.png")
    plt.close(fig)


def main(args):
    todo = {} if args.plot else {run: snapshots.chosen(run, args.round) for run in args.runs}
    folder = snapshots.folder(args.runs[0] if args.runs else ".", args.out)
    if args.turns:
        rows = read_csv(folder / "seconds.csv")
        for run in todo:
            for k in todo[run]:
                new = list(costs(run, snapshots.load(run, k, args.any_version), args.turns))
                kept = [list(row.values()) for row in rows if (row["run"], row["round"]) != (new[0][0], str(k))]
                write_csv(folder / "seconds.csv", COSTS, kept + new)
                rows = read_csv(folder / "seconds.csv")
                print(table(list(COSTS), new), flush=True)
        return
    path = folder / "attribution.csv"
    rows = read_csv(path)
    if args.plot and not rows:
        sys.exit(f"--plot: there is no {path}")
    for run in todo:
        for k in progress(todo[run], "round"):
            how = [Path(run).name, str(k), str(args.halves), str(args.episodes)]
            mine = [row for row in rows if [row["run"], row["round"]] == how[:2]]
            if mine and [mine[0][c] for c in ("run", "round", "halves", "episodes")] == how:
                continue
            new = list(attribute(run, snapshots.load(run, k, args.any_version), args.halves, args.episodes))
            rows = [row for row in rows if row not in mine]
            rows += [{c: f"{x:.4g}" if isinstance(x, float) else str(x) for c, x in zip(COLUMNS, row)} for row in new]
            write_csv(path, COLUMNS, [[row[c] for c in COLUMNS] for row in rows])
            say(f"{run}, round {k}: " + ", ".join(f"{r[8]} {r[9]:.2f} {r[10]:.2f}" for r in new))
    print(tables(folder))
    plot(folder)


if __name__ == "__main__":
    args = tyro.cli(Args)
    if not args.runs and not (args.plot and args.out):
        sys.exit("which run? give the folder of one or more")
    if args.halves < 3:
        sys.exit(f"--halves must be at least 3, got {args.halves}")
    if args.turns < 0:
        sys.exit(f"--turns must be 0 (none) or more, got {args.turns}")
    if args.episodes == 1 or args.episodes < 0:
        sys.exit(f"--episodes must be 0 (no return) or at least 2, got {args.episodes}")
    main(args)
