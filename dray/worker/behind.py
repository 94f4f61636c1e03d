"""The end of a trial whose group already trains another one: its last checkpoint is written, and its report follows."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from dray.leases.failure import failure_of
from dray.leases.messages import Departure
from dray.rpc.calls import PeerUnreachable
from dray.rpc.connection import Connection
from dray.storage.checkpoints import forget_copy
from dray.training.checkpoint.checkpointer import in_thread


@dataclass
class Left:
    """What a trial has left behind; see `dray.training.host.Behind.take`. `complete`: does it all, and returns how the
    trial has left."""

    finish: Callable[[], None]
    nbytes: int
    goes_on: bool
    complete: Callable[[], Departure] | None = None


class Behind:
    """Implements `dray.training.host.Behind`, for one lease of this process after another.

    At most one trial has left its last checkpoint behind: memory holds one copy of a state.

    Args:
        desk: the connection to the desk.

    Attributes:
        left: what the current lease's trial has left behind; None: nothing.
        write_s: the time to write and commit this process's last checkpoint; 0 before the first.
    """

    def __init__(self, desk: Connection) -> None:
        self._desk, self._lease, self._rank = desk, 0, 0
        self._earlier: Future[None] = Future()
        self._earlier.set_result(None)
        self._nbytes = 0  # of the copy that the earlier trial has left
        self._began, self._start_s = 0.0, 0.0
        self.left: Left | None = None
        self.write_s = 0.0

    def close(self) -> None:
        self.wait()
        forget_copy()

    def begin(self, lease: int, rank: int) -> None:
        """This process begins a lease, as this rank."""
        self._lease, self._rank, self._began, self.left = lease, rank, time.monotonic(), None

    def trains(self) -> None:
        """The lease's trial begins to train."""
        self._start_s = time.monotonic() - self._began

    def is_wanted(self, *, returns: bool) -> bool:
        if returns and self.write_s <= self._start_s:  # it would start again for longer than it writes
            return False
        try:
            return bool(self._desk.waited_for(self._lease).result())
        except PeerUnreachable:  # the next report fails
            return False

    def take(self, finish: Callable[[], None], nbytes: int, *, goes_on: bool) -> None:
        self.left = Left(finish, nbytes, goes_on)

    def start(self, ended: Callable[[], object]) -> None:
        """Complete the lease's trial in another thread, if it has left anything behind, and tell the desk how it left.
        Before that, `ended` is called. The group is free by now."""
        left, lease, rank = self.left, self._lease, self._rank
        if left is None or (complete := left.complete) is None:
            ended()
            return

        def end() -> None:
            try:
                departure = complete()
            except BaseException as error:  # of its log, for example: the desk waits for its end
                text = "".join(traceback.format_exception(error))
                departure = Departure(outcome="errored", error=text, failure=failure_of(error, -1))
            ended()
            if rank == 0:
                self._desk.tell("leave", lease, rank, departure)

        self._earlier, self._nbytes, self.left = in_thread("dray-behind", end), left.nbytes, None

    @property
    def nbytes(self) -> int:
        """The size of the copy in memory."""
        if self.left is not None:
            return self.left.nbytes
        return 0 if self._earlier.done() else self._nbytes

    def wait(self) -> None:
        self._earlier.result()

    def call_after(self, work: Callable[[], object]) -> None:
        """Call a function once the earlier trial has ended."""
        self._earlier.add_done_callback(lambda _: work())
