"""What is run, as one table: SUITES, at the end of this file. An entry says what a suite asks, what it runs and how its page shows
it; `python -m benchmarks.run NAME` and `python -m benchmarks.report NAME` do the rest. A new suite is a new entry.

Settings are those of the paper's appendix A.2, with the rounds of its figures and, per environment, the percent that its
authors picked as best (appendix B.6). All arms of an entry have the same arguments, seeds, initial weights and first rollout.
"""

from benchmarks.reproduce import pages, rlhf, rlhf_controller, rlhf_grpo, rlhf_kl, tuned
from benchmarks.reproduce.entries import Entry, Suite
from benchmarks.reproduce.pages import NOTHING_DONE
from benchmarks.reproduce.paper import PAPER

COMMON = "--no-cuda --num-envs 1 --num-steps 2048 --max-grad-norm 0 --eval-episodes"
SGD = "--optimizer sgd --learning-rate 0.005"
ADAM = "--optimizer adam --learning-rate"
HIGHWAY = "--env-id benchmarks.variants.envpool_highway:EnvpoolHighway-v0"  # highway-v0, hundreds of times as fast
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


# ---- entries


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
    return Entry(environment, "benchmarks/variants/sb3_ppo", f"{arguments} {extra}".strip(), rounds, arm, seeds)


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
    return [
        entry(environment, *table, own=own),
        Entry(environment, "benchmarks/variants/restarted", arguments, rounds, restarted),
    ]


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
    """The filters of the paper's appendices B.4 and B.5, in benchmarks/variants/filters.py, at the percent of influence."""
    suffix = f"{ENVIRONMENTS[environment][3]:g}".replace(".", "_")
    table = {
        "H1": f"--filter benchmarks.variants.filters:h1_{suffix} --filter-when always",
        "H2": f"--filter benchmarks.variants.filters:h2_{suffix} --filter-when always",
        "TD error": "--filter benchmarks.variants.filters:td_error --filter-when always",
    }
    return entry(environment, "influence", "none", "random", own={name: table[name] for name in names})


# ---- what is compared with what

RATES = [f"lr x {factor}" for factor in (1, 4, 16)]
FOUR = ("influence", "influence, signal", "none", "random")
CLIPPED = {"influence, clipped against none, clipped": ("influence, clipped", "none, clipped")}
SOLVED = {
    "none": "--filter none",
    "not normalised": "--filter none --no-norm-adv",
    "clipped": "--filter none --max-grad-norm 0.5",
    "alike left out": "--filter benchmarks.variants.filters:unless_alike_02 --filter-when always",
}
AGAINST_PERCENT = {
    **{f"{p}% against none": (p, "none") for p in ("6.25", "12.5", "25", "50", "100")},
    "random at the paper's percent against none": ("random", "none"),
    **NOTHING_DONE,
}
AGAINST_RULES = {
    **{f"{arm} against none": (arm, "none") for arm in ("influence", "H1", "H2", "TD error", "random")},
    "influence against random": ("influence", "random"),
    **NOTHING_DONE,
}
AGAINST_SUSPECTS = {
    "influence against none": ("influence", "none"),
    "influence, restarted against none, as the authors": ("influence, restarted", "none"),
    "influence, restarted against none, restarted": ("influence, restarted", "none, restarted"),
    "none, restarted against none": ("none, restarted", "none"),
    **CLIPPED,
    "none, clipped against none": ("none, clipped", "none"),
    "influence against none, both with 100 episodes": ("influence, 100 episodes", "none, 100 episodes"),
    **NOTHING_DONE,
    "none against none of other seeds, 100 episodes": ("none, 100 episodes", "none, 100 episodes"),
}


# ---- the table

SUITES = [
    Suite(
        "fig6",
        "Figure 6: influence, none, random",
        "Does filtering learn faster than plain PPO, and than dropping as many records at random? The paper's Figure 6 and Tables 4"
        " and 5, in its settings.",
        [entry(name, *FOUR) for name in ("FrozenLake", "Acrobot", "MiniGrid", "LunarLander", "BipedalWalker", "Highway")],
        lambda data: [
            f"Percent of the negative records dropped: {', '.join(f'{e} {ENVIRONMENTS[e][3]:g}' for e in data)}. The authors picked it"
            " as the best for each environment; it is theirs here, not picked again.",
            "## Rounds and time saved (Figure 6b)",
            pages.efficiency_table(data, paper=PAPER["fig6"]),
            "The same on smoothed curves (trailing mean of five rounds):",
            pages.efficiency_table(data, smoothed=True),
            "Levels of the standard run that the other never reaches (they count as one round more than there are):",
            pages.missed_table(data),
            "## Return (Table 4)",
            pages.returns_table(data),
            pages.final_gains(data),
            pages.aggregates(data),
            "## Run time (Table 5)",
            pages.runtime_table(data),
        ],
        timed=True,
    ),
    Suite(
        "stalled",
        "Runs that stall",
        "How many runs never get going, with the paper's rule and with `signal`? More seeds of Figure 6. A run is stalled if more than"
        " half of the evaluations of theta(1), theta(2), ... have a normalised score below 0.05 (Acrobot: below -479; FrozenLake:"
        " 0.05; MiniGrid: 0.0475; LunarLander: -180), and stalled at the end if its final return has.",
        [
            entry("Acrobot", "influence", "influence, signal", "none", seeds=20),
            *(
                entry(name, "influence", "influence, signal", "none", seeds=10)
                for name in ("FrozenLake", "MiniGrid", "LunarLander")
            ),
        ],
        lambda data: [
            pages.stalled_table(data),
            pages.returns_table(data),
            pages.efficiency_table(data, paper=PAPER["fig6"], names=("SE_ave", "SE_peak")),
        ],
        caption="One line a run, as many seeds as the table says.",
        each_run=True,
    ),
    Suite(
        "learning_rate",
        "Larger steps",
        "A round without its negative records moves the policy several times as far as the whole round does. How does influence"
        " compare with plain PPO when both may take larger steps: the paper's SGD rate, 4 and (where that does not break both arms in"
        " their first round) 16 times that? Not in the paper.",
        [steps("FrozenLake", 1, 4, 16), steps("Acrobot", 1, 4), steps("MiniGrid", 1, 4, 16), steps("LunarLander", 1, 4)],
        lambda data: [
            pages.returns_table(
                data,
                {f"influence, {rate} against none, {rate}": (f"influence, {rate}", f"none, {rate}") for rate in RATES}
                | {"influence, lr x 1 against none, lr x 4": ("influence, lr x 1", "none, lr x 4")},
            )
        ],
    ),
    Suite(
        "adam",
        "Adam instead of SGD",
        "Is the gain there with Adam? The paper's Table 3 and Figure 15; FrozenLake, of sparse reward, is ours. `clipped`: gradients"
        " clipped at a norm of 0.5, which the paper's text has, and its code has not.",
        [
            adam("MiniGrid", 0.0003),
            adam("LunarLander", 0.001),
            adam("FrozenLake", 0.0003, clipped=False),
            sb3("MiniGrid", 3, f"{ADAM} 0.0003"),
        ],
        lambda data: [
            pages.returns_table(data, {**pages.AGAINST, **CLIPPED}),
            pages.efficiency_table(data, {**pages.AGAINST, **CLIPPED}, paper=PAPER["adam"]),
            "The same on smoothed curves:",
            pages.efficiency_table(data, {**pages.AGAINST, **CLIPPED}, smoothed=True),
        ],
        timed=True,
    ),
    Suite(
        "solved",
        "Runs that break down once they have solved MiniGrid",
        "With Adam and without clipping, MiniGrid's runs that have solved it lose it again (see [adam](../adam/README.md)). When all"
        " episodes are alike, advantages are divided by a vanishing spread: is that the cause, and what prevents it? `not normalised`:"
        " --no-norm-adv. `clipped`: gradients clipped at a norm of 0.5. `alike left out`: no update in rounds whose episodes' returns"
        " are within 0.02 (benchmarks/variants/filters.py). All arms are plain PPO. Broken down: after a"
        " normalised score of at least 0.95, a return of 0.9, one below 0.5.",
        [entry("MiniGrid", own=SOLVED, extra=f"{ADAM} 0.0003")],
        lambda data: [pages.broken_table(data), pages.returns_table(data, {})],
        caption="One line a run.",
        each_run=True,
    ),
    Suite(
        "percent",
        "How many of the negative records to drop",
        "The paper's Table 2 (three seeds) and Figure 14.",
        [percents(name) for name in ("FrozenLake", "Acrobot", "MiniGrid", "LunarLander")],
        lambda data: [
            pages.efficiency_table(data, AGAINST_PERCENT, beside=PAPER["percent"], names=("SE_ave", "SE_peak")),
            pages.returns_table(data, AGAINST_PERCENT),
        ],
    ),
    Suite(
        "filters",
        "Other filters",
        "Do heuristics on the advantages, or weights by the TD error, do as well? The paper's appendices B.4 and B.5, Figures 12 and"
        " 13. H1 and H2: of the records whose advantage differs in sign from its Monte-Carlo estimate, drop those where the two are"
        " furthest apart, or with the most negative product, as many percent of them as influence drops of the negative scores (the"
        " paper does not say how many). TD error: every record is drawn with a weight of 1 / rank(|TD error|) to the power of 0.6.",
        [
            rules("FrozenLake", "H1", "H2", "TD error"),
            rules("MiniGrid", "H1", "H2"),
            rules("LunarLander", "TD error"),
        ],
        lambda data: [
            pages.efficiency_table(data, AGAINST_RULES, names=("SE_ave", "SE_peak")),
            pages.returns_table(data, AGAINST_RULES),
        ],
    ),
    Suite(
        "baseline",
        "Plain PPO against stable-baselines3",
        "Is plain PPO, the arm `none`, right? Against stable-baselines3's own PPO at the same settings (plain SGD, no clipping of"
        " gradients in either). The differences are between runs of the same seed number, which share nothing.",
        [e for name, n in (("Acrobot", 20), ("LunarLander", 5)) for e in (entry(name, "none", seeds=n), sb3(name, n))],
        lambda data: [pages.returns_table(data, {"none against stable-baselines3": ("none", "stable-baselines3")})],
    ),
    Suite(
        "suspects",
        "Why ours differ from the paper's",
        "In what may the authors' runs differ from these? `restarted`: in their code every round of an influence run is a process of"
        " its own with the run's seed, so it begins with a reset to the same state and draws the same random numbers, while their"
        " standard run goes on from round to round. `clipped`: their text has gradients clipped at a norm of 0.5, their code does"
        " not. `100 episodes`: they evaluate with 100 episodes on Highway and 1000 elsewhere; these are the very runs of Figure 6,"
        " evaluated with 100 in place of 20.",
        [
            *suspects("LunarLander", "clipped"),
            *suspects("Acrobot", "clipped", "100 episodes"),
            *suspects("Highway", "100 episodes"),
        ],
        lambda data: [
            pages.efficiency_table(data, AGAINST_SUSPECTS, paper=PAPER["fig6"], names=("SE_ave", "SE_peak")),
            "The same on smoothed curves:",
            pages.efficiency_table(data, AGAINST_SUSPECTS, paper=PAPER["fig6"], smoothed=True, names=("SE_ave", "SE_peak")),
            pages.returns_table(data, AGAINST_SUSPECTS),
        ],
    ),
    Suite(
        "minigrid_scale",
        "MiniGrid's observation scale",
        "MiniGrid's symbols divided by 10, not by 255 as in the paper and in Figure 6.",
        [entry("MiniGrid", "influence", "none", extra="--obs-scale 10")],
        lambda data: [pages.returns_table(data), pages.efficiency_table(data)],
    ),
    rlhf.SUITE,
    rlhf_kl.SUITE,
    rlhf_grpo.SUITE,
    rlhf_controller.SUITE,
    *tuned.SUITES,
]
SUITES = {suite.name: suite for suite in SUITES}
