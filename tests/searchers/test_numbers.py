"""Every field of every event: values that can't be replayed are rejected, without a change of state."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from random import Random
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from searchers import (
    ASHA,
    Exited,
    FieldError,
    FirstPoints,
    MethodError,
    Reported,
    Search,
    SpaceError,
    Started,
    parse_space,
)
from searchers.errors import IllegalEvent
from searchers.events import Event
from searchers.search import Record
from tests.searchers.helpers import new_search
from tests.searchers.helpers import state as method_state

SPACE = parse_space(
    {
        "x": {"type": "double", "minval": 0, "maxval": 1},
        "layers": {"type": "int", "minval": 1, "maxval": 9},
        "optimizer": {"type": "categorical", "vals": ["sgd", "adam"]},
        "sizes": [8, 16],
        "clip": math.inf,
    }
)


class Given:
    """A sampler that always returns the same value."""

    def __init__(self, point: object) -> None:
        self.point = point

    def ask(self, trial: int) -> dict[str, object]:
        return cast("dict[str, object]", self.point)

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        pass


class Optimizer(str, Enum):
    SGD = "sgd"


def asha() -> ASHA:
    return ASHA(max_trials=8, max_length=16, num_rungs=3, max_concurrent_trials=2)


def new(lines: list[str], sampler: Given | None = None, **fields: Any) -> Search:
    def log(record: Record) -> None:
        lines.append(json.dumps(record, allow_nan=False))

    return new_search(asha(), SPACE, **{"smaller_is_better": False, "log": log, "sampler": sampler, **fields})


def running() -> tuple[Search, list[str]]:
    """Return a search with trial 0 running, and the journal's lines, which must be strict JSON."""
    search, lines = started()
    search.on(Started(trial=0))
    return search, lines


def started(sampler: Given | None = None) -> tuple[Search, list[str]]:
    lines: list[str] = []
    search = new(lines, sampler)
    search.start()
    return search, lines


def state(search: Search) -> str:
    return method_state(search.method) + str(dict(search.trials))  # as text: NaN is not equal to itself


def replayed(lines: list[str]) -> Search:
    return new([]).replay([json.loads(line) for line in lines])


ONES = [1, 1.0, np.float32(1), np.float64(1), np.int64(1), np.array(1), np.array([1.0])]
ONES += [Decimal(1), Fraction(1), torch.tensor(1), torch.tensor([1.0], requires_grad=True)]


@pytest.mark.parametrize("one", ONES, ids=lambda one: f"{type(one).__name__} {one}")
def test_a_number_of_any_type_is_a_number(one: Any) -> None:
    search, lines = running()
    search.on(Reported(trial=0, step=one, value=one))
    assert (search.trials[0].last, search.trials[0].last_step) == (1, 1)
    assert type(search.trials[0].last) is float
    assert state(replayed(lines)) == state(search)


@pytest.mark.parametrize("true", [True, np.True_, torch.tensor(True)], ids=str)
def test_a_metric_may_be_true_but_not_a_step(true: Any) -> None:
    search, lines = running()
    search.on(Reported(trial=0, step=1, value=true))
    assert search.trials[0].best == 1.0
    assert state(replayed(lines)) == state(search)
    with pytest.raises(IllegalEvent, match=r"step of trial 0 is .*True.* but must be a number"):
        search.on(Reported(trial=0, step=true, value=0.5))


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (Reported(trial=0, step=1, value=10**400), "value of trial 0 at step 1 is larger than any float"),
        (Reported(trial=0, step=10**400, value=1), "step of trial 0 is larger than any float"),
        (Reported(trial=0, step=1, value=cast("Any", "0.5")), r"is '0.5' \(str\), but must be a number"),
        (Reported(trial=0, step=1, value=cast("Any", torch.zeros(2))), r"\(Tensor\), but must be a number"),
        (Reported(trial=0, step=cast("Any", None), value=1), "step of trial 0 is None"),
        (Reported(trial=cast("Any", 0.0), step=1, value=1), "an integer >= 0, got 0.0"),
        (Started(trial=cast("Any", None)), "an integer >= 0, got None"),
        (Exited(trial=0, reason=cast("Any", ["completed"])), "must be one of completed, stopped"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_values_that_are_not_numbers_are_refused(event: Event, says: str) -> None:
    search, lines = running()
    before, logged = state(search), len(lines)
    with pytest.raises(IllegalEvent, match=says):
        search.on(event)
    assert (state(search), len(lines)) == (before, logged)


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.decimals(),
    st.fractions(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.lists(st.integers(), max_size=2),
    st.floats(width=32).map(np.float32),
    st.integers(-9, 9).map(np.int16),
    st.floats().map(np.array),
    st.sampled_from([10**308, 10**309, -(10**400), np.True_, object(), {}, float]),
)
trials = st.one_of(st.integers(-1, 2), st.sampled_from([False, True, np.int64(0)]), anything)
events = st.one_of(
    st.builds(Started, trial=trials),
    st.builds(Reported, trial=trials, step=st.one_of(st.sampled_from([1, 4, 16]), anything), value=anything),
    st.builds(Exited, trial=trials, reason=st.one_of(st.sampled_from(["completed", "errored"]), anything)),
)


@pytest.mark.filterwarnings("ignore:In future, it will be an error for 'np.bool':DeprecationWarning")  # NumPy 2.2
@given(st.lists(events, max_size=4))
@example([Reported(trial=0, step=cast("Any", Decimal("nan")), value=None)])
def test_every_accepted_event_can_be_replayed(events: list[Any]) -> None:
    search, lines = running()
    for event in events:
        before, logged = state(search), len(lines)
        try:
            search.on(event)
        except IllegalEvent:
            assert (state(search), len(lines)) == (before, logged)
    assert state(replayed(lines)) == state(search)


@pytest.mark.parametrize("wrong", [True, 9.0, "9", Decimal(9)])
def test_an_extension_that_is_not_an_integer_changes_nothing(wrong: Any) -> None:
    search, lines = running()
    before, logged = state(search), len(lines)
    for field in ("max_trials", "max_length"):
        with pytest.raises(MethodError, match=f"searcher.{field}: must be an integer >= "):
            search.extend(**{field: wrong})
    assert (state(search), len(lines)) == (before, logged)


def test_a_seed_may_be_a_numpy_or_torch_integer() -> None:
    lines: list[str] = []
    search = new(lines, seed=np.int64(7), smaller_is_better=np.False_)
    search.start()
    assert search.params(1) == SPACE.sample(Random("7:1"))
    assert state(replayed(lines)) == state(search)


# ------------------------------------------------------------------------------------------------------ hyperparameters

NUMPY_POINT = {
    "x": np.float32(0.5),
    "layers": np.int64(3),
    "optimizer": Optimizer.SGD,
    "sizes": np.array([8, 16]),
    "clip": np.float32("inf"),
}
PLAIN_POINT = {"x": 0.5, "layers": 3, "optimizer": "sgd", "sizes": [8, 16], "clip": math.inf}


def test_a_sampler_may_return_numpy_types() -> None:
    search, lines = started(Given(NUMPY_POINT))
    search.on(Started(trial=0))
    assert search.trials[0].hparams == PLAIN_POINT
    assert [type(value) for value in search.params(0).values()] == [float, int, str, list, float]
    assert state(replayed(lines)) == state(search)


def test_points_may_have_numpy_types() -> None:
    assert FirstPoints(SPACE, [NUMPY_POINT], Given({})).ask(0) == PLAIN_POINT


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": 2.0}, r"hyperparameters.x: must be a number from 0.* got 2.0; Given.ask\(0\) must return a point"),
        ({"x": "0.5"}, "hyperparameters.x: must be a number"),
        ({"x": True}, "hyperparameters.x: must be a number"),
        ({"y": 1}, "hyperparameters.y: is not a hyperparameter of the space"),
        ({"sizes": {8, 16}}, "hyperparameters: a hyperparameter is {8, 16}"),
        ({"sizes": {"$float": "inf"}}, "name must be a string other than '\\$float'"),
        ({"sizes": {8: 16}}, "name must be a string other than .*, got 8"),
        ({"layers": 10**400}, "larger than any float"),
    ],
)
def test_a_point_outside_the_space_is_refused(change: dict[str, object], says: str) -> None:
    search, lines = started(Given(PLAIN_POINT | change))
    before, logged = state(search), len(lines)
    with pytest.raises(SpaceError, match=says):
        search.on(Started(trial=0))
    assert (state(search), len(lines)) == (before, logged)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (10**400, "must be a number that a float can hold"),
        ([[10**400]], "must be a number that a float can hold"),
        ({"type": "int", "minval": 0, "maxval": 10**400}, "lr.maxval: must be an integer"),
        ({"type": "log", "base": 10**400, "minval": 0, "maxval": 1}, "lr.base: must be a finite number"),
        ({"$float": "inf"}, r"can't be called \$float"),
        ([{"$float": 1}], "lists and mappings of them"),
    ],
    ids=str,
)
def test_a_space_of_values_that_are_not_json_is_refused(spec: object, says: str) -> None:
    with pytest.raises(SpaceError, match=says):
        parse_space({"lr": spec})


def test_field_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(SpaceError([("hyperparameters.lr", "is wrong"), ("b", "too")])))
    assert isinstance(error, FieldError)
    assert str(error) == "hyperparameters.lr: is wrong\nb: too"
