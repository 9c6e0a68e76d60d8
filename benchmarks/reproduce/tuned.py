"""Equal footing: does filtering help where PPO is well set, and each arm has its own learning rate?

    python -m benchmarks.run tuning             every arm at every learning rate, on the tuning seeds
    python -m benchmarks.reproduce.tuned        apply the rule below, write results/tuned/chosen.csv; then `tuning` once more: 50%
    python -m benchmarks.run rules              other uses of the scores (benchmarks/variants/rules.py), on the tuning seeds
    python -m benchmarks.run tuned              the chosen ones, once, on the test seeds
    python -m benchmarks.run beyond             after the test: rates beyond the grid
    python -m benchmarks.report tuning rules tuned beyond    the pages

Settings are those that others published for plain PPO with Adam. The protocol, fixed before the first test run:

- Learning rates: RATES times the published one. Tuning seeds: 1 to 3. Test seeds: 101 to 110, each run once.
- A run is judged by the episodes that it trains on. Area: the mean over its rounds of the mean return of the episodes that
  ended in the round (a round without one counts as the round before it; before the first, as the first). Final return: the mean
  of the last tenth of the rounds.
- Rule: each arm takes the rate with the largest mean area over the tuning seeds, of equal ones the smaller. `influence` is
  tuned at 12.5 percent; 50 percent is then tried at the rate so chosen, and taken if its mean area is larger.
- Arms of the test: `none`, `influence`, and `random` at influence's rate and percent. All else is equal: steps, networks, and
  for a seed the first rollout.
- A verdict needs the 95% interval of the paired difference of areas to leave out zero. Settings that never learn are reported
  as they are.
"""

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.files import RESULTS, pyplot, read_csv, save_small, table, write_csv
from benchmarks.reproduce import metrics, pages
from benchmarks.reproduce.entries import Entry, Suite

RATES = (0.5, 1, 2, 4)
BEYOND = (8, 16)  # after the test: rates beyond the grid, at whose end LunarLander's two arms had their best ones
TUNING_SEEDS, TEST_SEEDS = 3, 10
COLUMNS = (("kl", "losses/approx_kl"), ("agreement", "influence/agreement"), ("noise_scale", "influence/noise_scale"))
RULES = ("agreeing", "scaled", "previous", "average", "as far", "least score", "least advantage")
# After the first 42 runs of `rules`: multiples of influence's rate for the one that was ahead of it somewhere, and for those whose
# steps are shorter by their own doing.
OTHER_RATES = {"agreeing": (0.25, 0.5, 2), "scaled": (2, 4), "as far": (2, 4)}
CHOSEN = RESULTS / "tuned" / "chosen.csv"
ZOO, CLEANRL = "rl-zoo3, hyperparams/ppo.yml", "CleanRL, ppo_continuous_action.py"
ADAM = "--optimizer adam --no-cuda --max-grad-norm 0.5"
COMPILED = f"{ADAM} --compile"  # for the three longest, in all arms: a third of their hours
MUJOCO = f"{COMPILED} --num-envs 1 --num-steps 2048 --norm-obs --norm-reward --anneal-lr --clip-vloss --vf-coef 0.25"


@dataclass(frozen=True)
class Setting:
    script: str
    arguments: str
    steps: int
    records: int  # a round
    learning_rate: float
    source: str

    @property
    def rounds(self):
        return self.steps // self.records


SETTINGS = {
    "DoorKey": Setting(
        "ppo_iif_minigrid",
        f"--env-id MiniGrid-DoorKey-5x5-v0 --obs-scale 10 {ADAM} --num-envs 8 --num-steps 128 --num-minibatches 16"
        " --update-epochs 10",
        100_000,
        1024,
        2.5e-4,
        f"{ZOO}, MiniGrid-DoorKey-5x5-v0; our network, no normalisation",
    ),
    "Acrobot": Setting(
        "ppo_iif",
        f"--env-id Acrobot-v1 {ADAM} --num-envs 16 --num-steps 256 --num-minibatches 64 --update-epochs 4 --gae-lambda 0.94",
        300_000,
        4096,
        3e-4,
        f"{ZOO}, Acrobot-v1; no normalisation",
    ),
    "LunarLander": Setting(
        "ppo_iif",
        f"--env-id LunarLander-v3 {ADAM} --num-envs 16 --num-steps 1024 --num-minibatches 256 --update-epochs 4"
        " --gamma 0.999 --gae-lambda 0.98 --ent-coef 0.01",
        500_000,
        16384,
        3e-4,
        f"{ZOO}, LunarLander-v2",
    ),
    "KeyCorridor": Setting(
        "ppo_iif_minigrid",
        f"--env-id MiniGrid-KeyCorridorS3R1-v0 --obs-scale 10 {COMPILED} --num-envs 8 --num-steps 512 --num-minibatches 64"
        " --update-epochs 10",
        500_000,
        4096,
        2.5e-4,
        f"{ZOO}, MiniGrid-FourRooms-v0, as it has no KeyCorridor; our network, no normalisation",
    ),
    "Hopper": Setting("ppo_iif_continuous", f"--env-id Hopper-v5 {MUJOCO}", 500_000, 2048, 3e-4, CLEANRL),
    "HalfCheetah": Setting("ppo_iif_continuous", f"--env-id HalfCheetah-v5 {MUJOCO}", 500_000, 2048, 3e-4, CLEANRL),
}


def flags(name, kind, factor, percent=12.5):
    """The arguments of an arm on an environment."""
    filtered = f" --filter-percent {percent:g}" if kind != "none" else ""
    return f"--filter {kind}{filtered} --learning-rate {SETTINGS[name].learning_rate * float(factor):g}"


def entry(name, arms, **fields):
    s = SETTINGS[name]
    fields |= {"records": s.records, "returns": "charts/episodic_return", "columns": COLUMNS}
    return Entry(name, s.script, s.arguments, s.rounds, arms, **fields)


def read_chosen():
    """{environment: row of chosen.csv}: the factors of the learning rate of `none` and of `influence`; the percent, empty until
    50 percent has been tried."""
    return {row["environment"]: row for row in read_csv(CHOSEN)}


def tuning_entries():
    """Every arm at every rate, and 50 percent where a rate has been chosen."""
    entries = []
    for name in SETTINGS:
        arms = {f"{kind}, lr x {f:g}": flags(name, kind, f) for f in RATES for kind in ("none", "influence")}
        if name in read_chosen():
            f = read_chosen()[name]["influence"]
            arms[f"influence 50%, lr x {f}"] = flags(name, "influence", f, 50)
        entries.append(entry(name, arms, seeds=TUNING_SEEDS, first_seed=1))
    return entries


def test_entries():
    """The environments whose choice is complete."""
    entries = []
    for name, row in read_chosen().items():
        if row["percent"]:
            arms = {"none": flags(name, "none", row["none"])}
            arms |= {kind: flags(name, kind, row["influence"], float(row["percent"])) for kind in ("influence", "random")}
            entries.append(entry(name, arms, seeds=TEST_SEEDS))
    return entries


def beyond_entries():
    """Both arms at larger rates, on the first five test seeds, where both had chosen the largest of the grid and one was ahead; and
    both with a wider clip, as a filtered round moves the policy further."""
    row = read_chosen().get("LunarLander")
    percent = float(row["percent"] or 12.5) if row else 12.5
    arms = {f"{kind}, lr x {f}": flags("LunarLander", kind, f, percent) for f in BEYOND for kind in ("none", "influence")}
    arms |= {f"{k}, lr x 4, clip 0.4": f"{flags('LunarLander', k, 4, percent)} --clip-coef 0.4" for k in ("none", "influence")}
    return [entry("LunarLander", arms, seeds=5)]


def rule_entries():
    """The rules at the rate and percent chosen for influence, some at others, too, on the tuning seeds."""
    entries = []
    for name in ("Acrobot", "DoorKey"):
        if name in read_chosen() and read_chosen()[name]["percent"]:
            row, s = read_chosen()[name], SETTINGS[name]
            arms = {}
            for rule in RULES:
                for factor in (1, *OTHER_RATES.get(rule, ())):
                    own = flags(name, "influence", float(row["influence"]) * factor, float(row["percent"]))
                    label = rule if factor == 1 else f"{rule}, own lr x {factor:g}"
                    arms[label] = f"--script {s.script} --rule {rule.replace(' ', '-')} {own}"
            plain = entry(name, arms, seeds=TUNING_SEEDS, first_seed=1)
            entries.append(replace(plain, script="benchmarks/variants/rules"))
    return entries


# ---- data


@dataclass
class Curve:
    """A run: mean training return of each round; seconds of each round's stages, and what else was logged of it. All [rounds],
    nan where there is none."""

    returns: np.ndarray
    seconds: np.ndarray
    kl: np.ndarray
    agreement: np.ndarray
    noise_scale: np.ndarray


def curve(rows):
    def column(name):
        return np.array([float(row[name]) if row[name] else np.nan for row in rows])

    returns = column("return")
    known = np.flatnonzero(~np.isnan(returns))
    if len(known):  # a round in which no episode ended has the return of the round before
        returns = returns[known[np.clip(np.searchsorted(known, np.arange(len(rows)), "right") - 1, 0, None)]]
    seconds = sum(np.nan_to_num(column(f"{stage}_seconds")) for stage in ("rollout", "scoring", "update"))
    return Curve(returns, seconds, column("kl"), column("agreement"), column("noise_scale"))


def area(c):
    return c.returns.mean()


def final(c):
    return c.returns[-max(1, len(c.returns) // 10) :].mean()


def load(suite, results):
    """{environment: {arm: {seed: Curve}}} of what is finished, in the order of the settings."""
    data = {name: {} for name in SETTINGS}
    for path in sorted((results / suite.name).glob("*_*.csv")):
        rows = read_csv(path)
        arms = data[rows[0]["environment"]]
        arms.setdefault(rows[0]["arm"], {})[int(rows[0]["seed"])] = curve(rows)
    return {name: arms for name, arms in data.items() if arms}


def choose(data):
    """Rows of chosen.csv by the rule, for the environments whose grid is complete."""
    rows = []
    for name, arms in data.items():
        areas = {arm: np.mean([*map(area, seeds.values())]) for arm, seeds in arms.items() if len(seeds) == TUNING_SEEDS}
        best = {}
        for kind in ("none", "influence"):
            names = [f"{kind}, lr x {f:g}" for f in RATES]
            if set(names) <= set(areas):
                best[kind] = f"{RATES[int(np.argmax([areas[n] for n in names]))]:g}"  # of equal ones the first, the smaller
        if len(best) == 2:
            few, half = (f"influence{percent}, lr x {best['influence']}" for percent in ("", " 50%"))
            percent = "" if half not in areas else "50" if areas[half] > areas[few] else "12.5"
            rows.append([name, best["none"], best["influence"], percent])
    return rows


# ---- pages


def spread(values, digits=3):
    values = np.array(values)
    error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.2g}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}g}{error}"


def tuning_tables(data):
    """Mean area of each arm at each rate; which was taken."""
    parts, chosen = [], read_chosen()
    for name, arms in data.items():
        rows = []
        for kind in ("none", "influence", "influence 50%"):
            cells = [arms.get(f"{kind}, lr x {f:g}") for f in RATES]
            if any(cells):
                rows.append([kind, *(spread([area(c) for c in seeds.values()]) if seeds else "" for seeds in cells)])
        rate = SETTINGS[name].learning_rate
        parts.append(table([f"{name}: mean area ± SE", *(f"{rate * f:g}" for f in RATES)], rows))
        if name in chosen:
            row = chosen[name]
            taken = f"Taken: none at {rate * float(row['none']):g}, influence at {rate * float(row['influence']):g}"
            parts.append(taken + (f" with {row['percent']} percent." if row["percent"] else "; 50 percent not yet tried."))
    return parts


def paired(arms, arm, other, statistic):
    seeds = sorted(set(arms.get(arm, {})) & set(arms.get(other, {})))
    return [statistic(arms[arm][s]) - statistic(arms[other][s]) for s in seeds]


def verdict(name, arms):
    """One line."""
    texts = []
    for other in ("none", "random"):
        mean, _, half = metrics.t_interval(paired(arms, "influence", other, area))
        if np.isnan(half):
            return f"**{name}**: not enough seeds yet."
        word = "ahead of" if mean > half else "behind" if mean < -half else "not told apart from"
        texts.append(f"{word} `{other}` ({mean:.3g} [{mean - half:.3g}, {mean + half:.3g}])")
    return f"**{name}**, {len(arms['influence'])} seeds: influence is {' and '.join(texts)} in area."


def tuned_tables(data):
    rows = []
    for name, arms in data.items():
        for arm, seeds in arms.items():
            means = {f: [np.nanmean(getattr(c, f)) for c in seeds.values()] for f in ("kl", "seconds")}
            agreements = [np.nanmean(c.agreement) for c in seeds.values() if not np.isnan(c.agreement).all()]
            cells = [name, arm, len(seeds), spread([*map(area, seeds.values())]), spread([*map(final, seeds.values())])]
            cells += [spread(means["kl"], 2), f"{np.mean(means['seconds']):.2f}"]
            rows.append([*cells, spread(agreements, 2) if agreements else ""])
    header = "environment|arm|seeds|area ± SE|final return ± SE|KL of the last minibatch|seconds a round|agreement"
    differences = []
    for name, arms in data.items():
        for arm, other in (("influence", "none"), ("influence", "random"), ("random", "none")):
            cells = []
            for statistic in (area, final):
                mean, _, half = metrics.t_interval(paired(arms, arm, other, statistic))
                cells.append(f"{mean:.3g}" + ("" if np.isnan(half) else f" [{mean - half:.3g}, {mean + half:.3g}]"))
            seeds = [np.array([[area(c)] for c in arms.get(a, {}).values()]) for a in (arm, other)]
            better = metrics.probability_of_improvement(*seeds) if min(map(len, seeds)) > 1 else ()
            cells.append("{:.2f} [{:.2f}, {:.2f}]".format(*better) if better else "")
            cells += [metrics.interquartile_mean(s)[0] if len(s) > 3 else np.nan for s in seeds]
            differences.append([name, f"{arm} minus {other}", *cells[:3], *(f"{x:.3g}" for x in cells[3:])])
    columns = "environment|arms|area, 95% interval|final return, 95% interval|probability that an area is larger|IQM|IQM of the other"
    lines = "\n".join(f"- {verdict(name, arms)}" for name, arms in data.items())
    return [lines, table(header.split("|"), rows, left=2), table(columns.split("|"), differences, left=2)]


def beyond_tables(data):
    """Each arm at each rate, those of the test included, and how far the influence of the test is ahead of it on the same seeds."""
    rows, tested, chosen = [], load(SUITES[1], RESULTS), read_chosen()
    for name, arms in data.items():
        seeds = set.union(*(set(runs) for runs in arms.values()))
        best = {kind: f"{kind}, lr x {chosen[name][kind]}" for kind in ("none", "influence")}
        both = {arm: {s: c for s, c in tested[name][kind].items() if s in seeds} for kind, arm in best.items()} | arms
        for arm, runs in both.items():
            mean, _, half = metrics.t_interval(paired(both, best["influence"], arm, area))
            ahead = f"{mean:.3g} [{mean - half:.3g}, {mean + half:.3g}]" if arm != best["influence"] else ""
            cells = [spread([*map(area, runs.values())]), spread([*map(final, runs.values())])]
            rows.append([name, arm, len(runs), *cells, spread([np.nanmean(c.kl) for c in runs.values()], 2), ahead])
    columns = (
        "environment|arm|seeds|area ± SE|final return ± SE|KL of the last minibatch|the test's influence minus this, area"
    )
    return [table(columns.split("|"), rows, left=2)]


def compared(name, arms):
    """The arms of `rules` with the two that they have to beat, each at its own best rate, same seeds; the names of these two."""
    row = read_chosen()[name]
    half = " 50%" if row["percent"] == "50" else ""
    others = {"none": f"none, lr x {row['none']}", "influence": f"influence{half}, lr x {row['influence']}"}
    tuning = load(SUITES[0], RESULTS)[name]
    return arms | {arm: tuning[known] for arm, known in others.items()}, list(others)


def rules_verdict(data):
    """Which rule is ahead of both in the mean area, at one rate at least, in every environment."""
    ahead = {}
    for name, arms in data.items():
        both, others = compared(name, arms)
        for arm in arms:
            gains = [paired(both, arm, other, area) for other in others]
            if all(len(gain) == TUNING_SEEDS and np.mean(gain) > 0 for gain in gains):
                ahead.setdefault(arm.split(",")[0], {}).setdefault(name, []).append(arm)
    passed = [rule for rule, names in ahead.items() if len(names) == len(data)]
    found = "; ".join(f"{' and '.join(arms)} on {name}" for names in ahead.values() for name, arms in names.items())
    return (
        f"To pass, a rule has to be ahead of both none and influence in mean area on {' and '.join(data)}, at one rate at least."
        f" Passed: {', '.join(passed) or 'none'} of {len(RULES)}. Ahead of both anywhere: {found or 'none'}"
    )


def rules_tables(data):
    """Mean area of each rule, and what it is ahead of the two that it has to beat."""
    rows = []
    for name, arms in data.items():
        both, others = compared(name, arms)
        for arm, seeds in both.items():
            cells = [f"{np.mean(paired(both, arm, o, area)):+.3g}" if arm != o else "" for o in others]
            seconds = [np.nanmean(c.seconds) for c in seeds.values()]
            rows.append([name, arm, len(seeds), spread([*map(area, seeds.values())]), *cells, f"{np.mean(seconds):.2f}"])
    columns = "environment|rule|seeds|area ± SE|minus none|minus influence|seconds a round"
    return [f"{rules_verdict(data)}.", table(columns.split("|"), rows, left=2)]


def draw(suite, results):
    """Curves: means over seeds, of up to three arms with their 95% intervals; of `rules`, with the two that they have to beat."""
    plt, data = pyplot(), suite.load(results)
    if suite.name == "rules":
        data = {name: compared(name, arms)[0] for name, arms in data.items()}
    fig, axes = plt.subplots(1, len(data), figsize=(4 * len(data) + 1.5, 3.2), dpi=100, squeeze=False, layout="constrained")
    styles = pages.styles_of(dict.fromkeys(arm for arms in data.values() for arm in arms))
    for ax, (name, arms) in zip(axes[0], data.items()):
        for arm, seeds in arms.items():
            returns = np.array([c.returns for c in seeds.values()])
            steps = (1 + np.arange(returns.shape[1])) * SETTINGS[name].records / 1000
            ax.plot(steps, returns.mean(0), label=arm, **styles[arm])
            if len(seeds) > 2 and len(arms) <= 3:
                half = metrics.t_quantile(len(seeds) - 1) * returns.std(0, ddof=1) / len(seeds) ** 0.5
                ax.fill_between(
                    steps, returns.mean(0) - half, returns.mean(0) + half, color=styles[arm]["color"], alpha=0.15, lw=0
                )
        ax.set(title=name, xlabel="thousand steps", ylabel="return of training episodes")
        ax.spines[["top", "right"]].set_visible(False)
    handles = {label: h for ax in axes[0] for h, label in zip(*ax.get_legend_handles_labels())}
    handles = {arm: handles[arm] for arm in styles}
    fig.legend(handles.values(), handles, loc="outside right upper", frameon=False, fontsize=7)
    save_small(fig, results / suite.name / f"{suite.name}.png")
    plt.close(fig)


SOURCES = "\n".join(
    f"- {name}: {s.steps:,} steps, published rate {s.learning_rate:g}; {s.source}{'; --compile' * ('--compile' in s.arguments)}."
    for name, s in SETTINGS.items()
)
SHARED = {"read": load, "picture": draw, "caption": "Return of training episodes, mean over seeds; bands: 95% interval (t)."}
SUITES = [
    Suite(
        "tuning",
        "Learning rates on equal footing: tuning",
        "Which learning rate is best for plain PPO, and which for influence-based filtering, at settings published for plain"
        f" PPO? Seeds 1 to 3; the rule is in benchmarks/reproduce/tuned.py.\n\n{SOURCES}",
        tuning_entries(),
        tuning_tables,
        **SHARED,
    ),
    Suite(
        "tuned",
        "Learning rates on equal footing: test",
        "Does filtering help where PPO is well set and each arm has its own learning rate? Settings, rates and the rule of choice"
        " were fixed before the first of these runs (see [tuning](../tuning/README.md)); seeds 101 to 110.",
        test_entries(),
        tuned_tables,
        **SHARED,
    ),
    Suite(
        "beyond",
        "Learning rates on equal footing: beyond the grid",
        "On LunarLander both arms chose the largest rate of the grid, four times the published one, and influence was ahead in the"
        " [test](../tuned/README.md). Is it still, if plain PPO may go further? Both at 8 and 16 times the published rate, and with the"
        " ratio clipped at 0.4 in place of 0.2, on the first five test seeds, run after the test had been seen.",
        beyond_entries(),
        beyond_tables,
        **SHARED,
    ),
    Suite(
        "rules",
        "Other rules",
        "Is there a better use of the scores, or of the agreement, than dropping the lowest? The rules of"
        " benchmarks/variants/rules.py at the rate and percent chosen for influence, on the tuning seeds 1 to 3; other rates for the one"
        " that was then ahead of none and influence (each at its own best rate) on one of the two, `agreeing`, and for the two that"
        " shorten the steps, `scaled` and `as far` (own lr x: a multiple of influence's rate).",
        rule_entries(),
        rules_tables,
        **SHARED,
    ),
]


if __name__ == "__main__":
    table_of = choose(load(SUITES[0], RESULTS))
    write_csv(CHOSEN, ["environment", "none", "influence", "percent"], table_of)
    for line in table_of:
        print(*line)
