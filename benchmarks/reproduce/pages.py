"""The page of a suite: its curves read from the CSVs, tables in Markdown, the picture.

`data` is {environment: {arm: {seed: Curve}}} of what is finished, in the order of the suite's table. A comparison is a pair of
arms, `arm` against `other` as the standard run; an arm against itself is its run of one seed against that of the next: what the
numbers are where nothing has been done. What the numbers mean: metrics.py.
"""

import itertools
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from benchmarks.files import pyplot, read_csv, save_small, table
from benchmarks.reproduce import metrics
from benchmarks.reproduce.paper import PAPER

NOTHING_DONE = {"none against none of other seeds": ("none", "none")}
AGAINST = {
    "influence against none": ("influence", "none"),
    "influence, signal against none": ("influence, signal", "none"),
    "influence against random": ("influence", "random"),
    "random against none": ("random", "none"),
    **NOTHING_DONE,
}
# Okabe and Ito's colours. Where the rule `signal` never acts its runs are those of `influence`: dashes leave both in sight.
STYLES = {
    "influence": {"color": "#0072B2", "lw": 1.8},
    "influence, signal": {"color": "#E69F00", "ls": (0, (3, 2))},
    "none": {"color": "#333333"},
    "random": {"color": "#CC79A7"},
    "stable-baselines3": {"color": "#009E73"},
}
OTHERS = "tab:green tab:red tab:purple tab:brown tab:cyan tab:orange tab:olive tab:pink".split()
SHADES = {"influence": "Blues", "none": "Greys", "": "viridis_r"}  # of arms that differ in a number only
OTHER_SHADES = ("Oranges", "Purples", "Greens")
# Since then every stream of random numbers is derived from (seed, round, purpose): a run made before cannot be repeated digit
# for digit.
STREAMS_CHANGED = "2026-12-02T22:00"


# ---- data


@dataclass
class Curve:
    """A run: returns of theta(k) [K + 1], seconds of each round's stages [K]."""

    returns: np.ndarray
    rollout: np.ndarray
    scoring: np.ndarray
    update: np.ndarray
    arm: str

    @property
    def seconds(self):
        return self.rollout + self.update + (0 if self.arm == "random" else self.scoring)


def load(suite, results):
    """The suite's `data`."""
    data = {e.environment: {} for e in suite.entries}
    for e in suite.entries:
        data[e.environment].update({arm: {} for arm in e.arms})
    for path in sorted((results / suite.name).glob("*.csv")):
        rows = read_csv(path)
        if path.name == "runs.csv" or rows[0]["environment"] not in data:
            continue
        environment, arm, seed = (rows[0][name] for name in ("environment", "arm", "seed"))
        stages = ([float(row[f"{name}_seconds"] or 0) for row in rows[:-1]] for name in ("rollout", "scoring", "update"))
        curve = Curve(np.array([float(row["return"]) for row in rows]), *map(np.array, stages), arm)
        data[environment].setdefault(arm, {})[int(seed)] = curve
    return {environment: arms for environment, arms in data.items() if any(arms.values())}


def pairs(arms, arm, other):
    """Curves (of arm, of other) with the same seed; of an arm with itself, those of each seed and the next."""
    mine, others = arms.get(arm, {}), arms.get(other, {})
    seeds = sorted(set(mine) & set(others))
    if arm == other:
        return [(mine[b], mine[a]) for a, b in zip(seeds, seeds[1:] + seeds[:1])] if len(seeds) > 1 else []
    return [(mine[seed], others[seed]) for seed in seeds]


def efficiency(arms, arm, other, smoothed=False):
    """{metric: its values over the seeds}."""
    found = []
    for mine, standard in pairs(arms, arm, other):
        a, b = (metrics.smooth(c.returns) if smoothed else c.returns for c in (mine, standard))
        found.append(metrics.sample_efficiency(b, a) | metrics.run_time(b, a, standard.seconds, mine.seconds))
    return {name: [f[name] for f in found] for name in ("SE_ave", "SE_peak", "missed", "RT_peak", "RT_peak_own")}


def differences(arms, arm, other, statistic):
    return [statistic(mine.returns) - statistic(standard.returns) for mine, standard in pairs(arms, arm, other)]


# ---- numbers as text


def number(x, decimals):
    return f"{round(float(x), decimals) + 0.0:.{decimals}f}"  # never -0.0


def mean_and_error(values, decimals=1):
    """Mean ± standard error; how many values are undefined, if any."""
    if not len(values):
        return ""
    mean, error, _ = metrics.t_interval(values)
    undefined = int(np.isnan(values).sum())
    text = "–" if np.isnan(mean) else number(mean, decimals) + ("" if np.isnan(error) else f" ± {number(error, decimals)}")
    return text + (f" ({undefined} undefined)" if undefined else "")


def interval(values, decimals):
    """Mean and 95% interval."""
    if not len(values):
        return ""
    mean, _, half = metrics.t_interval(values)
    low, high = number(mean - half, decimals), number(mean + half, decimals)
    return number(mean, decimals) + ("" if np.isnan(half) else f" [{low}, {high}]")


def decimals_of(environment):
    low, high = metrics.REFERENCE[environment]
    return 3 if high - low <= 1 else 1


def with_seeds(environment, arms):
    """The name of an environment and how many seeds its arms have."""
    counts = sorted({len(curves) for curves in arms.values() if curves})
    seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{environment} ({seeds} seed{'s' * (counts[-1] > 1)})"


# ---- tables


def efficiency_table(data, against=AGAINST, paper=None, beside=None, smoothed=False, names=("SE_ave", "SE_peak", "RT_peak")):
    """One row for each metric and comparison, one column for each environment, as Figure 6(b).

    paper: {environment: {metric: text}}, in rows of their own; beside: {environment: {arm: {metric: text}}}, in brackets.
    """
    rows = []
    for name in names:
        if paper and name in next(iter(paper.values())):
            rows.append([f"**{name}**, the paper's", *(paper.get(e, {}).get(name, "") for e in data)])
        for label, (arm, other) in against.items():
            cells = []
            for e, arms in data.items():
                ours = mean_and_error(efficiency(arms, arm, other, smoothed)[name])
                theirs = (beside or {}).get(e, {}).get(arm, {}).get(name)
                cells.append(f"{ours} ({theirs})" if ours and theirs else ours)
            if any(cells):
                rows.append([f"{name}, {label}", *cells])
    return table(["%, mean ± SE" + " (the paper's)" * bool(beside), *(with_seeds(e, arms) for e, arms in data.items())], rows)


def missed_table(data):
    """Levels of the standard run that the other never reaches (they count as one round more than there are)."""
    rows = []
    for label, (arm, other) in AGAINST.items():
        shares = [efficiency(arms, arm, other)["missed"] for arms in data.values()]
        if any(shares):
            rows.append([label, *(f"{100 * np.nanmean(s):.0f}" if len(s) and not np.all(np.isnan(s)) else "" for s in shares)])
    return table(["levels never reached, %", *data], rows)


def returns_table(data, against=AGAINST):
    """Area under the curve and final return: of each arm, and differences with 95% intervals."""
    blocks = []
    for title, statistic in (("area under the curve", metrics.area), ("final return", metrics.final_return)):
        rows = []
        for arm in dict.fromkeys(arm for arms in data.values() for arm in arms):
            cells = []
            for e, arms in data.items():
                values = [statistic(curve.returns) for curve in arms.get(arm, {}).values()]
                cells.append(mean_and_error(values, decimals_of(e)))
            rows.append([arm, *cells])
        for label, (arm, other) in against.items():
            cells = [interval(differences(arms, arm, other, statistic), decimals_of(e)) for e, arms in data.items()]
            if any(cells):
                rows.append([label.replace(" against ", " minus "), *cells])
        header = [f"{title}, mean ± SE, differences with 95% interval", *(with_seeds(e, arms) for e, arms in data.items())]
        blocks.append(table(header, rows))
    return "\n\n".join(blocks)


def final_gains(data):
    """The paper's 95% intervals of the final gain."""
    paper = "; ".join(f"{e} {PAPER['final'][e]}" for e in data if e in PAPER["final"])
    return (
        f"The paper's 95% intervals of the final gain, influence minus none (Table 4, five seeds): {paper}." if paper else ""
    )


def aggregates(data):
    """rliable's numbers over the environments in which every arm has as many seeds as anywhere."""
    names = ("influence", "influence, signal", "none", "random")
    common = {e: sorted(set.intersection(*(set(arms.get(name, {})) for name in names))) for e, arms in data.items()}
    n = max((len(seeds) for seeds in common.values()), default=0)
    chosen = [e for e, seeds in common.items() if len(seeds) == n]
    if n < 2:
        return "Over all environments: not enough seeds yet."

    def scores(arm, statistic):
        return np.array(
            [[metrics.normalise(e, statistic(data[e][arm][common[e][i]].returns)) for e in chosen] for i in range(n)],
            dtype=float,
        )

    rows = []
    for title, statistic in (("area under the curve", metrics.area), ("final return", metrics.final_return)):
        for arm in names:
            found = metrics.interquartile_mean(scores(arm, statistic))
            rows.append([f"{title}: IQM of {arm}", "{:.3f} [{:.3f}, {:.3f}]".format(*found)])
        for arm, other in (("influence", "none"), ("influence, signal", "none"), ("influence", "random"), ("random", "none")):
            found = metrics.probability_of_improvement(scores(arm, statistic), scores(other, statistic))
            rows.append([f"{title}: probability that {arm} beats {other}", "{:.2f} [{:.2f}, {:.2f}]".format(*found)])
    text = f"Over {', '.join(chosen)} ({n} seeds each), normalised scores, with rliable (95% stratified bootstrap):"
    return f"{text}\n\n{table(['', 'value'], rows)}"


def runtime_table(data):
    """Seconds of the stages, as Table 5."""
    rows = []
    for e, arms in data.items():
        both = pairs(arms, "influence", "none")
        if not both:
            continue
        scoring, update, standard = (
            np.mean([np.median(x) for x in column])
            for column in zip(*((mine.scoring, mine.update, other.update) for mine, other in both))
        )
        total, of_standard = (np.mean([c.seconds.sum() for c in column]) for column in zip(*both))
        paper = PAPER["runtime"][e]
        found = efficiency(arms, "influence", "none")
        rows.append(
            [
                f"{e} ({len(both)} seeds)",
                f"{scoring:.3f}",
                f"{scoring / standard:.2f} ({paper[0] / paper[2]:.2f})",
                f"{update:.3f} / {standard:.3f}",
                f"{update / standard:.2f} ({paper[1] / paper[2]:.2f})",
                f"{total:.1f} / {of_standard:.1f}",
                f"{total / of_standard:.2f} ({paper[3] / paper[4]:.2f})",
                f"{mean_and_error(found['RT_peak'])} ({PAPER['fig6'][e]['RT_peak']})",
                mean_and_error(found["RT_peak_own"]),
            ]
        )
    header = "in brackets: the paper's|scoring, s a round|scoring / update of none|update, s a round: influence / none|ratio"
    header += "|all rounds, s: influence / none|ratio|RT_peak, %|RT_peak against none's time to its peak, %"
    return table(header.split("|"), rows)


def stalled_table(data):
    rows = []
    for e, arms in data.items():
        for arm, curves in arms.items():
            if curves:
                returns = [curve.returns for curve in curves.values()]
                counts = [sum(bool(rule(e, r)) for r in returns) for rule in (metrics.stalled, metrics.stalled_at_end)]
                areas, ends = ([statistic(r) for r in returns] for statistic in (metrics.area, metrics.final_return))
                cells = [interval(values, decimals_of(e)) for values in (areas, ends)]
                rows.append([f"{e}, {arm}", len(returns), *counts, *cells])
    header = ["", "seeds", "stalled", "stalled at the end", "area under the curve [95%]", "final return [95%]"]
    return table(header, rows)


def broken_table(data):
    """How many runs solved their environment, and lost it again."""
    rows = []
    for e, arms in data.items():
        for arm, curves in arms.items():
            found = [metrics.broken_down(e, curve.returns) for curve in curves.values()]
            solved = [k for k in found if k is not None]
            cells = [
                len(found),
                len(solved),
                sum(k < np.inf for k in solved),
                ", ".join(f"{k:.0f}" for k in solved if k < np.inf),
            ]
            rows.append([f"{e}, {arm}", *cells])
    return table(["", "seeds", "solved", "of these broken down", "after rounds"], rows)


# ---- the head of the page


def spent(name, wanted, results):
    """What was run: finished, wanted, taken from another suite, CPU hours, date, commit; None if nothing was."""
    records = sorted(read_csv(results / name / "runs.csv"), key=lambda record: record["finished"])
    if not records:
        return None
    own = [record for record in records if not record["reused_from"]]
    hours = sum(float(record["cpu_seconds"]) for record in own) / 3600
    spans = [[record["finished"][:10] for record in own], [record["commit"] for record in own]]
    date, commit = (" to ".join(dict.fromkeys((span[0], span[-1]))) if span else "" for span in spans)
    finished = len({record["run"] for record in records} & wanted)
    return {"finished": finished, "reused": len(records) - len(own), "hours": hours, "date": date, "commit": commit} | {
        "old": any(record["finished"] < STREAMS_CHANGED for record in records),
        "versions": Counter((r["python"], r["torch"], r["numpy"], r["gymnasium"]) for r in records).most_common(1)[0][0],
    }


def made(name, wanted, results):
    """The sentence that says what was run, when, and with which code."""
    s = spent(name, wanted, results)
    if not s:
        return ""
    text = f"{s['finished']} of {len(wanted)} runs are finished"
    text += f", {s['reused']} of them taken from another suite" * bool(s["reused"])
    text += f"; {s['hours']:.1f} CPU hours on {s['date']}, made at commit {s['commit']}" * bool(s["commit"])
    text += ". Python {}, torch {}, numpy {}, Gymnasium {}.".format(*s["versions"])
    if s["old"]:
        text += (
            " (Since then the scripts derive their random numbers anew from seed, round and purpose, so the same command gives"
        )
        text += " other numbers today, alike in distribution.)"
    return text


# ---- the picture


def styles_of(arms):
    """{arm: how its line is drawn}. Arms that differ in a number only, such as "none, lr x 4", are shades of one colour."""
    import matplotlib

    families = {}
    for arm in arms:
        name, _, value = arm.rpartition(" lr x ")
        shaded = re.fullmatch(r"[\d.]+", value)
        families.setdefault(name.split(",")[0] if shaded else arm, []).append((float(value) if shaded else 1, arm))
    others, maps, styles = itertools.cycle(OTHERS), itertools.cycle(OTHER_SHADES), {}
    for name, members in families.items():
        if len(members) == 1:
            arm = members[0][1]
            styles[arm] = {"lw": 1.2, **(STYLES.get(arm) or {"color": next(others)})}
            continue
        shades = matplotlib.colormaps[SHADES.get(name) or next(maps)]
        for i, (_, arm) in enumerate(sorted(members)):
            styles[arm] = {"lw": 1.2, "color": matplotlib.colors.to_hex(shades(0.4 + 0.55 * i / (len(members) - 1)))}
    return styles


def draw(suite, results):
    """results/SUITE/SUITE.png: a panel for each environment, or, of a suite that shows each run, for each of its arms."""
    plt = pyplot()
    from matplotlib.ticker import MaxNLocator

    data = suite.load(results)
    if suite.each_run:
        panels = [(f"{e}, {arm}", e, {arm: arms[arm]}) for e, arms in data.items() for arm in arms if arms[arm]]
    else:
        panels = [(with_seeds(e, arms), e, arms) for e, arms in data.items()]
    columns = len(panels) if len(panels) < 4 else 2 if len(panels) == 4 else 3
    height = -(-len(panels) // columns)
    size = {"figsize": (3.7 * columns, 2.6 * height), "dpi": 90}
    figure, axes = plt.subplots(height, columns, squeeze=False, layout="constrained", **size)
    order = dict.fromkeys(arm for e in suite.entries for arm in e.arms)
    styles = styles_of(order)
    for ax, (title, environment, arms) in zip(axes.flat, panels):
        for arm, curves in sorted(arms.items(), key=lambda item: "signal" in item[0]):  # dashes above the line they follow
            if not curves:
                continue
            returns = np.array([curve.returns for curve in curves.values()])
            k = np.arange(returns.shape[1])
            if suite.each_run:
                ax.plot(k, returns.T, color=styles[arm]["color"], lw=0.6, alpha=0.7)
                continue
            mean, error, half = np.array([metrics.t_interval(column) for column in returns.T]).T
            ax.plot(k, mean, label=arm, **styles[arm])
            for width, alpha in ((error, 0.25), (half, 0.1)):
                ax.fill_between(k, mean - width, mean + width, color=styles[arm]["color"], alpha=alpha, lw=0)
        # Two or three seeds have intervals that would hide all else.
        low, high = metrics.REFERENCE[environment]
        bottom, top = ax.get_ylim()
        ax.set_ylim(max(bottom, low - 0.5 * (high - low)), min(top, high + 0.2 * (high - low)))
        ax.set_title(title, fontsize=9)
        ax.tick_params(labelsize=8)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    handles = {label: h for ax in axes.flat for h, label in zip(*ax.get_legend_handles_labels())}
    if handles:
        handles = {arm: handles[arm] for arm in order if arm in handles}
        figure.legend(
            handles.values(),
            handles,
            loc="outside upper center",
            ncols=min(len(handles), 4 if columns == 3 else 3),
            frameon=False,
            fontsize=8,
        )
    figure.supxlabel("round k", fontsize=9)
    figure.supylabel("return of theta(k)", fontsize=9)
    save_small(figure, results / suite.name / f"{suite.name}.png")
    plt.close(figure)
