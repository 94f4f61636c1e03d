"""Custom metrics, reduced per slot and then over slots."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch

from dray.training.metrics.reducers import MetricReducer, ReducerRegistry


class Mean(MetricReducer):
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1

    def per_slot_reduce(self) -> tuple[float, int]:
        return self.total, self.count

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> float:
        totals, counts = zip(*per_slot_metrics, strict=True)
        return sum(totals) / sum(counts)


@pytest.mark.api("6.2")
def test_a_reducer_sees_the_contribution_of_every_rank() -> None:
    ranks = [ReducerRegistry(), ReducerRegistry()]
    for registry, values in zip(ranks, ([1.0, 2.0], [6.0]), strict=True):
        mean = registry.wrap_reducer(Mean(), name="mean")
        for value in values:
            mean.update(value)
    rows = [registry.per_slot(training=True) for registry in ranks]
    assert ranks[0].cross_slot(rows, training=True) == ranks[1].cross_slot(rows, training=True) == {"mean": 3.0}


@pytest.mark.api("6.3")
def test_a_function_gets_values_in_the_order_of_one_process() -> None:
    ranks = [ReducerRegistry(), ReducerRegistry()]
    updates = [registry.wrap_reducer(lambda values: "".join(values), name="all") for registry in ranks]
    for index, letter in enumerate("abcde"):
        updates[index % 2].update(letter)
    rows = [registry.per_slot(training=False) for registry in ranks]
    assert ranks[0].cross_slot(rows, training=False) == {"all": "abcde"}


class Found(NamedTuple):
    scores: list[torch.Tensor]


def test_a_function_gets_tensors_as_they_were() -> None:
    """The outputs of a CUDA graph, or of torch.compile(mode="reduce-overhead"), are in the same memory each time."""
    registry = ReducerRegistry()
    scores = registry.wrap_reducer(lambda values: [float(found.scores[0]) for found, _ in values], name="scores")
    output = torch.ones(1, requires_grad=True) * 1
    for replay in range(3):
        output.detach().fill_(replay)
        scores.update((Found(scores=[output]), "label"))
    assert registry.cross_slot([registry.per_slot(training=True)], training=True) == {"scores": [0.0, 1.0, 2.0]}


@pytest.mark.api("6.4")
def test_a_reducer_without_a_name_returns_several_metrics() -> None:
    registry = ReducerRegistry()
    registry.wrap_reducer(lambda values: {"n": len(values), "sum": sum(values)}).update(4)
    assert registry.cross_slot([registry.per_slot(training=True)], training=True) == {"n": 1, "sum": 4}


@pytest.mark.api("6.5")
def test_training_and_validation_have_their_own_reducers() -> None:
    registry = ReducerRegistry()
    registry.wrap_reducer(len, name="t", for_validation=False)
    registry.wrap_reducer(len, name="v", for_training=False)
    assert registry.cross_slot([registry.per_slot(training=True)], training=True) == {"t": 0}
    assert registry.cross_slot([registry.per_slot(training=False)], training=False) == {"v": 0}


@pytest.mark.parametrize(
    ("training", "cure"),
    [
        (True, "if only evaluate_batch() updates it, wrap it with for_training=False"),
        (False, "if only train_batch() updates it, wrap it with for_validation=False"),
    ],
)
def test_a_reducer_without_values_is_told_how_to_leave_out_the_workload(training: bool, cure: str) -> None:
    registry = ReducerRegistry()
    registry.wrap_reducer(lambda values: sum(values) / len(values), name="mean")
    with pytest.raises(ValueError, match=re.escape(cure)):
        registry.cross_slot([registry.per_slot(training=training)], training=training)


def test_two_reducers_of_one_metric_are_refused() -> None:
    registry = ReducerRegistry()
    registry.wrap_reducer(len, name="n")
    registry.wrap_reducer(lambda values: {"n": 0.0})
    with pytest.raises(ValueError, match="a reducer and another reducer both give the metric 'n'"):
        registry.cross_slot([registry.per_slot(training=False)], training=False)
