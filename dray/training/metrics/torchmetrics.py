"""Metrics of torchmetrics as reducers: the states of all ranks are merged, and the metric is computed once.

torchmetrics itself would gather states in a separate collective whenever `compute()` is called. Here they are
exchanged with the trainer's other data, so that no rank waits for one that failed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch

from dray.training.metrics.reducers import MetricReducer, interleaved


def is_torchmetric(candidate: Any) -> bool:
    """Whether this is a `torchmetrics.Metric` or `MetricCollection`; impossible before torchmetrics is imported."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(candidate, (torchmetrics.Metric, torchmetrics.MetricCollection))


class TorchMetricReducer(MetricReducer):
    """A metric of torchmetrics, or a collection of them.

    Args:
        metric: the metric that the trial updates.
    """

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        metric.reset()
        #: Computes the metric of all ranks, on the CPU; the trial's own metric is not changed.
        self._whole = copy.deepcopy(metric).cpu()
        for _, part in _parts(self._whole):
            # Its state is already that of all ranks.
            part.distributed_available_fn = _alone

    def reset(self) -> None:
        self.metric.reset()

    def per_slot_reduce(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """(number of updates, state) of each metric in it, on the CPU."""
        if isinstance(self.metric, sys.modules["torchmetrics"].MetricCollection):
            # items() separates the state of metrics that share it in a collection.
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
    """A metric and the metrics in it, by path."""
    kind = sys.modules["torchmetrics"].Metric
    return ((name, module) for name, module in metric.named_modules() if isinstance(module, kind))


def _merged(states: list[Any], reduction: Any) -> Any:
    """Merge the states of all ranks, as torchmetrics would."""
    if isinstance(states[0], list):
        return interleaved(states)
    if len(states) == 1:
        return states[0]
    stacked = torch.stack(states)
    return stacked if reduction is None else reduction(stacked)


def _to_cpu(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        # A copy, since the metric will update its own.
        return state.detach().to("cpu", copy=True)
    if isinstance(state, (list, tuple)):
        return [_to_cpu(item) for item in state]
    return copy.deepcopy(state)


def _alone() -> bool:
    return False
