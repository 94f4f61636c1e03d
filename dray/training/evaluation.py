"""Validation metrics of batches, and their reduction over batches and ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dray.training.metrics.reducers import Reducer, check_names, reduce_values
from dray.training.metrics.values import detached, jsonable, to_numpy
from dray.training.trial import Rank, by_name


class ValidationMetrics:
    """The results of `evaluate_batch` on this rank, batch by batch."""

    def __init__(self) -> None:
        self._batches = 0
        self._columns: dict[str, list[Any]] = {}

    def add(self, metrics: Any) -> None:
        if not isinstance(metrics, dict):
            raise TypeError(
                f"evaluate_batch() must return a dict of metrics, got {metrics!r} of type {type(metrics).__name__}"
            )
        columns = self._columns
        if self._batches == 0:
            columns.update((name, []) for name in metrics)
        if metrics.keys() != columns.keys():
            raise ValueError(
                "evaluate_batch() must return the same metrics for every batch: "
                f"{sorted(columns)} before, {sorted(metrics)} now"
            )
        self._batches += 1
        for name, value in metrics.items():
            if type(value) is torch.Tensor and value.is_cpu and value.dim() == 0 and value.dtype in _NUMPY:
                # A fast path for most metrics: there is no device to wait for, and a number needs no copy.
                columns[name].append(np.array(value.item(), _NUMPY[value.dtype]))
            else:
                columns[name].append(detached(value))

    def take(self) -> list[dict[str, Any]]:
        """Each batch's metrics. Tensors become NumPy arrays, all fetched from the device together."""
        columns = {name: _fetch(values) for name, values in self._columns.items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(self._batches)]


#: The NumPy dtype in which `to_numpy` returns a tensor.
_NUMPY = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.float32,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.bool: np.bool_,
}


def _fetch(values: list[Any]) -> Sequence[Any]:
    # Tensors usually have the same dtype, and are fetched together. Stacking different dtypes would convert them.
    if {type(value) for value in values} == {torch.Tensor} and len({value.dtype for value in values}) == 1:
        with contextlib.suppress(RuntimeError):  # different shapes or devices
            return [np.asarray(row) for row in to_numpy(torch.stack(values))]
    return [to_numpy(value) for value in values]


def reducers_of(choice: Any, names: Sequence[str]) -> dict[str, Reducer]:
    """The reducer of each metric, from the result of `evaluation_reducer()`."""
    if isinstance(choice, Reducer):
        return dict.fromkeys(names, choice)
    if not isinstance(choice, dict) or not all(isinstance(reducer, Reducer) for reducer in choice.values()):
        raise TypeError(
            f"evaluation_reducer() must return a pytorch.Reducer or a dict of them by metric name, got {choice!r}"
        )
    if choice.keys() != set(names):
        raise ValueError(
            f"evaluation_reducer() must name exactly the metrics of evaluate_batch(): {sorted(names)}, got "
            f"{sorted(choice)}"
        )
    return choice


def reduce_batches(
    rows: Sequence[Mapping[str, Any]], reducers: Mapping[str, Reducer], records: Sequence[int]
) -> dict[str, float]:
    """Reduce one rank's validation metrics over its batches, with their numbers of records."""
    reduced = {}
    for name, reducer in reducers.items():
        values = [row[name] for row in rows]
        try:
            reduced[name] = reduce_values(reducer, values, records if reducer is Reducer.AVG_OVER_RECORDS else None)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"evaluate_batch() returned {values[0]!r} of type {type(values[0]).__name__} for the metric "
                f"{name!r}, which can't be reduced over batches; return a number, or use "
                "context.wrap_reducer()"
            ) from error
    return reduced


def combine_ranks(
    parts: Sequence[tuple[Mapping[str, float], int, int]], reducers: Mapping[str, Reducer]
) -> dict[str, float]:
    """Reduce validation metrics over ranks, from (metrics, batches, records) of those that had batches."""
    if len(parts) == 1:
        return dict(parts[0][0])
    metrics, batches, records = zip(*parts, strict=True)
    return {
        name: reduce_values(
            reducer, [each[name] for each in metrics], records if reducer is Reducer.AVG_OVER_RECORDS else batches
        )
        for name, reducer in reducers.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's share of a validation."""

    metrics: Mapping[str, Any]  # over its own batches
    reduced: list[Any]  # contributions to the reducers that the trial has wrapped
    reducers: Mapping[str, Reducer] = field(default_factory=dict)
    batches: int = 0
    records: int = 0


@dataclass(kw_only=True, eq=False)
class Evaluation:
    """Evaluates a trial's models on one rank.

    Args:
        data: the batches; None on ranks that don't evaluate.
        full_dataset: evaluate by `evaluate_full_dataset` on the chief, or on all ranks if they validate together; the
            chief's metrics count.
        spare: gives batches to run, without counting their results, on a rank that has fewer than others: all ranks
            take part in a forward pass of a sharded model.
    """

    rank: Rank
    data: Any
    full_dataset: bool
    spare: Callable[[], Iterable[Any]] | None = None
    batches: int = field(default=0, init=False)  # done in the latest validation

    def __post_init__(self) -> None:
        trial = self.rank.trial
        evaluate_batch = by_name(
            trial.evaluate_batch, "batch", "batch_idx", required=1
        )  # as in Determined's user guide
        self._evaluate_batch = self.rank.optimisation.forward(evaluate_batch)
        self._evaluate_all = self.rank.optimisation.forward(by_name(trial.evaluate_full_dataset, "data_loader"))

    def share(self, *, test_mode: bool) -> Share:
        """Evaluate this rank's data, or just one batch in `test_mode`."""
        self.rank.reducers.reset(training=False)
        self.rank.optimisation.eval_mode()
        for callback in self.rank.callbacks.values():
            callback.on_validation_start()
        if self.full_dataset:
            metrics = self._full_dataset_metrics() if self.data is not None else {}
            return Share(metrics=metrics, reduced=self.rank.reducers.per_slot(training=False))
        for callback in self.rank.callbacks.values():
            callback.on_validation_epoch_start()
        rows, records = self._batch_metrics(test_mode)
        for callback in self.rank.callbacks.values():
            callback.on_validation_epoch_end(rows)
        reducers = reducers_of(self.rank.trial.evaluation_reducer(), list(rows[0])) if rows else {}
        share = Share(
            metrics=reduce_batches(rows, reducers, records),
            reduced=self.rank.reducers.per_slot(training=False),
            reducers=reducers,
            batches=len(rows),
            records=sum(records),
        )
        if self.spare is not None and not (test_mode and rows):
            share = copy.deepcopy(share)  # reducers may change the values that they returned
            for batch in self.spare():
                self._evaluate_batch(batch=self._on_device(batch), batch_idx=len(rows))
        self.rank.optimisation.reshard()
        return share

    def _batch_metrics(self, test_mode: bool) -> tuple[list[dict[str, Any]], list[int]]:
        metrics, records = ValidationMetrics(), []
        evaluate_batch, batch_length = self._evaluate_batch, self.rank.batch_length
        for batch_idx, batch in enumerate(self.data):
            records.append(batch_length(batch))
            metrics.add(evaluate_batch(batch=self._on_device(batch), batch_idx=batch_idx))
            self.batches = batch_idx + 1
            if test_mode:
                break
        return metrics.take(), records

    def _on_device(self, batch: Any) -> Any:
        return batch if self.rank.to_device is None else self.rank.to_device(batch)

    def _full_dataset_metrics(self) -> dict[str, Any]:
        metrics = self._evaluate_all(data_loader=self.data)
        if not isinstance(metrics, dict):
            raise TypeError(
                "evaluate_full_dataset() must return a dict of metrics, "
                f"got {metrics!r} of type {type(metrics).__name__}"
            )
        self.rank.optimisation.reshard()
        return jsonable(metrics, source="evaluate_full_dataset()")

    def combine(self, shares: Sequence[Share]) -> dict[str, Any]:
        """Combine the shares of all ranks, in rank order, into the metrics. Every rank does so, without an exchange."""
        # Ranks that validate together have all evaluated the same full dataset.
        same = self.full_dataset and self.rank.optimisation.validates_together
        shares = shares[:1] if same else self.rank.averaged(shares)
        reduced = jsonable(
            self.rank.reducers.cross_slot([share.reduced for share in shares], training=False), source="a reducer"
        )
        if self.full_dataset:
            check_names(reduced, shares[0].metrics, "evaluate_full_dataset()")
            return {**shares[0].metrics, **reduced}
        shares = [share for share in shares if share.batches]
        if not shares:
            raise RuntimeError(
                "the validation data is empty: build_validation_data_loader() returned a loader without a batch; "
                "check its dataset, and drop_last with a dataset smaller than a batch"
            )
        if any(share.metrics.keys() != shares[0].metrics.keys() for share in shares):
            raise ValueError(
                "evaluate_batch() must return the same metrics on every rank, got "
                + ", ".join(str(sorted(share.metrics)) for share in shares)
            )
        own = combine_ranks([(share.metrics, share.batches, share.records) for share in shares], shares[0].reducers)
        check_names(reduced, own, "evaluate_batch()")
        return {**own, **reduced}
