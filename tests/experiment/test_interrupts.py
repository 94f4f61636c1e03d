"""Signals that ask a run to stop: one is a request, a later one ends it, and the handlers are the caller's again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dray.experiment import interrupts
from dray.experiment.interrupts import Interrupts, signal_of

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
each = pytest.mark.parametrize("number", ALL, ids=lambda number: number.name)


class SecondSignal(Exception):
    pass


def _second(number: int, frame: object) -> None:
    raise SecondSignal(signal.Signals(number).name)


@pytest.fixture(autouse=True)
def callers() -> Iterator[None]:
    """Handlers of the caller's own, which must be back afterwards."""
    before = {number: signal.signal(number, _second) for number in ALL}
    yield
    for number, handler in before.items():
        assert signal.signal(number, handler) is _second


@each
def test_a_signal_raises_and_names_itself(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt) as raised, Interrupts():
        signal.raise_signal(number)
    assert signal_of(raised.value) == number


@each
def test_a_signal_is_noted_while_it_is_held(number: signal.Signals) -> None:
    with Interrupts() as interrupted, pytest.raises(KeyboardInterrupt, match=number.name):
        with interrupted.held():
            assert not interrupted.wanted
            signal.raise_signal(number)
            assert interrupted.wanted
        interrupted.check()


def test_a_signal_that_python_could_not_raise_is_raised_before_the_run() -> None:
    with Interrupts() as interrupted:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)  # as in a __del__, which swallows it
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"), interrupted.held():
            pytest.fail("the run has begun")


def test_signals_that_come_together_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "TOGETHER_S", 1e9)
    with Interrupts() as interrupted, interrupted.held():
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            interrupted.check()


@each
def test_a_later_signal_acts_as_for_the_caller_after_the_final_message(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "TOGETHER_S", -1.0)
    reads, writes = os.pipe()
    monkeypatch.setattr(interrupts, "STDERR", writes)
    with pytest.raises(SecondSignal, match=number.name), Interrupts() as interrupted, interrupted.held():
        interrupted.final_message = "resume with: ...\n"
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(number)
    assert os.read(reads, 100) == b"resume with: ...\n"
    os.close(reads)
    os.close(writes)


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with Interrupts() as interrupted:
        signal.raise_signal(signal.SIGHUP)
        assert not interrupted.wanted
    assert signal.signal(signal.SIGHUP, _second) is signal.SIG_IGN


BEFORE_A_RUN = """
import os, signal
from dray.cli.errors import exit_on_signals
with exit_on_signals():
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_before_a_run_a_signal_ends_the_command_and_says_that_nothing_was_started() -> None:
    ended = subprocess.run([sys.executable, "-c", BEFORE_A_RUN], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (143, "dray: stopped by SIGTERM; nothing was started\n")


def test_a_script_that_was_stopped_ends_without_a_traceback_below_what_was_said() -> None:
    code = """
import sys
from dray.hosts.signals import print_no_traceback
stopped = KeyboardInterrupt("SIGINT")
print_no_traceback(stopped)
raise {}
"""
    ends = [
        subprocess.run([sys.executable, "-c", code.format(error)], capture_output=True, text=True)
        for error in ("stopped", "KeyError('another')")
    ]
    assert [(end.returncode, end.stderr.splitlines()[-1:]) for end in ends] == [
        (-signal.SIGINT, []),
        (1, ["KeyError: 'another'"]),
    ]
