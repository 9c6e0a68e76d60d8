"""What every training script guarantees. A new script is one more row of SCRIPTS.

The functions that the scripts share are the same text in all of them (test_the_scripts_share_their_text), so that what those do
is tested in one script, with the fixture `one`; what differs, or depends on the network, in each, with `script`.
"""

import ast
import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import offline_wandb
import pytest
import torch
import toy_filters
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributions import Categorical, Independent, Normal

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
torch.set_num_threads(1)


# ---- the table


class Mark(torch.nn.Module):
    """A critic whose value of a toy environment's observation is its mark."""

    def forward(self, obs):
        return obs[..., :1]


def grid_values_are_marks(agent):
    logits_and_value = agent.get_logits_and_value
    agent.get_logits_and_value = lambda obs: (logits_and_value(obs)[0], obs[..., 0, 0, :1].float())


@dataclasses.dataclass
class Script:
    name: str
    env: str  # small and fast, with an episode or two in every round and influence scores of both signs
    flags: str  # of every run: four rounds of `batch` records, each of 16 minibatches or more
    batch: int
    # agent, rng, obs [n, *shape] (numpy) -> sampled actions [n, ...] (numpy)
    act: Callable[[Any, Any, Any], Any]
    # agent, obs [n, *shape] -> pi(.|s), of batch shape [n]
    policy: Callable[[Any, torch.Tensor], torch.distributions.Distribution]
    scores_whole_round: bool = False  # normalises the advantages in the scores over the round, not in minibatches
    refused: tuple = ()  # (flags, what the message must hold), beside what all scripts refuse
    also_runs: tuple = ()  # flags of unusual environments that the script can learn
    # A script that takes any environment is tested with toy_envs.Toy as well.
    toy: str | None = None  # the id of one with observations and actions that the script takes, and flags for it
    mark: Callable[[Any], Any] | None = None  # observations of it [..., *shape] -> their marks [...]
    toy_is_float: bool = True  # its observations can be infinite
    critic_is_mark: Callable[[Any], None] | None = None  # let the agent's value of such an observation be its mark

    def __str__(self):
        return self.name

    @property
    def stages(self):
        """The script as a module."""
        return importlib.import_module(self.name[: -len(".py")])


SCRIPTS = [
    Script(
        name="ppo_iif.py",
        env="CartPole-v1",
        flags="--no-cuda --num-steps 128 --num-minibatches 16 --update-epochs 2 --total-timesteps 512",
        batch=128,
        act=lambda agent, rng, obs: agent.numpy_policy(rng)(obs),
        policy=lambda agent, obs: Categorical(logits=agent.actor(obs)),
        refused=(
            ("--env-id toy_envs:Continuous-v0", "ppo_iif_continuous.py"),
            ("--env-id toy_envs:Pixels-v0", "ppo_iif_atari.py"),
            ("--env-id minigrid:MiniGrid-Empty-8x8-v0", "ppo_iif_minigrid.py"),
        ),
        also_runs=(
            "--env-id toy_envs:Shifted-v0",
            "--env-id toy_envs:Nested-v0",
            "--env-id FrozenLake-v1 --num-envs 2 --num-steps 64",
        ),
        toy="toy_envs:Toy-v0",
        mark=lambda obs: obs[..., 0],
        critic_is_mark=lambda agent: setattr(agent, "critic", Mark()),
    ),
    Script(
        name="ppo_iif_continuous.py",
        env="Pendulum-v1",
        flags="""--no-cuda --num-steps 128 --num-minibatches 16 --update-epochs 2 --total-timesteps 512
            --norm-obs --norm-reward --env-kwargs '{"max_episode_steps": 30}'""",
        batch=128,
        act=lambda agent, rng, obs: agent.numpy_policy(rng)(obs),
        policy=lambda agent, obs: Independent(Normal(agent.actor_mean(obs), agent.actor_logstd.exp()), 1),
        scores_whole_round=True,
        refused=(
            ("--env-id CartPole-v1 --env-kwargs {}", "ppo_iif.py"),
            ("--env-id toy_envs:Toy-v0 --env-kwargs {}", "ppo_iif.py"),
            ("--env-id toy_envs:WholeNumbers-v0 --env-kwargs {}", "actions are Box"),
        ),
        also_runs=("--env-id BipedalWalker-v3 --env-kwargs {}", "--num-envs 2 --num-steps 64"),
        toy="toy_envs:Continuous-v0 --no-norm-obs --no-norm-reward",
        mark=lambda obs: obs[..., 0],
        critic_is_mark=lambda agent: setattr(agent, "critic", Mark()),
    ),
    Script(
        name="ppo_iif_minigrid.py",
        env="MiniGrid-Empty-5x5-v0",
        flags="""--no-cuda --num-steps 128 --num-minibatches 16 --update-epochs 2 --total-timesteps 512 --filter-when always
            --env-kwargs '{"max_steps": 30}'""",
        batch=128,
        act=lambda agent, rng, obs: agent.policy(rng)(obs)[0],
        policy=lambda agent, obs: Categorical(logits=agent.get_logits_and_value(obs)[0]),
        refused=(
            ("--env-id CartPole-v1 --env-kwargs {}", "ppo_iif.py"),
            ("--env-id toy_envs:Continuous-v0 --env-kwargs {}", "ppo_iif_continuous.py"),
            ("--obs-scale 0", "--obs-scale"),
        ),
        also_runs=("--fully-observable", "--num-envs 2 --num-steps 64"),
        toy="toy_envs:Grid-v0",
        mark=lambda obs: obs[..., 0, 0, 0],
        toy_is_float=False,
        critic_is_mark=grid_values_are_marks,
    ),
    Script(
        name="ppo_iif_atari.py",
        env="PongNoFrameskip-v4",
        flags="""--no-cuda --torch-threads 1 --num-envs 2 --num-steps 16 --num-minibatches 16 --update-epochs 1 --no-anneal-lr
            --total-timesteps 128 --filter-when always --env-kwargs '{"max_num_frames_per_episode": 60}'""",
        batch=32,
        act=lambda agent, rng, obs: agent.policy(rng)(obs)[0],
        policy=lambda agent, obs: Categorical(logits=agent.get_logits_and_value(obs)[0]),
        refused=(
            ("--env-id CartPole-v1 --env-kwargs {}", "ppo_iif.py"),
            ("--env-id toy_envs:Pixels-v0 --env-kwargs {}", "not an Atari game"),
        ),
        also_runs=("--env-id ALE/Freeway-v5",),
    ),
]


@pytest.fixture(params=SCRIPTS, ids=str, scope="module")
def script(request):
    return request.param


@pytest.fixture(params=[script for script in SCRIPTS if script.toy], ids=str, scope="module")
def toy_script(request):
    return request.param


@pytest.fixture(scope="module")
def one():
    """The script that stands for all, in what is the same text in all."""
    return SCRIPTS[0]


# What a script has of its own. The rest it shares with ppo_iif.py, text for text.
IMAGES = {"Agent", "rollout", "score", "evaluate", "make_env", "show"}
OWN = {
    "ppo_iif_continuous.py": {"Agent", "rollout", "score", "tells_apart", "Normalize", "make_env", "make_eval_envs"}
    | {"get_statistics", "set_statistics", "freeze_statistics"},
    "ppo_iif_minigrid.py": IMAGES | {"check_args"},
    "ppo_iif_atari.py": IMAGES | {"check_args", "game", "EnvPool", "make_envs"},
}
OWN_LINES = {  # of the main part
    "ppo_iif_continuous.py": ("set_statistics(", "freeze_statistics(", "get_statistics("),
    "ppo_iif_minigrid.py": ("Agent(envs, args.obs_scale)",),
    "ppo_iif_atari.py": ("was_real_done", "channels_last"),
}


def parts(script):
    """{name: text} of a script's functions and classes, and the lines of its main part."""
    text = (ROOT / script.name).read_text()
    nodes = ast.parse(text).body
    named = {node.name: ast.get_source_segment(text, node) for node in nodes if hasattr(node, "name")}
    return named, ast.get_source_segment(text, nodes[-1]).splitlines()


@pytest.mark.parametrize("script", SCRIPTS[1:], ids=str)
def test_the_scripts_share_their_text(script, one):
    """So that a fix can't be left in one. The names and types of the shared arguments are the same as well."""
    (ours, our_main), (theirs, their_main) = parts(one), parts(script)
    for name in (ours.keys() | theirs.keys()) - OWN[script.name] - {"Args", "mlp"}:
        assert theirs.get(name) == ours[name], name
    assert theirs.get("mlp", ours["mlp"]) == ours["mlp"]
    own = OWN_LINES[script.name]
    only = [line for line in their_main if line not in our_main]
    assert only and all(any(word in line for word in own) for line in only), only
    common = [line.replace(", args.obs_scale", "") for line in their_main]
    assert [line for line in our_main if line not in common] == []
    types = [{f.name: f.type for f in dataclasses.fields(s.stages.Args)} for s in (one, script)]
    assert types[0].items() <= types[1].items()


# ---- running a script as a whole


class Run(NamedTuple):
    code: int
    out: str
    err: str
    folder: Path  # the new one in runs/, None if there is none

    def rows(self):
        return scalars(self.folder)


def command(script, flags, own=True):
    """The command line; the row's own environment and flags come first, so that `flags` overrides them."""
    row = ["--env-id", script.env, *shlex.split(script.flags)] if own else []
    return [str(ROOT / script.name), *row, *shlex.split(flags)]


def environment(**variables):
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), **variables}


def folders(cwd):
    return {path.parent for path in Path(cwd).glob("runs/**/events.out.tfevents.*")}


def run(script, flags, cwd, apart=False, own=True):
    """Run a script to its end in the folder `cwd`, in a process of its own if `apart`.

    Else here, by the same file as __main__: a tenth of the time, and random streams that earlier tests have left anywhere.
    """
    before, argv = folders(cwd), command(script, flags, own)
    if apart:
        done = subprocess.run([sys.executable, *argv], cwd=cwd, env=environment(), capture_output=True, text=True)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        code, out, err = 0, io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.chdir(cwd)
            patch.setattr(sys, "argv", argv)
            try:
                runpy.run_path(argv[0], run_name="__main__")
            except SystemExit as error:  # any other error is one that the user would see as a traceback
                code = error.code if isinstance(error.code, int) else int(error.code is not None)
                if isinstance(error.code, str):
                    print(error.code, file=err)
        out, err = out.getvalue(), err.getvalue()
    new = folders(cwd) - before
    assert len(new) <= 1
    return Run(code, out, err, new.pop() if new else None)


def train(script, flags, cwd, apart=False, own=True):
    done = run(script, flags, cwd, apart, own)
    assert done.code == 0, done.err
    return done


def refusal(script, flags, cwd, apart=False, own=True):
    """The one line with which a script refuses to go on."""
    done = run(script, flags, cwd, apart, own)
    lines = [line for line in done.err.splitlines() if line.strip()]
    assert done.code != 0 and len(lines) == 1 and "Traceback" not in done.err, done
    return lines[0]


def scalars(folder):
    """{name: [(global step, value), ...]} of a run's folder."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def values(rows, name):
    return [value for _, value in rows[name]]


def repeatable(rows):
    """Those that do not depend on the clock, as text, in which a NaN equals a NaN."""
    return {name: str(points) for name, points in rows.items() if not name.startswith("time/") and name != "charts/SPS"}


def model(folder):
    (path,) = folder.glob("*.cleanrl_model")
    return torch.load(path, weights_only=True)


def assert_same(a, b, path="the model"):
    """Equal to the bit, through any nesting."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{path}[{i}]")
    else:
        assert a == b, path


def assert_same_end(a, b):
    """Two saved agents are the same in weights, optimizer, counters and random streams."""
    ignored = ("args", "run_name", "wandb_id")
    assert_same({k: v for k, v in a.items() if k not in ignored}, {k: v for k, v in b.items() if k not in ignored})


def toy(script, **kwargs):
    return f"--env-id {script.toy} --env-kwargs '{json.dumps(kwargs)}'"


# ---- running the stages of a script


class Stage(NamedTuple):
    stages: Any
    args: Any
    envs: Any
    agent: Any

    def moved(self):
        """With the agent away from the policy of the start, which is nearly uniform."""
        with torch.no_grad():
            for p in self.agent.parameters():
                p.add_(torch.randn(p.shape, generator=generator(p.numel())) * (p[0].numel() if p.dim() > 1 else 100) ** -0.5)
        return self

    def rollout(self, next_obs=None, rng=None):
        if next_obs is None:
            next_obs, _ = self.envs.reset(seed=1)
        return self.stages.rollout(self.agent, self.envs, next_obs, self.args.num_steps, rng or np.random.default_rng(1))

    def round(self):
        """A flat round, as the loop makes it."""
        batch, _, _ = self.rollout()
        batch = self.stages.gae(batch, self.args.gamma, self.args.gae_lambda)
        return {name: x.flatten(0, 1) for name, x in batch.items()}


def stage(script, flags="", seed=1):
    """A script's functions, with arguments, environments and an agent to call them with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command(script, flags))
        args, _ = script.stages.parse_args()
    torch.manual_seed(seed)
    envs = script.stages.make_envs(args, "test")
    return Stage(script.stages, args, envs, script.stages.Agent(envs))


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def weights(agent):
    return {name: p.detach().clone() for name, p in agent.named_parameters()}


# ---- training, logging, seeds

ARMS = ("influence", "random", "none")
CHARTS = {"episodic_return", "episodic_length", "learning_rate", "SPS", "round", "optimizer_steps", "skipped_updates"}
LOSSES = {"value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "explained_variance"}
INFLUENCE = {"negative_fraction", "dropped_fraction", "records_kept", "filtered_round", "nonfinite", "advantage_correlation"}
INFLUENCE |= {"score_mean", "score_std", "score_min", "score_max"}
CONSISTENCY = {"influence/agreement", "influence/noise_scale", "influence/noise_scale_infinite"}
TIME = {"rollout", "scoring", "update"}


@pytest.fixture(scope="module")
def arms(script, tmp_path_factory):
    """One run of each arm with one seed."""
    cwd = tmp_path_factory.mktemp("arms")
    return {arm: train(script, f"--filter {arm} --save-model", cwd, apart=arm == "influence") for arm in ARMS}


def rounds_of(rows):
    return len(rows["charts/round"])


@pytest.mark.parametrize("arm", ARMS)
def test_training_logs_every_name(script, arms, arm):
    rows = arms[arm].rows()
    influence = {f"influence/{name}" for name in INFLUENCE} if arm != "none" else set()
    expected = (
        {f"charts/{name}" for name in CHARTS} | {f"losses/{name}" for name in LOSSES} | {f"time/{name}" for name in TIME}
    )
    assert set(rows) - CONSISTENCY == expected | influence
    # of the target's gradients over parts of a round: here Atari's is scored in one
    assert ("influence/agreement" in rows) == (arm != "none" and "atari" not in script.name)
    rows = {name: points for name, points in rows.items() if name not in CONSISTENCY}
    assert len(rows["charts/episodic_return"]) > 3
    assert np.isfinite([value for points in rows.values() for _, value in points]).all()
    rounds = rounds_of(rows)
    assert rounds > 2
    for name in set(rows) - {"charts/episodic_return", "charts/episodic_length"}:
        assert [step for step, _ in rows[name]] == [script.batch * (k + 1) for k in range(rounds)], name
    assert values(rows, "charts/round") == list(range(rounds))
    steps = values(rows, "charts/optimizer_steps")
    assert steps[0] > 0 and steps == sorted(set(steps))

    histograms = EventAccumulator(str(arms[arm].folder)).Reload().Tags()["histograms"]
    assert histograms == (["influence/scores"] if arm != "none" else [])
    returns = re.findall(r"^global_step=(\d+), episodic_return=(\S+)$", arms[arm].out, re.MULTILINE)
    np.testing.assert_allclose(np.array(returns, dtype=float), rows["charts/episodic_return"], rtol=1e-6)
    assert len(re.findall(r"^SPS: \d+$", arms[arm].out, re.MULTILINE)) == rounds
    assert arms[arm].out.splitlines()[-1].endswith(f"tensorboard --logdir runs/{arms[arm].folder.name}")


def test_what_the_arms_drop(script, arms):
    rows = {arm: arms[arm].rows() for arm in ("influence", "random")}
    for arm in rows:
        kept = values(rows[arm], "influence/records_kept")
        negative = values(rows[arm], "influence/negative_fraction")
        filtered = values(rows[arm], "influence/filtered_round")
        percent = stage(script).args.filter_percent
        for k, n, f in zip(kept, negative, filtered):
            assert k == script.batch - f * int(percent / 100 * round(n * script.batch))
        assert min(kept) < script.batch
        dropped = values(rows[arm], "influence/dropped_fraction")
        np.testing.assert_allclose(dropped, 1 - np.array(kept) / script.batch, atol=1e-6)


def test_first_round_is_the_same_in_every_arm(script, arms):
    first = {
        arm: {name: [p for p in points if p[0] <= script.batch] for name, points in arms[arm].rows().items()} for arm in ARMS
    }
    names = ("charts/episodic_return", "charts/episodic_length")
    assert first["influence"]["charts/episodic_return"]
    for arm in ("random", "none"):
        assert all(first[arm][name] == first["influence"][name] for name in names)
    # the scores tell apart rounds that differ in anything
    assert all(first["random"][f"influence/{name}"] == first["influence"][f"influence/{name}"] for name in INFLUENCE)
    assert repeatable(first["random"]) != repeatable(first["influence"]) != repeatable(first["none"])


def test_same_seed_same_run(script, arms, tmp_path):
    """In another process, and whatever was drawn before it. Two runs that start together have folders of their own."""
    again = train(script, "--save-model", tmp_path)
    assert repeatable(again.rows()) == repeatable(arms["influence"].rows())
    assert_same_end(model(again.folder), model(arms["influence"].folder))
    other = train(script, f"--filter none --seed 2 --total-timesteps {script.batch}", tmp_path)
    assert other.folder != again.folder
    assert other.rows()["losses/value_loss"] != again.rows()["losses/value_loss"][:1]


def test_evaluation_does_not_change_training(script, arms, tmp_path):
    evaluated = train(script, "--save-model --eval-episodes 2", tmp_path)
    rows = evaluated.rows()
    assert_same_end(model(evaluated.folder), model(arms["influence"].folder))
    steps = [script.batch * k for k in range(rounds_of(rows) + 1)]  # theta(k) of every round, and the last
    for name in ("eval/episodic_return", "eval/episodic_return_std"):
        assert [step for step, _ in rows.pop(name)] == steps
    assert repeatable(rows) == repeatable(arms["influence"].rows())


@pytest.mark.parametrize("filter", ["random --filter-percent 0", "toy_filters:everything"])
def test_scoring_disturbs_nothing(script, arms, filter, tmp_path):
    """Where it drops nothing, an arm trains as plain PPO does."""
    nothing_dropped = train(script, f"--filter {filter} --save-model", tmp_path)
    assert_same(model(nothing_dropped.folder)["agent"], model(arms["none"].folder)["agent"])


def test_a_copied_script_runs(script, tmp_path):
    for name in (script.name, "iif_core.py"):
        shutil.copy(ROOT / name, tmp_path)
    flags = command(script, f"--total-timesteps {script.batch}")[1:]
    variables = {k: v for k, v in environment().items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, script.name, *flags], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "charts/episodic_return" in scalars(folders(tmp_path).pop())


def test_unusual_environments(script, tmp_path):
    for flags in script.also_runs:
        done = train(script, f"{flags} --total-timesteps {script.batch} --eval-episodes 2", tmp_path)
        rows = done.rows()
        assert rows["charts/episodic_return"] and len(rows["eval/episodic_return"]) == 2, flags


@pytest.mark.parametrize("num_envs, num_steps, num_minibatches", [(3, 8, 8), (1, 1, 1), (4, 1, 4)])
def test_unusual_rounds(script, num_envs, num_steps, num_minibatches, tmp_path):
    """Several environments, rounds of one record, minibatches of one record."""
    flags = f"--num-envs {num_envs} --num-steps {num_steps} --num-minibatches {num_minibatches} --save-model"
    done = train(script, f"{flags} --total-timesteps {3 * num_envs * num_steps} --filter-when always", tmp_path)
    assert all(p.isfinite().all() for p in model(done.folder)["agent"].values())
    assert rounds_of(done.rows()) == 3


def test_wandb(script, tmp_path):
    """Offline: what is sent, and that a resumed run, which starts again from W&B's step 0, is a run of its own."""
    variables = environment(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(tmp_path))
    variables |= {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    flags = command(script, f"--track --total-timesteps {2 * script.batch} --seed 3 --snapshot-rounds 1 --save-every 1")
    done = subprocess.run([sys.executable, *flags], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert str(file.parent.relative_to(tmp_path)) in done.stdout.splitlines()[-1]
    rows = [row for row in offline_wandb.history(file) if "influence/scores/values" in row]
    assert [row["global_step"] for row in rows] == [script.batch, 2 * script.batch]
    (folder,) = folders(tmp_path)
    points = dict(scalars(folder)["charts/episodic_return"])
    for row in rows:
        assert row["charts/episodic_return"] == pytest.approx(points[row["global_step"]])
        assert sum(row["influence/scores/values"]) == script.batch
        assert np.isfinite(row["influence/score_mean"]) and np.isfinite(row["losses/policy_loss"])
    (table,) = (row for row in offline_wandb.history(file) if "influence/records/path" in row)
    assert (table["influence/records/nrows"], table["global_step"]) == (min(40, script.batch), 2 * script.batch)
    (path,) = tmp_path.glob(f"wandb/offline-run-*/files/{table['influence/records/path']}")
    data = json.loads(path.read_text())
    scores = [row[data["columns"].index("scores")] for row in data["data"]]
    assert scores == sorted(scores) and scores[0] < 0 < scores[-1]
    images = "minigrid" in script.name or "atari" in script.name
    assert all((row[1] == "Image") == images for row in data["data"])  # which waits to be uploaded with the table
    staged = [path.read_bytes()[:4] for path in tmp_path.glob("artifacts/staging/*")]
    assert (b"\x89PNG" in staged) == images
    config = offline_wandb.config(file)
    assert (config["env_id"], config["exp_name"], config["seed"]) == (script.env, script.name[:-3], 3)
    if script is not SCRIPTS[0]:
        return

    more = [f"--resume={folder}/checkpoint.pt", "--track", f"--total-timesteps={4 * script.batch}"]
    done = subprocess.run([sys.executable, flags[0], *more], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (second,) = set(tmp_path.glob("wandb/offline-run-*/run-*.wandb")) - {file}
    first_run, second_run = (offline_wandb.run(path) for path in (file, second))
    assert first_run.run_id != second_run.run_id and second_run.run_group == first_run.run_group == folder.name
    steps = [row["global_step"] for row in offline_wandb.history(second) if "charts/round" in row]
    assert steps == [3 * script.batch, 4 * script.batch]


# ---- checkpoints


def test_a_killed_run_ends_as_one_that_was_not(script, tmp_path):
    flags = "--filter toy_filters:first_half_or_death --optimizer adam --save-every 2 --eval-episodes 1 --save-model"
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    dead = subprocess.run([sys.executable, *command(script, flags)], cwd=killed, env=environment(DEATH_IN_ROUND="3"))
    assert dead.returncode == -signal.SIGKILL
    (checkpoint,) = killed.glob("runs/**/checkpoint.pt")
    assert torch.load(checkpoint, weights_only=True)["iteration"] == 2  # round 2 is logged, but not in the checkpoint
    assert rounds_of(scalars(checkpoint.parent)) == 3

    time.sleep(1.1)  # TensorBoard reads event files in the order of their seconds
    resumed = train(script, f"{flags} --resume {checkpoint}", killed)
    assert resumed.folder is None  # it goes on in the folder of the run
    straight = train(script, flags, whole).folder
    assert_same_end(model(checkpoint.parent), model(straight))
    assert repeatable(scalars(checkpoint.parent)) == repeatable(scalars(straight))


@pytest.fixture(scope="module")
def checkpoint(script, tmp_path_factory):
    """Of the last of four rounds."""
    return (
        train(script, "--save-every 2 --filter random --save-model", tmp_path_factory.mktemp("checkpoint")).folder
        / "checkpoint.pt"
    )


def test_resume_with_more_timesteps(script, checkpoint, tmp_path):
    """A run may be extended, from its saved model, with no other argument, and ends where one of that length would have."""
    (file,) = checkpoint.parent.glob("*.cleanrl_model")
    more = f"--total-timesteps {6 * script.batch} --save-model"
    extended = train(script, f"--resume {file} {more}", tmp_path, own=False)
    assert rounds_of(extended.rows()) == 2
    straight = train(script, f"--save-every 2 --filter random {more}", tmp_path)
    assert_same_end(model(extended.folder), model(straight.folder))


def test_one_checkpoint_resumed_twice_at_once(one, tmp_path, monkeypatch):
    """Another process saves, whole, in the middle of our saving."""
    s, write, path = stage(one), torch.save, tmp_path / "checkpoint.pt"
    optimizer, run = torch.optim.SGD(s.agent.parameters(), lr=1), SimpleNamespace(iteration=1)

    def save(*args):
        write(*args)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", write)
            patch.setattr(os, "getpid", lambda: 1)
            s.stages.save(path, s.args, run, s.agent, optimizer)

    monkeypatch.setattr(torch, "save", save)
    s.stages.save(path, s.args, run, s.agent, optimizer)
    assert torch.load(path, weights_only=True)["iteration"] == 1 and list(tmp_path.iterdir()) == [path]


def test_resume_logs_no_step_twice(one, tmp_path):
    """Also where the run had gone on after its checkpoint."""
    begun = train(one, f"--save-every 2 --eval-episodes 1 --total-timesteps {5 * one.batch}", tmp_path).folder
    time.sleep(1.1)  # as above
    train(one, f"--resume {begun}/checkpoint.pt --total-timesteps {6 * one.batch}", tmp_path, own=False)
    rows = scalars(begun)
    for name, first in (("eval/episodic_return", 0), ("charts/round", 1), ("influence/score_mean", 1)):
        assert [step for step, _ in rows[name]] == [one.batch * k for k in range(first, 7)]


@pytest.fixture(scope="module")
def checkpoint_of_one(one, tmp_path_factory):
    return train(one, "--save-every 2", tmp_path_factory.mktemp("checkpoint")).folder / "checkpoint.pt"


DAMAGE = {
    "missing": lambda path, state: path.unlink(),
    "half-written": lambda path, state: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "only weights": lambda path, state: torch.save(state["agent"], path),
    "unknown arguments": lambda path, state: torch.save(state | {"args": state["args"] | {"of_another_script": 1}}, path),
    "another network": lambda path, state: torch.save(state | {"agent": {"other": torch.ones(1)}}, path),
    "another script": lambda path, state: torch.save(state | {"script": "ppo_iif_atari.py"}, path),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_bad_checkpoints_are_refused(one, checkpoint_of_one, how, tmp_path):
    path = tmp_path / "bad.pt"
    shutil.copy(checkpoint_of_one, path)
    DAMAGE[how](path, torch.load(path, weights_only=True))
    assert "bad.pt" in refusal(one, f"--resume {path} --total-timesteps {6 * one.batch}", tmp_path)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--seed 7", "--seed"),
        ("--filter none", "--filter"),
        ("--gamma 0.5", "--gamma"),
        ("--update-epochs 7", "--update-epochs"),
        ("--num-envs 3", "--num-envs"),
        ("--save-every 1", "--save-every"),
        ("--total-timesteps 512", "--total-timesteps"),  # nothing left to do
        ("--total-timesteps 0", "--total-timesteps"),
    ],
)
def test_what_resume_cannot_change(one, checkpoint_of_one, flags, text, tmp_path):
    flags = flags.replace("512", str(4 * one.batch))
    more = f"--total-timesteps {6 * one.batch}"
    assert text in refusal(one, f"--save-every 2 --resume {checkpoint_of_one} {more} {flags}", tmp_path)
    assert not (tmp_path / "runs").exists()


# ---- arguments that cannot work

REFUSED_VALUES = {
    "num-minibatches": "7 4096 0",
    "total-timesteps": "15 -1",
    "num-steps": "0",
    "num-envs": "0",
    "update-epochs": "0",
    "torch-threads": "0",
    "seed": f"-1 {10**30}",
    "exp-name": "a/b",
    "save-every": "-1",
    "eval-episodes": "-1",
    "learning-rate": "0 -0.1 nan inf",
    "gamma": "1.5 nan",
    "gae-lambda": "-0.5",
    "clip-coef": "nan",
    "max-grad-norm": "-1 nan",
    "vf-coef": "nan",
    "ent-coef": "inf",
    "target-kl": "nan",
    "filter-percent": "101 -1 nan",
    "filter": "influenze '' nowhere:rule toy_filters toy_filters:missing toy_filters:number .toy_filters:nothing",
    "snapshot-rounds": "1,x -1 every:0 4",  # they are 0 to 3
    "env-id": "nowhere:NoSuch-v0 'not an id'",
}
REFUSED = [
    (f"--{name} {shlex.quote(value)}", f"--{name} {value}")
    for name, values in REFUSED_VALUES.items()
    for value in shlex.split(values)
] + [
    ("--env-kwargs {oops", "--env-kwargs"),
    ("--env-kwargs '[1]'", "--env-kwargs"),
    # environments that are not what they declare
    ("--env-id toy_envs:OldReset-v0", "reset"),
    ("--env-id toy_envs:OldStep-v0", "step"),
    ("--env-id toy_envs:OtherShape-v0", "(1, 3)"),
    ("--env-id toy_envs:OtherShapeLater-v0", "(4,)"),
    ("--env-id toy_envs:OtherType-v0", "int64"),
    ("--env-id toy_envs:ListOfRewards-v0", "reward"),
    ("--env-id toy_envs:Toy-v0 --capture-video", "--capture-video"),
    ("--env-id toy_envs:Invisible-v0 --capture-video", "--capture-video"),
]
REFUSED_BY_EACH = (
    ("""--env-kwargs '{"no_such_argument": 1}'""", "no_such_argument"),
    ("--env-id NoSuch-v0", "NoSuch-v0"),
    ("--env-id toy_envs:MultiDiscrete-v0 --env-kwargs {}", "toy_envs:MultiDiscrete-v0"),
)


@pytest.mark.parametrize(
    "script, flags, text",
    [(SCRIPTS[0], *row) for row in REFUSED] + [(s, *row) for s in SCRIPTS for row in (REFUSED_BY_EACH + s.refused)],
    ids=lambda x: str(x)[:40],
)
def test_arguments_that_cannot_work(script, flags, text, tmp_path):
    assert text in refusal(script, flags, tmp_path)
    assert not (tmp_path / "runs").exists()


def test_a_refusal_as_the_user_sees_it(one, tmp_path):
    assert "--num-minibatches 7" in refusal(one, "--num-minibatches 7", tmp_path, apart=True)


@pytest.mark.parametrize("arm, value", [("influence", "NaN"), ("random", "-Infinity"), ("none", "NaN")])
@pytest.mark.parametrize(
    "script, what",
    [(s, what) for s in SCRIPTS if s.toy for what in (("bad_reward", "bad_obs") if s.toy_is_float else ("bad_reward",))],
    ids=str,
)
def test_numbers_that_are_not_finite(script, arm, what, value, tmp_path):
    """The run ends in that round, names the record, and what was logged before is on disk."""
    step = script.batch + 41  # the 41st record of round 1
    env = f"""--env-id {script.toy} --env-kwargs '{{"lengths": [1], "rewards": [1, 2], "{what}": [{step}, {value}]}}'"""
    done = run(script, f"{env} --filter {arm}", tmp_path)
    lines = [line for line in done.err.splitlines() if line.strip()]
    assert done.code != 0 and len(lines) == 1, done
    assert re.search(r"\bround 1\b", lines[0]) and "not finite" in lines[0], lines
    # an observation is both that after record 40 and that before record 41
    count, record = ("1", "40") if what == "bad_reward" else ("[12]", "4[01]")
    assert re.search(rf"\b{count} of {script.batch}\b", lines[0]) and re.search(rf"\brecord {record}\b", lines[0]), lines
    rows = done.rows()
    assert rows["charts/round"] == [(script.batch, 0)] and len(rows["charts/episodic_return"]) == script.batch


def test_weights_that_are_not_finite(one, tmp_path):
    """They are not saved."""
    flags = "--optimizer sgd --learning-rate 1e30 --save-every 1 --save-model"
    assert re.search(r"round \d.*--learning-rate", refusal(one, flags, tmp_path))
    for path in tmp_path.glob("runs/**/checkpoint.pt"):
        assert all(p.isfinite().all() for p in torch.load(path, weights_only=True)["agent"].values())
    assert not list(tmp_path.glob("runs/**/*.cleanrl_model"))


def test_scores_that_are_not_finite(one, tmp_path):
    """Of a round that is finite itself."""
    assert "round 0" in refusal(one, toy(one, rewards=[1e37, -1e37]), tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_booleans_as_sweeps_write_them(script):
    """--norm_adv=True and --norm-adv=False beside --norm-adv, --no-norm-adv, for every boolean."""
    booleans = [f.name for f in dataclasses.fields(script.stages.Args) if f.type is bool]
    booleans = [name for name in booleans if name != "envpool" or find_spec("envpool")]  # refused where it is not installed
    assert {"norm_adv", "cuda", "track", "anneal_lr"} <= set(booleans)

    def parsed(*words):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [script.name, "--no-cuda", *words])
            return dataclasses.asdict(script.stages.parse_args()[0])

    plain = parsed()
    for name in booleans:
        dashed = name.replace("_", "-")
        for value in (True, False):
            for word in (f"--{name}={value}", f"--{dashed}={value}", f"--{name}={str(value).lower()}"):
                assert parsed(word) == plain | {name: value}, word
        assert parsed(f"--{dashed}")[name] and parsed(f"--{name}")[name]
        assert not parsed(f"--no-{dashed}")[name] and not parsed(f"--no_{name}")[name]
    assert parsed("--exp-name=True")["exp_name"] == "True"


@pytest.mark.parametrize("kind", ["Recorded", "Monitored", "Episodic"])
def test_environments_that_keep_their_own_statistics(one, kind, tmp_path):
    """Whatever stands in info["episode"] already."""
    flags = f"--env-id toy_envs:{kind}-v0 --num-envs 2 --num-steps 64 --total-timesteps {one.batch} --eval-episodes 2"
    rows = train(one, flags, tmp_path).rows()
    assert set(values(rows, "charts/episodic_return")) == {4} == set(values(rows, "charts/episodic_length"))
    assert values(rows, "eval/episodic_return") == [4, 4]


def test_videos(one, tmp_path):
    """Training is the same with them."""
    filmed = train(one, f"--capture-video --save-model --total-timesteps {one.batch}", tmp_path)
    plain = train(one, f"--save-model --total-timesteps {one.batch}", tmp_path)
    assert list((tmp_path / "videos" / filmed.folder.name).glob("*.mp4"))
    assert_same_end(model(filmed.folder), model(plain.folder))


# ---- rollout, advantages


def test_rows_are_the_real_steps_in_order(toy_script):
    s = stage(
        toy_script,
        toy(toy_script, lengths=[1, 3, 2], ends=["terminated", "truncated"], rewards=None)
        + " --num-steps 7 --num-minibatches 1",
    )
    assert s.envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.SAME_STEP
    first, episodes, next_obs = s.rollout()
    assert toy_script.mark(first["obs"]).flatten().tolist() == [0, 10, 11, 12, 20, 21, 30]
    assert first["rewards"].flatten().tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert first["dones"].flatten().tolist() == [True, False, False, True, False, True, True]
    assert first["terminations"].flatten().tolist() == [True, False, False, False, False, True, False]
    assert episodes == [(0, 0, 1.0, 1), (3, 0, 9.0, 3), (5, 0, 11.0, 2), (6, 0, 7.0, 1)]
    second, episodes, _ = s.rollout(next_obs)
    assert toy_script.mark(second["obs"]).flatten().tolist() == [40, 41, 42, 50, 51, 60, 70]
    assert second["rewards"].flatten().tolist() == [8, 9, 10, 11, 12, 13, 14]
    assert episodes == [(2, 0, 27.0, 3), (4, 0, 23.0, 2), (5, 0, 13.0, 1)]
    assert toy_script.mark(first["obs"]).flatten().tolist() == [0, 10, 11, 12, 20, 21, 30]  # its memory is its own


def test_rows_of_several_environments(toy_script):
    s = stage(toy_script, toy(toy_script, lengths=[2], rewards=None) + " --num-envs 3 --num-steps 4 --num-minibatches 1")
    batch, episodes, _ = s.rollout()
    assert toy_script.mark(batch["obs"]).tolist() == [[0] * 3, [1] * 3, [10] * 3, [11] * 3]
    assert batch["rewards"].tolist() == [[1] * 3, [2] * 3, [3] * 3, [4] * 3]
    assert episodes == [(1, i, 3.0, 2) for i in range(3)] + [(3, i, 7.0, 2) for i in range(3)]


def test_logprobs_and_values_are_those_of_the_policy(script):
    s = stage(script, "--num-envs 2 --num-steps 32").moved()
    batch = s.round()
    with torch.no_grad():
        logprobs = script.policy(s.agent, batch["obs"]).log_prob(batch["actions"])
        values = s.agent.get_value(batch["obs"]).flatten()
    torch.testing.assert_close(batch["logprobs"], logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch["values"], values, atol=1e-5, rtol=1e-5)


def test_episodes_are_logged_at_their_step(toy_script, tmp_path):
    """Over all environments; the last of a round at its end, beside the round's other numbers."""
    flags = "--num-envs 3 --num-steps 5 --num-minibatches 1 --total-timesteps 30"
    rows = train(toy_script, f"{toy(toy_script, lengths=[2])} {flags}", tmp_path).rows()
    assert [step for step, _ in rows["charts/episodic_return"]] == [6] * 3 + [12, 12, 15] + [18] * 3 + [24] * 3 + [30] * 3


def test_advantages_by_hand(toy_script):
    """gamma = lambda = 1/2 and V(s) = mark: step by step, with d = r + V(s')/2 - V(s) and A = d + A'/4,

    mark  reward  then                    d                    A
       0       1  1                       1 + .5 - 0           1.5 + 1/4 = 1.75
       1       2  terminated              2 - 1                1
      10       3  11                      3 + 5.5 - 10         -1.5 - 1/4 = -1.75
      11       4  truncated at 12         4 + 6 - 11           -1
      20       5  21, the round is over   5 + 10.5 - 20        -4.5
    """
    env = toy(toy_script, lengths=[2], ends=["terminated", "truncated"], rewards=None)
    s = stage(toy_script, env + " --num-envs 2 --num-steps 5 --num-minibatches 1 --gamma 0.5 --gae-lambda 0.5")
    toy_script.critic_is_mark(s.agent)
    batch = s.round()
    assert batch["values"].view(5, 2).T.tolist() == [[0, 1, 10, 11, 20]] * 2
    assert batch["advantages"].view(5, 2).T.tolist() == [[1.75, 1, -1.75, -1, -4.5]] * 2
    assert batch["returns"].view(5, 2).T.tolist() == [[1.75, 2, 8.25, 10, 15.5]] * 2


def test_a_time_limit_bootstraps(toy_script):
    """gamma = 1, lambda = 0: A = r + V(s') - V(s), and the mark rises by one a step, at the limit as well."""
    env = toy(toy_script, lengths=[10**6], max_episode_steps=3)
    s = stage(toy_script, env + " --num-steps 8 --num-minibatches 1 --gamma 1 --gae-lambda 0")
    toy_script.critic_is_mark(s.agent)
    assert s.round()["advantages"].tolist() == [2] * 8


def test_sampling_follows_the_policy(script):
    """The policy that acts, of numpy, against the one that is trained, of torch."""
    s = stage(script).moved()
    shape, rng = (64, *s.envs.single_observation_space.shape), np.random.default_rng(0)
    if s.envs.single_observation_space.dtype == np.uint8:  # images, bright and dark
        obs = (255 * rng.random(shape) * rng.random((64, *[1] * (len(shape) - 1))) ** 4).astype(np.uint8)
    else:
        obs = rng.normal(size=shape).astype(np.float32)

    class NoNoise:
        def __getattr__(self, name):
            return lambda *args, size=(), **kwargs: np.zeros(size)

    with torch.no_grad():
        policy = script.policy(s.agent, torch.from_numpy(obs))
    likeliest = script.act(s.agent, NoNoise(), obs)
    assert len(np.unique(likeliest, axis=0)) > 1
    np.testing.assert_allclose(likeliest, policy.mode, atol=1e-5)

    n = 20_000 if obs[0].size < 1000 else 1000
    for i in range(3):
        actions = torch.from_numpy(script.act(s.agent, np.random.default_rng(i), np.repeat(obs[i : i + 1], n, axis=0)))
        if isinstance(policy, Categorical):
            p = policy.probs[i].double()
            counts = torch.bincount(actions, minlength=len(p))
            assert ((counts - n * p).square() / (n * p)).sum() < 20 * len(p)
        else:
            error = (actions.mean(0) - policy.mean[i]) / policy.stddev[i]
            assert error.abs().max() < 5 / n**0.5
            assert (actions.std(0) / policy.stddev[i] - 1).abs().max() < 5 / n**0.5


# ---- scores, selection


@pytest.mark.parametrize("flags", ["", "--no-norm-adv", "--num-envs 2 --num-steps 8"])
def test_scores_equal_a_loop_over_the_records(script, flags):
    """In double precision: minus the product of the gradients of a record's loss and of the target, one record at a time.

    The loss takes its advantage normalised over the whole round, or among the minibatch_size records that a permutation by the
    generator puts it with.
    """
    s = stage(script, f"--num-envs 1 --num-steps 16 --num-minibatches 4 {flags}").moved()
    batch = {name: x.double() if x.is_floating_point() or name == "obs" else x for name, x in s.round().items()}
    s.agent.double()
    scores = s.stages.score(s.agent, batch, s.args, generator(5))

    advantages, n = batch["advantages"], s.args.batch_size
    normalized = advantages.clone()
    if s.args.norm_adv:
        size = n if script.scores_whole_round else s.args.minibatch_size
        for inds in torch.randperm(n, generator=generator(5)).split(size):
            normalized[inds] = (advantages[inds] - advantages[inds].mean()) / (advantages[inds].std() + 1e-8)

    def gradient(loss):
        grads = torch.autograd.grad(loss, list(s.agent.parameters()), allow_unused=True)
        return torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(s.agent.parameters(), grads)])

    def logprobs():
        return script.policy(s.agent, batch["obs"]).log_prob(batch["actions"])

    direction = gradient((advantages * logprobs()).mean())
    expected = torch.stack([-gradient(-normalized[i] * logprobs()[i]) @ direction for i in range(n)])
    assert (expected < 0).any() and (expected > 0).any()
    torch.testing.assert_close(scores.double(), expected, atol=1e-8 * expected.abs().max().item(), rtol=1e-6)


def test_the_critic_has_no_part_in_the_scores(script):
    """They run over the policy's head and over the trunk, where the two share one."""
    s = stage(script).moved()
    batch, shared = s.round(), [p for name, p in s.agent.named_parameters() if name.startswith("network.")]

    def scores():
        return s.stages.score(s.agent, batch, s.args, generator())

    before = scores()
    with torch.no_grad():
        for p in s.agent.critic.parameters():
            p.normal_(generator=generator(p.numel()))
    assert torch.equal(scores(), before)
    policy = [p for name, p in s.agent.named_parameters() if not name.startswith("critic.")]
    for p in policy:
        with torch.no_grad():
            kept = p.clone()
            p += 0.01
            assert not torch.equal(scores(), before)
            p.copy_(kept)
    assert bool(shared) == (script.name in ("ppo_iif_minigrid.py", "ppo_iif_atari.py"))


def test_random_drops_as_many_as_influence(one):
    s = stage(one, "--filter random --filter-percent 40")
    batch = {**s.round(), "scores": torch.randn(s.args.batch_size, generator=generator())}
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first, second = (s.stages.select(batch, s.args, generator(seed)) for seed in (1, 2))
    again = s.stages.select(batch, s.args, generator(1))
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == np.random.get_state()[1].tolist()
    influence = s.stages.select(batch, dataclasses.replace(s.args, filter="influence"), generator(1))

    dropped = int(0.4 * (batch["scores"] < 0).sum())
    assert dropped > 5
    assert len(influence) == len(first) == len(second) == s.args.batch_size - dropped
    assert set(influence.tolist()) == set(batch["scores"].argsort()[dropped:].tolist())
    chosen = [set(x.tolist()) for x in (first, second, again, influence)]
    assert all(len(x) == len(first) and x <= set(range(s.args.batch_size)) for x in chosen)
    assert chosen[0] == chosen[2] and chosen[0] != chosen[1] and chosen[3] not in chosen[:2]

    everything = dataclasses.replace(s.args, filter="influence", filter_of="all", filter_percent=75)
    assert len(s.stages.select(batch, everything, generator())) == s.args.batch_size // 4


def test_a_filter_of_ones_own(one, tmp_path):
    toy_filters.seen.clear()
    done = train(one, "--filter toy_filters:first_half", tmp_path)
    rows = done.rows()
    assert values(rows, "influence/records_kept") == [one.batch // 2] * rounds_of(rows)
    assert len(toy_filters.seen) == rounds_of(rows)
    for name in ("obs", "actions", "rewards", "advantages", "returns", "values", "logprobs", "scores"):
        assert all(len(batch[name]) == one.batch for batch in toy_filters.seen), name
    rows = train(one, "--filter toy_filters:weights", tmp_path).rows()
    assert all(np.isfinite(value) for _, value in rows["losses/policy_loss"])


@pytest.mark.parametrize(
    "rule",
    [
        *("one_weight_too_few", "negative_weight", "nan_weight", "zero_weights", "mask", "number_mask", "bytes_mask"),
        *("out_of_range", "negative_index", "two_dimensional", "one_number"),
    ],
)
def test_wrong_filters(one, rule):
    s = stage(one, f"--filter toy_filters:{rule}")
    batch = {**s.round(), "scores": torch.randn(s.args.batch_size, generator=generator())}
    with pytest.raises((ValueError, SystemExit), match=f"--filter toy_filters:{rule} must return"):
        s.stages.select(batch, s.args, generator())


@pytest.mark.parametrize("rule", ["nothing", "empty_list"])
def test_nothing_left(one, rule, tmp_path):
    done = train(one, f"--filter toy_filters:{rule} --save-model", tmp_path)
    rows = done.rows()
    assert values(rows, "charts/skipped_updates") == [k + 1 for k in range(rounds_of(rows))]
    assert values(rows, "charts/optimizer_steps") == [0] * rounds_of(rows)
    assert values(rows, "influence/dropped_fraction") == [1] * rounds_of(rows)
    assert not [name for name in rows if name.startswith("losses/")]
    assert_same(model(done.folder)["agent"], stage(one).agent.state_dict())


def test_training_goes_on_after_a_skipped_update(one, tmp_path):
    done = train(one, "--filter toy_filters:every_other_round --save-model", tmp_path)
    rows = done.rows()
    steps = values(rows, "charts/optimizer_steps")
    assert values(rows, "charts/skipped_updates") == [0, 1, 1, 2]
    assert 0 < steps[0] == steps[1] < steps[2] == steps[3]
    assert all(p.isfinite().all() for p in model(done.folder)["agent"].values())


@pytest.mark.parametrize(
    "env, when, filtered",
    [
        (dict(lengths=[4]), "signal", False),
        (dict(lengths=[4]), "always", True),
        (dict(lengths=[10**6]), "signal", False),  # no episode ends
        (dict(lengths=[3, 5]), "signal", True),  # equal rewards, but returns that differ
        (dict(lengths=[4], rewards=[1, 2, 3, 4]), "signal", True),  # equal returns, but rewards that differ
    ],
)
def test_which_rounds_are_filtered(toy_script, env, when, filtered, tmp_path):
    flags = f"{toy(toy_script, **env)} --filter-when {when} --filter-percent 100 --total-timesteps {2 * toy_script.batch}"
    rows = train(toy_script, flags, tmp_path).rows()
    assert values(rows, "influence/filtered_round") == [filtered] * 2
    kept, negative = rows["influence/records_kept"], rows["influence/negative_fraction"]
    for (_, k), (_, n) in zip(kept, negative):
        assert n > 0
        assert k == (toy_script.batch - round(n * toy_script.batch) if filtered else toy_script.batch)


@pytest.mark.parametrize(
    "script, flags",
    [(s, "influence") for s in SCRIPTS if "continuous" not in s.name]
    + [(SCRIPTS[0], flags) for flags in ("influence --filter-of all", "random", "toy_filters:first_half", "none")],
    ids=str,
)
def test_a_policy_that_is_all_but_deterministic(script, flags, tmp_path, monkeypatch):
    """Its scores are rounding errors: nothing tells good from bad, rounds are left whole, and the run goes on to its end."""
    actions = stage(script).envs.single_action_space.n

    @torch.no_grad()
    def favour_the_first_action(bias):
        return bias.fill_(0).index_fill_(0, torch.tensor(0), 40.0 * (len(bias) == actions))

    monkeypatch.setattr(torch.nn.init, "zeros_", favour_the_first_action)
    done = train(script, f"--filter {flags} --filter-when always --filter-percent 50 --learning-rate 1e-9", tmp_path)
    rows = done.rows()
    assert rounds_of(rows) == 4 and set(values(rows, "losses/clipfrac")) == {0}
    if flags != "none":
        assert set(values(rows, "influence/filtered_round")) == {0}
        assert set(values(rows, "influence/records_kept")) == {script.batch}


# ---- minibatches, update


def test_minibatches(one):
    s = stage(one)
    size, n = s.args.minibatch_size, s.args.batch_size

    def cut(kept, **changes):
        args = dataclasses.replace(s.args, **changes)
        first, second = (s.stages.minibatches(kept, args, rng) for rng in [generator()] * 2)
        assert sum(map(len, first)) < 8 or torch.cat(first).tolist() != torch.cat(second).tolist()  # reshuffled
        inds = torch.cat(first).tolist() if first else []
        assert len(set(inds)) == len(inds) and set(inds) <= set(kept.tolist())
        return [len(mb) for mb in first]

    kept = torch.randperm(n, generator=generator())
    assert s.args.num_minibatches >= 16
    assert cut(kept) == [size] * s.args.num_minibatches
    assert cut(kept[: 5 * size + size // 2]) == [size] * 5  # what is left over sits this epoch out
    assert cut(kept[: size - 1]) == [size - 1]  # unless it is all there is
    assert cut(kept[:1]) == [1]
    assert cut(kept[:0]) == []
    # with few minibatches, nearly equal parts and nobody sits out
    assert cut(kept, num_minibatches=4) == [n // 4] * 4
    k = n // 5
    assert sorted(cut(kept[: 4 * k + 3], num_minibatches=4)) == [k, k + 1, k + 1, k + 1]
    assert cut(kept[:3], num_minibatches=4) == [1, 1, 1]
    assert cut(kept[:0], num_minibatches=4) == []
    assert cut(kept, num_minibatches=1) == [n]


@pytest.mark.parametrize("num_minibatches", [None, 4])
def test_minibatches_by_weight(one, num_minibatches):
    s = stage(one)
    n = s.args.batch_size
    args = dataclasses.replace(s.args, num_minibatches=num_minibatches or s.args.num_minibatches)
    weight, rng = torch.arange(n) % 4 * 1.0, generator()
    epochs = [s.stages.minibatches(weight, args, rng) for _ in range(200)]
    assert all([len(mb) for mb in epoch] == [args.minibatch_size] * args.num_minibatches for epoch in epochs)
    counts = torch.bincount(torch.cat([mb for epoch in epochs for mb in epoch]), minlength=n).double()
    assert (counts[weight == 0] == 0).all()
    expected = 200 * n * weight / weight.sum()
    assert ((counts - expected).abs() <= 5 * expected.sqrt()).all()


SETTINGS = [
    "",
    "--no-norm-adv",
    "--clip-vloss",
    "--ent-coef 0.03 --vf-coef 0.25",
    "--max-grad-norm 0.01",
    "--max-grad-norm 1e6",
    "--num-minibatches 2 --update-epochs 3",
]


@pytest.mark.parametrize("flags", SETTINGS)
def test_update_is_textbook_ppo(script, flags):
    """Parameter by parameter, on half of the records, whose ratios and values have moved away from those of the rollout."""
    plain = "--clip-coef 0.2 --vf-coef 0.5 --ent-coef 0 --max-grad-norm 0 --norm-adv --no-clip-vloss"
    s = stage(script, f"--num-steps 32 --num-minibatches 1 --update-epochs 1 {plain} {flags}").moved()
    batch = s.round()
    noise = torch.randn(3, s.args.batch_size, generator=generator())
    batch["logprobs"] = batch["logprobs"] + 0.3 * noise[0]
    batch["values"] = batch["values"] + noise[1]
    batch["advantages"] = 2 * noise[2] + 1
    kept = torch.arange(0, s.args.batch_size, 2)
    sgd = torch.optim.SGD(s.agent.parameters(), lr=0.002, fused=True)  # as the scripts have it

    start = {name: x.clone() for name, x in s.agent.state_dict().items()}
    losses, steps = s.stages.update(s.agent, sgd, batch, kept, s.args, generator(7))
    result = weights(s.agent)
    assert steps == s.args.num_minibatches * s.args.update_epochs

    s.agent.load_state_dict(start)
    shuffle, params = generator(7), dict(s.agent.named_parameters())
    for _ in range(s.args.update_epochs):
        for inds in s.stages.minibatches(kept, s.args, shuffle):
            b = {name: x[inds] for name, x in batch.items()}
            policy, new_values = script.policy(s.agent, b["obs"]), s.agent.get_value(b["obs"]).flatten()
            advantages = b["advantages"]
            if s.args.norm_adv:
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            ratio = (policy.log_prob(b["actions"]) - b["logprobs"]).exp()
            assert ((ratio - 1).abs() > 0.2).any()
            clipped = ratio.clamp(0.8, 1.2)
            policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
            errors = (new_values - b["returns"]) ** 2
            if s.args.clip_vloss:
                near = b["values"] + (new_values - b["values"]).clamp(-0.2, 0.2)
                errors = torch.maximum(errors, (near - b["returns"]) ** 2)
            entropy = policy.entropy().mean()
            loss = policy_loss + s.args.vf_coef * errors.mean() - s.args.ent_coef * entropy
            grads = torch.autograd.grad(loss, list(params.values()))
            norm = torch.cat([g.flatten() for g in grads]).norm()
            if s.args.max_grad_norm:
                grads = [g * min(1, s.args.max_grad_norm / norm.item()) for g in grads]
                assert (norm > s.args.max_grad_norm) == (s.args.max_grad_norm < 1)
            with torch.no_grad():
                for p, g in zip(params.values(), grads):
                    p -= 0.002 * g
    for name, p in params.items():
        step = p.detach() - start[name]
        assert step.abs().max() > 0, name
        assert (result[name] - p).abs().max() < 0.002 * step.abs().max() + 1e-7, name
    torch.testing.assert_close(losses["policy_loss"], policy_loss.item(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(losses["value_loss"], errors.mean().item(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(losses["entropy"], entropy.item(), atol=1e-5, rtol=1e-4)


def test_update_does_not_look_at_dropped_records(script):
    s = stage(script)
    batch, kept = s.round(), torch.arange(0, s.args.batch_size, 3)
    start, results = s.agent.state_dict(), []
    start = {name: x.clone() for name, x in start.items()}
    dropped = torch.ones(s.args.batch_size, dtype=torch.bool)
    dropped[kept] = False
    for garbage in (False, True):
        if garbage:
            batch = {name: x.clone() for name, x in batch.items()}
            for x in batch.values():
                x[dropped] = float("nan") if x.is_floating_point() else 1
        s.agent.load_state_dict(start)
        s.stages.update(s.agent, torch.optim.SGD(s.agent.parameters(), lr=0.1), batch, kept, s.args, generator(7))
        results.append(weights(s.agent))
    assert_same(*results)
    assert all(p.isfinite().all() for p in results[0].values())


def test_a_minibatch_of_one_is_not_normalised(script):
    s = stage(script, "--num-steps 16 --num-minibatches 16 --update-epochs 1 --learning-rate 0.1")
    batch = s.round()
    before = weights(s.agent)
    losses, steps = s.stages.update(
        s.agent, torch.optim.SGD(s.agent.parameters(), lr=0.1), batch, torch.tensor([3]), s.args, generator()
    )
    assert steps == 1 and np.isfinite(list(losses.values())).all()
    torch.testing.assert_close(losses["policy_loss"], -batch["advantages"][3].item(), rtol=1e-5, atol=1e-6)
    assert all(p.isfinite().all() for p in s.agent.parameters())
    assert any(not torch.equal(p, before[name]) for name, p in s.agent.named_parameters())


def test_target_kl_ends_an_update(one, tmp_path):
    rows = train(one, "--filter none --update-epochs 5 --target-kl 1e-12", tmp_path).rows()
    steps = stage(one).args.num_minibatches
    assert rows["charts/optimizer_steps"][0][1] in [k * steps for k in (1, 2, 3, 4)]


def test_learning_rate_annealing(one, tmp_path):
    rows = train(one, "--anneal-lr --learning-rate 0.001", tmp_path).rows()
    np.testing.assert_allclose(values(rows, "charts/learning_rate"), [0.001, 0.00075, 0.0005, 0.00025], rtol=1e-6)


# ---- evaluation


@pytest.mark.parametrize("num_envs", [1, 4])
def test_evaluation_does_not_favour_short_episodes(toy_script, num_envs):
    def evaluate(seed):
        s = stage(toy_script, toy(toy_script, lengths=[1, 60], by_seed=True) + f" --num-envs {num_envs}")
        torch.manual_seed(4)
        before = torch.get_rng_state()
        returns = s.stages.evaluate(s.agent, s.envs.envs, 24, seed)
        assert torch.equal(before, torch.get_rng_state())
        return returns, [env.unwrapped for env in s.envs.envs]

    returns, envs = evaluate(1)
    assert returns.shape == (24,)
    begun = sorted(length for env in envs for length in env.begun)
    assert begun == sorted(length for env in envs for length in env.finished) == sorted(returns.tolist())
    assert 5 < begun.count(60) < 19
    assert (evaluate(1)[0] == returns).all()
    assert (evaluate(2)[0] != returns).any()


def test_evaluation_episodes_that_do_not_end(script, monkeypatch, capsys):
    """They are cut, count with their returns so far, and a line says so; those that end are whole."""
    s = stage(script, toy(script, lengths=[3, 10**6], by_seed=True) if script.toy else "")
    monkeypatch.setattr(s.stages, "EVAL_STEPS", 5)
    returns = s.stages.evaluate(s.agent, s.envs.envs, 8, seed=1)
    assert "did not end" in capsys.readouterr().out or not script.toy
    if script.toy:
        assert set(returns) == {3, 5}
    assert len(returns) == 8 and (s.stages.evaluate(s.agent, s.envs.envs, 8, seed=1) == returns).all()
