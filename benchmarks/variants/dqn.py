"""DQN with influence-based filtering against plain DQN: `python -m benchmarks.variants.dqn`.

Arms of examples/dqn_iif.py: plain, influence, random (as many dropped), all with as many training steps; and plain with as
many more steps as the fresh transitions of influence cost. Writes results/dqn/runs.csv, one row an evaluation, and dqn.png;
runs that are in it are not done again. --table prints and draws what is there.
"""

import re
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import tyro

from benchmarks.files import RESULTS, ROOT, progress, pyplot, read_csv, save_small, say, table, write_csv
from benchmarks.reproduce import metrics

FOLDER = RESULTS / "dqn"
SEEDS = range(101, 106)
STEPS = {"CartPole-v1": 20_000, "Acrobot-v1": 50_000}  # of the training environment
ARMS = {"plain": "none", "plain, as many more steps": "none", "influence": "influence", "random": "random"}
COLUMNS = ("env", "arm", "seed", "training_steps", "environment_steps", "eval_return")
LINE = re.compile(r"global_step=(\d+), environment_steps=(\d+), eval_return=(\S+)")


@dataclass
class Args:
    envs: tuple[str, ...] = tuple(STEPS)
    """which of the environments"""
    table: bool = False
    """run nothing: print the table and draw the picture of what is there"""


def steps_of(env, arm):
    """Training steps of a run; a fresh set of 128 is played at the steps 1000, 1500, ..."""
    return STEPS[env] + (128 * ((STEPS[env] - 1000) // 500 + 1) if "more" in arm else 0)


def curve(env, arm, seed, folder):
    """Rows of one run."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = f"--env-id {env} --seed {seed} --filter {ARMS[arm]} --total-timesteps {steps_of(env, arm)}"
    command = [sys.executable, str(ROOT / "examples" / "dqn_iif.py"), *flags.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{env}, {arm}, seed {seed} failed: {(done.stderr.strip().splitlines() or [''])[-1]}")
    return [[env, arm, seed, *match] for match in LINE.findall(done.stdout)]


def by_run(rows, env):
    """{arm: {seed: returns of its evaluations}}."""
    found = {}
    for row in rows:
        if row["env"] == env:
            found.setdefault(row["arm"], {}).setdefault(row["seed"], []).append(float(row["eval_return"]))
    return found


def interval(x):
    mean, _, half = metrics.t_interval(x)
    return f"{mean:.1f} ± {half:.1f}"


def results(rows):
    """Markdown: mean over the ten evaluations and the last one, with 95% t intervals over seeds, and influence's difference to
    each other arm, paired by seed."""
    lines = []
    for env in dict.fromkeys(row["env"] for row in rows):
        found = by_run(rows, env)
        steps = {row["arm"]: row["environment_steps"] for row in rows if row["env"] == env}  # the last row of each is its end
        for arm, runs in found.items():
            both = sorted(set(runs) & set(found.get("influence", {})))
            cells = [interval([measure(x) for x in runs.values()]) for measure in (np.mean, lambda x: x[-1])]
            if arm == "influence":
                gain = "–"
            else:
                gain = interval([np.mean(found["influence"][s]) - np.mean(runs[s]) for s in both]) if len(both) > 1 else ""
            lines.append([env, arm, steps[arm], len(runs), *cells, gain])
    header = [
        "environment",
        "arm",
        "environment steps",
        "seeds",
        "mean of ten evaluations",
        "last evaluation",
        "influence minus it",
    ]
    return table(header, lines, left=2)


def table_of(folder):
    return results(read_csv(folder / "runs.csv"))


def plot(rows):
    plt, envs = pyplot(), list(dict.fromkeys(row["env"] for row in rows))
    fig, axes = plt.subplots(1, len(envs), figsize=(4.6 * len(envs), 3.4), dpi=110, squeeze=False)
    for ax, env in zip(axes[0], envs):
        for arm, runs in by_run(rows, env).items():
            first = next(iter(runs))
            x = [int(r["environment_steps"]) for r in rows if (r["env"], r["arm"], r["seed"]) == (env, arm, first)]
            y = np.array(list(runs.values()))
            half = metrics.t_quantile(len(y) - 1) * y.std(0, ddof=1) / len(y) ** 0.5 if len(y) > 1 else 0
            (line,) = ax.plot(x, y.mean(0), label=arm)
            ax.fill_between(x, y.mean(0) - half, y.mean(0) + half, color=line.get_color(), alpha=0.15, lw=0)
        ax.set(xlabel="environment steps, fresh ones counted", ylabel="return of the greedy policy", title=f"DQN, {env}")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False, fontsize=8)
    fig.tight_layout()
    save_small(fig, FOLDER / "dqn.png")
    plt.close(fig)


def main(args):
    path = FOLDER / "runs.csv"
    rows = read_csv(path)
    if not args.table:
        there = {(row["env"], row["arm"], row["seed"]) for row in rows}
        rest = [(env, arm, seed) for seed in SEEDS for env in args.envs for arm in ARMS if (env, arm, str(seed)) not in there]
        for env, arm, seed in progress(rest, "run"):
            new = curve(env, arm, seed, FOLDER / "work")
            rows += [dict(zip(COLUMNS, map(str, row))) for row in new]
            write_csv(path, COLUMNS, [[row[c] for c in COLUMNS] for row in rows])
            say(f"{env}, {arm}, seed {seed}: {new[-1][-1]}")
    plot(rows)
    print(results(rows))


if __name__ == "__main__":
    main(tyro.cli(Args))
