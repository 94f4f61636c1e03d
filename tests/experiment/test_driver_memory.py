"""The driver keeps little of a trial that has ended; bench/driver_memory.py measures how much, over 100,000 trials."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import dray.experiment.experiment

BENCH = Path(__file__).parents[2] / "bench"
TRIALS = 240, 720
"""Between two times at which tables grow: a dict of up to 6 * 2 ** n / 9 entries is twice as large afterwards."""
BYTES_A_TRIAL = 1000
"""About 700, of which 150 are hyperparameters and 250 their values and the search's; 2,000 before."""


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark's module; no other test finds it."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("driver_memory")
    for name in ("driver_memory", "_measure"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("terminal", [False, True], ids=["file", "terminal"])
def test_the_driver_keeps_less_than_a_kilobyte_of_a_trial(
    played: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    # The study's database is no memory of Python's, and takes most of the time.
    monkeypatch.setattr(dray.experiment.experiment, "_observers", lambda *_: {})
    driver = played.Driver(tmp_path / "experiment", played.config("stopping", "random", 1000), terminal=terminal)
    held = []
    tracemalloc.start()
    try:
        for trials in TRIALS:
            driver.play(trials)
            driver.settle()
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        driver.close()
    assert (held[1] - held[0]) / (TRIALS[1] - TRIALS[0]) < BYTES_A_TRIAL
