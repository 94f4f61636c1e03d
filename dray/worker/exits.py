"""The end of a trial's program on its ranks: a rank that has ended waits for the others, unless they wait for it.

Under torchrun a process that ends closes its connections, so a rank that waits for it in a collective operation fails.
Here the processes and their connections live on, and that rank would wait until the operation times out. But it can be
told: it has begun more collective operations of all ranks than another rank whose program has ended.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dray.desk.failure import running_users_line

LOOK_S = 1.0
ENDED_POLL_S = 0.1


def begun() -> int:
    """How many collective operations of all ranks this rank has begun; 0 if the count can't be relied on.

    gloo also counts what one rank sends to another: with two ranks it counts on both, with more not on all. So does
    NCCL with older versions of torch for batched sends; there even two ranks may differ.
    """
    if not (torch.__version__ >= "2.7" if dist.get_backend() == "nccl" else dist.get_world_size() <= 2):
        return 0
    return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]


class Ends:
    """The end of one lease's program, on one rank.

    Args:
        store: through which all ranks of the group tell one another things beside collectives; see
            `DistributedContext.side_store`. None: there is no other rank.
        lease: its number.
        rank, size: of this process within its group.
        begun: the function of this name, or a substitute.
    """

    def __init__(self, store: Any, lease: int, rank: int, size: int, begun: Callable[[], int] = begun) -> None:
        self._store, self._rank, self._begun = store, rank, begun
        self._ended = [f"ended/{lease}/{each}" for each in range(size)]
        self._waits = f"waits/{lease}"

    @contextlib.contextmanager
    def of_others_seen(self, code: Path | None) -> Iterator[None]:
        """While the program runs in the block, tell ranks that have ended if this one waits for them.

        Args:
            code: the directory of the user's code.
        """
        if self._store is None:
            yield
            return
        over, program = threading.Event(), threading.get_ident()

        def look() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone with another rank, whose end is told otherwise
                while not over.wait(LOOK_S):
                    if (missing := self._missing()) is not None:
                        line = running_users_line(sys._current_frames()[program], code)
                        what = f"rank {self._rank} waits in a collective operation for rank {missing}"
                        self._store.set(self._waits, "\n".join([f"{what}, which has left the program", *line]))
                        return

        thread = threading.Thread(target=look, name="dray-ends", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _missing(self) -> int | None:
        """A rank that this one waits for in vain, if any."""
        for rank, key in enumerate(self._ended):
            if self._store.check([key]) and int(self._store.get(key)) < self._begun():
                return rank
        return None

    def awaited(self) -> str:
        """The program has ended here: wait until it has on all ranks.

        Not by a collective, which times out: what one rank does alone in the end may take longer.

        Returns:
            The error, if another rank waits for this one; otherwise "".
        """
        if self._store is None:
            return ""
        self._store.set(self._ended[self._rank], str(self._begun()))
        pause_s = 0.001
        while not self._store.check(self._ended):
            if self._store.check([self._waits]):
                return str(self._store.get(self._waits).decode())
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, ENDED_POLL_S)
        return ""
