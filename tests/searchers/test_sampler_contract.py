"""Properties of every sampler that learns."""

from __future__ import annotations

import json
from random import Random

import pytest

from searchers import (
    ASHA,
    Exited,
    Metric,
    Objectives,
    PromotionASHA,
    Reported,
    Search,
    SpaceError,
    Started,
    parse_space,
)
from searchers.named_sampler import named_sampler
from searchers.samplers import Sampler
from searchers.search import Record
from searchers.space import Space
from searchers.testing import OBJECTIVES, Extension, play, repeat
from tests.searchers.helpers import LINE, needs_constraints, new_search

MIXED = parse_space(
    {
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
        "n": {"type": "int", "minval": 1, "maxval": 400},
        "act": {"type": "categorical", "vals": ["relu", [1, 2], None]},
        "batch": 64,
        "optimizer": {
            "type": "categorical",
            "vals": [{"name": "sgd", "momentum": {"type": "double", "minval": 0, "maxval": 0.9}}, {"name": "adam"}],
        },
    }
)
RUNGS = (1, 4, 16)
OPTIONS: dict[str, dict[str, object]] = {
    "multi_fidelity": {},
    "tpe": {"n_startup_trials": 3},
    "nsga2": {"population_size": 4},
    "cmaes": {},
    "QMCSampler": {},
}
"""By name, with which they soon propose something of their own."""


def new_sampler(name: str, space: Space, objectives: Objectives | None = None) -> Sampler:
    return named_sampler(name, space, seed=7, rungs=RUNGS, options=OPTIONS[name], objectives=objectives)


@pytest.mark.parametrize("name", OPTIONS)
def test_proposals_are_plain_points_of_the_space_and_asking_changes_nothing(name: str) -> None:
    sampler = new_sampler(name, MIXED)
    for trial in range(24):
        point = sampler.ask(trial)
        assert json.loads(json.dumps(point)) == point
        assert MIXED.check(point, path="p") == point
        sampler.tell(Started(trial=trial), point)
        sampler.tell(Reported(trial=trial, step=16, value=trial % 7), point)
        sampler.tell(Exited(trial=trial, reason="completed"), point)
    asked = [sampler.ask(trial) for trial in (25, 26, 27)]
    assert [sampler.ask(trial) for trial in (25, 26, 27)] == asked


@pytest.mark.parametrize("name", OPTIONS)
def test_the_constraint_holds_for_every_proposal_or_an_error_says_that_it_can_not_be_met(name: str) -> None:
    sampler = new_sampler(name, Space(root=LINE.root, constraint=lambda point: point["x"] > 0.5))  # type: ignore[operator]
    for trial in range(24):
        point = sampler.ask(trial)
        x = float(str(point["x"]))
        assert x > 0.5
        sampler.tell(Started(trial=trial), point)
        sampler.tell(Reported(trial=trial, step=16, value=(x - 0.3) ** 2), point)  # the optimum is at 0.3
        sampler.tell(Exited(trial=trial, reason="completed"), point)
    with pytest.raises(SpaceError, match="rejected all 1000 points"):
        new_sampler(name, Space(root=LINE.root, constraint=lambda point: False)).ask(0)


@pytest.mark.parametrize(
    ("name", "several"),
    [
        *((name, False) for name in OPTIONS),
        ("multi_fidelity", True),
        *(pytest.param(name, True, marks=needs_constraints) for name in ("tpe", "nsga2", "QMCSampler")),
    ],
)
def test_a_replayed_search_gets_the_same_proposals(name: str, several: bool) -> None:
    """Histories are cut in the middle, and have failures, non-finite values, late reports and extensions."""
    objectives = OBJECTIVES if several else None

    def search(records: list[Record], log: list[Record]) -> Search:
        method = ASHA(max_trials=12, max_length=16, num_rungs=3, max_concurrent_trials=4, pareto=several)
        sampler = new_sampler(name, MIXED, objectives)
        return new_search(method, MIXED, log, sampler=sampler, objectives=objectives).replay(records)

    log: list[Record] = []
    extensions = [Extension(max_length=64), Extension(max_trials=16)]
    play(search([], log), 5, extensions=extensions)
    records: list[Record] = json.loads(json.dumps(log))
    assert len({str(record["hparams"]) for record in records if "hparams" in record}) > 10
    rest: list[Record] = []
    again = search(records[: len(records) // 2], rest)
    for record in records[len(records) // 2 :]:
        repeat(again, record)
    assert json.loads(json.dumps(rest)) == records[len(records) // 2 :]


LOSS, SIZE, TIME = (Metric(name=name) for name in ("loss", "size", "time"))
SEVERAL = (
    OBJECTIVES,
    Objectives((LOSS, SIZE, TIME)),
    Objectives((LOSS, Metric(name="size", at_most=0.5), Metric(name="time", at_least=0.2, at_most=0.8))),
    Objectives((SIZE, LOSS, Metric(name="size", at_least=0.3))),
)
SPACES = tuple(
    parse_space(root)
    for root in (
        {"x": {"type": "double", "minval": 0, "maxval": 1}},
        {
            "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
            "n": {"type": "int", "minval": 1, "maxval": 3},
            "x": {"type": "categorical", "vals": [{"a": {"type": "double", "minval": 0, "maxval": 1}}, {"b": 1}]},
        },
        {"x": {"type": "categorical", "vals": ["relu", None]}, "batch": 64},
        {"x": 1},
    )
)


@pytest.mark.parametrize("seed", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_random_searches_with_several_objectives_are_replayed_with_the_same_proposals(seed: int) -> None:
    """With late, repeated, missing and non-finite reports, failures, extensions and requests."""
    rng = Random(f"{seed}:several")
    space, objectives, kind = rng.choice(SPACES), rng.choice(SEVERAL), rng.choice((PromotionASHA, PromotionASHA, ASHA))
    concurrent, divisor = rng.choice((1, 4, 16)), rng.choice((2, 4))
    extensions = rng.sample([Extension(max_length=64), Extension(max_trials=24)], rng.randrange(3))

    def search(log: list[Record]) -> Search:
        method = kind(
            max_trials=16,
            max_length=16,
            num_rungs=3,
            divisor=divisor,
            max_concurrent_trials=concurrent,
            pareto=True,
        )
        sampler = named_sampler("multi_fidelity", space, seed=seed, rungs=method.rungs, objectives=objectives)
        return Search(
            method, space, seed=seed, smaller_is_better=True, log=log.append, sampler=sampler, objectives=objectives
        )

    log: list[Record] = []
    play(search(log), seed, extensions=extensions)
    records: list[Record] = json.loads(json.dumps(log))
    rest: list[Record] = []
    cut = rng.randrange(len(records))
    again = search(rest).replay(records[:cut])
    for record in records[cut:]:
        repeat(again, record)
    assert json.loads(json.dumps(rest)) == records[cut:], f"seed {seed}: the replay of {cut} records proposes otherwise"
    assert sum("hparams" in record for record in records) > 20
