"""Each rank's own time of a training step, which names the rank that the others wait for.

Ranks that average their gradients end each step together, so a step takes all of them equally long. A rank's own time
leaves out its waits for the others: from its last gradient to the end of the backward pass, and while the chief's
buffers arrive. A model that is sharded waits all through `train_batch`, so there only the rest is a rank's own time.

On a GPU, times are between events in its stream. They are read after training has synchronized with the GPU anyway.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dray.training.parallel.ddp import DDPModel

STEPS = 200  # the last steps, which the figures are about


class StepTimer:
    """Times one rank's last steps, and its waits for data and for the device.

    Attributes:
        data_s: seconds of waiting for data, in all.
    """

    def __init__(self, device: torch.device) -> None:
        self._has_stream = device.type == "cuda"
        self._last: Any = None  # the end of the step before
        self._gradient: Any = None  # the last gradient of a backward pass that has not ended
        self._waits: list[tuple[Any, Any]] = []
        self._unread: deque[tuple[Any, Any, list[tuple[Any, Any]]]] = deque(maxlen=STEPS)
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS)  # own time and waits for other ranks, in ms
        self._began = self._ended = 0.0
        self.data_s = self._device_s = self._all_s = 0.0
        self._known = 0.0, 0.0, 0.0  # the same three at the last figures

    @contextlib.contextmanager
    def watching(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Notice during the block when these models wait for other ranks."""
        with contextlib.ExitStack() as stack:
            for model in models:
                # The parameter that a forward pass uses first gets its gradient last.
                first = next((each for each in model.parameters() if each.requires_grad), None)
                if isinstance(model, DDPModel) and first is not None:
                    stack.callback(first.register_post_accumulate_grad_hook(self.on_gradient).remove)  # type: ignore[no-untyped-call]
                    model.while_syncing = self.waiting
                    stack.callback(delattr, model, "while_syncing")
            yield

    def begin(self) -> None:
        """Call before the first step of a section."""
        self._began = self._ended = time.perf_counter()
        self._last, self._gradient, self._waits = self._now(), None, []

    def on_gradient(self, _: torch.Tensor) -> None:
        """Call when a backward pass has its last gradient; of several calls, the last counts."""
        self._gradient = self._now()

    def end_backward(self) -> None:
        if self._gradient is not None:
            self._waits.append((self._gradient, self._now()))
            self._gradient = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which this rank may wait for others."""
        began = self._now()
        yield
        self._waits.append((began, self._now()))

    def end_step(self) -> None:
        now = self._now()
        self._unread.append((self._last, now, self._waits))
        self._last, self._waits = now, []

    def end(self, data_s: float) -> None:
        """Call after the last step of a section, in which this rank has waited `data_s` for data."""
        self._ended = time.perf_counter()
        self.data_s += data_s

    def synchronized(self) -> None:
        """Call when the device has completed the section."""
        now = time.perf_counter()
        self._device_s += now - self._ended
        self._all_s += now - self._began

    def figures(self) -> dict[str, float]:
        """Figures of this rank, after `synchronized`: the median and the 99th percentile of its own times in ms, the
        median of its waits for others, and the shares of time that it has waited for data and for a GPU."""
        between = torch.cuda.Event.elapsed_time if self._has_stream else _between
        while self._unread:
            first, last, waits = self._unread.popleft()
            waited = sum(between(*each) for each in waits)
            self._steps.append((between(first, last) - waited, waited))
        sums = self.data_s, self._device_s, self._all_s
        data_s, device_s, all_s = (now - then for now, then in zip(sums, self._known, strict=True))
        if not self._steps or not all_s:
            return {}
        own, waits_ms = zip(*self._steps, strict=True)
        figures = {
            "step_ms": quantile(own, 0.5),
            "step_p99_ms": quantile(own, 0.99),
            "rank_wait_ms": quantile(waits_ms, 0.5),
            "host_wait_percent": 100 * data_s / all_s,
        }
        if self._has_stream:
            figures["device_wait_percent"] = 100 * device_s / all_s
        self._known = sums
        return figures

    def _now(self) -> Any:
        if not self._has_stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _between(first: float, last: float) -> float:
    return 1000 * (last - first)


def quantile(values: Iterable[float], share: float) -> float:
    """
    >>> quantile([3, 1, 2], 0.5)
    2
    """
    ordered = sorted(values)
    return ordered[int(share * len(ordered))]


def over_ranks(ranks: Sequence[Mapping[str, float]], nodes: Sequence[str]) -> dict[str, float]:
    """The step times of a trial, from the figures of each rank and its node.

    A rank alone would take its own time for a step, and what averaging the gradients takes at least: the wait of the
    rank that the others wait for. ``step_ms`` is the median over ranks, ``step_p99_ms`` the maximum.
    ``slowest_rank_percent/NODE/RANK`` says by how much the slowest rank exceeds the median of the others.
    """
    timed = {rank: figures for rank, figures in enumerate(ranks) if "step_ms" in figures}
    if not timed:
        return {}
    least = min(each["rank_wait_ms"] for each in timed.values())
    steps = {rank: each["step_ms"] + least for rank, each in timed.items()}
    found = {
        "step_ms": quantile(steps.values(), 0.5),
        "step_p99_ms": max(each["step_p99_ms"] for each in timed.values()) + least,
    }
    slowest = max(steps, key=lambda rank: steps[rank])
    others = [step for rank, step in steps.items() if rank != slowest]
    if others and (median := quantile(others, 0.5)) > 0:
        found[f"slowest_rank_percent/{nodes[slowest]}/{slowest}"] = 100 * (steps[slowest] / median - 1)
    return found
