"""The suite `rlhf_controller`: does the controller of the KL penalty reach its target in runs of this length?"""

import numpy as np

from benchmarks.files import pyplot, table
from benchmarks.reproduce.entries import Entry, Suite
from benchmarks.reproduce.pages import mean_and_error
from benchmarks.reproduce.rlhf import COLUMNS, column, finish, load

TARGETS, HORIZONS = (4, 9), {
    1000: "-",
    300: ":",
    10000: "--",
}  # of the fixed coefficient 0.04 the KL is between the two targets
PANELS = (("kl", "KL of a response from the reference model"), ("kl_coef", "coefficient of the penalty"))


def parts(arm):
    """The target and the horizon in the name of an arm."""
    return [float(word.split()[-1]) for word in arm.split(", ")]


def tables(data):
    rows = []
    for arm, runs in data.items():
        target, horizon = parts(arm)
        kl, coefs = ([column(r, name) for r in runs.values()] for name, _ in PANELS)
        last = [x[-10:] for x in kl]
        near = [f"{np.sum(np.abs(x - target) <= target / 5)} of {len(x)}" for x in last]
        cells = [mean_and_error([x[-5:].mean() for x in kl]), ", ".join(near)]
        cells += [mean_and_error([x[i] for x in coefs], 4) for i in (0, -1)]
        cells.append(mean_and_error([column(r, "return")[-5:].mean() for r in runs.values()], 3))
        rows.append([f"{target:g}", f"{horizon:g}", len(runs), *cells])
    columns = [
        "target",
        "horizon, prompts",
        "seeds",
        "KL, last five rounds",
        "of the last ten rounds within a fifth of the target",
    ]
    columns += ["coefficient at first", "at last", "held-out reward, last five"]
    return ["Mean ± SE over seeds.", table(columns, rows, left=0)]


def draw(suite, results):
    plt = pyplot()
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4.6 * len(PANELS), 3), dpi=90, layout="constrained")
    for ax, (name, title) in zip(axes, PANELS):
        for arm, runs in suite.load(results).items():
            target, horizon = parts(arm)
            style = {"color": f"C{TARGETS.index(int(target))}", "ls": HORIZONS[int(horizon)], "lw": 1.2}
            for i, rows in enumerate(runs.values()):
                ax.plot(column(rows, name), label=arm if i == 0 else None, **style)
            if name == "kl":
                ax.axhline(target, color=style["color"], lw=0.5)
        ax.set_title(title, fontsize=9)
    finish(figure, suite, results, "round k", ncols=3)


SUITE = Suite(
    "rlhf_controller",
    "The KL controller of the language model",
    "Does `--adaptive-kl` reach its target in a run of a few thousand prompts, with the default horizon, a shorter one and TRL's? Plain PPO in the"
    " setting of the suite `rlhf_kl`, 40 rounds of 128 prompts from a coefficient of 0.04, which by itself leads to a KL between the two"
    " targets.",
    [
        Entry(
            "reviews",
            "ppo_iif_rlhf",
            "--no-cuda --optimizer adam --learning-rate 0.0001 --batch-size 128 --minibatch-size 4 --eval-prompts 128"
            " --eval-model-name tiny --filter none --kl-coef 0.04",
            40,
            {
                f"target {target}, horizon {horizon}": f"--kl-target {target} --kl-horizon {horizon}"
                for horizon in HORIZONS
                for target in TARGETS
            },
            seeds=1,
            records=128,
            returns="eval/reward",
            columns=(*COLUMNS.items(), ("kl_coef", "rlhf/kl_coef")),
        )
    ],
    tables,
    caption="Each line a run; thin lines: the targets.",
    timed=True,
    read=load,
    picture=draw,
)
