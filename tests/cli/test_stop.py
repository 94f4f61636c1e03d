"""``dray experiment stop``: an interrupt of the driver, wherever it is seen from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from dray.experiment.interrupts import NotRunning, stop
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from searchers.journal import Journal
from tests.cli.said import Said

Dray = Callable[..., Said]

DRIVER = """
import sys, time
from searchers.journal import Journal

with Journal(sys.argv[1]):
    try:
        print("runs", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        sys.exit("interrupted")
"""


@pytest.fixture
def driver(held: Journal, digits: ExperimentDirectory) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs the experiment, which is in the middle of its search."""
    held.close()
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(digits.journal)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        yield process
        process.kill()


def test_the_driver_is_interrupted_and_waited_for(driver: subprocess.Popen[str], dray: Dray) -> None:
    said = dray("e", "stop", "digits")
    assert said.code == 0
    assert f"process {driver.pid}: waiting until its running trials have saved" in said.err
    assert said.err.endswith("stopped; resume with: dray experiment resume digits\n")
    assert driver.communicate(timeout=60)[1] == "interrupted\n"


def test_one_that_does_not_run_says_so(digits: ExperimentDirectory, dray: Dray) -> None:
    assert dray("e", "stop", "digits").is_one_line() == f"dray: {digits.path} is not running\n"


def test_a_driver_on_another_machine_is_not_taken_for_a_process_of_this_one(
    held: Journal, digits: ExperimentDirectory, dray: Dray
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        digits.journal.with_name("journal.jsonl.lock").write_text(f"{other.pid}\n")
        said = dray("e", "stop", "digits").is_one_line()
        assert f"is running on another machine or in another container, as process {other.pid} there" in said
        assert other.poll() is None
        assert other.stdin is not None
        other.stdin.write(b"\n")


def test_one_in_an_object_store_says_where_to_stop_it(digits: ExperimentDirectory) -> None:
    it = replace(StoredExperiment(directory=digits, where="s3://bucket/digits", is_copy=False), is_copy=True)
    with pytest.raises(NotRunning, match="s3://bucket/digits is in an object store; if it is running, stop it on"):
        stop(it, print)
