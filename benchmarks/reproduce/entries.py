"""What the table of suites is made of: a suite has entries, an entry has arms and seeds, and each arm and seed is a run."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.files import RESULTS
from benchmarks.reproduce import pages

FIRST_SEED = 101
ROUND = 2048  # records, everywhere but of a language model


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
    first_seed: int = FIRST_SEED


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


@dataclass(frozen=True)
class Suite:
    """What `python -m benchmarks.run NAME` runs, and the page that `python -m benchmarks.report NAME` makes of it."""

    name: str
    title: str
    question: str  # what it is there to find out; the part of the paper that it repeats
    entries: list[Entry]
    tables: Callable  # its data -> the parts of the page, in Markdown
    caption: str = "Lines: mean over seeds; dark bands: standard error; light bands: 95% interval (t)."
    each_run: bool = False  # the picture shows every run, not means
    timed: bool = False  # run times are compared between arms, which must have run side by side: nothing from another suite
    read: Callable = pages.load  # (suite, results) -> its data, empty if nothing is finished
    picture: Callable = pages.draw  # (suite, results): draws NAME.png

    def runs(self, seeds=None, only=(), names=(), rounds=None):
        """Its runs in their order: seed by seed, so that a suite that is cut short has whole seeds, and the arms of one environment
        next to each other. `seeds` and `rounds` override the table; `only` and `names` choose environments and arms.
        """
        queue = []
        for position, e in enumerate(self.entries):
            for seed in range(e.first_seed, e.first_seed + (seeds or e.seeds)):
                for arm, own in e.arms.items():
                    if (not only or e.environment in only) and (not names or arm in names):
                        number = rounds or e.rounds
                        flags = (e.arguments, own, f"--total-timesteps {number * e.records} --seed {seed}")
                        arguments = " ".join(filter(None, flags))
                        run = Run(self.name, e.environment, arm, seed, number, e.script, arguments, e.returns, e.columns)
                        queue.append(((seed, position), run))
        return [run for _, run in sorted(queue, key=lambda pair: pair[0])]

    def load(self, results=RESULTS):
        return self.read(self, results)

    def head(self, results=RESULTS):
        """The beginning of its page."""
        parts = [
            f"# {self.title}",
            self.question,
            f"`python -m benchmarks.run {self.name} && python -m benchmarks.report {self.name}`",
        ]
        if not self.load(results):
            return "\n\n".join([*parts, "Not yet run."])
        runs = {run.name for run in self.runs()}
        parts += [pages.made(self.name, runs, results), f"![{self.title}]({self.name}.png)", f"*{self.caption}*"]
        return "\n\n".join(parts)

    def body(self, results=RESULTS):
        """The tables of its page."""
        data = self.load(results)
        return "\n\n".join(filter(None, self.tables(data))) if data else ""


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
