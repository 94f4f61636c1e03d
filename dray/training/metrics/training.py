"""Training metrics of batches, which stay on the device until a report needs them, and their averages over ranks.

No batch waits for the device: values are fetched only here, once per report.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dray.training.metrics.values import as_number, detached, to_numpy, whole

#: (sum, number of values) by name; None for a metric that is not a number.
Sums = dict[str, tuple[float, int] | None]
#: One value per batch (or None) by name; None for a metric that is not a number.
Values = dict[str, list[float | None] | None]


class Column:
    """One metric of a workload: a value per batch, which stays on the device until it is needed."""

    __slots__ = ("_chunks", "fresh", "is_number")

    AT_ONCE = 64  # the number of tensors to stack into one

    def __init__(self) -> None:
        self.is_number = True
        self.fresh: list[Any] = []  # the newest values: tensors of one value each, numbers, None
        self._chunks: list[torch.Tensor | list[float | None]] = []

    def add(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = whole(value)
            if value.numel() != 1:
                self.is_number = False
                return
            # A copy on the device: the user may change the tensor in place, and a CUDA graph overwrites its outputs at
            # its next replay, also with torch.compile(mode="reduce-overhead").
            value = value.detach().clone()
            if value.dim():
                value = value.reshape(())
        elif value is not None and (value := as_number(value)) is None:
            self.is_number = False
            return
        if len(self.fresh) >= self.AT_ONCE:
            self._fold()
        self.fresh.append(value)

    def pending(self) -> list[torch.Tensor]:
        self._fold()
        return [chunk for chunk in self._chunks if isinstance(chunk, torch.Tensor)] if self.is_number else []

    def values(self, fetched: Iterator[float]) -> list[float | None] | None:
        """All values, with those of `pending()` taken from `fetched`."""
        if not self.is_number:
            return None
        values: list[float | None] = []
        for chunk in self._chunks:
            values.extend(itertools.islice(fetched, len(chunk)) if isinstance(chunk, torch.Tensor) else chunk)
        return values

    def _fold(self) -> None:
        for are_tensors, values in itertools.groupby(self.fresh, lambda value: isinstance(value, torch.Tensor)):
            chunk: Any = list(values)
            if are_tensors:
                chunk = torch.stack(chunk)
                chunk = chunk.to(torch.float32 if chunk.device.type == "mps" else torch.float64)  # MPS has no float64
            self._chunks.append(chunk)
        self.fresh = []


class TrainingMetrics:
    """The metrics of one training workload. `keep_batches`: also keep each batch's metrics unchanged, for callbacks.
    `keep_times`: also keep the `times` of batches, in seconds since the epoch, for TensorBoard."""

    __slots__ = ("_columns", "_kept", "keep_batches", "keep_times", "times")

    def __init__(self, keep_batches: bool = False) -> None:
        self.keep_batches = keep_batches
        self.keep_times = False
        self.reset()

    def reset(self) -> None:
        self._columns: dict[str, Column] = {}
        self._kept: list[dict[str, Any]] = []
        self.times: list[float] = []

    def add(self, metrics: Mapping[str, Any] | torch.Tensor) -> None:
        """Add the result of `train_batch`: a dict or a tensor, with the same names in each batch."""
        if not isinstance(metrics, dict):
            if not isinstance(metrics, torch.Tensor):
                raise TypeError(
                    "train_batch() must return a dict of metrics or one tensor (the loss), "
                    f"got {metrics!r} of type {type(metrics).__name__}"
                )
            metrics = {"loss": metrics}
        columns = self._columns
        if metrics.keys() != columns.keys():
            if columns:
                raise ValueError(
                    f"train_batch() must return the same metrics for every batch: {sorted(columns)} before, "
                    f"{sorted(metrics)} now"
                )
            columns.update((name, Column()) for name in metrics)
        for name, value in metrics.items():
            column = columns[name]
            if type(value) is torch.Tensor and value.is_cpu:
                # There is no device to wait for, and a number needs no copy. The number of elements is not checked
                # first: each torch call costs a microsecond here, where its code is not in the processor's caches.
                try:
                    value = value.item()
                except RuntimeError:
                    column.is_number = False
                    continue
            if type(value) is float:
                column.fresh.append(value)
            else:
                column.add(value)
        if self.keep_times:
            self.times.append(time.time())
        if self.keep_batches:
            self._kept.append({name: detached(value) for name, value in metrics.items()})

    def take_values(self) -> Values:
        """Each metric's values by batch. Waits for the device once."""
        pending = [chunk for column in self._columns.values() for chunk in column.pending()]
        fetched = iter(torch.cat([chunk.to(pending[0].device) for chunk in pending]).tolist() if pending else ())
        return {name: column.values(fetched) for name, column in self._columns.items()}

    def take_batches(self) -> list[dict[str, Any]]:
        """Each batch's metrics, with tensors as NumPy arrays."""
        return [{name: to_numpy(value) for name, value in metrics.items()} for metrics in self._kept]


def sums_of(values: Values) -> Sums:
    sums: Sums = {}
    for name, column in values.items():
        known = None if column is None else [value for value in column if value is not None]
        sums[name] = None if known is None else (sum(known, 0.0), len(known))
    return sums


def rows_of(ranks: Sequence[Values]) -> Iterator[dict[str, float]]:
    """Each batch's numbers by name, averaged over ranks."""
    columns = {}
    for name in ranks[0]:
        parts = [values[name] for values in ranks]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            columns[name] = known[0] if len(known) == 1 else [_mean(row) for row in zip(*known, strict=False)]
    for row in zip(*columns.values(), strict=False):
        yield {name: value for name, value in zip(columns, row, strict=True) if value is not None}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def average_sums(ranks: Sequence[Sums]) -> dict[str, float | None]:
    """Averages over the batches of all ranks; metrics that were always None left out, other non-numbers as None."""
    result: dict[str, float | None] = {}
    for name in dict.fromkeys(name for sums in ranks for name in sums):
        parts = [sums[name] for sums in ranks if name in sums]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            result[name] = None
        elif (count := sum(part[1] for part in known)) > 0:
            result[name] = sum(part[0] for part in known) / count if len(known) > 1 else known[0][0] / count
    return result


def average_batches(ranks: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each batch's metrics, averaged over ranks; values other than numbers are the chief's."""
    if len(ranks) == 1:
        return ranks[0]
    averaged = []
    for rows in zip(*ranks, strict=True):
        row = {}
        for name, value in rows[0].items():
            values = [as_number(other.get(name)) for other in rows]
            row[name] = value if None in values else np.float64(_mean(values))
        averaged.append(row)
    return averaged
