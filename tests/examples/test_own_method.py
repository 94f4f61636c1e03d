"""The example of a user's own method: its rule in closed form, the contract, and its script."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dray import import_from_path
from searchers import Create, Exited, Method, MethodError, Reported, Stop
from searchers.testing import check_method

OWN = Path(__file__).parents[2] / "examples" / "own_method"


@pytest.fixture
def own() -> Iterator[ModuleType]:
    with import_from_path(OWN):
        yield importlib.import_module("median_stopping")


def started(own: ModuleType, trials: int) -> Any:
    method = own.MedianStopping(max_trials=trials, rungs=[1, 4], max_concurrent_trials=trials)
    assert method.start() == [Create(trial=trial) for trial in range(trials)]
    return method


def test_it_keeps_the_contract(own: ModuleType) -> None:
    def make() -> Method:
        method: Method = own.MedianStopping(max_trials=20, rungs=[1, 2, 4, 8], max_concurrent_trials=4)
        return method

    check_method(make, max_creations=20 + 80, seeds=range(1))


def test_a_trial_stops_where_it_is_worse_than_the_median(own: ModuleType) -> None:
    """The median of an even number of values is the larger middle one, so the second trial continues."""
    method = started(own, 7)
    answers = [
        method.on(Reported(trial=trial, step=1, value=value))
        for trial, value in enumerate([0.5, 0.6, 0.7, 0.4, 0.55, 0.45, math.inf])
    ]
    stopped = [bool(answer) for answer in answers]
    #   0.5 | 0.5 0.6 | 0.5 0.6 0.7 | 0.4 0.5 0.6 0.7 | 0.4 0.5 0.55 0.6 0.7 | ...: medians 0.5 0.6 0.6 0.6 0.55 0.55
    assert stopped == [False, False, True, False, False, False, True]
    assert answers[2] == [Stop(trial=2)]


def test_at_its_whole_length_no_trial_is_stopped(own: ModuleType) -> None:
    method = started(own, 3)
    for trial in range(3):
        assert method.on(Reported(trial=trial, step=1, value=0.5)) == []
        assert method.on(Reported(trial=trial, step=4, value=float(trial))) == []


def test_a_stopped_trial_is_followed_when_it_has_ended(own: ModuleType) -> None:
    method = own.MedianStopping(max_trials=9, rungs=[1, 4], max_concurrent_trials=1)
    method.start()
    assert method.on(Reported(trial=0, step=1, value=math.inf)) == [Stop(trial=0)]
    assert method.on(Exited(trial=0, reason="stopped")) == [Create(trial=1)]
    assert method.on(Reported(trial=1, step=1, value=0.5)) == []


def test_more_trials_but_no_longer_ones(own: ModuleType) -> None:
    method = started(own, 2)
    with pytest.raises(MethodError, match=r"searcher\.max_length"):
        method.extend(max_length=16)
    for trial in range(2):
        method.on(Exited(trial=trial, reason="completed"))
    assert method.extend(max_trials=3) == [Create(trial=2)]
    assert method.on(Reported(trial=2, step=1, value=math.inf)) == [Stop(trial=2)]


@pytest.mark.slow
def test_script_says_what_stopping_saves() -> None:
    done = subprocess.run(
        [sys.executable, "median_stopping.py"], cwd=OWN, capture_output=True, text=True, timeout=240, check=True
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[:2] for row in rows] == [["random", "search"], ["median", "stopping"], ["ASHA", "best"]]
    hours = [float(row[-2]) for row in rows]
    assert hours[0] > 2 * hours[1] > 2 * hours[2]
