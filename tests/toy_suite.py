"""Runs a suite of toy runs, SUITE RESULTS WORKERS WAIT_FOR: what `python -m benchmarks.run` does, with another table."""

import sys
from pathlib import Path

from benchmarks import run
from benchmarks.reproduce import suites
from benchmarks.reproduce.entries import Entry, Suite

_, suite, results, workers, wait_for = sys.argv
END = "--then go"
ARMS = {
    "good": {"one": END, "two, scored": f"{END} --scored 1 --filter-percent 50"},
    "again": {"uno": END, "fresh": "--then go --x 1"},
    "broken": {"bad": "--then fail", "short": "--then end", "one": END},
    "slow": {"one": END, "wait": f"--then wait --for {wait_for}"},
}
for name, arms in ARMS.items():
    entry = Entry("Toy", "tests/toy_training", "--optimizer sgd --eval-episodes 7", 3, arms, seeds=1)
    suites.SUITES[name] = Suite(name, "Toys", "?", [entry], lambda data: [])
try:
    run.main(run.Args(suite, workers=int(workers), results=Path(results)))
except KeyboardInterrupt:
    sys.exit(130)
