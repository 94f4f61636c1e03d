"""The config's `profiling` section: torch's profiler traces a window of batches, and on a GPU also its memory."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, profile, tensorboard_trace_handler

from dray.training.plan import FIRST_TRACED, window_fault
from dray.training.units import is_int

log = logging.getLogger(__name__)

BATCHES = 10  # the length of a window without an end
MAX_EVENTS = 100_000  # the number of latest allocations in a snapshot of GPU memory


def dump_memory(path: Path) -> None:
    """Write what occupies the GPU's memory, and since `Window` began also its history, for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


class Window(profile):
    """Traces batches `begin_on_batch` to `end_after_batch` of a run that begins at batch `first`.

    A run that ends within the window, even by an error, writes its trace up to there.
    """

    def __init__(
        self,
        *,
        first: int,
        rank: int,
        directory: Path,
        device: torch.device,
        begin_on_batch: int = FIRST_TRACED,
        end_after_batch: int | None = None,
    ) -> None:
        self._begin = begin_on_batch
        if not is_int(begin_on_batch) or begin_on_batch < 0:  # nothing else checks a program's config
            raise ValueError(f"profiling.begin_on_batch must be an int >= 0, got {begin_on_batch!r}")
        self._end = begin_on_batch + BATCHES - 1 if end_after_batch is None else end_after_batch
        if fault := window_fault(begin_on_batch, self._end):
            raise ValueError(f"profiling.end_after_batch {fault}")
        self._first, self._name, self._directory = first, f"rank{rank}", directory
        self._records_memory = device.type == "cuda"
        super().__init__(schedule=self._action, on_trace_ready=self._write)

    def _action(self, step: int) -> ProfilerAction:
        batch = self._first + step
        if self._begin <= batch <= self._end:
            return ProfilerAction.RECORD_AND_SAVE if batch == self._end else ProfilerAction.RECORD
        return ProfilerAction.WARMUP if batch == self._begin - 1 else ProfilerAction.NONE

    def start_trace(self) -> None:
        if self._records_memory:
            # Only Python's frames: resolving C++ symbols would take minutes.
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_EVENTS, clear_history=True)
        super().start_trace()

    def _write(self, _: profile) -> None:
        try:
            tensorboard_trace_handler(str(self._directory), self._name, use_gzip=True)(self)
            if self._records_memory:
                dump_memory(self._directory / f"{self._name}.memory.pickle")
            log.info("wrote a profile of batches %d to %d to %s", self._begin, self._end, self._directory)
        except (OSError, RuntimeError) as error:
            # A failure here must neither end the training nor hide the error that ends it.
            log.warning("a profile could not be written to %s: %s", self._directory, error)
        finally:
            if self._records_memory:
                torch.cuda.memory._record_memory_history(enabled=None)
