"""What a trial leaves behind that runs on or fills memory: it is ended if possible, otherwise reported."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import torch

from dray.imports import is_installed
from dray.memory import MACHINE_MEMORY, give_back
from dray.pytorch.cached import drop_all, unheld
from dray.worker.children import END_S, children, end_children

LEAK = 1 / 20
"""How much more memory (as a share of the machine's, or of a GPU's) a process may keep after a trial than after the
first one: little enough for the workers of eight GPUs at once, and enough that only a real leak restarts processes,
which takes seconds."""

_DRAY = Path(__file__).parents[2]
# searchers is not imported: trials have no use for it.
_OURS = tuple(f"{place}{os.sep}" for place in (_DRAY, _DRAY.parent / "searchers"))


class Leftovers:
    """Looks after each trial for what was not there when this object was made."""

    def __init__(self) -> None:
        self._threads = set(sys._current_frames())
        self._children = set(children())
        self._memory: int | None = None
        self._gpu_memory: int | None = None

    def has_children(self) -> bool:
        """Whether there are child processes that were not there before."""
        return bool(children(self._children))

    def found(self) -> list[str]:
        """Why this process should run no other trial; empty if it can."""
        found = [*self._running_threads(), *self._running_children()]
        memory, gpu_memory = unheld()
        if self._memory is None or self._gpu_memory is None:
            # Measured after the first trial: it has imported and warmed up what later ones use too.
            self._memory, self._gpu_memory = memory, gpu_memory
        grown = memory - self._memory
        if grown > LEAK * MACHINE_MEMORY:
            give_back()
            grown = unheld()[0] - self._memory
        if grown > LEAK * MACHINE_MEMORY and drop_all():  # they may have grown since they were made
            give_back()
            grown = unheld()[0] - self._memory
        if grown > LEAK * MACHINE_MEMORY:
            found.append(
                f"its memory has grown by {_mb(grown)} since its first trial: something keeps trials' objects alive"
            )
        if gpu_memory:
            grown = gpu_memory - self._gpu_memory
            if grown > LEAK * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory:
                found.append(f"{_mb(grown)} more of its GPU memory is in use than after its first trial")
        return found

    def _running_threads(self) -> list[str]:
        """Threads that still run the trial's code.

        Threads of libraries are left alone: many libraries have one that serves the whole process, and waits.
        """
        deadline = time.monotonic() + END_S
        while left := {
            ident: place
            for ident, frame in sys._current_frames().items()
            if ident not in self._threads and ident != threading.get_ident() and (place := _of_users(frame))
        }:
            if time.monotonic() > deadline:
                names = {thread.ident: thread.name for thread in threading.enumerate()}
                return [
                    f"thread {names.get(ident, ident)} is still running, at {place}" for ident, place in left.items()
                ]
            time.sleep(0.01)
        return []

    def _running_children(self) -> list[str]:
        """Child processes. They are ended, but their ends of pipes and queues in this process may be unusable."""
        ended = end_children(spare=self._children)
        return [f"process {child} was still running: {command}" for child, command in ended.items()]


def _of_users(frame: FrameType | None) -> str:
    """The innermost place of this stack in code that is neither installed nor ours; "" if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        # Code made from a string, such as the methods of a dataclass, has no file.
        if not file.startswith(("<", *_OURS)) and not is_installed(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _mb(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
