"""The suite `rlhf`: reward against KL, of every arm at several coefficients of the KL penalty, and what the paper shows of its own
runs (Figures 7 and 16, Table 6) at the coefficient that it has. For benchmarks/report.py.

A filter that only weakens the penalty gets more reward and more KL, as a lower coefficient does. So what counts is the height of
an arm's points (KL, value), means of the last five rounds, above the curve through those of plain PPO of the same seed. The curve
is linear between them, and is not continued beyond them.

The level that counts is the standard run's final one: the mean reward of its last five rounds. A run of the same seed reaches
it in the first round up to which the mean of the last five (or fewer) rewards is as high; a level never reached counts as one
round more than there are. Rewards are those of the training's rollouts, as in Figure 7(a).
"""

import numpy as np

from benchmarks import metrics
from benchmarks.run import RESULTS, read_csv
from benchmarks.suites import SUITES

SUITE = "rlhf"
PAPER = {  # Table 6, seconds a round: generation, rewards and forward passes; influence; optimisation
    "f_seq": (1.71 + 1.03, 2.15, 40.39),
    "none": (1.59 + 0.99, 0.0, 85.56),
}
PAPER_REACHED = ("32.8 ± 1.5", "16.8 ± 1.3")  # percent of the rounds, and of the run time, to the standard run's final level
PANELS = (("return", "reward on held-out prompts"), ("held_out", "second classifier, held out"))
PAPERS_COEF = 0.04


def load(results=RESULTS):
    """{arm: {seed: its rows}} of what is finished, in the order of the suite's table."""
    (entry,) = SUITES[SUITE]
    data = {arm: {} for arm in entry.arms}
    for path in sorted((results / SUITE).glob("*.csv")):
        if path.name != "runs.csv":
            rows = read_csv(path)
            data.setdefault(rows[0]["arm"], {})[int(rows[0]["seed"])] = rows
    return {arm: runs for arm, runs in data.items() if runs}


def column(rows, name):
    """The values of a column, without rows that have none (the last: the policy after the last round)."""
    return np.array([float(row[name]) for row in rows if row[name]])


def stages(arm, rows):
    """Seconds of rollout, scoring and update of each round, [K, 3]. Controls score only to know how many records to drop."""
    seconds = np.stack([column(rows, f"{name}_seconds") for name in ("rollout", "scoring", "update")], 1)
    if not arm.startswith("f_"):
        seconds[:, 1] = 0
    return seconds


def reached(arm, rows, standard):
    """Rounds, and seconds, until the standard run's final level, in percent of all of the standard run's."""
    level = column(standard, "reward")[-5:].mean()
    smoothed = metrics.smooth(column(rows, "reward"))
    m = metrics.rounds_to(smoothed, level)[0] + 1  # the reward of round m - 1 is there after m rollouts
    mine, all_of_standard = stages(arm, rows).sum(1), stages("none", standard).sum(1)
    seconds = mine[:m].sum() + (mine.mean() if m > len(mine) else 0)
    return 100 * m / len(all_of_standard), 100 * seconds / all_of_standard.sum()


def ends(rows):
    """(KL, held-out reward, second classifier), means over the last five rounds, of their policies theta(k)."""
    return np.array([[float(row[name]) for name in ("kl", "return", "held_out")] for row in rows[:-1]])[-5:].mean(0)


def frontier(data):
    """{arm: {coefficient of the KL penalty: {seed: its ends}}}"""
    found = {}
    for name, runs in data.items():
        arm, _, coef = name.partition(", kl ")
        found.setdefault(arm, {})[float(coef)] = {seed: ends(rows) for seed, rows in runs.items()}
    return {arm: dict(sorted(coefs.items())) for arm, coefs in found.items()}


def heights(points, standard):
    """How far an arm's points (KL, ...) of one seed are above the curve through plain PPO's, on average, [2]: NaN if none lies
    within the curve."""
    standard = np.array(sorted(map(tuple, standard)))
    inside = [p for p in points if standard[0, 0] <= p[0] <= standard[-1, 0]]
    above = [[p[i] - np.interp(p[0], standard[:, 0], standard[:, i]) for i in (1, 2)] for p in inside]
    return np.mean(above, 0) if above else np.full(2, np.nan)


def above_none(found, arm):
    """{seed: heights} of the seeds in which the arm and plain PPO have all of their coefficients."""
    seeds = set.intersection(*(set(runs) for a in (arm, "none") for runs in found[a].values()))
    complete = len(found[arm]) > 1 and len(found["none"]) > 1
    return {
        seed: heights(*([runs[seed] for runs in found[a].values()] for a in (arm, "none")))
        for seed in (sorted(seeds) if complete else ())
    }


def block(results=RESULTS):
    from benchmarks.report import interval, mean_and_error, picture, table

    data = load(results)
    if not data:
        return f"Not yet run: `python -m benchmarks.run {SUITE}`."
    found, rows = frontier(data), []
    for arm, coefs in found.items():
        above = list(above_none(found, arm).values()) if arm != "none" and "none" in found else []
        for coef, runs in coefs.items():
            kl, *values = zip(*runs.values())
            first = coef == min(coefs)
            cells = [interval([x[i] for x in above], 3) if first and above else "" for i in (0, 1)]
            dropped = [
                1 - (column(r, "records_kept") / np.diff(column(r, "global_step"))).mean()
                for r in data[f"{arm}, kl {coef:g}"].values()
            ]
            cells = [mean_and_error(list(kl)), *(mean_and_error(list(v), 3) for v in values), *cells]
            rows.append([arm, f"{coef:g}", len(runs), *cells, mean_and_error([100 * x for x in dropped], 0)])
    columns = ["", "KL penalty", "seeds", "KL", "held-out reward", "second classifier"]
    columns += ["reward above none at equal KL [95%]", "classifier above none at equal KL [95%]", "dropped, %"]
    done, wanted = sum(map(len, data.values())), len(data and SUITES[SUITE][0].arms) * SUITES[SUITE][0].seeds

    data = {arm.partition(", kl ")[0]: runs for arm, runs in data.items() if arm.endswith(f"kl {PAPERS_COEF:g}")}
    paced = []
    for arm, runs in data.items():
        both = [reached(arm, mine, data["none"][seed]) for seed, mine in runs.items() if seed in data.get("none", {})]
        paper = PAPER_REACHED if arm == "f_seq" else ("", "")
        cells = [mean_and_error(values) + (f" ({p})" if p else "") for values, p in zip(zip(*both), paper)] or ["", ""]
        final = {seed: column(r, "reward")[-5:].mean() for seed, r in runs.items()}
        paced.append([arm, len(runs), *cells, mean_and_error(list(final.values()), 3)])
    header = "|seeds|% of rounds to the final level of none (the paper's)|% of its run time|training reward".split("|")

    seconds = {arm: np.mean([np.median(stages(arm, r), 0) for r in runs.values()], 0) for arm, runs in data.items()}
    times = []
    for arm, spent in seconds.items():
        cells = [*spent, spent.sum()]
        ratio = spent.sum() / seconds["none"].sum() if "none" in seconds else np.nan
        texts = [f"{x:.2f}" for x in (*cells, ratio)]
        if arm in PAPER:
            paper = [*PAPER[arm], sum(PAPER[arm]), sum(PAPER[arm]) / sum(PAPER["none"])]
            texts = [f"{text} ({x:.2f})" for text, x in zip(texts, paper)]
        times.append([arm, *texts])
    stages_header = ["seconds a round (the paper's, on an A100)", "rollout", "scoring", "update", "all", "to none"]
    return "\n\n".join(
        [
            picture(SUITE, "Held-out reward and second classifier against KL"),
            f"*{done} of {wanted} runs are in. A point is one coefficient of the KL penalty, a curve an arm; mean and standard error"
            " over seeds.*",
            "Means of the last five rounds, mean ± SE over seeds. Above none at equal KL: over all the arm's points within the"
            " range of plain PPO's curve of the same seed.",
            table(columns, rows),
            f"At a KL penalty of {PAPERS_COEF:g}, the paper's measures, in which a weaker hold on the KL counts as progress:",
            table(header, paced),
            table(stages_header, times),
        ]
    )


def draw(results=RESULTS):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from benchmarks.snapshots import save_small

    figure, axes = plt.subplots(1, len(PANELS), figsize=(4.6 * len(PANELS), 3.6), dpi=90, layout="constrained")
    for panel, (ax, (_, title)) in enumerate(zip(axes, PANELS), start=1):
        for i, (arm, coefs) in enumerate(frontier(load(results)).items()):
            means, errors = [], []
            for runs in coefs.values():
                both = [metrics.t_interval([p[j] for p in runs.values()]) for j in (0, panel)]
                means.append([mean for mean, _, _ in both])
                errors.append([0 if np.isnan(error) else error for _, error, _ in both])
            (x, y), (x_error, y_error) = np.array(means).T, np.array(errors).T
            ax.errorbar(x, y, y_error, x_error, color=f"C{i}", lw=1.2, marker="o", ms=3, label=arm)
        ax.set_title(title, fontsize=9)
        ax.set_xlabel("KL of a response from the reference model", fontsize=8)
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 4), frameon=False, fontsize=8)
    save_small(figure, results / SUITE / f"{SUITE}.png")
    plt.close(figure)
