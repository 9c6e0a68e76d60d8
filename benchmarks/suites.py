"""What is run, as one table: SUITES, in the order of their importance.

Settings are those of the paper's appendix A.2, with the rounds of its figures and, per environment, the percent that its
authors picked as best (appendix B.6). All arms of an entry have the same arguments, seeds, initial weights and first rollout.
"""

import shlex
from dataclasses import dataclass

FIRST_SEED = 101
ROUND = 2048  # records, everywhere
COMMON = "--no-cuda --num-envs 1 --num-steps 2048 --max-grad-norm 0 --eval-episodes"
SGD = "--optimizer sgd --learning-rate 0.005"
ADAM = "--optimizer adam --learning-rate"
HIGHWAY = "--env-id benchmarks.envpool_highway:EnvpoolHighway-v0"  # highway-v0, hundreds of times as fast
ENVIRONMENTS = {  # name: (script, its arguments, rounds, percent of the negatives that the paper drops)
    "FrozenLake": (
        "ppo_iif",
        f"""--env-id FrozenLake-v1 --env-kwargs '{{"map_name": "4x4", "is_slippery": false}}' {SGD} {COMMON} 20""",
        30,
        50,
    ),
    "Acrobot": ("ppo_iif", f"--env-id Acrobot-v1 {SGD} {COMMON} 20", 20, 50),
    "MiniGrid": ("ppo_iif_minigrid", f"--env-id MiniGrid-Empty-8x8-v0 --obs-scale 255 {SGD} {COMMON} 20", 40, 12.5),
    "Highway": ("ppo_iif", f"""{HIGHWAY} --env-kwargs '{{"vehicles_count": 10}}' {SGD} {COMMON} 20""", 25, 50),
    "LunarLander": ("ppo_iif", f"--env-id LunarLander-v3 {SGD} {COMMON} 20", 100, 12.5),
    "BipedalWalker": ("ppo_iif_continuous", f"--env-id BipedalWalker-v3 {ADAM} 0.0003 {COMMON} 10", 150, 6.25),
}
# A small language model, made to write of films with a lexicon's favour. It is built once: python ppo_iif_rlhf.py --prepare
RLHF = (
    "--no-cuda --optimizer adam --learning-rate 0.0001 --batch-size 128 --minibatch-size 4 --eval-prompts 128"
    " --eval-model-name tiny --no-adaptive-kl"
)
RLHF_ARMS = {  # each at each coefficient of the KL penalty: a filter that only lowers it is no better than a lower coefficient
    "none": "--filter none",
    "f_seq, fresh": "--filter influence --target seq --validation-prompts 128",
    "f_seq_kl, fresh": "--filter influence --target seq_kl --validation-prompts 128",
    "f_return, fresh": "--filter influence --target return --validation-prompts 128",
    "random, fresh": "--filter random --target seq --validation-prompts 128",  # as many dropped as f_seq on fresh answers would
    "f_seq": "--filter influence --target seq",
    "f_seq_kl": "--filter influence --target seq_kl",
    "f_return": "--filter influence --target return",
}
RLHF_KL_COEFS = (0.04, 0.01, 0.02, 0.08)
RLHF_COLUMNS = {
    "reward": "rlhf/reward",
    "kl": "rlhf/kl",
    "response_length": "rlhf/response_length",
    "held_out": "eval/classifier",
}


@dataclass(frozen=True)
class Entry:
    """Runs on one environment: every arm with every seed."""

    environment: str
    script: str
    arguments: str
    rounds: int
    arms: dict[str, str]  # name: its own arguments
    seeds: int = 5
    records: int = ROUND  # a round
    returns: str = "eval/episodic_return"  # what the script logs as the return of theta(k)
    columns: tuple[tuple[str, str], ...] = ()  # more columns of the results, and what the script logs for them


@dataclass(frozen=True)
class Run:
    """One training run."""

    suite: str
    environment: str
    arm: str
    seed: int
    rounds: int
    script: str
    arguments: str
    returns: str = "eval/episodic_return"
    columns: tuple[tuple[str, str], ...] = ()

    @property
    def name(self):
        words = "".join(c if c.isalnum() or c == "." else " " for c in f"{self.environment} {self.arm}").split()
        return f"{words[0]}_{'-'.join(words[1:])}_{self.seed}"

    @property
    def command(self):
        return f"python {self.script}.py {self.arguments}"


def arms(percent, *names):
    """The arms of that name, with the arguments that make them."""
    filtered = f"--filter-percent {percent:g} --filter-when"
    table = {
        "influence": f"--filter influence {filtered} always",  # the paper's rule
        "influence, signal": f"--filter influence {filtered} signal",  # the scripts' default
        "none": "--filter none",
        "random": f"--filter random {filtered} always",
    }
    return {name: table[name] for name in names}


def entry(environment, *names, extra="", own=None, **fields):
    """An environment in the paper's setting with the arms of these names, and others of its own: {name: arguments}."""
    script, arguments, rounds, percent = ENVIRONMENTS[environment]
    return Entry(
        environment, script, f"{arguments} {extra}".strip(), rounds, {**arms(percent, *names), **(own or {})}, **fields
    )


def sb3(environment, seeds, extra=""):
    """stable-baselines3's own PPO, with the same arguments."""
    _, arguments, rounds, _ = ENVIRONMENTS[environment]
    arm = {"stable-baselines3": ""}
    return Entry(environment, "benchmarks/sb3_ppo", f"{arguments} {extra}".strip(), rounds, arm, seeds)


def adam(environment, learning_rate, clipped=True):
    """The environment with Adam; without clipping, as the authors' code, and with, as their text."""
    own = {arm: f"{rule} --max-grad-norm 0.5" for arm, rule in arms(ENVIRONMENTS[environment][3], "influence", "none").items()}
    own = {f"{arm}, clipped": rule for arm, rule in own.items()} if clipped else None
    return entry(environment, "influence", "none", "random", extra=f"{ADAM} {learning_rate}", own=own)


def suspects(environment, *kinds):
    """In what the authors' runs may differ from these: rounds that restart, clipped gradients, evaluations of more episodes."""
    script, arguments, rounds, percent = ENVIRONMENTS[environment]
    table = arms(percent, "influence", "none")
    flags = {"clipped": "--max-grad-norm 0.5", "100 episodes": "--eval-episodes 100"}
    own = {f"{arm}, {kind}": f"{rule} {flags[kind]}" for kind in kinds for arm, rule in table.items()}
    restarted = {f"{arm}, restarted": rule for arm, rule in table.items()}
    return [entry(environment, *table, own=own), Entry(environment, "benchmarks/restarted", arguments, rounds, restarted)]


def percents(environment):
    sweep = {f"{p:g}": arms(p, "influence")["influence"] for p in (6.25, 12.5, 25, 50, 100)}
    return entry(environment, "none", "random", own=sweep)


def steps(environment, *factors):
    """Plain PPO and influence with larger learning rates: what is left of the difference once both may take large steps?"""
    percent = ENVIRONMENTS[environment][3]
    return entry(
        environment,
        own={
            f"{name}, lr x {factor}": f"{arms(percent, name)[name]} --learning-rate {0.005 * factor:g}"
            for name in ("influence", "none")
            for factor in factors
        },
    )


def rules(environment, *names):
    """The filters of the paper's appendices B.4 and B.5, in benchmarks/filters.py, at the percent of influence."""
    suffix = f"{ENVIRONMENTS[environment][3]:g}".replace(".", "_")
    table = {
        "H1": f"--filter benchmarks.filters:h1_{suffix} --filter-when always",
        "H2": f"--filter benchmarks.filters:h2_{suffix} --filter-when always",
        "TD error": "--filter benchmarks.filters:td_error --filter-when always",
    }
    return entry(environment, "influence", "none", "random", own={name: table[name] for name in names})


FOUR = ("influence", "influence, signal", "none", "random")
SUITES = {
    # Is plain PPO, the arm `none`, right? Against another implementation at the same settings.
    "baseline": [e for name, n in (("Acrobot", 20), ("LunarLander", 5)) for e in (entry(name, "none", seeds=n), sb3(name, n))],
    # Figure 6, Tables 4 and 5
    "fig6": [
        entry("FrozenLake", *FOUR),
        entry("Acrobot", *FOUR),
        entry("MiniGrid", *FOUR),
        entry("LunarLander", *FOUR),
        entry("BipedalWalker", *FOUR),
        entry("Highway", *FOUR),
    ],
    # Table 3, Figure 15
    "adam": [
        adam("MiniGrid", 0.0003),
        adam("LunarLander", 0.001),
        adam("FrozenLake", 0.0003, clipped=False),
        sb3("MiniGrid", 3, f"{ADAM} 0.0003"),
    ],
    # How many runs never get going?
    "stalled": [
        entry("Acrobot", "influence", "influence, signal", "none", seeds=20),
        *(
            entry(name, "influence", "influence, signal", "none", seeds=10)
            for name in ("FrozenLake", "MiniGrid", "LunarLander")
        ),
    ],
    # Table 2, Figure 14
    "percent": [percents(name) for name in ("FrozenLake", "Acrobot", "MiniGrid", "LunarLander")],
    # Figures 12 and 13
    "filters": [
        rules("FrozenLake", "H1", "H2", "TD error"),
        rules("MiniGrid", "H1", "H2"),
        rules("LunarLander", "TD error"),
    ],
    # Not in the paper: a filtered round also moves the policy further. (16 times the rate breaks both arms in their first round
    # on Acrobot and LunarLander.)
    "learning_rate": [
        steps("FrozenLake", 1, 4, 16),
        steps("Acrobot", 1, 4),
        steps("MiniGrid", 1, 4, 16),
        steps("LunarLander", 1, 4),
    ],
    # MiniGrid's symbols divided by 10, not by 255
    "minigrid_scale": [entry("MiniGrid", "influence", "none", extra="--obs-scale 10")],
    # Why do ours differ from the paper's?
    "suspects": [
        *suspects("LunarLander", "clipped"),
        *suspects("Acrobot", "clipped", "100 episodes"),
        *suspects("Highway", "100 episodes"),
    ],
    # Figures 7 and 16, Table 6, at several coefficients of the KL penalty
    "rlhf": [
        Entry(
            "reviews",
            "ppo_iif_rlhf",
            RLHF,
            40,
            {
                f"{arm}, kl {coef:g}": f"{flags} --filter-percent 100 --kl-coef {coef:g}"
                for arm, flags in RLHF_ARMS.items()
                for coef in RLHF_KL_COEFS
            },
            seeds=3,
            records=128,
            returns="eval/reward",
            columns=tuple(RLHF_COLUMNS.items()),
        )
    ],
}
# Their run times are compared between arms, which must have run side by side: nothing is taken over from another suite.
TIMED = ("fig6", "adam", "rlhf")


def runs_of(suite, seeds=None, only=(), names=(), rounds=None):
    """The runs of a suite in their order: seed by seed, so that a suite that is cut short has whole seeds, and the arms of one
    environment next to each other. `seeds` and `rounds` override the table; `only` and `names` choose environments and arms.
    """
    queue = []
    for position, e in enumerate(SUITES[suite]):
        for seed in range(FIRST_SEED, FIRST_SEED + (seeds or e.seeds)):
            for arm, own in e.arms.items():
                if (not only or e.environment in only) and (not names or arm in names):
                    number = rounds or e.rounds
                    flags = (e.arguments, own, f"--total-timesteps {number * e.records} --seed {seed}")
                    arguments = " ".join(filter(None, flags))
                    run = Run(suite, e.environment, arm, seed, number, e.script, arguments, e.returns, e.columns)
                    queue.append(((seed, position), run))
    return [run for _, run in sorted(queue, key=lambda pair: pair[0])]


def options(arguments):
    """{option: its values} of a command line. Of an option given twice, the last counts, as for the scripts."""
    found, option = {}, None
    for word in shlex.split(arguments):
        if word.startswith("--"):
            option = word
            found[option] = []
        else:
            found[option].append(word)
    return {option: " ".join(values) for option, values in found.items()}
