"""A search of a space with few points: each is tried once, then the search ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from searchers import (
    ASHA,
    AdaptiveASHA,
    Exited,
    Grid,
    Method,
    PromotionASHA,
    RandomSearch,
    Requested,
    Search,
    Single,
    Space,
    Started,
    parse_space,
)
from searchers.auto import Auto
from searchers.errors import SpaceError
from searchers.named_sampler import named_sampler
from searchers.repeats import Repeats
from searchers.samplers import FirstPoints, RandomSampler
from searchers.search import Record
from searchers.simulate import Curve, simulate
from tests.searchers.helpers import new_search

SIX = {
    "layers": {"type": "int", "minval": 1, "maxval": 2},
    "optimizer": {
        "type": "categorical",
        "vals": ["adam", {"name": "sgd", "momentum": {"type": "categorical", "vals": [0, 0.9]}}],
    },
}
METHODS: dict[str, Callable[..., Method]] = {
    "random": lambda n: RandomSearch(max_trials=n, max_length=9),
    "asha": lambda n: ASHA(max_trials=n, max_length=9, num_rungs=3, divisor=3),
    "promotion": lambda n: PromotionASHA(max_trials=n, max_length=9, num_rungs=3, divisor=3),
    "adaptive": lambda n: AdaptiveASHA(max_trials=n, max_length=64, divisor=4),
    "auto": lambda n: Auto(max_trials=n, max_length=9),
}


def run(
    method: Method, sampler: str = "random", *, space: Space | None = None, seed: int = 7
) -> tuple[Search, list[Record]]:
    space, log = space or parse_space(SIX), list[Record]()
    drawn_by = named_sampler(sampler, space, seed=seed, rungs=method.rungs)
    search = new_search(method, space, log, sampler=drawn_by, seed=seed)
    done = simulate(search, 3, lambda hparams: Curve(lambda step: len(str(hparams)) / step)).done
    assert done == "completed"
    assert search.progress() == 1
    return search, log


def tried(search: Search) -> list[str]:
    return [json.dumps(search.params(trial), sort_keys=True) for trial in search.trials if search.repeat(trial) is None]


@pytest.mark.parametrize("most", [100, 100_000_000])
@pytest.mark.parametrize("method", METHODS)
def test_each_point_is_tried_once_then_the_search_ends(method: str, most: int) -> None:
    for sampler in ("random", "multi_fidelity", "tpe"):
        search, log = run(METHODS[method](most), sampler)
        assert len(set(tried(search))) == len(search.trials) == log[0]["points"] == 6


def test_a_smaller_budget_ends_before_and_tries_no_point_twice() -> None:
    for seed in range(10):
        search, _ = run(METHODS["auto"](5), seed=seed)
        assert len(set(tried(search))) == len(search.trials) == 5


def test_the_same_seed_tries_the_same_points_in_the_same_order() -> None:
    first, again, other = (tried(run(METHODS["random"](100), seed=seed)[0]) for seed in (7, 7, 8))
    assert first == again != other
    space = parse_space(SIX)
    assert json.loads(first[0]) == RandomSampler(space, 7).ask(0)  # what is new is drawn as in any space


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "double", "minval": 0, "maxval": 1},
        {"type": "log", "base": 10, "minval": -3, "maxval": 0, "step": 0.1},
        {"type": "int", "minval": 1, "maxval": 1001},
        {"type": "double", "minval": 0, "maxval": 1, "count": 4},  # a count is only for grids
    ],
)
def test_infinite_and_large_spaces_are_not_limited(spec: dict[str, Any]) -> None:
    assert parse_space({"x": spec, "y": {"type": "categorical", "vals": [1]}}).every_point() is None


@pytest.mark.parametrize(
    ("spec", "points"),
    [
        ({"type": "int", "minval": 0, "maxval": 9, "count": 2}, 10),
        ({"type": "int", "minval": 1, "maxval": 1000, "log": True}, 1000),
        ({"type": "double", "minval": 0.1, "maxval": 0.5, "step": 0.1}, 5),
        ({"type": "categorical", "vals": [{"a": {"type": "int", "minval": 1, "maxval": 3}}, 0]}, 4),
    ],
)
def test_the_points_of_a_finite_space_are_counted(spec: dict[str, Any], points: int) -> None:
    every = parse_space({"x": spec}).every_point()
    assert every is not None
    assert every.size == len({str(point) for point in every}) == points


def test_points_that_the_constraint_rejects_do_not_count() -> None:
    space = parse_space(SIX, constraint=lambda point: point["layers"] == 2)
    search, log = run(METHODS["auto"](100), space=space)
    assert len(set(tried(search))) == log[0]["points"] == 3


def test_constants_alone_may_be_trained_with_many_seeds() -> None:
    search, log = run(METHODS["random"](4), space=parse_space({"layers": 3}))
    assert len(search.trials) == 4
    assert "points" not in log[0]


def test_an_invalid_point_is_not_tried_again() -> None:
    search = new_search(METHODS["random"](4), parse_space(SIX))
    found = simulate(search, 3, lambda hparams: None if hparams["layers"] == 1 else Curve(lambda step: 1 / step))
    assert (found.trials, found.ended) == (6, {"invalid_hp": 3, "completed": 3})


def test_a_given_point_is_not_drawn_again() -> None:
    space = parse_space(SIX)
    points = [{"layers": 2, "optimizer": "adam"}, {"layers": 2, "optimizer": "adam"}]
    for seed in range(5):
        sampler = FirstPoints(space, points, RandomSampler(space, seed))
        search = new_search(METHODS["random"](100), space, sampler=sampler, seed=seed)
        simulate(search, 2, lambda hparams: Curve(lambda step: 1 / step))
        assert json.loads(tried(search)[0]) == points[0]
        assert len(set(tried(search))) == len(search.trials) == 6


def test_a_persons_trial_takes_no_point_from_the_search() -> None:
    search = new_search(METHODS["random"](100), parse_space(SIX))
    search.start()
    search.request(Requested(hparams={"layers": 1, "optimizer": "adam"}))
    simulate(search, 3, lambda hparams: Curve(lambda step: 1 / step))
    assert len(search.trials) == 7
    assert len(set(tried(search))) == 6


def test_repeats_follow_when_all_points_were_tried() -> None:
    search, _ = run(Repeats(METHODS["auto"](100), seeds=3, top=2))
    assert len(search.trials) == 6 + 6
    assert len(set(tried(search))) == 6


def test_a_grid_and_a_single_trial_are_as_before() -> None:
    space = parse_space({"layers": {"type": "int", "minval": 1, "maxval": 9, "count": 3}})
    for method in (Grid(points=3, max_length=9), Single(max_length=9), Repeats(Single(max_length=9), seeds=1, top=1)):
        assert "points" not in run(method, space=space)[1][0]


def test_more_trials_find_no_more_points() -> None:
    search, log = run(METHODS["random"](100))
    assert [str(action) for action in search.extend(max_trials=200)] == ["Done(reason='completed')"]
    again = new_search(METHODS["random"](100), parse_space(SIX)).replay(log)
    assert again.trials == search.trials
    assert again.done == search.done


@pytest.mark.parametrize("is_old", [True, False])
def test_a_resumed_search_goes_on_as_its_journal_began(*, is_old: bool) -> None:
    """Earlier versions tried points again, and their journals have no number of points."""
    _, log = run(METHODS["random"](100))
    begun = [json.loads(json.dumps(record)) for record in log[:4]]
    if is_old:
        begun[0] = {name: value for name, value in begun[0].items() if name != "points"}
        begun[0]["actions"] = [{"action": "create", "trial": trial} for trial in range(16)]
    more: list[Record] = []
    resumed = new_search(METHODS["random"](100), parse_space(SIX), more).replay(begun)
    simulate(resumed, 3, lambda hparams: Curve(lambda step: 1 / step))
    assert len(resumed.trials) == (100 if is_old else 6)
    replayed = new_search(METHODS["random"](100), parse_space(SIX)).replay([*begun, *more])
    assert tried(replayed) == tried(resumed)


def test_a_trial_restarts_with_its_own_point() -> None:
    search = new_search(METHODS["random"](100), parse_space(SIX))
    search.start()
    for trial in (0, 1, 0):
        search.on(Started(trial=trial))
    before = search.params(0)
    search.on(Exited(trial=1, reason="errored"))
    search.on(Started(trial=0))
    assert search.params(0) == before != search.params(1)


def test_a_constraint_that_allows_no_point_is_an_error_not_the_end() -> None:
    space = parse_space(SIX, constraint=lambda point: False)
    with pytest.raises(SpaceError, match="the constraint rejected all"):
        run(METHODS["random"](20), space=space)
