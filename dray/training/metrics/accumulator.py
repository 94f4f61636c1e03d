"""Metrics of batches, kept on the device until they are needed.

No training batch waits for the device: values are fetched only here, once per report.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import numbers
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dray.training.metrics.reducers import Reducer, reduce_values

#: (sum, number of values) by name; None for a metric that is not a number.
Sums = dict[str, tuple[float, int] | None]
#: One value per batch (or None) by name; None for a metric that is not a number.
Values = dict[str, list[float | None] | None]


class Column:
    """One metric of a workload: a value per batch, left on the device until it is needed."""

    __slots__ = ("_chunks", "fresh", "is_number", "on_device")

    #: How many tensors are kept before they are stacked into one.
    AT_ONCE = 64

    def __init__(self) -> None:
        self.is_number = True
        #: The newest values, of one kind: tensors of one value each if they are `on_device`, else numbers.
        self.fresh: list[Any] = []
        self.on_device = False
        self._chunks: list[torch.Tensor | list[float | None]] = []

    def add(self, value: Any) -> None:
        on_device = isinstance(value, torch.Tensor)
        if on_device:
            if value.numel() != 1:
                self.is_number = False
                return
            # A copy, on the device: the user may change the tensor in place, and a CUDA graph overwrites its outputs
            # in its next replay, also those of torch.compile(mode="reduce-overhead").
            value = value.detach().clone()
            if value.dim():
                value = value.reshape(())
        elif value is not None and (value := as_number(value)) is None:
            self.is_number = False
            return
        if on_device is not self.on_device or (on_device and len(self.fresh) == self.AT_ONCE):
            self._fold()
            self.on_device = on_device
        self.fresh.append(value)

    def pending(self) -> list[torch.Tensor]:
        """What has to be fetched from the device."""
        self._fold()
        return [chunk for chunk in self._chunks if isinstance(chunk, torch.Tensor)] if self.is_number else []

    def values(self, fetched: Iterator[float]) -> list[float | None] | None:
        """All values, with those of `pending()` taken from `fetched`."""
        if not self.is_number:
            return None
        found: list[float | None] = []
        for chunk in self._chunks:
            found.extend(itertools.islice(fetched, len(chunk)) if isinstance(chunk, torch.Tensor) else chunk)
        return found

    def _fold(self) -> None:
        if self.fresh:
            self._chunks.append(_widened(torch.stack(self.fresh)) if self.on_device else self.fresh)
            self.fresh = []


class TrainingMetrics:
    """The metrics of one training workload.

    Args:
        keep_batches: also keep every batch's metrics as they are, for callbacks.
        keep_times: keep the time of each batch, for TensorBoard.
    """

    __slots__ = ("_columns", "_kept", "keep_batches", "keep_times", "times")

    def __init__(self, keep_batches: bool = False, keep_times: bool = False) -> None:
        self.keep_batches = keep_batches
        self.keep_times = keep_times
        self.reset()

    def reset(self) -> None:
        self._columns: dict[str, Column] = {}
        self._kept: list[dict[str, Any]] = []
        #: The time of each batch, in seconds since the epoch.
        self.times: list[float] = []

    def add(self, metrics: Mapping[str, Any] | torch.Tensor) -> None:
        """Add what `train_batch` returned.

        Raises:
            TypeError: neither a dict nor a tensor.
            ValueError: the names differ from those of the batches before.
        """
        if isinstance(metrics, dict):  # first, since the check for a tensor takes longer
            pass
        elif isinstance(metrics, torch.Tensor):
            metrics = {"loss": metrics}
        else:
            raise TypeError(
                "train_batch() must return a dict of metrics or one tensor (the loss), "
                f"got {metrics!r} of type {type(metrics).__name__}"
            )
        columns = self._columns
        if not columns:
            columns.update((name, Column()) for name in metrics)
        if metrics.keys() != columns.keys():
            raise ValueError(
                f"train_batch() must return the same metrics for every batch: {sorted(columns)} before, "
                f"{sorted(metrics)} now"
            )
        for name, value in metrics.items():
            column = columns[name]
            if isinstance(value, torch.Tensor) and value.is_cpu and value.dim() == 0 and value.is_floating_point():
                # Fast path for most metrics: there is no device to wait for, and a number needs no copy and no detach.
                value = value.item()
                if not column.on_device:
                    column.fresh.append(value)
                    continue
            column.add(value)
        if self.keep_times:
            self.times.append(time.time())
        if self.keep_batches:
            self._kept.append({name: _copy(value) for name, value in metrics.items()})

    def take_values(self) -> Values:
        """Every batch's value of each metric; waits for the device once."""
        pending = [chunk for column in self._columns.values() for chunk in column.pending()]
        fetched = iter(torch.cat([chunk.to(pending[0].device) for chunk in pending]).tolist() if pending else ())
        return {name: column.values(fetched) for name, column in self._columns.items()}

    def take_batches(self) -> list[dict[str, Any]]:
        """Every batch's metrics, with tensors as NumPy arrays."""
        return [{name: to_numpy(value) for name, value in metrics.items()} for metrics in self._kept]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    # MPS has no float64.
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def sums_of(values: Values) -> Sums:
    """A rank's sums for the averages."""
    sums: Sums = {}
    for name, column in values.items():
        known = None if column is None else [value for value in column if value is not None]
        sums[name] = None if known is None else (sum(known, 0.0), len(known))
    return sums


def rows_of(ranks: Sequence[Values]) -> Iterator[dict[str, float]]:
    """For each batch, its numbers by name, averaged over ranks."""
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


def _copy(value: Any) -> Any:
    # A copy, as the user may change the tensor in place.
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def average_sums(ranks: Sequence[Sums]) -> dict[str, float | None]:
    """Averages over the batches of all ranks. A metric that was always None is left out; a non-number is None."""
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
            numbers_ = [v for v in values if v is not None]
            row[name] = np.float64(sum(numbers_) / len(numbers_)) if len(numbers_) == len(values) else value
        averaged.append(row)
    return averaged


def as_number(value: Any) -> float | None:
    """The value as a float, if it is a number that a float can hold, or holds exactly one; else None."""
    if isinstance(value, (int, float, numbers.Real, np.number, np.bool_)):
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "fiub":
        return float(value.reshape(()))
    return None


def to_numpy(value: Any) -> Any:
    """Tensors as NumPy arrays, also in dicts, lists and tuples; the rest as it is."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.dtype is torch.bfloat16:
            value = value.float()
        return value.cpu().numpy()
    if isinstance(value, dict):
        return {key: to_numpy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_numpy(item) for item in value) if not hasattr(value, "_fields") else value
    return value


class ValidationMetrics:
    """What `evaluate_batch` returned for each batch on this rank."""

    def __init__(self) -> None:
        self._batches = 0
        #: By name: a value per batch; and, for each value that was taken out of a tensor, the tensor's dtype.
        self._columns: dict[str, tuple[list[Any], list[torch.dtype | None]]] = {}

    def add(self, metrics: Any) -> None:
        """Add one batch.

        Raises:
            TypeError: not a dict.
            ValueError: the names differ from those of the batches before.
        """
        if not isinstance(metrics, dict):
            raise TypeError(
                f"evaluate_batch() must return a dict of metrics, got {metrics!r} of type {type(metrics).__name__}"
            )
        columns = self._columns
        if self._batches == 0:
            columns.update((name, ([], [])) for name in metrics)
        if metrics.keys() != columns.keys():
            raise ValueError(
                "evaluate_batch() must return the same metrics for every batch: "
                f"{sorted(columns)} before, {sorted(metrics)} now"
            )
        self._batches += 1
        for name, value in metrics.items():
            values, dtypes = columns[name]
            if type(value) is torch.Tensor and value.is_cpu and value.dim() == 0 and value.dtype in _NUMPY:
                # Fast path for most metrics: there is no device to wait for, and a number needs no copy.
                values.append(value.item())
                dtypes.append(value.dtype)
            else:
                values.append(_copy(value))
                dtypes.append(None)

    def take(self) -> list[dict[str, Any]]:
        """Every batch's metrics, with tensors as NumPy arrays, all fetched from the device together."""
        columns = {name: _fetch(values, dtypes) for name, (values, dtypes) in self._columns.items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(self._batches)]


#: The dtypes that `to_numpy` gives tensors of these.
_NUMPY = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.float32,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.bool: np.bool_,
}


def _fetch(values: list[Any], dtypes: list[torch.dtype | None]) -> Sequence[Any]:
    # Tensors of the same dtype, as they mostly are, are fetched together. Stacking several dtypes would change them.
    if {type(value) for value in values} == {torch.Tensor} and len({value.dtype for value in values}) == 1:
        with contextlib.suppress(RuntimeError):  # different shapes or devices
            return [np.asarray(row) for row in to_numpy(torch.stack(values))]
    return [
        to_numpy(value) if dtype is None else np.array(value, _NUMPY[dtype])
        for value, dtype in zip(values, dtypes, strict=True)
    ]


def reducers_of(choice: Any, names: Sequence[str]) -> dict[str, Reducer]:
    """The reducer for each metric, from what `evaluation_reducer()` returned.

    Raises:
        TypeError: it is neither a Reducer nor a dict of them.
        ValueError: the dict's keys are not exactly the metrics' names.
    """
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


def reduce_batches(rows: Sequence[Mapping[str, Any]], reducers: Mapping[str, Reducer]) -> dict[str, float]:
    """One rank's share of the validation metrics.

    Raises:
        TypeError: a metric is not a number.
    """
    reduced = {}
    for name, reducer in reducers.items():
        values = [row[name] for row in rows]
        try:
            reduced[name] = reduce_values(reducer, values)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"evaluate_batch() returned {values[0]!r} of type {type(values[0]).__name__} for the metric "
                f"{name!r}, which can't be reduced over batches ({error}); return a number, or use "
                "context.wrap_reducer()"
            ) from error
    return reduced


def combine_ranks(
    parts: Sequence[tuple[Mapping[str, float], int]], reducers: Mapping[str, Reducer]
) -> dict[str, float]:
    """Validation metrics over all ranks, from the (metrics, number of batches) of the ranks that had any."""
    if len(parts) == 1:
        return dict(parts[0][0])
    counts = [count for _, count in parts]
    return {
        name: reduce_values(reducer, [metrics[name] for metrics, _ in parts], counts)
        for name, reducer in reducers.items()
    }


def jsonable(metrics: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """The metrics as plain numbers, strings, lists and dicts.

    Raises:
        TypeError: a metric, which it names, is not JSON-serialisable.
    """
    return {str(name): _plain(value, name=str(name), source=source) for name, value in metrics.items()}


def _plain(value: Any, *, name: str, source: str) -> Any:
    if value is None or isinstance(value, (bool, float, str)):
        return value
    value = to_numpy(value)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "fiubU":
        return value.item() if value.size == 1 else value.tolist()
    number = as_number(value)
    if number is not None:
        return int(value) if isinstance(value, numbers.Integral) else number
    if isinstance(value, numbers.Real):
        raise TypeError(f"{source} returned the metric {name!r} with a number that is larger than any float")
    if isinstance(value, (list, tuple)):
        return [_plain(item, name=name, source=source) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item, name=f"{name}.{key}", source=source) for key, item in value.items()}
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"{source} returned the metric {name!r} of type {type(value).__name__}, which is not JSON-serialisable; "
            "return numbers, strings, or lists and dicts of them"
        ) from None
    return value
