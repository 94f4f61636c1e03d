"""A process whose trial makes no progress is ended, and its log has its stacks."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dray.worker.hang import exit_if_hung

pytestmark = pytest.mark.slow

START = """
import os, re, sys, time
from dray.worker.hang import exit_if_hung

trains = True  # each look then finds progress, however seldom this process gets to run
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)

def report(what):
    print(what, flush=True)

def sleeps():
    global trains
    trains = False
    time.sleep(1000)

def computes():
    global trains
    trains = False
    re.match("(a+)+$", "a" * 60 + "b")  # years, all of them with the interpreter's lock held

def waits():
    global trains
    trains = False
    while "hang_timeout_s" not in open(sys.argv[1]).read():
        time.sleep(0.05)
    trains = True

with exit_if_hung({within}, pulse=lambda: trains and time.monotonic(), log=log, report=report, grace_s={grace}):
    time.sleep(0.6)
    ({hangs})()
print("over")
"""


def run(tmp_path: Path, hangs: str, within: float = 2.0, grace: float = 0.0) -> tuple[int, str, str]:
    """Exit code, output and log of a process that first trains for .6 s."""
    program = tmp_path / "program.py"
    program.write_text(START.format(within=within, hangs=hangs, grace=grace))
    done = subprocess.run([sys.executable, program, tmp_path / "log"], stdout=subprocess.PIPE, text=True, timeout=240)
    return done.returncode, done.stdout, (tmp_path / "log").read_text()


def test_process_that_sleeps_is_reported_and_ended(tmp_path: Path) -> None:
    code, output, log = run(tmp_path, "sleeps")
    assert code == 1
    assert output == "no batch trained or validated, and no checkpoint saved, for 2 s (hang_timeout_s)\n"
    assert "hang_timeout_s" in log.splitlines()[0]
    assert f'File "{tmp_path / "program.py"}", line 14 in sleeps' in log


def test_process_that_recovers_in_its_grace_period_runs_on(tmp_path: Path) -> None:
    code, output, log = run(tmp_path, "waits", within=1.0, grace=600)
    assert (code, output) == (0, "over\n")
    assert log.count("hang_timeout_s") == 1
    assert " in waits" in log


def test_process_that_holds_the_gil_is_ended_without_a_report(tmp_path: Path) -> None:
    code, output, log = run(tmp_path, "computes")
    assert (code, output) == (1, ""), "no Python thread can report it"
    assert f'File "{tmp_path / "program.py"}", line 19 in computes' in log


def test_process_that_makes_progress_runs_on(tmp_path: Path) -> None:
    assert run(tmp_path, "lambda: time.sleep(6)") == (0, "over\n", "")


def test_without_a_timeout_nothing_is_watched() -> None:
    with exit_if_hung(None, pulse=lambda: 0, log=1, report=pytest.fail):
        assert not [thread for thread in threading.enumerate() if thread.name == "dray-hang"]
