"""The suite `rlhf`: its arms, and its page, which shows them as the paper shows its own (Figures 7 and 16, Table 6).

The level that counts is the standard run's final one: the mean reward of its last five rounds. A run of the same seed reaches
it in the first round up to which the mean of the last five (or fewer) rewards is as high; a level never reached counts as one
round more than there are. Rewards are those of the training's rollouts, as in Figure 7(a).
"""

import numpy as np

from benchmarks.files import pyplot, read_csv, save_small, table
from benchmarks.reproduce import metrics
from benchmarks.reproduce.entries import Entry, Suite
from benchmarks.reproduce.pages import interval, mean_and_error

PAPER = {  # Table 6, seconds a round: generation, rewards and forward passes; influence; optimisation
    "influence": (1.71 + 1.03, 2.15, 40.39),
    "none": (1.59 + 0.99, 0.0, 85.56),
}
PAPER_REACHED = ("32.8 ± 1.5", "16.8 ± 1.3")  # percent of the rounds, and of the run time, to the standard run's final level
PANELS = (("reward", "training reward"), ("return", "reward on held-out prompts"), ("held_out", "second classifier, held out"))
COLUMNS = {  # of the results: what the script logs for them
    "reward": "rlhf/reward",
    "kl": "rlhf/kl",
    "response_length": "rlhf/response_length",
    "held_out": "eval/classifier",
}


def load(suite, results):
    """{arm: {seed: its rows}} of what is finished, in the order of the suite's table."""
    (entry,) = suite.entries
    data = {arm: {} for arm in entry.arms}
    for path in sorted((results / suite.name).glob("*.csv")):
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
    if not arm.startswith("influence"):
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


def tables(data):
    rows = []
    for arm, runs in data.items():
        both = [reached(arm, mine, data["none"][seed]) for seed, mine in runs.items() if seed in data.get("none", {})]
        paper = PAPER_REACHED if arm == "influence" else ("", "")
        cells = [mean_and_error(values) + (f" ({p})" if p else "") for values, p in zip(zip(*both), paper)] or ["", ""]
        final = {
            name: {seed: column(r, name)[-5:].mean() for seed, r in runs.items()}
            for name in ("reward", "return", "held_out", "kl")
        }
        for name, decimals in (("reward", 3), ("return", 3), ("held_out", 3), ("kl", 1)):
            cells.append(mean_and_error(list(final[name].values()), decimals))
        standard = {seed: column(r, "return")[-5:].mean() for seed, r in data.get("none", {}).items()}
        gain = [value - standard[seed] for seed, value in final["return"].items() if seed in standard]
        cells.insert(4, interval(gain, 3) if arm != "none" else "")
        dropped = [1 - (column(r, "records_kept") / np.diff(column(r, "global_step"))).mean() for r in runs.values()]
        rows.append([arm, len(runs), *cells, mean_and_error([100 * x for x in dropped], 0)])
    header = "|seeds|% of rounds to the final level of none (the paper's)|% of its run time|training reward".split("|")
    header += ["held-out reward", "minus none [95%]", "second classifier", "KL", "dropped, %"]

    seconds = {arm: np.mean([np.median(stages(arm, r), 0) for r in runs.values()], 0) for arm, runs in data.items()}
    times = []
    for arm, found in seconds.items():
        cells = [*found, found.sum()]
        ratio = found.sum() / seconds["none"].sum() if "none" in seconds else np.nan
        texts = [f"{x:.2f}" for x in (*cells, ratio)]
        if arm in PAPER:
            paper = [*PAPER[arm], sum(PAPER[arm]), sum(PAPER[arm]) / sum(PAPER["none"])]
            texts = [f"{text} ({x:.2f})" for text, x in zip(texts, paper)]
        times.append([arm, *texts])
    stages_header = ["seconds a round (the paper's, on an A100)", "rollout", "scoring", "update", "all", "to none"]
    text = "Final values are means of the last five rounds; all are mean ± SE over seeds."
    return [text, table(header, rows), table(stages_header, times)]


def draw(suite, results):
    plt = pyplot()
    figure, axes = plt.subplots(1, len(PANELS), figsize=(3.7 * len(PANELS), 3), dpi=90, layout="constrained")
    for ax, (name, title) in zip(axes, PANELS):
        for i, (arm, runs) in enumerate(suite.load(results).items()):
            curves = [column(rows, name) for rows in runs.values()]
            curves = np.array([metrics.smooth(c) if name == "reward" else c for c in curves])
            mean, error, _ = np.array([metrics.t_interval(values) for values in curves.T]).T
            ax.plot(mean, color=f"C{i}", lw=1.2, label=arm)
            ax.fill_between(range(len(mean)), mean - error, mean + error, color=f"C{i}", alpha=0.2, lw=0)
        ax.set_title(title, fontsize=9)
    finish(figure, suite, results, "round k")


def finish(figure, suite, results, xlabel, ncols=None):
    """Axes, one legend above them (`ncols` columns, or one row), and the file of a suite's picture."""
    for ax in figure.axes:
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=ncols or len(labels), frameon=False, fontsize=8)
    figure.supxlabel(xlabel, fontsize=9)
    save_small(figure, results / suite.name / f"{suite.name}.png")
    pyplot().close(figure)


SUITE = Suite(
    "rlhf",
    "Language models",
    "Does filtering save rounds when a language model is fine-tuned? The paper's Figures 7 and 16 and Table 6, in the small. A GPT of two"
    " layers learns to praise films (the paper: gpt-neo-2.7B with LoRA learns to be less toxic), 60 rounds of 128 prompts, minibatches"
    " of 4. `influence`: f_seq, all records of negative influence on the round itself are dropped; `influence, return`: f_return;"
    " `fresh`: influence on 128 fresh answers, as the authors' scripts, so that no record counts for itself; `random`: as many dropped"
    " at random; `reward`: as many, half of them of the highest rewards and half of the lowest. The model is built once: `python"
    " -m benchmarks.reproduce.rlhf_tiny`.",
    [
        Entry(
            "reviews",
            "ppo_iif_rlhf",
            "--no-cuda --optimizer adam --learning-rate 0.0001 --batch-size 128 --minibatch-size 4 --eval-prompts 128"
            " --eval-model-name tiny --kl-horizon 10000",
            60,
            {
                "influence": "--filter influence --filter-percent 100 --target seq",
                "influence, return": "--filter influence --filter-percent 100 --target return",
                "influence, fresh": "--filter influence --filter-percent 100 --target seq --validation-prompts 128",
                "random, fresh": "--filter random --filter-percent 100 --target seq --validation-prompts 128",
                "none": "--filter none",
                "random": "--filter random --filter-percent 100 --target seq",
                "reward": "--filter reward --filter-percent 100 --target seq",
            },
            seeds=3,
            records=128,
            returns="eval/reward",
            columns=tuple(COLUMNS.items()),
        )
    ],
    tables,
    caption="Mean and standard error over seeds. Rewards of training are trailing means of five rounds.",
    timed=True,
    read=load,
    picture=draw,
)
