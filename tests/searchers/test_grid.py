"""Grid search in closed form."""

from __future__ import annotations

import pytest

from searchers import Create, Done, Exited, Grid, MethodError, Resume
from searchers.events import Reason
from tests.searchers.states import state


def test_each_end_is_followed_by_the_next_point() -> None:
    method = Grid(points=3, max_concurrent_trials=2)
    assert method.start() == [Create(trial=0), Create(trial=1)]
    assert method.on(Exited(trial=1, reason="completed")) == [Create(trial=2)]
    assert method.on(Exited(trial=0, reason="errored")) == []
    assert method.on(Exited(trial=2, reason="completed")) == [Done(reason="completed")]


def test_zero_concurrent_trials_means_no_limit() -> None:
    assert len(Grid(points=100, max_concurrent_trials=0).start()) == 100


def test_an_empty_grid_is_done_at_once() -> None:
    method = Grid(points=0)
    assert method.progress({}) < 1
    assert method.start() == [Done(reason="completed")]
    assert method.progress({}) == 1


def test_an_invalid_point_is_not_replaced() -> None:
    method = Grid(points=2, max_concurrent_trials=1)
    method.start()
    assert method.on(Exited(trial=0, reason="invalid_hp")) == [Create(trial=1)]
    assert method.progress({}) == 1 / 2, "the point counts as tried"
    assert method.on(Exited(trial=1, reason="completed")) == [Done(reason="completed")]


@pytest.mark.parametrize(
    ("reasons", "outcome"),
    [
        (["invalid_hp", "invalid_hp"], "invalid_hp"),
        (["invalid_hp", "canceled"], "canceled"),
        (["invalid_hp", "errored"], "errored"),
        (["canceled", "errored"], "errored"),
        (["invalid_hp", "stopped"], "completed"),
    ],
)
def test_reason_of_done(reasons: list[Reason], outcome: str) -> None:
    method = Grid(points=2)
    method.start()
    first, last = [method.on(Exited(trial=trial, reason=reason)) for trial, reason in enumerate(reasons)]
    assert first == []
    assert last == [Done(reason=outcome)]  # type: ignore[arg-type]


def test_a_grid_can_get_longer_but_not_larger() -> None:
    method = Grid(points=2, max_length=4)
    method.start()
    for trial in (0, 1):
        method.on(Exited(trial=trial, reason="completed"))
    before = state(method)
    with pytest.raises(MethodError, match=r"searcher\.max_trials: a grid has as many trials as points, got 3"):
        method.extend(max_trials=3)
    assert state(method) == before
    assert method.extend(max_length=8) == [Resume(trial=0), Resume(trial=1)]
    assert method.rungs == (8,)


def test_all_invalid_fields_are_named_at_once() -> None:
    with pytest.raises(MethodError) as caught:
        Grid(points=-1, max_concurrent_trials=-1, max_length=0)
    assert str(caught.value).splitlines() == [
        "searcher.points: must be an integer >= 0, got -1",
        "searcher.max_concurrent_trials: must be an integer >= 0, got -1",
        "searcher.max_length: must be an integer >= 1, got 0",
    ]
