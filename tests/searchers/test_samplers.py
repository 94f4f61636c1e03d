"""Samplers: their events, the order of grids, and known first points."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from searchers import (
    ASHA,
    Event,
    Exited,
    FirstPoints,
    GridSampler,
    JournalError,
    RandomSampler,
    RandomSearch,
    Reported,
    Sampler,
    Search,
    SpaceError,
    Started,
    parse_space,
)
from searchers.search import Record
from searchers.testing import play
from tests.searchers.helpers import new_search

SPACE = parse_space(
    {
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
        "layers": {"type": "int", "minval": 1, "maxval": 8},
        "model": {"act": {"type": "categorical", "vals": ["relu", "gelu"]}, "bias": True},
        "optimizer": {
            "type": "categorical",
            "vals": [{"name": "sgd", "momentum": {"type": "double", "minval": 0, "maxval": 0.9}}, {"name": "adam"}],
        },
    }
)
POINT: dict[str, object] = {
    "lr": 0.01,
    "layers": 2,
    "model": {"act": "gelu", "bias": True},
    "optimizer": {"momentum": 0.5, "name": "sgd"},
}


class Recording:
    """A sampler that returns the number of events so far, and records all calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.events: list[tuple[Event, dict[str, object]]] = []

    def ask(self, trial: int) -> dict[str, object]:
        self.calls.append(trial)
        return {"layers": len(self.events)}

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        self.calls.append(event)
        self.events.append((event, dict(hparams)))


LAYERS = parse_space({"layers": {"type": "int", "minval": 0, "maxval": 10_000}})


def search_with(sampler: Sampler, log: list[Record], *, smaller_is_better: bool = True) -> Search:
    method = ASHA(max_trials=20, max_length=16, num_rungs=3, max_concurrent_trials=2)
    return new_search(method, LAYERS, log, smaller_is_better=smaller_is_better, sampler=sampler)


# --------------------------------------------------------------------------------------------------- asking and telling


def test_ask_is_called_once_at_a_trials_first_start_and_tell_after_each_event() -> None:
    sampler = Recording()
    search = search_with(sampler, [])
    search.start()
    assert sampler.calls == []
    events: list[Event] = [
        Started(trial=1),
        Reported(trial=1, step=1, value=0.5),
        Started(trial=1),  # the trial was restarted
        Started(trial=0),
        Exited(trial=1, reason="errored"),
    ]
    for event in events:
        search.on(event)
    assert sampler.calls == [1, events[0], events[1], events[2], 0, events[3], events[4]]
    assert [hparams["layers"] for _, hparams in sampler.events] == [0, 0, 0, 3, 0]


def test_values_passed_to_tell_are_smaller_is_better_and_never_nan() -> None:
    sampler = Recording()
    search = search_with(sampler, [], smaller_is_better=False)
    search.start()
    search.on(Started(trial=0))
    for step, value in enumerate([0.25, float("nan"), None, float("inf")], start=2):
        search.on(Reported(trial=0, step=step, value=value))
    values = [event.value for event, _ in sampler.events if isinstance(event, Reported)]
    assert values == [-0.25, float("inf"), float("inf"), float("inf")]


def test_a_trial_that_never_started_has_empty_hyperparameters() -> None:
    sampler = Recording()
    search = search_with(sampler, [])
    search.start()
    search.on(Exited(trial=0, reason="canceled"))
    assert sampler.events == [(Exited(trial=0, reason="canceled"), {})]


@pytest.mark.parametrize("seed", range(3))
def test_replay_passes_the_same_events_to_tell_and_does_not_ask(seed: int) -> None:
    log: list[Record] = []
    first, second = Recording(), Recording()
    play(search_with(first, log), seed)
    search_with(second, []).replay(json.loads(json.dumps(log)))
    assert second.events == first.events
    assert second.calls == [event for event, _ in first.events]


def test_params_of_a_pending_trial_are_not_fixed() -> None:
    sampler = Recording()
    search = search_with(sampler, [])
    search.start()
    assert search.params(1) == {"layers": 0}
    search.on(Started(trial=0))
    search.on(Started(trial=1))
    assert search.trials[1].hparams == {"layers": 1}


# --------------------------------------------------------------------------------------------------------------- random


def test_random_draws_depend_on_the_trial_number() -> None:
    sampler = RandomSampler(SPACE, seed=7)
    later = [sampler.ask(trial) for trial in (5, 3)]
    sampler.tell(Started(trial=0), {})
    assert [sampler.ask(3), sampler.ask(5)] == later[::-1] == [SPACE.sample(Random(f"7:{trial}")) for trial in (3, 5)]


# ----------------------------------------------------------------------------------------------------------------- grid


def test_changing_a_returned_grid_point_changes_nothing() -> None:
    grid = GridSampler(parse_space({"a": [1]}))
    grid.ask(0)["a"].append(2)  # type: ignore[attr-defined]
    assert grid.ask(0) == {"a": [1]}


def test_asking_beyond_the_grid_raises() -> None:
    with pytest.raises(SpaceError, match="the grid has only 1 points, and none for trial 1, counted from 0"):
        GridSampler(parse_space({"a": 1})).ask(1)


# --------------------------------------------------------------------------------------------------------- first points


def test_known_points_come_first_then_the_samplers() -> None:
    random = RandomSampler(SPACE, seed=7)
    sampler = FirstPoints(SPACE, [POINT, POINT | {"layers": 3}], random)
    assert [sampler.ask(trial) for trial in range(3)] == [POINT, POINT | {"layers": 3}, random.ask(2)]


def test_known_points_are_checked_filled_in_and_normalised() -> None:
    point = {"lr": 0.1, "layers": 3.0, "model": {"act": "relu"}, "optimizer": {"name": "adam"}}
    asked = FirstPoints(SPACE, [point], RandomSampler(SPACE, seed=7)).ask(0)
    assert asked == point | {"layers": 3, "model": {"act": "relu", "bias": True}}
    assert type(asked["layers"]) is int


def test_a_sampler_with_extended_is_notified_of_an_extension() -> None:
    class Following(RandomSampler):
        rungs: tuple[float, ...] = ()

        def extended(self, rungs: tuple[float, ...]) -> None:
            self.rungs = rungs

    sampler = Following(SPACE, seed=7)
    for first in (FirstPoints(SPACE, [POINT], sampler), FirstPoints(SPACE, [POINT], RandomSampler(SPACE, seed=7))):
        method = RandomSearch(max_trials=2, max_length=4)
        search = new_search(method, SPACE, sampler=first)
        search.start()
        search.extend(max_length=16)
    assert sampler.rungs == (16,)


def test_the_inner_sampler_gets_known_points() -> None:
    class Spaced(Recording):
        space = LAYERS

    inner = Spaced()
    sampler = FirstPoints(inner.space, [{"layers": 5}], inner)
    sampler.tell(Started(trial=0), {"layers": 5})
    assert inner.events == [(Started(trial=0), {"layers": 5})]


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        ({"lr": 1.0}, ".lr", "must be a number from 0.0001 to 0.1, got 1.0"),
        ({"lr": "0.1"}, ".lr", "must be a number from"),
        ({"lr": float("nan")}, ".lr", "must be a number from"),
        ({"layers": 9}, ".layers", "must be an integer from 1 to 8, got 9"),
        ({"layers": 2.5}, ".layers", "must be an integer from 1 to 8, got 2.5"),
        ({"layers": True}, ".layers", "must be an integer from 1 to 8, got True"),
        ({"learning_rate": 1}, ".learning_rate", "is not a hyperparameter of the space"),
        ({"layer": 1}, ".layer", "did you mean layers?"),
        ({"model": 3}, ".model", "must be a mapping of hyperparameters, got 3"),
        ({"model": {"act": "tanh"}}, ".model.act", "must be one of 'relu', 'gelu', got 'tanh'"),
        ({"model": {"act": "relu", "bias": False}}, ".model.bias", "must be the constant True, got False"),
        ({"model": {}}, ".model.act", "is missing"),
        ({"optimizer": "sgd"}, ".optimizer", "must be one of 2 mappings, got 'sgd'"),
        ({"optimizer": {"name": "sgd"}}, ".optimizer.momentum", "is missing"),
        ({"optimizer": {"name": "sgd", "momentum": 2}}, ".optimizer.momentum", "must be a number from 0.0 to 0.9"),
        ({"optimizer": {"name": "adam", "momentum": 0.5}}, ".optimizer.momentum", "is not a hyperparameter"),
    ],
    ids=str,
)
def test_bad_points_are_refused_by_path(change: dict[str, object], path: str, says: str) -> None:
    with pytest.raises(SpaceError) as caught:
        FirstPoints(SPACE, [POINT, POINT | change], RandomSampler(SPACE, seed=7))
    ((where, what),) = caught.value.faults
    assert where == f"searcher.points[1]{path}"
    assert says in what


def test_all_faults_of_all_points_are_named() -> None:
    lean = {name: value for name, value in POINT.items() if name != "lr"}
    with pytest.raises(SpaceError) as caught:
        FirstPoints(SPACE, [lean, POINT, POINT | {"layers": 0, "lr": 7}, 5], RandomSampler(SPACE, seed=7))  # type: ignore[list-item]
    assert [path for path, _ in caught.value.faults] == [
        "searcher.points[0].lr",
        "searcher.points[2].layers",
        "searcher.points[2].lr",
        "searcher.points[3]",
    ]


def test_a_point_that_violates_the_constraint_is_refused() -> None:
    space = parse_space({"x": {"type": "int", "minval": 0, "maxval": 9}}, constraint=lambda point: point["x"] != 3)
    with pytest.raises(SpaceError, match=r"searcher.points\[0\]: is rejected by the constraint"):
        FirstPoints(space, [{"x": 3}], RandomSampler(space, seed=0))


# ------------------------------------------------------------------------------------------- journals of other searches


def journal_of(space: dict[str, object], **fields: Any) -> list[Record]:
    log: list[Record] = []
    search = new_search(RandomSearch(max_trials=3), parse_space(space), log, **fields)
    search.start()
    search.on(Started(trial=0))
    return log


OURS: dict[str, object] = {"x": {"type": "double", "minval": 0, "maxval": 1}}


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (journal_of(OURS, seed=8), "line 1: the journal belongs to another search: its seed is 8, not 7"),
        (journal_of(OURS, smaller_is_better=False), "line 1: .* its smaller_is_better is False, not True"),
        (journal_of({"y": OURS["x"]}), r"line 2: .* trial 0 are not .*: hyperparameters.y: is not a hyperparameter"),
        (journal_of({"x": {"type": "int", "minval": 5, "maxval": 6}}), "line 2: .* hyperparameters.x: must be a"),
    ],
    ids=["seed", "direction", "names", "values"],
)
def test_the_journal_of_another_search_is_refused(records: list[Record], says: str) -> None:
    with pytest.raises(JournalError, match=says):
        new_search(RandomSearch(max_trials=3), parse_space(OURS)).replay(records)
