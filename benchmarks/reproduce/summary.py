"""The tables of README.md and benchmarks/README.md: what the paper says and what was found, one row each. The verdicts are by hand,
the numbers from the suites' CSVs; a suite that has not been run leaves its cell empty.
"""

import numpy as np

from benchmarks.explain.snapshots import spearman
from benchmarks.files import read_csv, table
from benchmarks.reproduce import fixed_reference, metrics, pages, rlhf_kl, tuned
from benchmarks.reproduce.paper import PAPER
from benchmarks.reproduce.suites import SUITES


class Data:
    """The suites' data, each read once."""

    def __init__(self, results):
        self.results, self.read = results, {}

    def __getitem__(self, suite):
        if suite not in self.read:
            self.read[suite] = SUITES[suite].load(self.results)
        return self.read[suite]

    def gains(self, suite, environment, arm, other, statistic=metrics.area):
        return pages.differences(self[suite].get(environment, {}), arm, other, statistic)

    def gain(self, suite, environment, arm, other, statistic=metrics.area):
        """`arm` minus `other`: mean and 95% interval."""
        return pages.interval(self.gains(suite, environment, arm, other, statistic), pages.decimals_of(environment))

    def sure(self, suite, arm, other, sign=1):
        """The environments in which the area's whole interval lies on that side of zero, and how many there are."""
        found = []
        for e in self[suite]:
            mean, _, half = metrics.t_interval(self.gains(suite, e, arm, other))
            if sign * mean - half > 0:
                found.append(e)
        return f"{', '.join(found) or 'none'} (of {len(self[suite])})"

    def span(self, suite, metric, arm="influence", other="none"):
        """Least and largest mean of a metric over the environments."""
        means = [np.nanmean(v) for arms in self[suite].values() if (v := pages.efficiency(arms, arm, other)[metric])]
        return f"{min(means):.0f} to {max(means):.0f}"


def paper_span(metric):
    means = [float(row[metric].split(" ")[0]) for row in PAPER["fig6"].values()]
    return f"{min(means):.0f} to {max(means):.0f}"


def link(page, text=None):
    return f"[{text or page}](results/{page}/README.md)"


# ---- what the paper says


def figure6(d):
    text = f"area above plain PPO's, interval included, on {d.sure('fig6', 'influence', 'none')};"
    text += f" SE_ave {d.span('fig6', 'SE_ave')}%, SE_peak {d.span('fig6', 'SE_peak')}%, RT_peak {d.span('fig6', 'RT_peak')}%"
    said = f"{paper_span('SE_ave')}% fewer rounds on average, {paper_span('SE_peak')}% to the peak, {paper_span('RT_peak')}% less time"
    return "Figure 6", said, text, "in part: faster on most, by less; Acrobot's runs stall", link("fig6")


def random(d):
    text = (
        f"area below plain PPO's in the mean on {sum(np.mean(d.gains('fig6', e, 'random', 'none')) < 0 for e in d['fig6'])} of"
    )
    text += f" {len(d['fig6'])}, interval included on {d.sure('fig6', 'random', 'none', -1)}"
    return (
        "Figure 6, random",
        "dropping as many at random is worse than plain PPO",
        text,
        "yes, where there is a difference",
        link("fig6"),
    )


def final(d):
    ours = [("MiniGrid", "stalled"), ("LunarLander", "stalled"), ("BipedalWalker", "fig6")]
    text = "; ".join(f"{e} {d.gain(suite, e, 'influence', 'none', metrics.final_return)}" for e, suite in ours)
    said = "; ".join(f"{e} {PAPER['final'][e]}" for e, _ in ours)
    return "Table 4, final gain", said, text, "MiniGrid yes, the others not shown", f"{link('stalled')}, {link('fig6')}"


def runtime(d):
    ratios = [
        np.mean([np.median(mine.scoring) / np.median(other.update) for mine, other in pages.pairs(arms, "influence", "none")])
        for arms in d["fig6"].values()
    ]
    paper = [row[0] / row[2] for row in PAPER["runtime"].values()]
    said = f"scoring takes {min(paper):.2f} to {max(paper):.2f} of a plain update; what is dropped pays for it"
    return "Table 5, run time", said, f"{min(ratios):.2f} to {max(ratios):.2f}", "yes", link("fig6")


def percent(d):
    text = "; ".join(
        f"{e} " + ", ".join(f"{p}%: {np.mean(d.gains('percent', e, p, 'none')):.3g}" for p in ("12.5", "50", "100"))
        for e in ("FrozenLake", "MiniGrid", "LunarLander")
    )
    said = "nearly any percent is better than none, 100 is not the best: 50 in simple, 12.5 in complex environments"
    return "Table 2, Figure 14", said, f"gain in area, {text}", "yes, but Acrobot (stalled runs)", link("percent")


def adam(d):
    said = "; ".join(f"{e} SE_ave {row['SE_ave']}%" for e, row in PAPER["adam"].items())
    text = "; ".join(
        f"{e} SE_ave {pages.mean_and_error(pages.efficiency(arms, 'influence', 'none')['SE_ave'])}%, area"
        f" {d.gain('adam', e, 'influence', 'none')}"
        for e, arms in d["adam"].items()
    )
    verdict = "not shown: on MiniGrid runs of every arm break down once it is solved"
    return "Table 3, Figure 15, Adam", said, text, verdict, link("adam")


def rules(d):
    said = "advantage heuristics and TD error as good as influence on FrozenLake, no better than plain PPO or worse elsewhere"
    cells = [
        ("FrozenLake", ("influence", "H1", "H2", "TD error")),
        ("MiniGrid", ("influence", "H1", "H2")),
        ("LunarLander", ("influence", "TD error")),
    ]
    text = "; ".join(
        f"{e} " + ", ".join(f"{a} {np.mean(d.gains('filters', e, a, 'none')):.3g}" for a in arms) for e, arms in cells
    )
    return "Figures 12, 13", said, f"gain in area, {text}", "yes", link("filters")


def diagnosis(d):
    rho = {}
    for k in (2, 5, 10):
        found = []
        for path in sorted((d.results / "explain").glob(f"FrozenLake_10?/round_{k:06d}_ranks.csv")):
            rank, a, a_true = np.array([[float(r[c]) for c in ("rank", "advantage", "a_true")] for r in read_csv(path)]).T
            found.append(spearman(rank, a_true * a))
        rho[k] = ", ".join(f"{x:.2f}" for x in found)
    text = "three seeds: " + "; ".join(f"round {k}: {values}" for k, values in rho.items())
    said = "harmful records have wrong advantages: on FrozenLake, round 5, their rank by influence and A_true * A correlate by -0.67"
    return "Figures 3, 8, 9", said, text, "yes on FrozenLake; on MiniGrid only at the ends of the ranking", link("explain")


def behaviour(d):
    said = "a behaviour forms in three phases: same action anywhere, then in similar states, then saturation"
    text = "Highway: the roughness of influence has the paper's form; that the helpful records come closer is seen on Acrobot, not there"
    return "Figures 4, 10", said, text, "in part", link("explain")


def interventions(d):
    gains = {}
    for r in read_csv(d.results / "explain" / "interventions" / "interventions.csv"):
        if r["return"]:
            gains.setdefault(r["env"].split("-")[0], {}).setdefault((r["run"], r["round"]), {})[r["arm"]] = float(r["return"])
    text = []
    for e, found in gains.items():
        change = [x["filtered"] - x["whole round"] for x in found.values() if {"filtered", "whole round"} <= x.keys()]
        text.append(f"{e} {np.mean(np.array(change) > 0):.0%}")
    said = "dropping all negative records of one round raises the return on FrozenLake and Acrobot, at random it does not"
    verdict = "yes; on LunarLander it lowers it"
    return "Figures 5, 11", said, f"rounds with a gain: {', '.join(text)}", verdict, link("explain")


def rlhf(d):
    from benchmarks.reproduce.rlhf import PAPER_REACHED, column, reached

    runs, text = d["rlhf"], []
    for arm in ("influence", "influence, fresh", "none"):
        share = pages.mean_and_error([reached(arm, rows, runs["none"][seed])[0] for seed, rows in runs.get(arm, {}).items()])
        kl = np.mean([column(rows, "kl")[-5:].mean() for rows in runs.get(arm, {}).values()])
        text.append(f"{arm} {share}% of the rounds (KL {kl:.1f})")
    said = f"f_seq reaches plain PPO's level in {PAPER_REACHED[0]}% of the rounds and {PAPER_REACHED[1]}% of the time"
    return "Figures 7, 16, Table 6", said, "; ".join(text), "in part, and not at equal KL", link("rlhf")


def reference(d):
    changes = fixed_reference.load(d.results)
    text = "; ".join(
        f"{e}: own round {found['own'][1].mean():+.2g}, fixed reference {found['fixed'][1].mean():+.2g}"
        for e, found in changes.items()
    )
    said = "scored against a well-trained policy's rollout, filtering raises that target and not the return"
    return "authors' rebuttal", said, f"change of the return, {text}", "yes, in the mean", link("fixed_reference")


def paper(results):
    d = Data(results)
    made = (figure6, random, final, runtime, percent, adam, rules, diagnosis, behaviour, interventions, rlhf, reference)
    return table(["in the paper", "it says", "we found", "agrees?", "page"], [row(d) for row in made], left=5)


# ---- what a sceptic asks


def sceptic(results):
    d = Data(results)
    steps = "; ".join(
        f"{e} "
        + ", ".join(
            f"x {k}: {g}"
            for k in (1, 4, 16)
            if (g := d.gain("learning_rate", e, *(f"{a}, lr x {k}" for a in ("influence", "none"))))
        )
        for e in d["learning_rate"]
    )
    stalled = {
        arm: sum(bool(metrics.stalled("Acrobot", c.returns)) for c in curves.values())
        for arm, curves in d["stalled"].get("Acrobot", {}).items()
    }
    rows = [
        [
            "Would a larger learning rate do as much?",
            f"On FrozenLake it does: gain of influence over none in area at the paper's rate and multiples of it: {steps}",
            link("learning_rate"),
        ],
        [
            "And where plain PPO is well set, each arm at its own best rate?",
            " ".join(tuned.verdict(name, arms).replace("**", "") for name, arms in d["tuned"].items())
            + " On LunarLander the gain goes when both are clipped at 0.4",
            f"{link('tuned')}, {link('beyond')}",
        ],
        ["Is there a better use of the scores?", tuned.rules_verdict(d["rules"]), link("rules")],
        [
            "Does it ever do harm?",
            "On Acrobot, in rounds in which nothing tells good from bad. Stalled runs: "
            + ", ".join(f"{arm} {n} of {len(d['stalled']['Acrobot'][arm])}" for arm, n in stalled.items())
            + f". With `signal`, the default here, the area gains {d.gain('stalled', 'Acrobot', 'influence, signal', 'none')}",
            link("stalled"),
        ],
        [
            "Is your plain PPO a straw man?",
            "Area minus stable-baselines3's own: "
            + "; ".join(f"{e} {d.gain('baseline', e, 'none', 'stable-baselines3')}" for e in d["baseline"]),
            link("baseline"),
        ],
        [
            "Why is SE_ave so far below the paper's?",
            "Not clipping, not restarted rounds; on Highway, the number of evaluation episodes. Without any difference between the arms"
            f" SE_ave is {d.span('fig6', 'SE_ave', 'none', 'none')}%, as a level reached by luck counts against the other run",
            link("suspects"),
        ],
        ["Is Highway highway-v0?", "envpool's, mirrored: equal step for step, and in distribution", link("highway")],
        [
            "Does MiniGrid's scale matter?",
            "Divided by 10 both arms learn faster; five seeds do not tell them apart",
            link("minigrid_scale"),
        ],
        [
            "Is a score what dropping its record does?",
            "For one step, to four digits. Along the 320 steps of a round it still is on FrozenLake; on Acrobot and LunarLander it"
            " mostly tells better from worse sets, at a fraction of the size",
            link("explain"),
        ],
        [
            "What does it cost?",
            "Scoring: two to three ordinary passes over the round. A round with IIF takes as long as one without, but on Atari",
            link("cost"),
        ],
        ["Does every script learn?", "One seed of each arm; Pong did not with IIF at CleanRL's rate", link("learning")],
    ]
    return table(["question", "answer", "page"], rows, left=3)


# ---- what has been run


def suites(results):
    rows = []
    for suite in SUITES.values():
        runs = {run.name for run in suite.runs()}
        found = pages.spent(suite.name, runs, results)
        cells = [f"0 of {len(runs)}", "", "", ""]
        if found:
            cells = [f"{found['finished']} of {len(runs)}", f"{found['hours']:.1f}", found["date"], found["commit"]]
        title = link(suite.name, suite.title) if found else suite.title
        rows.append([title, f"`python -m benchmarks.run {suite.name}`", *cells])
    return table(["suite", "command", "runs", "CPU hours", "date", "commit"], rows, left=2)


# ---- the first screen


def when(results):
    """When does it help? For README.md."""
    d = Data(results)

    def line(setting, suite, gains, decimals, of=""):
        mean, _, half = metrics.t_interval(gains)
        said = "yes" if mean > half else "no" if mean < -half else "not shown"
        link = f"[{suite}](benchmarks/results/{suite}/README.md)"
        return [setting, f"{pages.interval(gains, decimals)} ({len(gains)} seeds){of}", said, link]

    def row(setting, suite, environment, arm="influence", other="none"):
        return line(setting, suite, d.gains(suite, environment, arm, other), pages.decimals_of(environment))

    at = {k: (f"influence, lr x {k}", f"none, lr x {k}") for k in (1, 4, 16)}
    rows = [
        row("MiniGrid-Empty-8x8, the paper's SGD rate", "stalled", "MiniGrid"),
        row("LunarLander, the paper's SGD rate", "stalled", "LunarLander"),
        row("Acrobot, the paper's SGD rate, `signal` (default)", "stalled", "Acrobot", "influence, signal"),
        row("FrozenLake, the paper's SGD rate", "stalled", "FrozenLake"),
        row("FrozenLake, 16 times that rate for both", "learning_rate", "FrozenLake", *at[16]),
        row("LunarLander, Adam", "adam", "LunarLander"),
        row("BipedalWalker, Adam (the paper's setting)", "fig6", "BipedalWalker"),
    ]
    for name, arms in d["tuned"].items():
        gains = tuned.paired(arms, "influence", "none", tuned.area)
        if len(gains) == tuned.TEST_SEEDS:
            rows.append(line(f"{name}, Adam, a published setting, each arm at its own best rate", "tuned", gains, 2))
    found = rlhf_kl.frontier(d["rlhf_kl"])
    for arm, text in (("f_seq, fresh", "f_seq"), ("f_seq_kl, fresh", "a target that knows the KL penalty")):
        gains = [reward for reward, _ in rlhf_kl.above(found, arm, "none").values()] if arm in found else []
        if len(gains) > 2:
            rows.append(line(f"language model, scored on fresh answers, {text}", "rlhf_kl", gains, 3, ", reward at equal KL"))
    return table(["setting", "influence minus plain PPO: area under the return curve [95%]", "helps?", "data"], rows, left=4)
