"""Leaks of a trial: threads, processes and memory, which are ended or freed, or are a reason to replace the process."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Set
from types import FrameType
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from dray.leases.failure import is_users_file
from dray.memory import MACHINE_MEMORY, give_back, gpu_in_use
from dray.pytorch.cached import bytes_without_kept, drop_all
from dray.text import counted, cut, printable, size
from dray.training.parallel import ddp
from dray.worker.children import END_S, children, end_children

MAX_GROWTH = 1 / 20
"""The growth of a process's memory since its first trial that is allowed, as a share of the machine's or the GPU's
memory: little enough for the workers of eight GPUs together, and enough that only a real leak restarts processes, which
takes seconds."""

MAX_NAMED = 5
"""How many child processes are named at most."""


class Leaks:
    """Finds threads, child processes and memory that a trial leaves behind.

    Threads and children that exist when the object is created don't count. `owns_gpu`: no other trial uses this
    process's GPU.
    """

    def __init__(self, *, owns_gpu: bool = True) -> None:
        self._owns_gpu = owns_gpu
        self._threads = set(sys._current_frames())
        self._children = set(children())
        self._memory: tuple[int, int] | None = None

    def has_children(self) -> bool:
        """Whether a trial's child process is running."""
        return bool(children(self._children))

    def clean_up(self, kept: int = 0) -> list[str]:
        """End child processes, and free memory that has grown, but for `kept` bytes. Returns the reasons not to run
        another trial in this process."""
        threads = self._threads_in_users_code()
        # Ended children count too: their ends of pipes and queues in this process may be unusable.
        ended = end_children(spare=self._children)
        running = [
            f"process {child} was still running: {cut(printable(command), 200)}" for child, command in ended.items()
        ]
        if len(running) > MAX_NAMED:
            running[MAX_NAMED:] = [f"{len(running) - MAX_NAMED} more processes were still running"]
        return [*threads, *running, *self._grown_memory(kept)]

    def _threads_in_users_code(self) -> list[str]:
        """Threads that are running the user's code. Many libraries keep a waiting thread for the whole process."""
        deadline = time.monotonic() + END_S
        while running := {
            ident: line
            for ident, frame in sys._current_frames().items()
            if ident not in self._threads and ident != threading.get_ident() and (line := _users_line(frame))
        }:
            if time.monotonic() > deadline:
                names = {thread.ident: thread.name for thread in threading.enumerate()}
                return [
                    f"thread {names.get(ident, ident)} is still running, at {line}" for ident, line in running.items()
                ]
            time.sleep(0.01)
        return []

    def _grown_memory(self, kept: int) -> list[str]:
        memory, gpu_memory = bytes_without_kept()
        if self._owns_gpu and gpu_in_use():
            # Includes memory outside of torch's allocator, such as NCCL's communicators.
            free, total = torch.cuda.mem_get_info()
            gpu_memory += total - free - torch.cuda.memory_reserved()
        if self._memory is None:
            # Measured after the first trial, whose imports and caches serve later ones too.
            self._memory = memory - kept, gpu_memory
        reasons, limit = [], MAX_GROWTH * MACHINE_MEMORY
        before = self._memory[0] + kept
        grown = memory - before
        if grown > limit:  # only then, because it takes time
            give_back()
            grown = bytes_without_kept()[0] - before
        if grown > limit and drop_all():  # cached values may have grown since they were made
            give_back()
            grown = bytes_without_kept()[0] - before
        if grown > limit:
            why = "something keeps trials' objects alive"
            reasons.append(f"its memory has grown by {size(grown)} since its first trial: {why}")
        if gpu_memory:
            gpu_grown = gpu_memory - self._memory[1]
            if gpu_grown > MAX_GROWTH * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory:
                reasons.append(f"{size(gpu_grown)} more of its GPU's memory is in use than after its first trial")
        return reasons


def _users_line(frame: FrameType | None) -> str:
    """The innermost line of the user's own code in this stack; "" if there is none."""
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# ------------------------------------------------------------------------------------------------------ process groups
# Trials make process groups with `new_group` or `init_device_mesh`. Each has threads and connections, and a
# communicator in the GPU's memory.
def group_names() -> set[str]:
    """The names of all process groups of this process."""
    return {group.group_name for group in c10d._world.pg_map}


def groups_of_trial(before: Set[str]) -> list[Any]:
    """The process groups that a trial has made and not destroyed, in the order of their making on all ranks.
    `before`: `group_names` at the trial's beginning."""
    return [group for group in c10d._world.pg_map if group.group_name not in before and not ddp.is_kept(group)]


def end_groups(groups: list[Any]) -> list[str]:
    """End process groups, on all ranks together, and empty the list. Returns the reasons not to run another trial in
    this process: a global variable, a library's cache or compiled code still holds a group, which the next trial might
    use."""
    device = torch.device("cuda" if gpu_in_use() else "cpu")
    if gpu_in_use():
        torch.cuda.synchronize()  # ending would abort queued collectives that another rank may still need
    made = [weakref.ref(group) for group in groups]
    while groups:  # no variable may keep a group: its threads end with the last reference
        ddp.end_group(device, groups.pop())
    held = sum(group() is not None for group in made)
    return [f"{counted(held, 'process group')} that its trial made can't be freed"] if held else []
