"""Bars and what is printed beside them; what is known of a process that has ended."""

import io
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import files


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream, shown", [(Terminal(), True), (io.StringIO(), False)])
def test_a_bar_on_a_terminal_and_nothing_in_a_pipe(monkeypatch, capsys, stream, shown):
    monkeypatch.setattr(sys, "stderr", stream)
    seen = []
    for k in files.progress([3, 5], "round"):
        files.say(f"round {k}")
        seen.append(k)
    assert seen == [3, 5] and capsys.readouterr().out == "round 3\nround 5\n"
    assert ("round/s" in stream.getvalue() or "?round" in stream.getvalue()) == shown
    assert bool(stream.getvalue()) == shown


def test_a_bar_over_what_has_no_length(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(files.progress(iter([3, 5]), "round", total=2)) == [3, 5]
    assert "0/2" in sys.stderr.getvalue()


def test_without_tqdm_the_items_as_they_are(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(files.progress([3, 5], "round")) == [3, 5]
    files.say("a line")
    assert capsys.readouterr().out == "a line\n"


@pytest.mark.skipif(sys.platform != "linux", reason="units and meaning of the peak are Linux's")
def test_an_ended_process():
    """It used the CPU time and the memory that it says itself. (More than this process has: Linux counts from before the fork.)"""
    import resource

    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 + 64  # MB
    code = f"import time\nx = b'1' * {more * 2**20}\nwhile time.process_time() < 0.3: pass\nraise SystemExit(3)"
    status, cpu_seconds, peak = files.ended(subprocess.Popen([sys.executable, "-c", code]))
    assert status == 3 and 0.3 <= cpu_seconds < 10 and more < peak < more + 64


def test_an_ended_process_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.delattr("os.wait4")
    status, cpu_seconds, peak = files.ended(subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))
    assert status == 3 and cpu_seconds != cpu_seconds and peak != peak


@pytest.mark.parametrize("terminal", [True, False])
def test_a_training_run_tells_the_time_left_on_a_terminal(monkeypatch, capsys, terminal):
    import ppo_iif

    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    args = ppo_iif.Args(num_steps=500, total_timesteps=5999)  # 11 rounds
    run = SimpleNamespace(global_step=1500, iteration=3)
    writer = SimpleNamespace(add_scalar=lambda *row: None)
    ppo_iif.log_round(writer, args, run, [], {"charts/SPS": 50})
    assert capsys.readouterr().out == "SPS: 50" + " (3 of 11 rounds, 0:01:20 left)" * terminal + "\n"
