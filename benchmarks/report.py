"""Every page and picture, from the CSVs in results/ alone: `python -m benchmarks.report [PAGE ...]`.

A page is results/PAGE/README.md: prose by hand, and between `<!-- report: BLOCK -->` and `<!-- end -->` what is made here. A page
that is not there yet is begun. Two more are `benchmarks`, benchmarks/README.md, and `readme`, README.md. Works with what there is,
and says of how many seeds it is. What the numbers mean: reproduce/metrics.py.
"""

import os
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks.cost import atari, compiling, environments, halfcheetah, random_play, scaling, scoring, throughput
from benchmarks.explain import attribution, intervene, local_check, records
from benchmarks.files import RESULTS, ROOT
from benchmarks.reproduce import fixed_reference, learning, rlhf_controller, rlhf_grpo, rlhf_kl, summary
from benchmarks.reproduce.suites import SUITES
from benchmarks.variants import dqn, envpool_highway

PAGES = {suite.name: {"head": suite.head, "tables": suite.body} for suite in SUITES.values()}
PAGES |= {  # page: {block: (results) -> its Markdown}
    "fixed_reference": {"tables": fixed_reference.body},
    "learning": {"tables": lambda results: learning.table(results / "learning")},
    "cost": {
        "scoring": lambda results: scoring.table(results / "cost" / "scoring.csv"),
        "throughput": lambda results: throughput.table(results / "cost" / "throughput.csv"),
        "compared": lambda results: throughput.compared(results / "cost" / "throughput.csv"),
        "halfcheetah": lambda results: halfcheetah.table(results / "cost" / "halfcheetah.csv"),
        "compiling": lambda results: compiling.table(results / "cost" / "compiling.csv"),
        "scaling": lambda results: scaling.table(results / "cost" / "scaling.csv"),
        "environments": lambda results: environments.table(results / "cost" / "environments.csv"),
        "atari": lambda results: atari.table(results / "cost" / "atari.csv"),
    },
    "details": {"random_play": lambda results: random_play.table(results / "cost" / "random_play.csv")},
    "highway": {"tables": lambda results: envpool_highway.table(results / "highway")},
    "explain": {
        "ranks": lambda results: records.table(results / "explain"),
        "interventions": lambda results: intervene.table(results / "explain" / "interventions"),
        "agreement": lambda results: intervene.agreement_table(results / "explain" / "agreement"),
        "local_check": lambda results: local_check.table(results / "explain"),
    },
    "attribution": {
        "methods": lambda results: attribution.tables(results / "attribution"),
        "dqn": lambda results: dqn.table_of(results / "dqn"),
    },
    "language_models": {
        "frontier": rlhf_kl.state,
        "grpo": lambda results: rlhf_kl.state(results, rlhf_grpo.SUITE),
        "controller": lambda results: rlhf_controller.SUITE.body(results),
    },
    "benchmarks": {"paper": summary.paper, "sceptic": summary.sceptic, "suites": summary.suites},
    "readme": {"when": summary.when},
}


def path_of(page, results=RESULTS):
    own = {"benchmarks": ROOT / "benchmarks" / "README.md", "readme": ROOT / "README.md"}
    own |= {name: ROOT / "docs" / f"{name.replace('_', '-')}.md" for name in ("details", "attribution", "language_models")}
    return own.get(page, results / page / "README.md")


def insert(text, name, content, page=""):
    """Put the content of a block between its markers."""
    found = re.findall(rf"<!-- report: {name} -->\n.*?<!-- end -->", text, re.DOTALL)
    if len(found) != 1:
        sys.exit(f"{page} must have one place <!-- report: {name} --> ... <!-- end -->, found {len(found)}")
    return text.replace(found[0], f"<!-- report: {name} -->\n{content}\n<!-- end -->")


def filled(page, results=RESULTS):
    """The page as the CSVs have it."""
    path = path_of(page, results)
    empty = "".join(f"<!-- report: {block} -->\n<!-- end -->\n\n" for block in PAGES[page])
    text = path.read_text(encoding="utf-8") if path.exists() else empty.rstrip() + "\n"
    for block, content in PAGES[page].items():
        text = insert(text, block, content(results), path)
    return text


def draw(page, results=RESULTS):
    """Its picture, of those that are not drawn where the data is made."""
    if page in SUITES and SUITES[page].load(results):
        SUITES[page].picture(SUITES[page], results)
    elif page == fixed_reference.SUITE and fixed_reference.load(results):
        fixed_reference.draw(results)


@dataclass
class Args:
    pages: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """pages to make (default: all)"""
    results: Path = RESULTS
    """folder of the results, with the page of each suite"""


if __name__ == "__main__":
    args = tyro.cli(Args)
    if set(args.pages) - set(PAGES):
        sys.exit(f"{(set(args.pages) - set(PAGES)).pop()} is no page: {', '.join(PAGES)}")
    if not find_spec("rliable"):
        sys.exit("benchmarks.report needs rliable: pip install -r requirements-benchmarks.txt")
    for page in args.pages or PAGES:
        draw(page, args.results)
        path, text = path_of(page, args.results), filled(page, args.results)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"written to {os.path.relpath(path)}", flush=True)
