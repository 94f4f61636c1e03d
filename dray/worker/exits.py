"""Waits until a trial's program has exited on all ranks, and detects a rank that is blocked by another rank's exit.

Under torchrun a process that exits closes its connections, so a rank that is blocked in a collective with it fails.
Here processes and connections outlive the program, and that rank would block until the collective times out. Counting
collectives detects this: the blocked rank has begun more of them than the rank whose program has exited.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dray.leases.failure import running_users_line

CHECK_EVERY_S = 1.0
POLL_S = 0.1


def collectives_begun() -> int:
    """The number of collectives of all ranks that this rank has begun, as far as the count is reliable.

    gloo also counts point-to-point messages: with two ranks on both of them, with more ranks not on all.
    """
    world: Any = dist.group.WORLD
    backends = {world._get_backend(device) for device in world._device_types}
    return sum(
        each._get_sequence_number_for_group()
        for each in backends
        if each.name() != "gloo" or dist.get_world_size() <= 2
    )


class ProgramExits:
    """The exits of one lease's program, seen from one rank. `store`: from `DistributedContext.side_store`; None for a
    single rank. `count`: `collectives_begun`, or a substitute."""

    def __init__(
        self, store: Any, lease: int, rank: int, size: int, count: Callable[[], int] = collectives_begun
    ) -> None:
        self._store, self._rank, self._count = store, rank, count
        self._exited = [f"exited/{lease}/{each}" for each in range(size)]
        self._blocked = f"blocked/{lease}"

    @contextlib.contextmanager
    def watch(self, code: Path | None) -> Iterator[None]:
        """Report if the program in the block is blocked in a collective with a rank that has exited."""
        if self._store is None:
            yield
            return
        done = threading.Event()
        thread = threading.Thread(
            target=self._report_if_blocked, args=(done, threading.get_ident(), code), name="dray-exits", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _report_if_blocked(self, done: threading.Event, program: int, code: Path | None) -> None:
        with contextlib.suppress(RuntimeError):  # the store died with its rank, whose death is reported elsewhere
            while not done.wait(CHECK_EVERY_S):
                if (exited := self._awaited_rank()) is not None:
                    what = f"rank {self._rank} is blocked in a collective; rank {exited} already exited"
                    line = running_users_line(sys._current_frames()[program], code)
                    self._store.set(self._blocked, "\n".join([what, *line]))
                    return

    def _awaited_rank(self) -> int | None:
        """A rank that has exited, and has begun fewer collectives than this one."""
        for rank, key in enumerate(self._exited):
            if self._store.check([key]) and int(self._store.get(key)) < self._count():
                return rank
        return None

    def wait(self) -> str:
        """Wait, after the program has exited on this rank, until it has on all ranks. Returns an error if another rank
        is blocked by this exit, otherwise "".

        A collective would time out while another rank finishes its work alone.
        """
        if self._store is None:
            return ""
        self._store.set(self._exited[self._rank], str(self._count()))
        pause_s = 0.001
        while not self._store.check(self._exited):
            if self._store.check([self._blocked]):
                return str(self._store.get(self._blocked).decode())
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S)
        return ""
