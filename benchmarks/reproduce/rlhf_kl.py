"""The suite `rlhf_kl`: reward against KL, of every arm at several coefficients of the KL penalty.

A filter that only weakens the penalty gets more reward and more KL, as a lower coefficient does. So what counts is the height of
an arm's points (KL, value), means of the last five rounds, above the curve through those of plain PPO of the same seed. The curve
is linear in log KL between them, and is not continued beyond them. (Plain PPO's own middle points, left out, lie 0.010 of reward
above that curve, and 0.030 above one that is linear in KL, which would be counted as a gain of the arm.)
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
    above = [[p[i] - np.interp(np.log(p[0]), np.log(standard[:, 0]), standard[:, i]) for i in (1, 2)] for p in inside]
    return np.mean(above, 0) if above else np.full(2, np.nan)


def above(found, arm, standard):
    """{seed: heights} of the seeds in which the arm and the standard one have all of their coefficients."""
    seeds = set.intersection(*(set(runs) for a in (arm, standard) for runs in found[a].values()))
    complete = len(found[arm]) > 1 and len(found[standard]) > 1
    return {
        seed: heights(*([runs[seed] for runs in found[a].values()] for a in (arm, standard)))
        for seed in (sorted(seeds) if complete else ())
    }


def tables(data, standard="none", name="plain PPO"):
    found, rows = frontier(data), []
    for arm, coefs in found.items():
        higher = list(above(found, arm, standard).values()) if arm != standard and standard in found else []
        for coef, runs in coefs.items():
            kl, *values = zip(*runs.values())
            cells = [interval([x[i] for x in higher], 3) if higher and coef == min(coefs) else "" for i in (0, 1)]
            cells = [mean_and_error(list(kl)), *(mean_and_error(list(v), 3) for v in values), *cells]
            kept = [
                column(r, "records_kept") / np.diff(column(r, "global_step")) for r in data[f"{arm}, kl {coef:g}"].values()
            ]
            rows.append([arm, f"{coef:g}", len(runs), *cells, mean_and_error([100 * (1 - x.mean()) for x in kept], 0)])
    columns = ["", "KL penalty", "seeds", "KL", "held-out reward", "second classifier"]
    columns += [f"{what} above {standard} at equal KL [95%]" for what in ("reward", "classifier")] + ["dropped, %"]
    text = (
        f"Means of the last five rounds, mean ± SE over seeds. Above {standard} at equal KL: over those of the arm's points that are"
        f" in and within the range of {name}'s curve of the same seed, linear in log KL."
    )
    return [text, table(columns, rows)]


def state(results, suite=None):
    """How many of a suite's runs are in, and how far each arm is above the standard one at equal KL; for docs/language-models.md."""
    suite = suite or SUITE
    own, of_arm = load(suite, results), {}
    for arm, runs in own.items():
        of_arm.setdefault(arm.partition(", kl ")[0], []).append(len(runs))
    (entry,), coefs = suite.entries, len({arm.partition(", kl ")[2] for arm in suite.entries[0].arms})
    parts = [f"{arm}: {sum(counts)} of {coefs * entry.seeds}" for arm, counts in of_arm.items()]
    text = f"**{sum(map(len, own.values()))} of {len(suite.runs())} runs are in** ({'; '.join(parts)})."
    return f"{text}\n\n{suite.tables(suite.load(results))[1]}" if own else "Not yet run."


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
