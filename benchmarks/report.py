"""Every figure and table of the reproduction, from the CSVs in results/ alone: `python -m benchmarks.report [BLOCK ...]`.

Draws results/SUITE/SUITE.png and writes each block of benchmarks/README.md between its markers, `<!-- report: BLOCK -->` and
`<!-- end -->`. Works with what there is, and says of how many seeds it is. What the numbers mean: benchmarks/reproduce/metrics.py.
"""

import re
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

import numpy as np
import tyro

from benchmarks.cost import scoring, throughput
from benchmarks.explain import intervene, local_check, records
from benchmarks.explain.snapshots import save_small
from benchmarks.reproduce import fixed_reference, learning, metrics, rlhf
from benchmarks.reproduce.suites import ENVIRONMENTS, SUITES, runs_of
from benchmarks.run import RESULTS, ROOT, read_csv
from benchmarks.variants import envpool_highway

README = ROOT / "benchmarks" / "README.md"
COLOURS = {"influence": "C0", "none": "C1", "influence, signal": "C2", "random": "C3", "stable-baselines3": "C4"}
# The paper's numbers: Figure 6(b), Tables 2 (three seeds), 3, 4 and 5 of arXiv 2505.19281v2; mean and standard error.
PAPER = {
    "fig6": {
        "FrozenLake": {"SE_ave": "34.0 ± 2.0", "SE_peak": "19.2 ± 5.9", "RT_peak": "29.5 ± 2.9"},
        "Acrobot": {"SE_ave": "36.7 ± 6.5", "SE_peak": "48.5 ± 0.8", "RT_peak": "55.2 ± 1.0"},
        "MiniGrid": {"SE_ave": "65.8 ± 3.3", "SE_peak": "61.7 ± 4.1", "RT_peak": "69.1 ± 1.7"},
        "Highway": {"SE_ave": "37.7 ± 6.1", "SE_peak": "55.1 ± 2.9", "RT_peak": "59.9 ± 0.7"},
        "LunarLander": {"SE_ave": "26.0 ± 1.8", "SE_peak": "39.7 ± 3.7", "RT_peak": "44.9 ± 2.5"},
        "BipedalWalker": {"SE_ave": "31.0 ± 8.7", "SE_peak": "26.2 ± 8.0", "RT_peak": "29.2 ± 0.7"},
    },
    "adam": {
        "MiniGrid": {"SE_ave": "24.1 ± 1.4", "SE_peak": "13.3 ± 3.1", "RT_peak": "18.5 ± 1.0"},
        "LunarLander": {"SE_ave": "46.7 ± 4.5", "SE_peak": "62.2 ± 5.0", "RT_peak": "65.9 ± 3.2"},
    },
    "percent": {
        "FrozenLake": {
            "12.5": {"SE_ave": "23.5 ± 3.1", "SE_peak": "15.6 ± 5.1"},
            "25": {"SE_ave": "30.5 ± 3.3", "SE_peak": "22.1 ± 7.4"},
            "50": {"SE_ave": "33.7 ± 3.4", "SE_peak": "19.6 ± 8.4"},
            "100": {"SE_ave": "32.7 ± 1.7", "SE_peak": "15.9 ± 5.5"},
        },
        "Acrobot": {
            "12.5": {"SE_ave": "29.2 ± 0.8", "SE_peak": "31.5 ± 2.2"},
            "25": {"SE_ave": "35.1 ± 0.6", "SE_peak": "48.5 ± 0.8"},
            "50": {"SE_ave": "36.7 ± 6.5", "SE_peak": "48.5 ± 0.8"},
            "100": {"SE_ave": "35.0 ± 0.5", "SE_peak": "43.1 ± 5.7"},
        },
        "MiniGrid": {
            "12.5": {"SE_ave": "67.5 ± 5.1", "SE_peak": "67.4 ± 4.4"},
            "25": {"SE_ave": "60.3 ± 10.6", "SE_peak": "58.8 ± 13.1"},
            "50": {"SE_ave": "67.0 ± 5.3", "SE_peak": "50.6 ± 20.7"},
            "100": {"SE_ave": "75.4 ± 3.6", "SE_peak": "54.9 ± 22.5"},
        },
        "LunarLander": {
            "12.5": {"SE_ave": "28.2 ± 1.3", "SE_peak": "41.6 ± 5.7"},
            "25": {"SE_ave": "22.7 ± 5.6", "SE_peak": "32.9 ± 13.1"},
            "50": {"SE_ave": "10.2 ± 6.5", "SE_peak": "15.5 ± 17.1"},
            "100": {"SE_ave": "8.9 ± 2.0", "SE_peak": "15.8 ± 7.3"},
        },
    },
    "final": {"MiniGrid": "[0.04, 0.33]", "LunarLander": "[22.54, 130.52]", "BipedalWalker": "[24.40, 75.99]"},
    "runtime": {  # seconds: scoring a round; optimisation a round, of IIF and of the standard run; all rounds, of both
        "FrozenLake": (0.11, 1.51, 2.01, 82.15, 93.85),
        "Acrobot": (0.25, 1.42, 2.02, 70.01, 79.87),
        "MiniGrid": (0.25, 4.52, 5.02, 365.23, 378.41),
        "Highway": (0.13, 2.39, 3.29, 214.41, 233.66),
        "LunarLander": (0.13, 1.85, 2.05, 318.68, 328.79),
        "BipedalWalker": (0.12, 3.09, 3.30, 676.78, 691.28),
    },
}


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


def load(results, suite):
    """{environment: {arm: {seed: Curve}}} of what is finished, in the order of the suite's table."""
    data = {e.environment: {} for e in SUITES[suite]}
    for e in SUITES[suite]:
        data[e.environment].update({arm: {} for arm in e.arms})
    for path in sorted((results / suite).glob("*.csv")):
        rows = read_csv(path)
        if path.name == "runs.csv" or rows[0]["environment"] not in data:
            continue
        environment, arm, seed = (rows[0][name] for name in ("environment", "arm", "seed"))
        stages = ([float(row[f"{name}_seconds"] or 0) for row in rows[:-1]] for name in ("rollout", "scoring", "update"))
        curve = Curve(np.array([float(row["return"]) for row in rows]), *map(np.array, stages), arm)
        data[environment].setdefault(arm, {})[int(seed)] = curve
    return {environment: arms for environment, arms in data.items() if any(arms.values())}


def pairs(arms, arm, other):
    """Curves (of arm, of other) with the same seed; of an arm with itself, those of each seed and the next: no treatment."""
    mine, others = arms.get(arm, {}), arms.get(other, {})
    seeds = sorted(set(mine) & set(others))
    if arm == other:
        return [(mine[b], mine[a]) for a, b in zip(seeds, seeds[1:] + seeds[:1])] if len(seeds) > 1 else []
    return [(mine[seed], others[seed]) for seed in seeds]


def efficiency(arms, arm, other, smoothed=False):
    """{metric: its values over the seeds}, of `arm` against `other` as the standard run."""
    found = []
    for mine, standard in pairs(arms, arm, other):
        a, b = (metrics.smooth(c.returns) if smoothed else c.returns for c in (mine, standard))
        found.append(metrics.sample_efficiency(b, a) | metrics.run_time(b, a, standard.seconds, mine.seconds))
    return {name: [f[name] for f in found] for name in ("SE_ave", "SE_peak", "missed", "RT_peak", "RT_peak_own")}


def differences(arms, arm, other, statistic):
    return [statistic(mine.returns) - statistic(standard.returns) for mine, standard in pairs(arms, arm, other)]


# ---- Markdown


def table(header, rows):
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


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


def picture(suite, text):
    return f"![{text}](results/{suite}/{suite}.png)"


BANDS = "Lines: mean over seeds; dark bands: standard error; light bands: 95% interval (t)."
AGAINST = {  # what is compared with what
    "influence against none": ("influence", "none"),
    "influence, signal against none": ("influence, signal", "none"),
    "influence against random": ("influence", "random"),
    "random against none": ("random", "none"),
    "none against none of other seeds": ("none", "none"),
}


def efficiency_table(data, names, paper=None, smoothed=False, against=AGAINST):
    """One row for each metric and comparison, one column for each environment, as Figure 6(b)."""
    rows = []
    for name in names:
        if paper and name in next(iter(paper.values())):
            rows.append([f"**{name}**, the paper's", *(paper.get(e, {}).get(name, "") for e in data)])
        for label, (arm, other) in against.items():
            cells = [mean_and_error(efficiency(arms, arm, other, smoothed)[name]) for arms in data.values()]
            if any(cells):
                rows.append([f"{name}, {label}", *cells])
    return table(["%, mean ± SE", *(with_seeds(e, arms) for e, arms in data.items())], rows)


def missed_table(data):
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


# ---- blocks


def fig6(results):
    data = load(results, "fig6")
    names = ("SE_ave", "SE_peak", "RT_peak")
    percents = ", ".join(f"{e} {ENVIRONMENTS[e][3]:g}" for e in data)
    return "\n\n".join(
        [
            picture("fig6", "Return against rounds, all arms"),
            f"*Return of theta(k) against the round k. {BANDS}*",
            f"Percent of the negative records dropped: {percents}. The authors picked it as the best for each environment; it"
            " is theirs here, not picked again.",
            efficiency_table(data, names, PAPER["fig6"]),
            "The same on smoothed curves (trailing mean of five rounds):",
            efficiency_table(data, names, smoothed=True),
            "Levels of the standard run that the other never reaches (they count as one round more than there are):",
            missed_table(data),
        ]
    )


def final(results):
    data = load(results, "fig6")
    parts = [returns_table(data)]
    if any(e in data for e in PAPER["final"]):
        paper = "; ".join(f"{e} {PAPER['final'][e]}" for e in data if e in PAPER["final"])
        parts.append(f"The paper's 95% intervals of the final gain, influence minus none (Table 4, five seeds): {paper}.")
    return "\n\n".join([*parts, aggregates(data)])


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


def runtime(results):
    data = load(results, "fig6")
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
    header = [
        "in brackets: the paper's",
        "scoring, s a round",
        "scoring / update of none",
        "update, s a round: influence / none",
    ]
    header += ["ratio", "all rounds, s: influence / none", "ratio", "RT_peak, %", "RT_peak against none's time to its peak, %"]
    return table(header, rows)


def baseline(results):
    data = load(results, "baseline")
    against = {"none against stable-baselines3": ("none", "stable-baselines3")}
    parts = [
        picture("baseline", "Plain PPO here and in stable-baselines3"),
        f"*{BANDS}*",
        returns_table(data, against=against),
    ]
    return "\n\n".join(parts)


def adam(results):
    data = load(results, "adam")
    names = ("SE_ave", "SE_peak", "RT_peak")
    against = {**AGAINST, "influence, clipped against none, clipped": ("influence, clipped", "none, clipped")}
    parts = [picture("adam", "Return against rounds with Adam"), f"*{BANDS}*"]
    parts += [efficiency_table(data, names, PAPER["adam"], against=against), "The same on smoothed curves:"]
    parts += [efficiency_table(data, names, smoothed=True, against=against), returns_table(data, against)]
    return "\n\n".join(parts)


def stalled(results):
    data = load(results, "stalled")
    rows = []
    for e, arms in data.items():
        for arm, curves in arms.items():
            if curves:
                returns = [curve.returns for curve in curves.values()]
                counts = [sum(bool(rule(e, r)) for r in returns) for rule in (metrics.stalled, metrics.stalled_at_end)]
                cells = [
                    interval([statistic(r) for r in returns], decimals_of(e))
                    for statistic in (metrics.area, metrics.final_return)
                ]
                rows.append([f"{e}, {arm}", len(returns), *counts, *cells])
    header = ["", "seeds", "stalled", "stalled at the end", "area under the curve [95%]", "final return [95%]"]
    text = picture("stalled", "Every run of each arm")
    parts = [text, "*One line a run, as many seeds as the table says.*", table(header, rows), returns_table(data)]
    return "\n\n".join([*parts, efficiency_table(data, ("SE_ave", "SE_peak"), PAPER["fig6"])])


def percent(results):
    data = load(results, "percent")
    against = {f"{p}% against none": (p, "none") for p in ("6.25", "12.5", "25", "50", "100")}
    against["random at the paper's percent against none"] = ("random", "none")
    against["none against none of other seeds"] = ("none", "none")
    rows = []
    for name in ("SE_ave", "SE_peak"):
        for label, (arm, other) in against.items():
            cells = []
            for e, arms in data.items():
                ours, paper = mean_and_error(efficiency(arms, arm, other)[name]), PAPER["percent"][e].get(arm, {}).get(name)
                cells.append(ours + f" ({paper})" * bool(ours and paper))
            rows.append([f"{name}, {label}", *cells])
    header = ["%, mean ± SE (the paper's)", *(with_seeds(e, arms) for e, arms in data.items())]
    parts = [picture("percent", "Return against rounds for each percent"), f"*{BANDS}*", table(header, rows)]
    return "\n\n".join([*parts, returns_table(data, against=against)])


def other_filters(results):
    data = load(results, "filters")
    against = {f"{arm} against none": (arm, "none") for arm in ("influence", "H1", "H2", "TD error", "random")}
    against["influence against random"] = ("influence", "random")
    against["none against none of other seeds"] = ("none", "none")
    rows = []
    for name in ("SE_ave", "SE_peak"):
        for label, (arm, other) in against.items():
            cells = [mean_and_error(efficiency(arms, arm, other)[name]) for arms in data.values()]
            rows.append([f"{name}, {label}", *cells])
    header = ["%, mean ± SE", *(with_seeds(e, arms) for e, arms in data.items())]
    return "\n\n".join(
        [
            picture("filters", "Return against rounds with other filters"),
            f"*{BANDS}*",
            table(header, rows),
            returns_table(data, against=against),
        ]
    )


def learning_rate(results):
    data = load(results, "learning_rate")
    parts = [picture("learning_rate", "Influence and none at three learning rates"), f"*{BANDS}*"]
    rates = [f"lr x {factor}" for factor in (1, 4, 16)]
    against = {f"influence, {rate} against none, {rate}": (f"influence, {rate}", f"none, {rate}") for rate in rates}
    against["influence, lr x 1 against none, lr x 4"] = ("influence, lr x 1", "none, lr x 4")
    return "\n\n".join([*parts, returns_table(data, against)])


def minigrid_scale(results):
    data = load(results, "minigrid_scale")
    parts = [picture("minigrid_scale", "MiniGrid with symbols divided by 10"), f"*{BANDS}*"]
    return "\n\n".join([*parts, efficiency_table(data, ("SE_ave", "SE_peak", "RT_peak")), returns_table(data)])


def suspects(results):
    data = load(results, "suspects")
    against = {
        "influence against none": ("influence", "none"),
        "influence, restarted against none, as the authors": ("influence, restarted", "none"),
        "influence, restarted against none, restarted": ("influence, restarted", "none, restarted"),
        "none, restarted against none": ("none, restarted", "none"),
        "influence, clipped against none, clipped": ("influence, clipped", "none, clipped"),
        "none, clipped against none": ("none, clipped", "none"),
        "influence against none, both with 100 episodes": ("influence, 100 episodes", "none, 100 episodes"),
        "none against none of other seeds": ("none", "none"),
        "none against none of other seeds, 100 episodes": ("none, 100 episodes", "none, 100 episodes"),
    }
    parts = [picture("suspects", "Restarted, clipped and better evaluated runs"), f"*{BANDS}*"]
    for smoothed in (False, True):
        parts += ["The same on smoothed curves:"] * smoothed
        parts.append(efficiency_table(data, ("SE_ave", "SE_peak"), PAPER["fig6"], smoothed, against))
    return "\n\n".join([*parts, returns_table(data, against)])


def cost(results):
    """What was run, with which code, at what cost."""
    commands = {suite: (f"benchmarks.run {suite}", {run.name for run in runs_of(suite)}) for suite in SUITES}
    commands[fixed_reference.SUITE] = ("benchmarks.reproduce.fixed_reference", {run.name for run in fixed_reference.runs()})
    rows, versions = [], Counter()
    for suite, (command, wanted) in commands.items():
        records = sorted(read_csv(results / suite / "runs.csv"), key=lambda record: record["finished"])
        own = [record for record in records if not record["reused_from"]]
        if records:
            hours = sum(float(record["cpu_seconds"]) for record in own) / 3600
            spans = [[record["finished"][:10] for record in own], [record["commit"] for record in own]]
            spans = [" to ".join(dict.fromkeys((span[0], span[-1]))) if span else "" for span in spans]
            count = f"{len({record['run'] for record in records} & wanted)} of {len(wanted)}"
            rows.append([f"`python -m {command}`", count, len(records) - len(own), f"{hours:.1f}", *spans])
            versions.update((r["python"], r["torch"], r["numpy"], r["gymnasium"]) for r in own)
    if not rows:
        return "Nothing has been run yet."
    header = ["command", "runs finished", "of them taken from another suite", "CPU hours", "date", "commit"]
    said = "; ".join("Python {}, torch {}, numpy {}, Gymnasium {}".format(*found) for found in versions)
    return f"{table(header, rows)}\n\nVersions: {said}."


BLOCKS = {  # name: (its function, the suite that it shows)
    "fig6": (fig6, "fig6"),
    "cost": (cost, None),
    "baseline": (baseline, "baseline"),
    "final": (final, "fig6"),
    "adam": (adam, "adam"),
    "stalled": (stalled, "stalled"),
    "percent": (percent, "percent"),
    "runtime": (runtime, "fig6"),
    "filters": (other_filters, "filters"),
    "learning_rate": (learning_rate, "learning_rate"),
    "minigrid_scale": (minigrid_scale, "minigrid_scale"),
    "suspects": (suspects, "suspects"),
    "fixed_reference": (fixed_reference.block, None),
    "rlhf": (rlhf.block, None),
    "scoring": (lambda results: scoring.table(results / "scoring.csv").strip(), None),
    "throughput": (lambda results: throughput.table(results / "throughput.csv").strip(), None),
    "learning": (lambda results: learning.table(results / "learning"), None),
    "highway": (envpool_highway.table, None),
    "diagnosis": (lambda results: records.table(results / "explain"), None),
    "interventions": (lambda results: intervene.table(results / "explain" / "interventions"), None),
    "local_check": (lambda results: local_check.table(results / "explain"), None),
}


def block(name, results=RESULTS):
    """The Markdown of a block."""
    function, suite = BLOCKS[name]
    if suite and not load(results, suite):
        return f"Not yet run: `python -m benchmarks.run {suite}`."
    return function(results)


def insert(text, name, content):
    """Put the content of a block between its markers in a README."""
    found = re.findall(rf"<!-- report: {name} -->\n.*?<!-- end -->", text, re.DOTALL)
    if len(found) != 1:
        sys.exit(f"the README must have one place <!-- report: {name} --> ... <!-- end -->, found {len(found)}")
    return text.replace(found[0], f"<!-- report: {name} -->\n{content}\n<!-- end -->")


# ---- figures


def draw(results, suite):
    """results/SUITE/SUITE.png: a panel for each environment."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    data = load(results, suite)
    if suite == "stalled":  # a panel for each arm as well
        panels = [(f"{e}, {arm}", e, {arm: arms[arm]}) for e, arms in data.items() for arm in arms if arms[arm]]
    else:
        panels = [(with_seeds(e, arms), e, arms) for e, arms in data.items()]
    columns = len(panels) if len(panels) < 4 else 2 if len(panels) == 4 else 3
    height = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        height, columns, figsize=(3.7 * columns, 2.6 * height), dpi=90, squeeze=False, layout="constrained"
    )
    order = dict.fromkeys(arm for e in SUITES[suite] for arm in e.arms)
    colours = {arm: COLOURS.get(arm, f"C{4 + i % 6}") for i, arm in enumerate(order)}
    for ax, (title, environment, arms) in zip(axes.flat, panels):
        for arm, curves in arms.items():
            if not curves:
                continue
            returns = np.array([curve.returns for curve in curves.values()])
            k = np.arange(returns.shape[1])
            if suite == "stalled":
                ax.plot(k, returns.T, color=colours[arm], lw=0.6, alpha=0.7)
                continue
            mean, error, half = np.array([metrics.t_interval(column) for column in returns.T]).T
            ax.plot(k, mean, color=colours[arm], lw=1.2, label=arm)
            for width, alpha in ((error, 0.25), (half, 0.1)):
                ax.fill_between(k, mean - width, mean + width, color=colours[arm], alpha=alpha, lw=0)
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
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8)
    figure.supxlabel("round k", fontsize=9)
    figure.supylabel("return of theta(k)", fontsize=9)
    save_small(figure, results / suite / f"{suite}.png")
    plt.close(figure)


@dataclass
class Args:
    blocks: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """blocks of the README to make (default: all)"""


if __name__ == "__main__":
    args = tyro.cli(Args)
    if set(args.blocks) - set(BLOCKS):
        sys.exit(f"{(set(args.blocks) - set(BLOCKS)).pop()} is no block: {', '.join(BLOCKS)}")
    if not find_spec("rliable"):
        sys.exit("benchmarks.report needs rliable: pip install -r requirements-benchmarks.txt")
    text = README.read_text()
    for name in args.blocks or BLOCKS:
        suite = BLOCKS[name][1]
        if suite == name and load(RESULTS, suite):
            draw(RESULTS, suite)
        elif name == fixed_reference.SUITE and fixed_reference.load(RESULTS):
            fixed_reference.draw(RESULTS)
        elif name == rlhf.SUITE and rlhf.load(RESULTS):
            rlhf.draw(RESULTS)
        text = insert(text, name, block(name))
    README.write_text(text)
