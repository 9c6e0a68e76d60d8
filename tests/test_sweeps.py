"""The sweep files start their scripts with arguments that these take, and the W&B page shows what the scripts log."""

import importlib
import itertools
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import wandb.wandb_agent
from torch.utils.tensorboard import SummaryWriter
from wandb.sdk.launch.sweeps.utils import load_sweep_config

from iif_core import log_influence

ROOT = Path(__file__).resolve().parent.parent
SWEEPS = sorted(ROOT.glob("sweeps/*.yaml"))
by_script = pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
sys.path.insert(0, str(ROOT / "sweeps"))
import workspace  # noqa: E402


def agent_command(monkeypatch, tmp_path, config, values):
    """What W&B's own agent would start for one run of a sweep."""
    started = []

    def process(command, **kwargs):
        started.append(command)
        return SimpleNamespace()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_RUN_ID", "")  # the agent sets it
    monkeypatch.setattr(wandb.wandb_agent, "AgentProcess", process)
    agent = SimpleNamespace(_in_jupyter=False, _function=None, _run_processes={}, _forward_signals=False)
    agent._sweep_command = list(config["command"]) if "command" in config else None
    run = {"run_id": "run", "program": config["program"], "args": {name: {"value": value} for name, value in values.items()}}
    wandb.wandb_agent.Agent._command_run(agent, run)
    return started[0]


def corners(parameters):
    """Runs in which every value of every parameter, and both ends of every range, occurs."""
    lists = {
        name: spec.get("values") or ([spec["value"]] if "value" in spec else [spec["min"], spec["max"]])
        for name, spec in parameters.items()
    }
    for i in range(max(len(values) for values in lists.values())):
        yield {name: values[min(i, len(values) - 1)] for name, values in lists.items()}


def test_every_script_has_a_sweep():
    assert [path.stem for path in SWEEPS] == sorted(path.stem for path in ROOT.glob("ppo_iif*.py"))


@by_script
def test_the_agents_command_is_what_the_script_takes(path, monkeypatch, tmp_path):
    config = load_sweep_config(str(path))
    assert config["program"] == f"{path.stem}.py" and config["method"] in ("grid", "random", "bayes")
    text, metric = (ROOT / config["program"]).read_text(), config["metric"]["name"]
    assert f'"{metric}"' in text or f'f"{metric.split("/")[0]}/{{name}}"' in text
    assert config["metric"]["goal"] == "maximize"
    script = importlib.import_module(path.stem)
    for values in corners(config["parameters"]):
        *interpreter, program = (command := agent_command(monkeypatch, tmp_path, config, values))[:3]
        assert (interpreter, program) == (["/usr/bin/env", "python"], config["program"])
        monkeypatch.setattr(sys, "argv", command[2:])
        monkeypatch.chdir(ROOT)
        args, _ = script.parse_args()
        got = {name: getattr(args, name) for name in values}
        assert got == values and all(type(got[name]) in (type(value), float) for name, value in values.items())


@by_script
def test_booleans_as_a_sweep_passes_them(path, monkeypatch, tmp_path):
    script = importlib.import_module(path.stem)
    config = {"program": f"{path.stem}.py"}
    booleans = [f.name for f in script.Args.__dataclass_fields__.values() if f.type in (bool, "bool") and f.init]
    for name, value in itertools.product(
        set(booleans) - ({"dropout"} if find_spec("envpool") else {"dropout", "envpool"}), (True, False)
    ):
        monkeypatch.setattr(sys, "argv", agent_command(monkeypatch, tmp_path, config, {name: value})[2:])
        monkeypatch.chdir(ROOT)
        assert getattr(script.parse_args()[0], name) is value


def log_two_rounds(folder):
    scores = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, 4.0])
    writer = SummaryWriter(folder)
    for step in (6, 12):
        log_influence(writer, scores * step, torch.arange(1, 6), step)
        writer.add_scalar("charts/episodic_return", step / 2, step)
        writer.add_scalar("influence/agreement", 0.25, step)
        for name in ("time/rollout", "time/scoring", "time/update"):
            writer.add_scalar(name, 0.5, step)
    writer.close()


def test_export_holds_what_was_logged_and_is_drawn(tmp_path):
    log_two_rounds(tmp_path / "run")
    workspace.export(tmp_path / "run", tmp_path / "csv")
    scalars, bins = pd.read_csv(tmp_path / "csv" / "scalars.csv"), pd.read_csv(tmp_path / "csv" / "scores.csv")
    assert scalars[scalars.name == "charts/episodic_return"].value.tolist() == [3, 6]
    assert scalars[scalars.name == "influence/negative_fraction"].value.tolist() == pytest.approx([1 / 3, 1 / 3], rel=1e-4)
    assert bins.groupby("step").records.sum().tolist() == [6, 6]
    assert bins[bins.right <= 0].groupby("step").records.sum().tolist() == [2, 2]
    for step, one in bins.groupby("step"):
        for score in np.array([-2.0, -1.0, 0.0, 1.0, 2.0, 4.0]) * step:
            assert ((one.left <= score + 1e-3) & (score <= one.right + 1e-3)).any()
    workspace.draw(tmp_path / "csv", tmp_path / "page.png")
    workspace.rounds(tmp_path / "rounds.png", (f"{tmp_path}/csv:0", f"{tmp_path}/csv:1"))
    assert (tmp_path / "page.png").read_bytes()[:4] == (tmp_path / "rounds.png").read_bytes()[:4] == b"\x89PNG"


def test_the_documents_pictures_are_of_committed_data():
    text = (ROOT / "docs" / "wandb.md").read_text()
    assert set(re.findall(r"docs/(?!images)[\w/]+", text)) == {"docs/data/LunarLander"}
    scalars = pd.read_csv(ROOT / "docs" / "data" / "LunarLander" / "scalars.csv")
    agreement = scalars[scalars.name == "influence/agreement"].value
    assert f"the agreement was negative in {(agreement < 0).sum()} of the {len(agreement)} rounds" in text
    assert all(path.stat().st_size < 100_000 for path in (ROOT / "docs" / "images").iterdir())


def test_export_of_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no TensorBoard files"):
        workspace.export(tmp_path, tmp_path / "csv")


def test_the_page_in_wandb_shows_every_panel_side_by_side():
    pytest.importorskip("wandb_workspaces")
    view = workspace.workspace("someone", "ppo-iif")._to_model()
    assert (view.entity, view.project) == ("someone", "ppo-iif")
    spec = json.loads(json.dumps(view.spec.model_dump(by_alias=True, exclude_none=True, mode="json")))["section"]
    assert spec["settings"]["xAxis"] == "global_step"
    (section,) = spec["panelBankConfig"]["sections"]
    assert section["isOpen"] and section["flowConfig"]["columnsPerPage"] * section["flowConfig"]["rowsPerPage"] == 6
    panels = [panel["config"] for panel in section["panels"]]
    assert [panel["chartTitle"] for panel in panels] == [title for title, _, _ in workspace.PAGE]
    assert [panel.get("metrics") or panel["mediaKeys"] for panel in panels] == [names for _, names, _ in workspace.PAGE]
    assert all(panel["xAxis"] == "global_step" for panel in panels if "metrics" in panel)


def test_the_page_names_what_the_scripts_log():
    text = (ROOT / "ppo_iif.py").read_text() + (ROOT / "iif_core.py").read_text()
    for _, names, _ in workspace.PAGE:
        for name in names:
            assert name in text or name.split("/")[1] in text, name
