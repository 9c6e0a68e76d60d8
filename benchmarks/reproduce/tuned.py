"""Equal footing: does filtering help where PPO is well set, and each arm has its own learning rate?

    python -m benchmarks.run tuning              every arm at every learning rate, on the tuning seeds
    python -m benchmarks.reproduce.tuned choose  the rule below: writes results/tuned/chosen.csv
    python -m benchmarks.run tuned               the chosen ones, once, on the test seeds
    python -m benchmarks.reproduce.tuned report  results/tuned/README.md and its picture

Settings are those that others published for plain PPO with Adam. The protocol, fixed before the first test run:

- Learning rates: RATES times the published one. Tuning seeds: 1 to 3. Test seeds: 101 to 110, each run once.
- A run is judged by the episodes that it trains on. Area: the mean over its rounds of the mean return of the episodes that
  ended in the round (a round without one counts as the round before it; before the first, as the first). Final return: the mean
  of the last tenth of the rounds.
- Rule: each arm takes the rate with the largest mean area over the tuning seeds, of equal ones the smaller. `influence` is
  tuned at 12.5 percent; 50 percent is then tried at the rate so chosen, and taken if its mean area is larger.
- Arms of the test: `none`, `influence`, and `random` at influence's rate and percent. No arm gets anything that another does
  not: same steps, same networks, same first rollout for a seed.
- Settings that never learn are reported as they are.
"""

import sys
from dataclasses import dataclass

import numpy as np

from benchmarks.reproduce.suites import Entry
from benchmarks.run import RESULTS, read_csv, write_csv

RATES = (0.5, 1, 2, 4)
TUNING_SEEDS, TEST_SEEDS = 3, 10
COLUMNS = (("kl", "losses/approx_kl"), ("agreement", "influence/agreement"), ("noise_scale", "influence/noise_scale"))
CHOSEN = RESULTS / "tuned" / "chosen.csv"
ZOO = "rl-zoo3, hyperparams/ppo.yml"
CLEANRL = "CleanRL, ppo_continuous_action.py"
ADAM = "--optimizer adam --no-cuda --max-grad-norm 0.5"


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
        f"{ZOO}, MiniGrid-DoorKey-5x5-v0, with our network for its MlpPolicy and without its normalisation",
    ),
    "Acrobot": Setting(
        "ppo_iif",
        f"--env-id Acrobot-v1 {ADAM} --num-envs 16 --num-steps 256 --num-minibatches 64 --update-epochs 4 --gae-lambda 0.94",
        300_000,
        4096,
        3e-4,
        f"{ZOO}, Acrobot-v1, without its normalisation",
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
        f"--env-id MiniGrid-KeyCorridorS3R1-v0 --obs-scale 10 {ADAM} --num-envs 8 --num-steps 512 --num-minibatches 64"
        " --update-epochs 10",
        500_000,
        4096,
        2.5e-4,
        f"{ZOO}, MiniGrid-FourRooms-v0 (it has no KeyCorridor), with our network and without its normalisation",
    ),
    "Hopper": Setting(
        "ppo_iif_continuous",
        f"--env-id Hopper-v5 {ADAM} --norm-obs --norm-reward --anneal-lr --clip-vloss --vf-coef 0.25",
        500_000,
        2048,
        3e-4,
        CLEANRL,
    ),
    "HalfCheetah": Setting(
        "ppo_iif_continuous",
        f"--env-id HalfCheetah-v5 {ADAM} --norm-obs --norm-reward --anneal-lr --clip-vloss --vf-coef 0.25",
        500_000,
        2048,
        3e-4,
        CLEANRL,
    ),
}


def rule(kind, percent=12.5):
    return "--filter none" if kind == "none" else f"--filter {kind} --filter-percent {percent:g}"


def at(setting, factor):
    return f"--learning-rate {setting.learning_rate * factor:g}"


def entry(name, own, **fields):
    s = SETTINGS[name]
    fields |= {"records": s.records, "returns": "charts/episodic_return", "columns": COLUMNS}
    return Entry(name, s.script, s.arguments, s.rounds, own, **fields)


def tuning():
    """The entries of the suite `tuning`: every arm at every rate, then 50 percent where a rate has been chosen."""
    chosen, entries = read_chosen(), []
    for name, s in SETTINGS.items():
        arms = {f"{arm}, lr x {f:g}": f"{rule(arm)} {at(s, f)}" for f in RATES for arm in ("none", "influence")}
        if name in chosen:
            f = float(chosen[name]["influence"])
            arms[f"influence 50%, lr x {f:g}"] = f"{rule('influence', 50)} {at(s, f)}"
        entries.append(entry(name, arms, seeds=TUNING_SEEDS, first_seed=1))
    return entries


def test():
    """The entries of the suite `tuned`: the environments whose choice is complete."""
    entries = []
    for name, row in read_chosen().items():
        if row["percent"]:
            s, f, percent = SETTINGS[name], float(row["influence"]), float(row["percent"])
            arms = {"none": f"{rule('none')} {at(s, float(row['none']))}"}
            arms |= {kind: f"{rule(kind, percent)} {at(s, f)}" for kind in ("influence", "random")}
            entries.append(entry(name, arms, seeds=TEST_SEEDS))
    return entries


def read_chosen():
    """{environment: row of chosen.csv}: the factors of the learning rate of `none` and `influence`, and the percent, empty until
    50 percent has been tried."""
    return {row["environment"]: row for row in read_csv(CHOSEN)}


# ---- curves


def curve(rows):
    """Mean return of each round, [rounds]; a round in which no episode ended has that of the round before."""
    returns = np.array([float(row["return"]) if row["return"] else np.nan for row in rows])
    known = np.flatnonzero(~np.isnan(returns))
    return returns[known[np.clip(np.searchsorted(known, np.arange(len(returns)), "right") - 1, 0, None)]]


def area(returns):
    return returns.mean()


def final(returns):
    return returns[-max(1, len(returns) // 10) :].mean()


def load(suite):
    """{environment: {arm: {seed: rows}}} of what is finished."""
    data = {}
    for path in sorted((RESULTS / suite).glob("*_*.csv")):
        rows = read_csv(path)
        data.setdefault(rows[0]["environment"], {}).setdefault(rows[0]["arm"], {})[int(rows[0]["seed"])] = rows
    return data


# ---- the rule


def choose():
    """Apply the rule to what the tuning runs have shown, environment by environment."""
    table = []
    for name, arms in load("tuning").items():
        areas = {arm: np.mean([area(curve(rows)) for rows in seeds.values()]) for arm, seeds in arms.items()}
        whole = {arm for arm, seeds in arms.items() if len(seeds) == TUNING_SEEDS}
        best = {}
        for arm in ("none", "influence"):
            names = [f"{arm}, lr x {f:g}" for f in RATES]
            if set(names) <= whole:
                best[arm] = RATES[int(np.argmax([areas[n] for n in names]))]  # of equal ones the first, the smaller rate
        if len(best) == 2:
            few, half = (f"influence{p}, lr x {best['influence']:g}" for p in ("", " 50%"))
            percent = "" if half not in whole else "50" if areas[half] > areas[few] else "12.5"
            table.append([name, *(f"{best[arm]:g}" for arm in ("none", "influence")), percent])
    write_csv(CHOSEN, ["environment", "none", "influence", "percent"], table)
    for row in table:
        print(*row)


if __name__ == "__main__":
    if sys.argv[1:] == ["choose"]:
        choose()
    else:
        sys.exit("python -m benchmarks.reproduce.tuned choose")
