"""The benchmarks' harness, metrics, filters and report."""

import ast
import csv
import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro

import ppo_iif
from benchmarks import files, report, run
from benchmarks.reproduce import fixed_reference, metrics, rlhf_kl, summary
from benchmarks.reproduce.entries import options
from benchmarks.reproduce.suites import SUITES
from benchmarks.variants import filters

ROOT = Path(__file__).resolve().parent.parent


# ---- run.py


def toy_suite(suite, results, workers=1, wait_for="-"):
    command = [sys.executable, str(ROOT / "tests" / "toy_suite.py"), suite, str(results), str(workers), str(wait_for)]
    setup = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "cwd": results.parent, "stderr": subprocess.PIPE}
    # Where the tests run in the background, Ctrl-C is ignored, and a child would inherit that.
    return {"args": command, **setup, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}


def run_toys(*args, **kwargs):
    return subprocess.run(**toy_suite(*args, **kwargs), text=True, stdout=subprocess.PIPE)


def read(path):
    return list(csv.DictReader(open(path)))


def test_a_suite_is_run_and_its_results_are_tidy(tmp_path):
    results = tmp_path / "results"
    done = run_toys("good", results, workers=2)
    assert done.returncode == 0, done.stderr
    rows = read(results / "good" / "Toy_two-scored_101.csv")
    assert list(rows[0]) == run.COLUMNS and len(rows) == 4
    wall = [float(row.pop("wall_seconds")) for row in rows]
    assert wall == sorted(wall) and wall[0] == 0
    labels = {"suite": "good", "environment": "Toy", "arm": "two, scored", "percent": "50", "optimizer": "sgd", "seed": "101"}
    seconds = {"rollout_seconds": "1.0000", "scoring_seconds": "0.5000", "update_seconds": "2.0000"}
    did = {"records_kept": "1999", "negative_fraction": "0.25", **seconds}
    assert rows[1] == {**labels, "round": "1", "global_step": "2048", "return": "111", "episodes": "7", **did}
    last = dict.fromkeys(did, "")
    assert rows[3] == {**labels, "round": "3", "global_step": "6144", "return": "131", "episodes": "7", **last}
    assert read(results / "good" / "Toy_one_101.csv")[0]["records_kept"] == "2048"  # not scored: all
    records = read(results / "good" / "runs.csv")
    assert [record["run"] for record in records] == ["Toy_one_101", "Toy_two-scored_101"]
    assert records[0]["command"].startswith("python tests/toy_training.py --optimizer sgd --eval-episodes 7 --then go")
    assert all(records[0][name] for name in run.RECORD if name != "reused_from") and float(records[0]["cpu_seconds"]) > 0
    assert sorted(path.name for path in (results / "good" / "work").iterdir()) == ["lock"]
    assert not (tmp_path / "runs").exists()


def test_finished_runs_are_skipped_and_identical_ones_reused(tmp_path):
    results = tmp_path / "results"
    assert run_toys("good", results).returncode == 0
    before = {path: path.stat().st_mtime_ns for path in results.glob("good/*.csv")}
    done = run_toys("good", results)
    assert done.returncode == 0 and "2 of 2 runs are finished" in done.stdout
    assert before == {path: path.stat().st_mtime_ns for path in results.glob("good/*.csv")}

    done = run_toys("again", results)
    assert done.returncode == 0 and "1 of 2 runs are finished" in done.stdout
    mine, original = (read(results / name) for name in ("again/Toy_uno_101.csv", "good/Toy_one_101.csv"))
    assert mine == [{**row, "suite": "again", "arm": "uno"} for row in original]
    fresh, reused = read(results / "again" / "runs.csv")
    assert (reused["reused_from"], reused["cpu_seconds"]) == ("good/Toy_one_101", "0") and not fresh["reused_from"]

    text = (results / "good" / "runs.csv").read_text()
    (results / "good" / "runs.csv").write_text(text.replace("6144", "2048"))
    done = run_toys("good", results)
    assert done.returncode != 0 and "Toy_one_101.csv is of another command" in done.stderr


def test_a_failed_run_is_reported_and_the_others_go_on(tmp_path):
    results = tmp_path / "results"
    done = run_toys("broken", results)
    assert done.returncode == 1
    assert "Toy_bad_101 failed (exit status 1)" in done.stderr and "ValueError: the toy breaks" in done.stderr
    assert "Toy_short_101 failed (1 rounds and 2 evaluations" in done.stderr
    assert done.stderr.strip().endswith("2 of 3 runs failed: Toy_bad_101, Toy_short_101")
    assert [path.name for path in results.glob("broken/Toy*.csv")] == ["Toy_one_101.csv"]
    assert [record["run"] for record in read(results / "broken" / "runs.csv")] == ["Toy_one_101"]
    assert "the toy breaks" in (results / "broken" / "work" / "Toy_bad_101" / "log.txt").read_text()
    assert not (results / "broken" / "work" / "Toy_bad_101" / "runs").exists()


def wait_until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise TimeoutError


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize("how, status", [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_killed_suite_goes_on_and_leaves_nothing_running(tmp_path, how, status):
    results, go = tmp_path / "results", tmp_path / "go"
    log = results / "slow" / "work" / "Toy_wait_101" / "log.txt"
    process = subprocess.Popen(**toy_suite("slow", results, 1, go), stdout=subprocess.DEVNULL)
    wait_until(lambda: log.exists() and "waiting" in log.read_text())
    pid = int(log.read_text().split()[1])
    assert log.read_text().split()[2] == "1"  # OMP_NUM_THREADS
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode == status
    wait_until(lambda: not alive(pid))
    finished = read(results / "slow" / "runs.csv")
    assert [record["run"] for record in finished] == ["Toy_one_101"]
    assert not (results / "slow" / "Toy_wait_101.csv").exists()
    go.touch()
    done = run_toys("slow", results, 1, go)
    assert done.returncode == 0 and "1 of 2 runs are finished" in done.stdout
    assert finished == read(results / "slow" / "runs.csv")[:1]
    assert len(read(results / "slow" / "Toy_wait_101.csv")) == 4
    assert not log.parent.exists()


def test_ray_runs_the_same(tmp_path):
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "benchmarks.run", "fig6", "--only", "FrozenLake", "--filter", "none", "--seeds", "1"]
    command += ["--rounds", "1", "--workers", "1"]
    for engine in ("local", "ray"):
        done = subprocess.run([*command, "--engine", engine, "--results", tmp_path / engine], cwd=ROOT)
        assert done.returncode == 0
    one, other = (read(tmp_path / engine / "fig6" / "FrozenLake_none_101.csv") for engine in ("local", "ray"))
    assert [row["return"] for row in one] == [row["return"] for row in other] and len(one) == 2
    assert read(tmp_path / "ray" / "fig6" / "runs.csv")[0]["commit"]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--only Pong", "--only Pong: baseline has Acrobot; LunarLander"),
        ("--filter iif", "--filter iif: baseline has none; stable-baselines3"),
        ("--seeds 0", "--seeds must be at least 1, got 0"),
        ("--workers -1", "--workers must be at least 1, got -1"),
    ],
)
def test_bad_arguments_get_one_line(flags, message):
    command = [sys.executable, "-m", "benchmarks.run", "baseline", *flags.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip() == message


@pytest.mark.parametrize("engine, missing", [("local", "tqdm"), ("local", "filelock"), ("ray", "ray")])
def test_a_missing_extra_gets_one_line(tmp_path, monkeypatch, engine, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match="pip install -r requirements-benchmarks.txt"):
        run.main(run.Args("fig6", engine=engine, results=tmp_path))


# ---- suites.py


def test_suites_are_what_they_say():
    for suite in SUITES:
        queue = SUITES[suite].runs()
        assert len({r.name for r in queue}) == len(queue) == len({run.key(r.command) for r in queue})
        for r in queue:
            given = options(r.arguments)
            assert (ROOT / f"{r.script}.py").exists() and given["--seed"] == str(r.seed)
            if suite in ("tuning", "tuned", "rules"):
                assert int(given["--total-timesteps"]) == int(given["--num-envs"]) * int(given["--num-steps"]) * r.rounds
                continue
            if suite.startswith("rlhf"):
                assert int(given["--total-timesteps"]) == int(given["--batch-size"]) * r.rounds
                continue
            episodes = "100" if r.arm.endswith("100 episodes") else "10" if r.environment == "BipedalWalker" else "20"
            assert given["--eval-episodes"] == episodes
            assert int(given["--total-timesteps"]) == 2048 * r.rounds
            assert given["--max-grad-norm"] == ("0.5" if r.arm.endswith("clipped") else "0")
    queue = SUITES["fig6"].runs()
    assert len(queue) == 5 * 6 * 4
    assert [r.seed for r in queue[:24]] == [101] * 24 and {r.environment for r in queue[-4:]} == {"Highway"}
    assert [r.arm for r in queue[:4]] == ["influence", "influence, signal", "none", "random"]
    # the arms of an environment differ in nothing but the filter
    others = {}
    for r in queue:
        rest = {k: v for k, v in options(r.arguments).items() if not k.startswith("--filter")}
        assert others.setdefault((r.environment, r.seed), rest) == rest


def test_the_arguments_of_a_suite_are_the_scripts_own():
    for script, arguments in {(r.script, r.arguments) for suite in SUITES.values() for r in suite.runs(seeds=1)}:
        module, words = importlib.import_module(script.replace("/", ".")), shlex.split(arguments)
        if script.endswith("rules"):
            own, words = module.PARSER.parse_known_args(words)
            module = importlib.import_module(own.script)
        tyro.cli(getattr(module, "Args", ppo_iif.Args), args=words)


def test_the_same_run_has_the_same_key():
    same = ("python a.py --x 1 --y '{\"b\": 2}' --no-cuda", "python a.py --no-cuda --y '{\"b\": 2}' --x 3 --x 1")
    assert run.key(same[0]) == run.key(same[1])
    assert run.key(same[0]) != run.key("python a.py --x 2 --y '{\"b\": 2}' --no-cuda")
    assert run.key("python a.py --x 1") != run.key("python b.py --x 1")


# ---- metrics.py

STANDARD = [0.0, 2.0, 1.0, 4.0, 3.0, 6.0]  # K = 5: its levels 2, 4, 6 are reached in rounds 1, 3, 5


def test_sample_efficiency_by_hand():
    # 2 in round 1 (as standard), 4 in round 2 (1 - 2/3), 6 in round 2 (1 - 2/5)
    found = metrics.sample_efficiency(STANDARD, [0.0, 2.0, 7.0, 5.0, 5.0, 5.0])
    assert found["SE_ave"] == pytest.approx((0 + 100 / 3 + 60) / 3) and found["SE_peak"] == pytest.approx(60)
    assert found["missed"] == 0
    # 2 in round 2 (1 - 2/1), 4 in round 3 (0), 6 never: m = 6 (1 - 6/5)
    found = metrics.sample_efficiency(STANDARD, [0.0, 1.0, 3.0, 4.0, 4.0, 4.0])
    assert found["SE_ave"] == pytest.approx((-100 + 0 - 20) / 3) and found["SE_peak"] == pytest.approx(-20)
    assert found["missed"] == pytest.approx(1 / 3)
    assert metrics.sample_efficiency(STANDARD, STANDARD) == {"SE_ave": 0, "SE_peak": 0, "missed": 0}


def test_levels_start_above_round_zero():
    assert metrics.levels(STANDARD).tolist() == [2, 4, 6]
    assert metrics.levels([3.0, 1.0, 3.0, 3.5, 3.5]).tolist() == [3.5]
    found = metrics.sample_efficiency([3.0, 1.0, 3.0], [3.0, 9.0, 9.0])
    assert all(np.isnan(value) for value in found.values())
    assert all(np.isnan(value) for value in metrics.run_time([3.0, 1.0, 3.0], [3.0, 9.0, 9.0], [1, 1], [1, 1]).values())
    # a run that is above the level from the start needs no round at all
    assert metrics.sample_efficiency(STANDARD, [9.0] * 6)["SE_ave"] == 100


def test_run_time_by_hand():
    # The peak, 5, is reached by standard in round 2 (after 10 + 20 seconds of 60), by the other in round 1 (after 12).
    standard, other = [0.0, 1.0, 5.0, 4.0], [0.0, 5.0, 5.0, 5.0]
    found = metrics.run_time(standard, other, [10, 20, 30], [12, 1, 1])
    assert found["RT_peak"] == pytest.approx(100 * (1 - 12 / 60))
    assert found["RT_peak_own"] == pytest.approx(100 * (1 - 12 / 30))
    # Never: its 9 seconds, and one more round of 3.
    found = metrics.run_time(standard, [0.0] * 4, [10, 20, 30], [2, 3, 4])
    assert found["RT_peak"] == pytest.approx(100 * (1 - 12 / 60))


def test_smoothing_is_a_trailing_mean_of_five():
    assert metrics.smooth([1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0]).tolist() == [1, 2, 3, 4, 5, 7, 9]


def test_final_return_and_area():
    assert metrics.final_return(list(range(11))) == 8  # K = 10: the mean of 6, 7, 8, 9, 10
    assert metrics.final_return(list(range(10))) == 9  # K = 9: the last
    assert metrics.area([0.0, 1.0, 5.0]) == 2


def test_runs_that_break_down():
    assert metrics.broken_down("MiniGrid", [0, 0.4, 0.91, 0.5, 0.95, 0.4, 0.2]) == 5  # 0.475 is one half of 0.95
    assert metrics.broken_down("MiniGrid", [0, 0.4, 0.91, 0.5]) == np.inf
    assert metrics.broken_down("MiniGrid", [0, 0.9, 0.1]) is None


def test_stalled_runs():
    # Acrobot scores 0.05 at -500 + 0.05 * 420 = -479.
    assert metrics.normalise("Acrobot", [-500.0, -80.0]).tolist() == [0, 1]
    low, high = -480.0, -478.0
    assert not metrics.stalled("Acrobot", [low, low, low, high, high])  # 2 of 4: not more than half
    assert metrics.stalled("Acrobot", [high, low, low, low, high])
    assert metrics.stalled_at_end("Acrobot", [high] * 6 + [low] * 5)
    assert not metrics.stalled_at_end("Acrobot", [low] * 6 + [low] * 4 + [-400.0])


def test_t_interval():
    mean, error, half = metrics.t_interval([1.0, 2.0, 3.0, 4.0, 5.0, np.nan])
    assert mean == 3 and error == pytest.approx(0.5**0.5) and half == pytest.approx(2.776445 * 0.5**0.5)
    assert metrics.t_interval([2.0])[0] == 2 and np.isnan(metrics.t_interval([2.0])[2])
    assert np.isnan(metrics.t_interval([np.nan])[0])


def test_aggregates_over_environments():
    library = pytest.importorskip("rliable.metrics")
    rng = np.random.default_rng(0)
    x, y = rng.integers(6, size=(5, 4)) / 5, rng.integers(6, size=(5, 4)) / 5
    mean, low, high = metrics.interquartile_mean(x)
    assert mean == pytest.approx(np.sort(x.ravel())[5:15].mean()) and low < mean < high
    assert metrics.interquartile_mean(x) == (mean, low, high)
    probability, low, high = metrics.probability_of_improvement(x, y)
    assert probability == pytest.approx(library.probability_of_improvement(x, y)) and low < probability < high
    assert metrics.probability_of_improvement(x + 9, y) == (1, 1, 1)


# ---- filters.py


def small_round(**columns):
    """Two states, 0 and 1, one action in each but for the third record; episodes of two, two, and one that is cut off."""
    batch = {
        "obs": torch.tensor([[0.0], [1.0], [0.0], [1.0], [0.0]]),
        "actions": torch.tensor([0, 0, 1, 0, 0]),
        "rewards": torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0]),
        "dones": torch.tensor([False, True, False, True, False]),
        "terminations": torch.tensor([False, True, False, False, False]),
        "values": torch.zeros(5),
        "next_values": torch.zeros(5),
        "advantages": torch.zeros(5),
    }
    return {**batch, **{name: torch.tensor(values) for name, values in columns.items()}}


def test_monte_carlo_advantages_by_hand():
    # Returns to go 0.5, 1, 0, 0, 2. Q(0, 0) = 1.25, Q(0, 1) = 0, V(0) = 2.5 / 3; Q(1, 0) = V(1) = 0.5.
    v = 2.5 / 3
    expected = [1.25 - v, 0, -v, 0, 1.25 - v]
    assert filters.mc_advantages(small_round(), gamma=0.5).tolist() == pytest.approx(expected)


def test_advantage_heuristics_by_hand():
    batch = small_round()
    v = (0.99 + 0 + 2) / 3
    true = [1.495 - v, 0, -v, 0, 1.495 - v]  # about 0.5, 0, -1, 0, 0.5
    assert filters.mc_advantages(batch).tolist() == pytest.approx(true)
    # Signs differ in records 0 (apart by 0.6, product -0.05), 2 (by 1.3, -0.3), 4 (by 0.9, -0.2) and 1 (by 2, 0: it is
    # nothing by Monte Carlo and something by estimate); they agree in record 3.
    batch["advantages"] = torch.tensor([-0.1, 2.0, 0.3, 0.0, -0.4])
    assert filters.h1(batch, 50).tolist() == [0, 3, 4]
    assert filters.h2(batch, 50).tolist() == [0, 1, 3]
    assert filters.h1_50(batch).tolist() == [0, 3, 4]
    assert filters.h1(batch, 49).tolist() == [0, 2, 3, 4]  # floor(49 * 4 / 100) = 1
    assert filters.h2(batch, 100).tolist() == [3]
    assert filters.h2(batch, 0).tolist() == [0, 1, 2, 3, 4]


def test_rounds_that_are_alike_by_hand():
    # The finished episodes have returns of 1 and 0, what is cut off does not count.
    assert filters.unless_alike(small_round(), 0.99).tolist() == [0, 1, 2, 3, 4]
    assert filters.unless_alike(small_round(), 1.01).tolist() == []
    alike = small_round(rewards=[0.0, 1.0, 0.0, 1.0, 5.0])
    assert filters.unless_alike_0(alike).tolist() == [] == filters.unless_alike_02(alike).tolist()
    one = small_round(dones=[False, True, False, False, False])
    assert len(filters.unless_alike_0(one)) == 5 == len(filters.unless_alike_0(small_round(dones=[False] * 5)))


def test_td_error_by_hand():
    # delta = r + 0.5 * V(s') * (no termination) - V(s) = 1, -3, 0.5, 2, 0: the ranks of their sizes are 3, 1, 4, 2, 5
    batch = small_round(
        rewards=[0.0, 0.0, 0.5, 1.0, 0.0],
        values=[0.0, 3.0, 0.0, 0.0, 1.0],
        next_values=[2.0, 100.0, 0.0, 2.0, 2.0],
    )
    expected = [rank**-0.6 for rank in (3, 1, 4, 2, 5)]
    assert filters.td_error(batch, gamma=0.5).tolist() == pytest.approx(expected)


def test_filters_reach_the_scripts(tmp_path):
    flags = "--env-id FrozenLake-v1 --num-steps 256 --total-timesteps 512 --filter benchmarks.variants.filters:h2_12_5"
    status, cpu = run.call([sys.executable, str(ROOT / "ppo_iif.py"), *flags.split()], tmp_path, tmp_path / "log.txt")
    assert status == 0 and cpu > 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(run.read_scalars(folder)["influence/records_kept"]) == 2


def test_restarted_rounds_repeat_themselves(tmp_path):
    flags = "--env-id CartPole-v1 --num-steps 256 --total-timesteps 512 --learning-rate 1e-12 --seed 3 --filter none"
    episodes = {}
    for script in ("benchmarks/variants/restarted", "ppo_iif"):
        folder = tmp_path / Path(script).name
        folder.mkdir()
        assert run.call([sys.executable, str(ROOT / f"{script}.py"), *flags.split()], folder, folder / "log.txt")[0] == 0
        lines = (folder / "log.txt").read_text().splitlines()
        found = [line.split("=") for line in lines if line.startswith("global_step")]
        found = [(int(step.split(",")[0]), float(value)) for _, step, value in found]
        episodes[script] = [[(t - 256 * k, r) for t, r in found if 256 * k < t <= 256 * (k + 1)] for k in (0, 1)]
    first, second = episodes["benchmarks/variants/restarted"]
    assert first and first == second == episodes["ppo_iif"][0] != episodes["ppo_iif"][1]


# ---- report.py


def write_results(results, suite, environment, arm, seed, returns, scoring=0.5):
    """A finished run of a table's suite, each round with a second of rollout, `scoring`, and two seconds of update."""
    (r,) = (r for r in SUITES[suite].runs(seed - 100, (environment,), (arm,)) if r.seed == seed)
    rows = []
    for k, value in enumerate(returns):
        did = [1500, 0.5, 1, scoring, 2] if k < len(returns) - 1 else [""] * 5
        rows.append([suite, environment, arm, 50, "sgd", seed, k, 2048 * k, value, 20, *did, k])
    record = {"run": r.name, "command": r.command, "rounds": r.rounds, "commit": "abc", "cpu_seconds": 1800}
    run.save(results, r, rows, {**record, "finished": f"2026-12-0{seed - 100}", **dict.fromkeys(run.RECORD[6:10], "1")})


@pytest.fixture
def results(tmp_path):
    """Two seeds of FrozenLake: of 101 the standard run reaches 0.2 and 0.4 in rounds 1 and 2, of 102 0.5 in round 2."""
    curves = {
        ("none", 101): [0, 0.2, 0.4, 0.1],
        ("influence", 101): [0, 0.4, 0.4, 0.3],
        ("random", 101): [0, 0.1, 0.2, 0.4],
        ("none", 102): [0, 0, 0.5, 0.2],
        ("influence", 102): [0, 0.1, 0.1, 0.1],
    }
    for (arm, seed), returns in curves.items():
        write_results(tmp_path, "fig6", "FrozenLake", arm, seed, returns, scoring=0 if arm == "none" else 0.5)
    return tmp_path


def cells(markdown, label):
    """The cells of the rows of this label."""
    return [[c.strip() for c in line.split("|")[2:-1]] for line in markdown.splitlines() if line.startswith(f"| {label} |")]


def test_a_page_by_hand(results):
    page = SUITES["fig6"].body(results)
    # Seed 101: 0.2 in round 1 (0), 0.4 in round 1 (50): 25. Seed 102: never, m = 4: 1 - 4 / 2 = -100. Mean -37.5, SE 62.5.
    assert cells(page, "SE_ave, influence against none")[0] == ["-37.5 ± 62.5"]
    assert cells(page, "SE_peak, influence against none")[0] == ["-25.0 ± 75.0"]
    # Standard takes 3 s a round, 9 in all. 101: 3.5 s; 102: four rounds of 3.5 s. 1 - 3.5 / 9 = 0.611, 1 - 14 / 9 = -0.556
    assert cells(page, "RT_peak, influence against none")[0] == ["2.8 ± 58.3"]
    assert cells(page, "**RT_peak**, the paper's") == [["29.5 ± 2.9"]]
    # One seed: 0.2 in round 2 (-100), 0.4 in round 3 (-50). Its scoring does not count: 9 of 9 s.
    assert cells(page, "SE_ave, random against none")[0] == ["-75.0"]
    assert cells(page, "RT_peak, random against none")[0] == ["0.0"]
    # 101 standard, 102 other: 0.2 in round 2 (-100), 0.4 in round 2 (0); the other way: 0.5 never, -100. -50 and -100
    assert cells(page, "SE_ave, none against none of other seeds")[0] == ["-75.0 ± 25.0"]
    assert cells(page, "influence against none") == [["50"]]  # levels never reached: none of two, one of one
    assert "FrozenLake (1 to 2 seeds)" in page and "Acrobot (" not in page
    # areas of influence 1.1 / 4 and 0.3 / 4, of none 0.7 / 4 twice; the interval is 0 +- 12.706 * 0.1
    assert cells(page, "influence")[0] == ["0.175 ± 0.100"]
    assert cells(page, "influence minus none")[0] == ["0.000 [-1.271, 1.271]"]
    assert cells(page, "influence minus none")[1] == ["0.050 [-1.856, 1.956]"]  # last returns: 0.2 and -0.1
    (runtime,) = cells(page, "FrozenLake (2 seeds)")
    assert runtime[:5] == ["0.500", "0.25 (0.05)", "2.000 / 2.000", "1.00 (0.75)", "10.5 / 9.0"]


def test_the_head_of_a_page_says_what_was_run(results):
    head = SUITES["fig6"].head(results)
    assert "5 of 120 runs are finished; 2.5 CPU hours on 2026-12-01 to 2026-12-02, made at commit abc." in head
    assert "`python -m benchmarks.run fig6" in head and "![Figure 6: influence, none, random](fig6.png)" in head
    assert SUITES["adam"].head(results).endswith("Not yet run.") and SUITES["adam"].body(results) == ""
    (row,) = (line for line in summary.suites(results).splitlines() if "run fig6`" in line)
    assert row.endswith("| 5 of 120 | 2.5 | 2026-12-01 to 2026-12-02 | abc |")


def test_a_new_suite_is_one_entry(results, monkeypatch):
    """Its page is begun by itself, and prose written into it stays."""
    new = replace(SUITES["fig6"], name="new", title="A new suite", tables=lambda data: [f"{len(data)} environment"])
    monkeypatch.setitem(SUITES, "new", new)
    monkeypatch.setitem(report.PAGES, "new", {"head": new.head, "tables": new.body})
    shutil.copytree(results / "fig6", results / "new")
    report.draw("new", results)
    assert (results / "new" / "new.png").exists()
    page = results / "new" / "README.md"
    page.write_text(report.filled("new", results))
    assert page.read_text().startswith("<!-- report: head -->\n# A new suite\n") and "1 environment" in page.read_text()
    page.write_text(page.read_text().replace("<!-- report: tables -->", "What I think.\n\n<!-- report: tables -->"))
    assert report.filled("new", results) == page.read_text()


def test_report_of_language_models_by_hand(tmp_path):
    """The standard run's final level is 0.275; its trailing mean gets there in the last of four rounds, of 3 s each, influence's
    in the first, of 2.5 s."""
    for arm, rewards, seconds in (("none", [0.1, 0.2, 0.4, 0.4], [1, 0, 2]), ("influence", [0.3, 0.3, 0.5, 0.5], [1, 0.5, 1])):
        (r,) = SUITES["rlhf"].runs(seeds=1, names=(arm,))
        rows = []
        for k in range(5):
            did = [96, 0.25, *seconds] if k < 4 else [""] * 5
            more = [rewards[k], 1, 20] if k < 4 else [""] * 3
            rows.append(["rlhf", "reviews", arm, 100, "adam", 101, k, 128 * k, 0.1 * k, 128, *did, k, *more, 0.6])
        run.save(tmp_path, r, rows, {"run": r.name, "command": r.command})
    page = SUITES["rlhf"].body(tmp_path)
    assert cells(page, "influence")[0] == "1|25.0 (32.8 ± 1.5)|20.8 (16.8 ± 1.3)|0.400|0.200|0.000|0.600|1.0|25".split("|")
    assert cells(page, "none")[0][:4] == ["1", "100.0", "100.0", "0.275"]
    assert cells(page, "influence")[1] == ["1.00 (2.74)", "0.50 (2.15)", "1.00 (40.39)", "2.50 (45.28)", "0.83 (0.51)"]
    report.draw("rlhf", tmp_path)
    assert (tmp_path / "rlhf" / "rlhf.png").stat().st_size > 2000


def test_report_of_language_models_at_equal_kl_by_hand(tmp_path):
    """Plain PPO's points (KL, reward) are (4, 0.4), (2, 0.2): at KL sqrt(8), midway in log KL, it has 0.3, and f_seq 0.5; beyond
    there is no curve."""
    for arm, kl, value in (
        ("none, kl 0.02", 4, 0.4),
        ("none, kl 0.04", 2, 0.2),
        ("f_seq, fresh, kl 0.02", 8**0.5, 0.5),
        ("f_seq, fresh, kl 0.04", 9, 0.5),
    ):
        (r,) = SUITES["rlhf_kl"].runs(seeds=1, names=(arm,))
        rows = []
        for k in range(5):
            did = [96, 0.25, 1, 0, 1] if k < 4 else [""] * 5
            more = [0.3, kl, 20] if k < 4 else [""] * 3
            rows.append(["rlhf_kl", "reviews", arm, 100, "adam", 101, k, 128 * k, value, 128, *did, k, *more, value + 0.1])
        run.save(tmp_path, r, rows, {"run": r.name, "command": r.command})
    page = SUITES["rlhf_kl"].body(tmp_path)
    assert cells(page, "f_seq, fresh") == [
        "0.02|1|2.8|0.500|0.600|0.200|0.200|25".split("|"),
        "0.04|1|9.0|0.500|0.600|||25".split("|"),
    ]
    assert cells(page, "none")[0] == "0.02|1|4.0|0.400|0.500|||25".split("|")
    state = rlhf_kl.state(tmp_path)
    assert state.startswith("**4 of 60 runs are in** (none: 2 of 12; f_seq, fresh: 2 of 12).") and cells(
        state, "f_seq, fresh"
    ) == cells(page, "f_seq, fresh")
    report.draw("rlhf_kl", tmp_path)
    assert (tmp_path / "rlhf_kl" / "rlhf_kl.png").stat().st_size > 2000


def test_report_of_grpo_beside_plain_ppo_by_hand(tmp_path):
    """GRPO's points (KL, reward) are (2, 0.2), (8, 0.6): at equal KL 4 it has 0.4, plain PPO, of its own suite, 0.3, and f_seq 0.5."""
    assert SUITES["rlhf_grpo"].load(tmp_path) == {}
    for suite, arm, kl, value in (
        ("rlhf_grpo", "GRPO, kl 0.2", 2, 0.2),
        ("rlhf_grpo", "GRPO, kl 0.1", 8, 0.6),
        ("rlhf_grpo", "GRPO, f_seq, fresh, kl 0.2", 4, 0.5),
        ("rlhf_grpo", "GRPO, f_seq, fresh, kl 0.1", 9, 0.9),
        ("rlhf_kl", "none, kl 0.01", 4, 0.3),
        ("rlhf_kl", "none, kl 0.02", 1, 0.1),
        ("rlhf_kl", "f_seq, fresh, kl 0.02", 1, 0.1),
    ):
        (r,) = SUITES[suite].runs(seeds=1, names=(arm,))
        rows = []
        for k in range(5):
            did = [96, 0.25, 1, 0, 1] if k < 4 else [""] * 5
            more = [0.3, kl, 20] if k < 4 else [""] * 3
            rows.append([suite, "reviews", arm, 100, "adam", 101, k, 128 * k, value, 128, *did, k, *more, value + 0.1])
        run.save(tmp_path, r, rows, {"run": r.name, "command": r.command})
    page = SUITES["rlhf_grpo"].body(tmp_path)
    assert "above GRPO at equal KL" in page and "|f_seq, fresh|" not in page.replace(" ", "")
    assert cells(page, "GRPO, f_seq, fresh")[0] == "0.1|1|9.0|0.900|1.000|0.100|0.100|25".split("|")
    assert cells(page, "PPO")[0] == "0.01|1|4.0|0.300|0.400|-0.100|-0.100|25".split("|")
    assert rlhf_kl.state(tmp_path, SUITES["rlhf_grpo"]).startswith(
        "**4 of 24 runs are in** (GRPO: 2 of 12; GRPO, f_seq, fresh: 2 of 12)."
    )
    report.draw("rlhf_grpo", tmp_path)
    assert (tmp_path / "rlhf_grpo" / "rlhf_grpo.png").stat().st_size > 2000


def test_report_of_the_kl_controller_by_hand(tmp_path):
    """Of the KLs 1, 3, 4 and 6 only 4 is within a fifth of the target 4 (3.2 to 4.8)."""
    (r,) = SUITES["rlhf_controller"].runs(names=("target 4, horizon 1000",))
    rows = []
    for k, kl in enumerate((1, 3, 4, 6, "")):
        did = [128, "", 1, 0, 1] if k < 4 else [""] * 5
        more = [0.3, kl, 20, 0.6, 0.04 - 0.01 * k] if k < 4 else ["", "", "", 0.6, ""]
        rows.append(["rlhf_controller", "reviews", r.arm, "", "adam", 101, k, 128 * k, 0.5, 128, *did, k, *more])
    run.save(tmp_path, r, rows, {"run": r.name, "command": r.command})
    page = SUITES["rlhf_controller"].body(tmp_path)
    assert cells(page, "4") == ["1000|1|3.5|1 of 4|0.0400|0.0100|0.500".split("|")]
    report.draw("rlhf_controller", tmp_path)
    assert (tmp_path / "rlhf_controller" / "rlhf_controller.png").stat().st_size > 2000


def test_stalled_runs_are_counted(tmp_path):
    for seed, returns in ((101, [-500, -500, -490, -100]), (102, [-500, -100, -100, -500]), (103, [-500, -100, -90, -80])):
        write_results(tmp_path, "stalled", "Acrobot", "none", seed, returns)
    (found,) = cells(SUITES["stalled"].body(tmp_path), "Acrobot, none")
    assert found[:3] == ["3", "1", "1"]


def test_figures_are_drawn_from_what_there_is(results):
    for environment, returns in (("FrozenLake", [0, 1]), ("MiniGrid", [0.1, 0.2, 0.3])):
        write_results(results, "stalled", environment, "none", 101, returns)
    for suite in ("fig6", "stalled"):
        report.draw(suite, results)
        assert 2000 < (results / suite / f"{suite}.png").stat().st_size < 150_000


def test_blocks_go_between_their_markers():
    text = "a\n<!-- report: x -->\nold\n<!-- end -->\nb\n<!-- report: y -->\n<!-- end -->\n"
    text = report.insert(report.insert(text, "x", "new \\1"), "y", "more")
    assert text == "a\n<!-- report: x -->\nnew \\1\n<!-- end -->\nb\n<!-- report: y -->\nmore\n<!-- end -->\n"
    assert report.insert(text, "x", "new \\1") == text
    with pytest.raises(SystemExit, match="found 0"):
        report.insert(text, "z", "new")


@pytest.mark.parametrize("page", report.PAGES)
def test_pages_show_the_committed_results(page):
    path = report.path_of(page)
    if page in SUITES and not SUITES[page].load():
        assert not path.exists() or report.filled(page) == path.read_text()
    else:
        assert report.filled(page) == path.read_text()


def test_no_circle_of_imports():
    """Within benchmarks/, by module, imports inside functions included."""
    graph = {}
    for path in (ROOT / "benchmarks").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[module] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks"):
                graph[module] |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    graph = {module: {other for other in imported if other in graph and other != module} for module, imported in graph.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


# ---- fixed_reference.py


def test_own_reference_is_the_influence_of_the_script():
    torch.manual_seed(0)
    training = fixed_reference.Training("FrozenLake", 1)
    batch = training.collect()
    expected = ppo_iif.score(training.agent, batch, training.args, torch.Generator().manual_seed(5))
    found = fixed_reference.influence_on(batch, training, batch, torch.Generator().manual_seed(5))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    # Against a reference of two records, by autograd, for some records.
    reference = {name: x[:2] for name, x in batch.items()}
    found = fixed_reference.influence_on(reference, training, batch, torch.Generator().manual_seed(5))
    params = list(training.agent.actor.parameters())
    direction = torch.autograd.grad(fixed_reference.target(training.agent, reference), params)
    inds = torch.randperm(2048, generator=torch.Generator().manual_seed(5))
    a = batch["advantages"][inds[:64]]
    for i in range(3):
        log_pi = training.agent.get_logprob(batch["obs"][inds[i]][None], batch["actions"][inds[i]][None])
        grads = torch.autograd.grad(log_pi.sum(), params)
        product = sum((g * d).sum() for g, d in zip(grads, direction))
        torch.testing.assert_close(found[inds[i]], (a[i] - a.mean()) / (a.std() + 1e-8) * product, rtol=1e-3, atol=1e-6)


def test_fixed_reference_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(fixed_reference, "EPISODES", 2)
    rows = fixed_reference.execute("FrozenLake", 101, 1101, rounds=2)
    assert [row[2:4] for row in rows] == [[0, "own"], [0, "fixed"], [1, "own"], [1, "fixed"]]
    assert all(0 < row[4] < 2048 for row in rows)
    for seed, change in ((101, 0.25), (102, 0.75)):
        rows = [["FrozenLake", seed, k, name, 9, k - 0.5, change] for k in range(2) for name in ("own", "fixed")]
        files.write_csv(tmp_path / "fixed_reference" / f"FrozenLake_{seed}.csv", fixed_reference.COLUMNS, rows)
    (found,) = cells(fixed_reference.body(tmp_path), "FrozenLake, the fixed reference")
    assert found == ["2", "50%", "0.500 [-2.677, 3.677]"]  # 12.706 * 0.25
    fixed_reference.draw(tmp_path)
    assert (tmp_path / "fixed_reference" / "fixed_reference.png").exists()
