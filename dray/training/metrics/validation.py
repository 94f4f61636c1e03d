"""Validation metrics of batches, and their reduction over batches and ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dray.training.metrics.reducers import Reducer, reduce_values
from dray.training.metrics.values import detached, to_numpy


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
                values.append(detached(value))
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
