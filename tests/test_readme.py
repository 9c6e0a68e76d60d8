"""The README's promises: its lines work, its tables are those of the data, and it tells of every argument."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from docs import generate

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SCRIPTS = sorted(path.stem for path in ROOT.glob("ppo_iif*.py"))


def changes():
    """The lines of the README's diff: [(line to replace or None, lines to put there)]."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    pairs = []
    for block in re.split(r"^ \.\.\.$", diff, flags=re.MULTILINE):
        lines = block.strip("\n").splitlines()
        (old,) = [line[1:].strip() for line in lines if line.startswith("-")] or [None]
        pairs.append((old, [line[1:].strip() for line in lines if line.startswith("+")]))
    return pairs


def test_the_memory_table_is_that_of_the_data():
    from benchmarks.cost import rlhf_memory

    page = (ROOT / "docs" / "language-models.md").read_text()
    assert len(rlhf_memory.table().splitlines()) > 2 and rlhf_memory.table() in page


def test_five_lines_add_iif_to_a_script(tmp_path):
    assert sum(len(new) for _, new in changes()) <= 5
    script = (ROOT / "tests" / "cleanrl_shaped.py").read_text()
    for old, new in changes():
        if old is None:
            script = script.replace("import gymnasium as gym\n", "\n".join(["import gymnasium as gym", *new, ""]), 1)
        else:
            (line,) = (line for line in script.splitlines() if line.strip() == old)
            indent = line[: len(line) - len(line.lstrip())]
            script = script.replace(line, "\n".join(indent + added for added in new))
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FOLDER": str(tmp_path / "run")}
    done = subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "script.py"], cwd=tmp_path, env=environment)
    assert done.returncode == 0
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert events.Tags()["histograms"] == ["influence/scores"]
    kept = [event.value for event in events.Scalars("influence/records_kept")]
    assert len(kept) == 3 and all(100 < k < 128 for k in kept)
    assert all(np.isfinite(event.value) for event in events.Scalars("losses/policy_loss"))
    assert [event.value for event in events.Scalars("minibatch")] == [16] * 3  # none is empty


def test_the_arguments_page_is_that_of_the_scripts():
    """If not: python -m docs.generate"""
    assert generate.arguments_page() == (ROOT / "docs" / "arguments.md").read_text()
    for script in SCRIPTS:
        help_text = subprocess.run([sys.executable, ROOT / f"{script}.py", "--help"], capture_output=True, text=True).stdout
        asked = set(re.findall(r"--([a-z][a-z0-9-]+)", help_text))
        assert all(name.replace("_", "-") in asked for name in generate.arguments(script))


def test_documents_are_short_enough_to_read():
    assert len(README.encode()) < 14_000 and len((ROOT / "benchmarks" / "README.md").read_bytes()) < 20_000


def test_every_script_is_in_the_readme():
    assert all(f"`{script}.py`" in README for script in SCRIPTS) and len(SCRIPTS) >= 4


def test_every_file_that_a_readme_names_is_there():
    pages = [*ROOT.glob("*.md")] + [path for room in ("docs", "benchmarks") for path in (ROOT / room).rglob("*.md")]
    for readme in pages:
        for target in re.findall(r"\]\(([^)#]+)", readme.read_text()):
            assert target.startswith("http") or (readme.parent / target).exists(), target
