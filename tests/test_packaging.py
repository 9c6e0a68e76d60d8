"""What `pip install .` and `uv run SCRIPT` bring along is what the code needs."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # Python 3.11

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS = sorted(path.name for path in ROOT.glob("ppo_iif*.py"))


def pins(*files):
    lines = [line.split("#")[0].strip() for file in files for line in (ROOT / file).read_text().splitlines()]
    return {line.partition("==")[0]: line for line in lines if line}


def imports(path):
    """The packages that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        yield from (name.partition(".")[0] for name in names)


def metadata(script):
    """A script's metadata (PEP 723), which stand in a comment."""
    (block,) = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", (ROOT / script).read_text(), re.MULTILINE)
    return tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))


def test_the_module_needs_what_it_imports():
    used = set(imports(ROOT / "iif_core.py")) - sys.stdlib_module_names
    assert {re.match("[a-z]+", need)[0] for need in PROJECT["dependencies"]} == used == {"numpy", "torch"}


def test_the_wheel_is_the_module_alone(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path]
    for name in ("iif_core.py", "pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / "source" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "source" / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*command, tmp_path / "source"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"ppo_iif-{PROJECT['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if ".dist-info/" not in name] == ["iif_core.py"]
        text = archive.read(f"ppo_iif-{PROJECT['version']}.dist-info/METADATA").decode()
    assert "Requires-Dist: torch>=2.6" in text and "Requires-Python: >=3.10" in text and "License-Expression: MIT" in text
    code = (
        "import iif_core, sys; assert iif_core.__file__.startswith(sys.argv[1]); print(iif_core.filter_bottom([-1.0, 1], 100))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(wheel)], cwd=tmp_path, env={"PYTHONPATH": str(wheel)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "tensor([1])", done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_scripts_metadata_are_the_pins(script):
    block, known = metadata(script), pins("requirements.txt", "requirements-rlhf.txt")
    named = {need.partition("==")[0]: need for need in block["dependencies"]}
    assert named == {name: known[name] for name in named}
    assert block["requires-python"] == ">=3.11"  # numpy's


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_scripts_metadata_name_what_it_imports(script):
    named = {need.partition("==")[0].replace("-", "_") for need in metadata(script)["dependencies"]}
    brought = {"huggingface_hub"}  # by transformers
    assert set(imports(ROOT / script)) - sys.stdlib_module_names - {"iif_core", "datasets", "envpool"} - brought <= named
