"""What dropping records in one round alone would have done: `python -m benchmarks.explain.intervene RUN [RUN ...]`.

For each saved round of each run (`--snapshot-rounds`), policies are trained from theta(k) with the script's own update, the
optimizer's state and the stream of shuffles that the round had: on the whole round, without the records of negative influence,
without as many random ones, and (not in the paper) on the whole round with the learning rate at which the policy moves as far
as without the negative ones: filtering also makes larger steps, and this tells the two apart. Each is evaluated over the same
seeds. Writes one row a policy (CSV, RUN/explain/interventions.csv; rounds that are in it are not done again) and box plots, over
runs, of the change in return against the whole round: the paper's section 4.3, figures 5 and 11. A second picture has these
changes against the agreement of the round (iif_core.return_influence): can a user know beforehand which rounds a filter helps?
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

from benchmarks import files
from benchmarks.explain import snapshots
from benchmarks.explain.snapshots import save_figure, write_csv
from iif_core import filter_bottom

ARMS = ("whole round", "filtered", "random", "as far")
COLOURS = ("", "tab:blue", "tab:gray", "tab:orange")
BANDS = ((-np.inf, 0.25), (0.25, 0.75), (0.75, np.inf))  # of agreement, in the table
COLUMNS = ("run", "env", "seed", "round", "arm", "return", "stderr", "records", "episodes", "kl", "lr_factor")
COLUMNS += ("agreement", "noise_scale")  # of the round, as the scripts log them


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """folders of runs; several seeds of one environment share a plot"""
    percent: float = 100.0
    """percentage of the records of negative influence to drop, the most negative first; another than 100 has files of its own"""
    episodes: int = 100
    """evaluate each policy over so many episodes"""
    rounds: tuple[int, ...] = ()
    """saved rounds to do (default: all)"""
    any_version: bool = False
    """open snapshots also where the environment's packages have other versions"""
    out: str | None = None
    """the folder to write to (default: explain/ in the first run)"""
    plot: bool = False
    """only draw the pictures, from the CSV in the folder to write to"""


def selections(batch, percent, generator):
    """{arm: indices of the records to train on}."""
    n, kept = len(batch["scores"]), filter_bottom(batch["scores"].cpu(), percent)
    random = torch.randperm(n, generator=generator)[: len(kept)].sort().values
    return dict(zip(ARMS, (torch.arange(n), kept, random, torch.arange(n))))


@torch.no_grad()
def divergence(snapshot, agent):
    """Mean KL divergence of the policy after the update from theta(k), estimated as CleanRL's approx_kl, over the round."""
    logratio = agent.get_logprob(snapshot.batch["obs"], snapshot.batch["actions"]) - snapshot.batch["logprobs"]
    return (logratio.exp() - 1 - logratio).mean().item()


def as_far(snapshot, selection, kl):
    """The factor of the learning rate with which the update over `selection` ends at the divergence `kl`, up to a tenth of it
    (bisection of its logarithm between 1/64 and 64), and the agent. None for both where there is none: PPO's clipping can
    hold the policy back at any learning rate, until it jumps."""
    low, high = -6.0, 6.0
    while high - low > 0.01:
        factor = 2 ** ((low + high) / 2)
        agent = snapshot.update(selection, lr_factor=factor)
        reached = divergence(snapshot, agent)
        if abs(reached - kl) <= 0.1 * kl:
            return factor, agent
        low, high = ((low + high) / 2, high) if reached < kl else (low, (low + high) / 2)
    return None, None


def intervene(run, snapshot, percent, episodes):
    """Rows of one round, one for each arm."""
    args, script = snapshot.args, snapshot.script
    envs = snapshot.eval_envs(episodes)
    generator, kl = torch.Generator().manual_seed(script.derive_seed(args.seed, 5, snapshot.round)), {}
    scores = snapshot.score()
    numbers = (scores.agreement, scores.noise_scale)
    chosen = selections(snapshot.batch, percent, generator)
    for arm, selection in files.progress(chosen.items(), "policy"):
        factor, agent = as_far(snapshot, selection, kl["filtered"]) if arm == "as far" else (1.0, snapshot.update(selection))
        if agent is None:
            yield (
                Path(run).name,
                args.env_id,
                args.seed,
                snapshot.round,
                arm,
                "",
                "",
                len(selection),
                episodes,
                "",
                "",
                *numbers,
            )
            continue
        kl[arm] = divergence(snapshot, agent)
        returns = script.evaluate(agent, envs, episodes, script.derive_seed(args.seed, 6, snapshot.round))
        stderr = returns.std(ddof=1) / len(returns) ** 0.5 if len(returns) > 1 else float("nan")
        row = (Path(run).name, args.env_id, args.seed, snapshot.round, arm, returns.mean(), stderr, len(selection), episodes)
        yield (*row, kl[arm], factor, *numbers)


def labels(percent):
    """{arm: what it is, beside the whole round}."""
    return dict(
        zip(ARMS[1:], (f"{percent:g}% of the negative dropped", "as many random dropped", "none dropped, moved as far"))
    )


def suffix(percent):
    return "" if percent == 100 else f"_{percent:g}"


def plot(rows, folder, percent):
    """Box plots of the change in return over the runs of an environment, against the round: one picture an environment."""
    plt = files.pyplot()
    for env in dict.fromkeys(row["env"] for row in rows):
        returns = {(r["run"], int(r["round"]), r["arm"]): float(r["return"]) for r in rows if r["env"] == env and r["return"]}
        runs, ks = sorted({run for run, _, _ in returns}), sorted({k for _, k, _ in returns})
        width = 0.27 * min(np.diff(ks), default=1)
        fig, ax = plt.subplots(figsize=(max(5, 0.45 * len(ks) + 2), 3.4), dpi=110)
        for (arm, label), colour, side in zip(labels(percent).items(), COLOURS[1:], (-1, 0, 1)):
            changes = [
                [returns[run, k, arm] - returns[run, k, ARMS[0]] for run in runs if (run, k, arm) in returns] for k in ks
            ]
            at = [k + side * width for k in ks]
            style = {"boxprops": {"facecolor": colour, "alpha": 0.5}, "medianprops": {"color": colour, "lw": 2}}
            boxes = ax.boxplot(
                changes, positions=at, widths=0.8 * width, patch_artist=True, showfliers=False, manage_ticks=False, **style
            )
            ax.scatter([x for x, change in zip(at, changes) for _ in change], sum(changes, []), s=8, color=colour, zorder=3)
            median = f"median {np.median(sum(changes, [])):+.3g}" if any(changes) else "never"
            boxes["boxes"][0].set_label(f"{label}, {median}")
        ax.axhline(0, color="tab:red", ls="--", lw=1)
        ax.set(xlabel="round", ylabel="change in return", title=f"{env}, {len(runs)} run{'s'[: len(runs) > 1]}")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.legend(frameon=False, fontsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        fig.tight_layout()
        save_figure(fig, folder / f"interventions_{env.rpartition(':')[2].replace('/', '-')}{suffix(percent)}.png")
        plt.close(fig)


def table(folder):
    """Markdown, from the CSVs in a folder: the change in return over the rounds and runs of each environment."""
    lines = []
    for path in sorted(folder.glob("interventions*.csv")):
        rows = [row for row in files.read_csv(path) if row["return"]]
        names = labels(float(path.stem.partition("_")[2] or 100))
        whole, filtered, random, far = ARMS
        for env in dict.fromkeys(row["env"] for row in rows):
            arms = {arm: {(r["run"], r["round"]): r for r in rows if (r["env"], r["arm"]) == (env, arm)} for arm in ARMS}
            covered = set(arms[far])
            runs = sorted({run for run, _ in arms[whole]})
            comparisons = [
                (names[filtered], filtered, whole, set(arms[filtered])),
                (names[random], random, whole, set(arms[random])),
                (names[far], far, whole, covered),
                (f"{names[filtered]}, on the rounds above", filtered, whole, covered),
                (f"{names[filtered]}, on the other rounds", filtered, whole, set(arms[filtered]) - covered),
            ]
            for label, arm, base, keys in comparisons:
                change, ratio = {}, []
                for key in keys & set(arms[base]):
                    one, other = arms[arm][key], arms[base][key]
                    change[key] = float(one["return"]) - float(other["return"])
                    ratio.append(float(one["kl"]) / float(other["kl"]))
                if change:
                    x = np.array(list(change.values()))
                    means = ", ".join(mean_and_error([change[k] for k in change if k[0] == run]) for run in runs)
                    cells = [env, label, len(runs), len(x), f"{np.median(x):+.3g}", means, f"{np.mean(x > 0):.0%}"]
                    lines.append([*cells, f"{np.median(ratio):.2g}"])
    header = "environment|update|runs|rounds|median change|mean change of each run|rounds with a gain|KL, median ratio"
    return files.table(header.split("|"), lines, left=2)


def changes(rows):
    """{environment: {arm but the whole round: (agreement [n], change in return [n])}}, of the rounds that have both."""
    found, whole = {}, {(r["run"], r["round"]): float(r["return"]) for r in rows if r["arm"] == ARMS[0]}
    for row in rows:
        agreement = float(row.get("agreement") or "nan")
        if row["arm"] != ARMS[0] and row["return"] and np.isfinite(agreement):
            arms = found.setdefault(row["env"], {arm: ([], []) for arm in ARMS[1:]})
            for values, x in zip(arms[row["arm"]], (agreement, float(row["return"]) - whole[row["run"], row["round"]])):
                values.append(x)
    return {env: {arm: tuple(map(np.array, xy)) for arm, xy in arms.items()} for env, arms in found.items()}


def correlation(x, y):
    """Spearman's, with its 95% interval: percentiles of a bootstrap over rounds. As text; empty where too few rounds tell."""
    if len(x) < 6 or not x.std() or not y.std():
        return ""
    rng = np.random.default_rng(1)
    picks = rng.integers(len(x), size=(2000, len(x)))
    low, high = np.nanpercentile([snapshots.spearman(x[i], y[i]) for i in picks], (2.5, 97.5))
    return f"{snapshots.spearman(x, y):+.2f} [{low:+.2f}, {high:+.2f}]"


def agreement_table(folder):
    """Markdown: how the changes of each CSV of a folder go with the agreement of the round."""
    lines = []
    for path in sorted(folder.glob("interventions*.csv")):
        names = labels(float(path.stem.partition("_")[2] or 100))
        for env, arms in changes(files.read_csv(path)).items():
            for arm, (x, y) in arms.items():
                cells = [len(x), correlation(x, y)]
                for low, high in BANDS:
                    band = list(y[(low <= x) & (x < high)])
                    cells.append(f"{mean_and_error(band)} ({len(band)})" if band else "")
                lines.append([env, names[arm], *cells])
    bands = (f"agreement {text} (rounds)" for text in ("below 0.25", "0.25 to 0.75", "above 0.75"))
    header = ["environment", "update", "rounds", "rank correlation of change and agreement [95%]", *bands]
    return files.table(header, lines, left=2)


def plot_agreement(rows, folder, percent):
    """Changes in return against the agreement of the round: one panel an environment."""
    plt, found = files.pyplot(), changes(rows)
    fig, axes = plt.subplots(1, len(found), figsize=(3.6 * len(found), 3.2), dpi=110, squeeze=False)
    for ax, (env, arms) in zip(axes[0], found.items()):
        for (arm, (x, y)), colour in zip(arms.items(), COLOURS[1:]):
            label = ", ".join(filter(None, (labels(percent)[arm], correlation(x, y))))
            ax.scatter(x, y, s=12, color=colour, alpha=0.7, lw=0, label=label)
        ax.axhline(0, color="tab:red", ls="--", lw=1)
        ax.set(xlabel="agreement of the round", ylabel="change in return", title=env)
        ax.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))
        ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    save_figure(fig, folder / f"agreement{suffix(percent)}.png")
    plt.close(fig)


def mean_and_error(x):
    if len(x) < 2:
        return f"{x[0]:+.2g}" if x else "–"
    return f"{round(np.mean(x), 9) + 0.0:+.2g} ± {np.std(x, ddof=1) / len(x) ** 0.5:.2g}"


def main(args):
    todo = {} if args.plot else {run: snapshots.chosen(run, args.rounds) for run in args.runs}
    folder = Path(args.out) if args.out else Path(args.runs[0]) / "explain"
    path = folder / f"interventions{suffix(args.percent)}.csv"
    if args.plot and not path.exists():
        sys.exit(f"--plot: there is no {path}")
    folder.mkdir(parents=True, exist_ok=True)
    rows = files.read_csv(path) if path.exists() else []
    for run, k in files.progress([(run, k) for run in todo for k in todo[run]], "round"):
        mine = [r for r in rows if r["run"] == Path(run).name and r["round"] == str(k)]
        if len(mine) == len(ARMS) and {r["episodes"] for r in mine} == {str(args.episodes)} and "agreement" in mine[0]:
            continue
        new = list(intervene(run, snapshots.load(run, k, args.any_version), args.percent, args.episodes))
        rows = [r for r in rows if r not in mine] + [{c: str(x) for c, x in zip(COLUMNS, row)} for row in new]
        write_csv(path, COLUMNS, [[row.get(c, "") for c in COLUMNS] for row in rows], quiet=True)
        files.say(f"{run}, round {k}: " + ", ".join(f"{row[4]} {row[5]}" for row in new))
    print(f"written to {path}")
    plot(rows, folder, args.percent)
    if changes(rows):
        plot_agreement(rows, folder, args.percent)


if __name__ == "__main__":
    args = tyro.cli(Args)
    if not args.runs and not (args.plot and args.out):
        sys.exit("which run? give the folder of one or more")
    if not 0 <= args.percent <= 100:
        sys.exit(f"--percent must lie in [0, 100], got {args.percent}")
    if args.episodes < 1:
        sys.exit(f"--episodes must be at least 1, got {args.episodes}")
    main(args)
