"""Values on the device, what becomes of them over batches and ranks, and custom reducers."""

from __future__ import annotations

import gc
import math
import re
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dray.training.errors import SearcherMetricError
from dray.training.evaluation import ValidationMetrics, combine_ranks, reduce_batches
from dray.training.metrics.checks import check_metrics
from dray.training.metrics.reducers import MetricReducer, Reducer, ReducerRegistry
from dray.training.metrics.training import (
    Column,
    TrainingMetrics,
    average_batches,
    average_sums,
    rows_of,
    sums_of,
)
from dray.training.metrics.values import jsonable, to_numpy


def averages(batches: list[Any]) -> dict[str, float | None]:
    kept = TrainingMetrics()
    for batch in batches:
        kept.add(batch)
    return average_sums([sums_of(kept.take_values())])


@pytest.mark.api("6.6")
def test_metrics_are_averaged_over_batches_whatever_they_come_as() -> None:
    batches = [
        {
            "tensor": torch.tensor(float(i)),
            "float": float(i),
            "int": i,
            "numpy": np.float32(i),
            "row": torch.tensor([i]),
        }
        for i in (1, 2, 6)
    ]
    assert averages(batches) == {"tensor": 3.0, "float": 3.0, "int": 3.0, "numpy": 3.0, "row": 3.0}


@pytest.mark.api("1.3")
def test_one_tensor_is_the_loss() -> None:
    assert averages([torch.tensor(1.0), torch.tensor(2.0)]) == {"loss": 1.5}


@pytest.mark.api("6.7")
def test_none_is_left_out_and_what_is_no_number_is_none() -> None:
    batches = [{"a": None, "b": 1.0, "c": "x", "d": None}, {"a": 4.0, "b": 2.0, "c": "y", "d": None}]
    assert averages(batches) == {"a": 4.0, "b": 1.5, "c": None}
    assert averages([{"big": torch.ones(3)}, {"big": torch.ones(3)}]) == {"big": None}


def test_a_tensor_that_is_changed_later_counts_as_it_was() -> None:
    total = torch.zeros(())
    kept = TrainingMetrics(keep_batches=True)
    for _ in range(3):
        total.add_(1)
        kept.add({"total": total})
    assert average_sums([sums_of(kept.take_values())]) == {"total": 2.0}
    assert [row["total"].item() for row in kept.take_batches()] == [1.0, 2.0, 3.0]


def test_values_do_not_hold_on_to_the_graph() -> None:
    class Forgotten(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mark = Mark()
            return x * 2

    class Mark:
        pass

    kept = TrainingMetrics()
    loss: torch.Tensor = Forgotten.apply(torch.ones((), requires_grad=True))
    mark = weakref.ref(loss.grad_fn.mark)  # type: ignore[union-attr]
    kept.add({"loss": loss})
    del loss
    gc.collect()
    assert mark() is None
    assert average_sums([sums_of(kept.take_values())]) == {"loss": 2.0}


def test_any_number_of_batches_is_averaged_and_few_tensors_are_kept() -> None:
    weight = torch.ones((), requires_grad=True)
    kept, column = TrainingMetrics(), Column()
    for i in range(1000):
        kept.add({"loss": weight * i, "count": torch.tensor(i), "mixed": weight * i if i % 2 else torch.tensor(i)})
        column.add(weight * i)
        assert len(column.fresh) <= Column.AT_ONCE
    assert len(column.pending()) == -(-1000 // Column.AT_ONCE)
    averages = average_sums([sums_of(kept.take_values())])
    assert averages == {"loss": 499.5, "count": 499.5, "mixed": 499.5}


def test_what_stays_on_a_device_counts_as_it_was() -> None:
    # The path of other devices' tensors; a CPU's floats are converted before.
    values = torch.ones(2, requires_grad=True) * torch.tensor([1.0, 5.0])
    total = torch.tensor(7.0)
    column = Column()
    for value in (values[0], total, 2.0, total.reshape(1)):
        column.add(value)
    with torch.no_grad():
        values.detach().zero_()
        total.zero_()
    assert column.values(iter(torch.cat(column.pending()).tolist())) == [1.0, 7.0, 2.0, 7.0]


@pytest.mark.gpu
def test_each_batch_of_a_model_compiled_with_cuda_graphs_counts() -> None:
    weight = torch.ones(4, device="cuda", requires_grad=True)

    @torch.compile(mode="reduce-overhead")  # type: ignore[untyped-decorator]
    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return (weight * batch).sum()

    kept, seen = TrainingMetrics(keep_batches=True), ValidationMetrics()
    for i in range(100):
        loss = loss_of(torch.full((4,), float(i), device="cuda"))
        loss.backward()  # type: ignore[no-untyped-call]
        weight.grad = None
        kept.add({"loss": loss})
        seen.add({"loss": loss})
    expected = [4.0 * i for i in range(100)]
    assert kept.take_values() == {"loss": expected}
    assert [row["loss"] for row in kept.take_batches()] == [row["loss"] for row in seen.take()] == expected


@pytest.mark.api("6.6")
def test_ranks_are_averaged_by_their_numbers_of_values() -> None:
    assert average_sums([{"a": (6.0, 2)}, {"a": (3.0, 1)}]) == {"a": 3.0}
    assert average_sums([{"a": (6.0, 2)}, {"a": None}]) == {"a": None}


@pytest.mark.api("6.6")
def test_batches_are_averaged_over_ranks_one_by_one() -> None:
    ranks = [[{"a": 1.0, "b": "x"}, {"a": 2.0, "b": "y"}], [{"a": 3.0, "b": "z"}, {"a": 6.0, "b": "z"}]]
    assert average_batches(ranks) == [{"a": 2.0, "b": "x"}, {"a": 4.0, "b": "y"}]


@pytest.mark.api("6.1")
@pytest.mark.parametrize(
    ("reducer", "expected"),
    [
        (Reducer.AVG, 3.0),
        (Reducer.AVG_OVER_RECORDS, 2.0),
        (Reducer.SUM, 9.0),
        (Reducer.MAX, 6.0),
        (Reducer.MIN, 1.0),
    ],
)
def test_validation_metrics_are_the_same_over_one_rank_or_two(reducer: Reducer, expected: float) -> None:
    rows, records = [{"a": torch.tensor(v)} for v in (1.0, 2.0, 6.0)], [4, 4, 1]  # (4 + 8 + 6) / 9 over records

    def share(part: slice) -> tuple[dict[str, float], int, int]:
        seen = ValidationMetrics()
        for row in rows[part]:
            seen.add(row)
        return reduce_batches(seen.take(), {"a": reducer}, records[part]), len(rows[part]), sum(records[part])

    assert combine_ranks([share(slice(None))], {"a": reducer}) == {"a": expected}
    # Ranks take every second batch.
    assert combine_ranks([share(slice(0, None, 2)), share(slice(1, None, 2))], {"a": reducer}) == {"a": expected}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(0.1, dtype=torch.float16), np.float16),
        (torch.tensor(0.1, dtype=torch.bfloat16), np.float32),
        (torch.tensor(0.1), np.float32),
        (torch.tensor(0.1, dtype=torch.float64), np.float64),
        (torch.tensor(2**62 + 1), np.int64),
        (torch.tensor(3, dtype=torch.uint8), np.uint8),
        (torch.tensor(True), np.bool_),
        (torch.tensor([1.0, 2.0]), np.float32),
        (torch.tensor(0.1, requires_grad=True), np.float32),
    ],
    ids=str,
)
def test_validation_callbacks_get_arrays_of_the_tensors_kind(value: torch.Tensor, expected: type) -> None:
    before = to_numpy(value).copy()
    seen = ValidationMetrics()
    for other in (value, torch.ones(3)):
        seen.add({"a": value, "mixed": other})
    with torch.no_grad():
        value.zero_()
    for row in seen.take():
        assert isinstance(row["a"], np.ndarray)
        assert row["a"].dtype == expected
        assert row["a"].shape == before.shape
        assert (row["a"] == before).all()


def test_metrics_become_plain_json() -> None:
    found = jsonable(
        {
            "t": torch.tensor([1.5], requires_grad=True),
            "i": np.int64(3),
            "l": [torch.tensor(1), 2],
            "a": np.ones(2),
            "s": "x",
            "n": None,
        },
        source="evaluate_full_dataset()",
    )
    assert found == {"t": 1.5, "i": 3, "l": [1, 2], "a": [1.0, 1.0], "s": "x", "n": None}
    assert type(found["i"]) is int
    assert math.isnan(jsonable({"x": float("nan")}, source="")["x"])
    assert jsonable({"of \udcff": 1.0}, source="") == {"of \\udcff": 1.0}, "which no file of metrics can hold"


@pytest.mark.api("9.3b")
def test_a_metric_that_is_no_json_is_named() -> None:
    with pytest.raises(TypeError, match=r"evaluate_full_dataset\(\) returned the metric 'm\.x' of type object"):
        jsonable({"m": {"x": object()}}, source="evaluate_full_dataset()")


def test_a_misspelt_searcher_metric_is_told_from_the_others() -> None:
    with pytest.raises(SearcherMetricError, match=r"did you mean accuracy\?"):
        check_metrics(["acccuracy"], {"loss": 0.5, "accuracy": 0.9})


@pytest.mark.api("2.11")
def test_every_batch_has_its_values_averaged_over_ranks() -> None:
    ranks = [TrainingMetrics(), TrainingMetrics()]
    for i in range(130):
        ranks[0].add({"tensor": torch.tensor(float(i)), "number": i, "sometimes": 1.0 if i == 1 else None, "text": "x"})
        ranks[1].add({"tensor": torch.tensor(i + 2.0), "number": i, "sometimes": None, "text": "x"})
    rows = list(rows_of([rank.take_values() for rank in ranks]))
    assert len(rows) == 130
    assert rows[0] == {"tensor": 1.0, "number": 0.0}
    assert rows[1] == {"tensor": 2.0, "number": 1.0, "sometimes": 1.0}
    assert rows[129] == {"tensor": 130.0, "number": 129.0}


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
