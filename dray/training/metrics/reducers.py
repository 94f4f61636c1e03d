"""Reducing metrics of batches to metrics of a workload, over batches and ranks."""

from __future__ import annotations

import abc
import copy
import enum
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dray.training.metrics.values import detached


class Reducer(enum.Enum):
    """Reduces the values of a validation metric over batches to one number.

    Attributes:
        AVG: the mean over batches, as in Determined. A last, smaller batch counts as much as any other.
        AVG_OVER_RECORDS: the mean over records: each batch is weighted by its length (`get_batch_length`).
        SUM, MAX, MIN: the sum, maximum or minimum over all batches of all ranks.
    """

    AVG = 1
    SUM = 2
    MAX = 3
    MIN = 4
    AVG_OVER_RECORDS = 5


def reduce_values(reducer: Reducer, values: Sequence[Any], counts: Sequence[int] | None = None) -> float:
    """Reduce values to one number. `counts`: the weights of values in an average.

    >>> reduce_values(Reducer.AVG, [1.0, 4.0], counts=[2, 1])
    2.0
    """
    array = np.asarray(values)
    if array.dtype.kind == "f":
        array = array.astype(np.float64)
    if reducer in (Reducer.AVG, Reducer.AVG_OVER_RECORDS):
        return float(np.mean(array if counts is None else np.average(array, axis=0, weights=counts)))
    return getattr(array, reducer.name.lower())().item()  # type: ignore[no-any-return]


class MetricReducer(abc.ABC):
    """A metric that can't be averaged over batches (ROC AUC, mean IoU), and is reduced in two steps.

    Give the class an `update` method with any arguments, and call it in `train_batch` or `evaluate_batch`. After each
    workload, `per_slot_reduce` is called on every slot, then `cross_slot_reduce` with the list of the slots' results in
    rank order, even if there is just one process.

    >>> class Largest(MetricReducer):
    ...     def reset(self):
    ...         self.seen = []
    ...     def update(self, value):
    ...         self.seen.append(value)
    ...     def per_slot_reduce(self):
    ...         return max(self.seen)
    ...     def cross_slot_reduce(self, per_slot_metrics):
    ...         return max(per_slot_metrics)
    >>> largest = Largest()
    >>> largest.reset()
    >>> largest.update(2.0)
    >>> largest.cross_slot_reduce([largest.per_slot_reduce(), 5.0])  # of two slots
    5.0
    """

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget all values. Called before each training and validation workload."""

    @abc.abstractmethod
    def per_slot_reduce(self) -> Any:
        """Return this slot's contribution, any picklable object. With several slots, its tensors arrive on the CPU."""

    @abc.abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """Return the metric from the contributions of all slots, in rank order: a dict of metrics if the reducer was
        wrapped without a name, and otherwise a value that is not a dict."""


class FunctionReducer(MetricReducer):
    """A function of all values, which with one `update` per batch are in the order of a single process."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self.function = function
        self.values: list[Any] = []

    def reset(self) -> None:
        self.values = []

    def update(self, value: Any) -> None:
        self.values.append(detached(value))

    def per_slot_reduce(self) -> list[Any]:
        return self.values

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        return self.function(interleaved(per_slot_metrics))


def interleaved(slots: Sequence[list[Any]]) -> list[Any]:
    """The slots' first values, then their second values, and so on: the order of batches in a single process.

    >>> interleaved([[1, 3, 5], [2, 4]])
    [1, 2, 3, 4, 5]
    """
    nothing = object()
    turns = itertools.zip_longest(*slots, fillvalue=nothing)
    return [value for turn in turns for value in turn if value is not nothing]


class ReducerRegistry:
    """The reducers that a trial has wrapped. Metrics of torchmetrics are moved to the device."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._returned: list[Any] = []
        self._wrapped: list[tuple[MetricReducer, str | None, bool, bool]] = []

    def wrap_reducer(
        self, reducer: Any, name: str | None = None, for_training: bool = True, for_validation: bool = True
    ) -> Any:
        """See `PyTorchTrialContext.wrap_reducer`."""
        wrapped: Any = reducer
        if is_torchmetric(reducer):
            wrapped = TorchMetricReducer(reducer.to(self._device))
        elif not isinstance(reducer, MetricReducer):
            if not callable(reducer) or isinstance(reducer, type):
                raise AssertionError(
                    f"wrap_reducer() takes a function or an instance of pytorch.MetricReducer, got {reducer!r}"
                )
            wrapped = FunctionReducer(reducer)
        returned = reducer if is_torchmetric(reducer) else wrapped
        if any(known is returned for known in self._returned):
            raise AssertionError(f"wrap_reducer() was called twice with the same reducer {reducer!r} (name={name!r})")
        self._returned.append(returned)
        self._wrapped.append((wrapped, name, for_training, for_validation))
        return returned

    def reset(self, *, training: bool) -> None:
        for reducer, name in self._of(training):
            _named(reducer, name, "reset", training=training)

    def per_slot(self, *, training: bool) -> list[Any]:
        return [_named(reducer, name, "per_slot_reduce", training=training) for reducer, name in self._of(training)]

    def cross_slot(self, contributions: Sequence[list[Any]], *, training: bool) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        for index, (reducer, name) in enumerate(self._of(training)):
            slots = [row[index] for row in contributions]
            value = _named(reducer, name, "cross_slot_reduce", slots, training=training)
            if isinstance(value, dict) != (name is None):
                must, how = ("must", "without a name") if name is None else ("must not", f"as {name!r}")
                raise ValueError(
                    f"the reducer {_describe(reducer)} {must} return a dict, because it was wrapped {how}, got "
                    f"{value!r} of type {type(value).__name__}"
                )
            reduced = value if name is None else {name: value}
            check_names(reduced, metrics, "another reducer")
            metrics.update(reduced)
        return metrics

    def _of(self, training: bool) -> list[tuple[MetricReducer, str | None]]:
        return [
            (reducer, name)
            for reducer, name, for_training, for_validation in self._wrapped
            if (for_training if training else for_validation)
        ]


def _describe(reducer: MetricReducer) -> str:
    if isinstance(reducer, FunctionReducer):
        return str(getattr(reducer.function, "__qualname__", repr(reducer.function)))
    return type(reducer).__name__


def check_names(reduced: Mapping[str, Any], others: Mapping[str, Any], source: str) -> None:
    """Raise a ValueError if a reducer's metric has the name of another metric."""
    if both := sorted(reduced.keys() & others.keys()):
        raise ValueError(
            f"a reducer and {source} both give the metric {', '.join(map(repr, both))}; give one of them another name: "
            "wrap_reducer(..., name=...)"
        )


def _named(reducer: MetricReducer, name: str | None, step: str, *args: Any, training: bool) -> Any:
    try:
        return getattr(reducer, step)(*args)
    except Exception as error:
        # All reducers have these methods, so the traceback does not identify the reducer.
        other, argument = ("evaluate_batch()", "for_training") if training else ("train_batch()", "for_validation")
        raise ValueError(
            f"the reducer {_describe(reducer)} (name={name!r}) failed in {step}(): {error!r}; if only {other} "
            f"updates it, wrap it with {argument}=False"
        ) from error


def is_torchmetric(candidate: Any) -> bool:
    """Whether this is a `torchmetrics.Metric` or `MetricCollection`. (It can't be before torchmetrics is imported.)"""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(candidate, (torchmetrics.Metric, torchmetrics.MetricCollection))


class TorchMetricReducer(MetricReducer):
    """A torchmetrics metric or collection that the trial updates.

    torchmetrics itself would gather states in separate collectives. Here they travel with the trainer's other data, so
    that no rank waits for one that has failed.
    """

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        metric.reset()
        #: Computes the metric over all ranks, on the CPU, without changing the trial's own metric.
        self._whole = copy.deepcopy(metric).cpu()
        for _, part in _parts(self._whole):
            # bool() is False: the state is that of all ranks, so there is nothing to gather.
            part.distributed_available_fn = bool

    def reset(self) -> None:
        self.metric.reset()

    def per_slot_reduce(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """(number of updates, state on the CPU) of each metric, by name."""
        if isinstance(self.metric, sys.modules["torchmetrics"].MetricCollection):
            # items() separates the states of metrics that share one in a collection.
            list(self.metric.items())
        return {
            name: (part._update_count, {key: _to_cpu(value) for key, value in part.metric_state.items()})
            for name, part in _parts(self.metric)
        }

    def cross_slot_reduce(self, per_slot_metrics: list[dict[str, tuple[int, dict[str, Any]]]]) -> Any:
        self._whole.reset()
        for name, part in _parts(self._whole):
            slots = [slot[name] for slot in per_slot_metrics]
            part._update_count = sum(count for count, _ in slots)
            for key, reduction in part._reductions.items():
                setattr(part, key, _merged([state[key] for _, state in slots], reduction))
        return self._whole.compute()


def _parts(metric: Any) -> Iterator[tuple[str, Any]]:
    kind = sys.modules["torchmetrics"].Metric
    return ((name, module) for name, module in metric.named_modules() if isinstance(module, kind))


def _merged(states: list[Any], reduction: Any) -> Any:
    if isinstance(states[0], list):
        return interleaved(states)
    if len(states) == 1:
        return states[0]
    stacked = torch.stack(states)
    return stacked if reduction is None else reduction(stacked)


def _to_cpu(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        # A copy, since the metric will update its state.
        return state.detach().to("cpu", copy=True)
    if isinstance(state, (list, tuple)):
        return [_to_cpu(item) for item in state]
    return copy.deepcopy(state)
