"""The suite `rlhf_kl`: reward against KL, of every arm at several coefficients of the KL penalty.

A filter that only weakens the penalty gets more reward and more KL, as a lower coefficient does. So what counts is the height of
an arm's points (KL, value), means of the last five rounds, above the curve through those of plain PPO of the same seed. The curve
is linear between them, and is not continued beyond them.
"""

import numpy as np

from benchmarks.files import pyplot, table
from benchmarks.reproduce import metrics
from benchmarks.reproduce.entries import Entry, Suite
from benchmarks.reproduce.pages import interval, mean_and_error
from benchmarks.reproduce.rlhf import COLUMNS, column, finish, load

PANELS = (("return", "reward on held-out prompts"), ("held_out", "second classifier, held out"))
ARMS = {
    "none": "--filter none",
    "f_seq, fresh": "--filter influence --target seq --validation-prompts 128",
    "f_seq_kl, fresh": "--filter influence --target seq_kl --validation-prompts 128",
    "f_return, fresh": "--filter influence --target return --validation-prompts 128",
    "random, fresh": "--filter random --target seq --validation-prompts 128",  # as many dropped as f_seq on fresh answers would
    "f_seq": "--filter influence --target seq",
    "f_seq_kl": "--filter influence --target seq_kl",
    "f_return": "--filter influence --target return",
}
COEFS = (0.04, 0.01, 0.02, 0.08)


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


def tables(data):
    found, rows = frontier(data), []
    for arm, coefs in found.items():
        above = list(above_none(found, arm).values()) if arm != "none" and "none" in found else []
        for coef, runs in coefs.items():
            kl, *values = zip(*runs.values())
            cells = [interval([x[i] for x in above], 3) if above and coef == min(coefs) else "" for i in (0, 1)]
            cells = [mean_and_error(list(kl)), *(mean_and_error(list(v), 3) for v in values), *cells]
            kept = [
                column(r, "records_kept") / np.diff(column(r, "global_step")) for r in data[f"{arm}, kl {coef:g}"].values()
            ]
            rows.append([arm, f"{coef:g}", len(runs), *cells, mean_and_error([100 * (1 - x.mean()) for x in kept], 0)])
    columns = ["", "KL penalty", "seeds", "KL", "held-out reward", "second classifier"]
    columns += ["reward above none at equal KL [95%]", "classifier above none at equal KL [95%]", "dropped, %"]
    text = (
        "Means of the last five rounds, mean ± SE over seeds. Above none at equal KL: over those of the arm's points that are in"
        " and within the range of plain PPO's curve of the same seed."
    )
    return [text, table(columns, rows)]


def state(results):
    """How many of the runs are in, and how far each arm is above plain PPO at equal KL; for docs/language-models.md."""
    data, wanted = load(SUITE, results), SUITE.runs()
    found, all_of_arm = frontier(data), len(COEFS) * SUITE.entries[0].seeds
    counts = {arm: sum(map(len, coefs.values())) for arm, coefs in found.items()}
    parts = [f"{arm}: {count} of {all_of_arm}" for arm, count in counts.items()]
    return f"**{sum(counts.values())} of {len(wanted)} runs are in** ({'; '.join(parts)}).\n\n{tables(data)[1]}"


def draw(suite, results):
    plt = pyplot()
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4.6 * len(PANELS), 3.6), dpi=90, layout="constrained")
    for panel, (ax, (_, title)) in enumerate(zip(axes, PANELS), start=1):
        for i, (arm, coefs) in enumerate(frontier(suite.load(results)).items()):
            means, errors = [], []
            for runs in coefs.values():
                both = [metrics.t_interval([p[j] for p in runs.values()]) for j in (0, panel)]
                means.append([mean for mean, _, _ in both])
                errors.append([0 if np.isnan(error) else error for _, error, _ in both])
            (x, y), (x_error, y_error) = np.array(means).T, np.array(errors).T
            ax.errorbar(x, y, y_error, x_error, color=f"C{i}", lw=1.2, marker="o", ms=3, label=arm)
        ax.set_title(title, fontsize=9)
    finish(figure, suite, results, "KL of a response from the reference model", ncols=4)


SUITE = Suite(
    "rlhf_kl",
    "Language models at equal KL",
    "Does filtering help a language model, or does it only weaken the KL penalty? The setting of the suite `rlhf`, 40 rounds, every arm"
    " at four fixed coefficients of the penalty. `f_seq`, `f_return`: influence on these targets, all records of negative influence are"
    " dropped; `f_seq_kl`: f_seq with the whole response's return, penalties included, for its weight; `fresh`: on 128 fresh answers;"
    " `random, fresh`: as many dropped at random as f_seq on fresh answers would.",
    [
        Entry(
            "reviews",
            "ppo_iif_rlhf",
            "--no-cuda --optimizer adam --learning-rate 0.0001 --batch-size 128 --minibatch-size 4 --eval-prompts 128"
            " --eval-model-name tiny --no-adaptive-kl",
            40,
            {
                f"{arm}, kl {coef:g}": f"{flags} --filter-percent 100 --kl-coef {coef:g}"
                for arm, flags in ARMS.items()
                for coef in COEFS
            },
            seeds=3,
            records=128,
            returns="eval/reward",
            columns=tuple(COLUMNS.items()),
        )
    ],
    tables,
    caption="A point is one coefficient of the KL penalty, a curve an arm; mean and standard error over seeds.",
    timed=True,
    read=load,
    picture=draw,
)
