"""The end of a trial whose group already trains another one: its last checkpoint is written, and its report follows."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import Future

from dray.leases.failure import failure_of
from dray.leases.messages import Departure
from dray.rpc.calls import PeerUnreachable
from dray.rpc.connection import Connection
from dray.training.checkpoint.checkpointer import in_thread


def none() -> tuple[float, ...]:
    return ()


class Behind:
    """Implements `dray.training.host.Behind`, for one lease of this process after another.

    At most one trial has left its last checkpoint behind: memory holds one copy of a state.

    Args:
        desk: the connection to the desk.

    Attributes:
        finish: waits until the current lease's last checkpoint and report are done; None if it has left none behind.
        goes_on: whether that trial would have trained on, if no other had waited.
        complete: finishes the trial and returns its departure; set once it has left.
        transfers, earlier_transfers: of that trial's host, and of the one before; see `dray.worker.host.RayHost`.
    """

    def __init__(self, desk: Connection) -> None:
        self._desk, self._lease, self._rank = desk, 0, 0
        self._earlier: Future[None] | None = None
        self._nbytes = 0
        self.finish: Callable[[], None] | None = None
        self.goes_on = False
        self.complete: Callable[[], Departure] | None = None
        self.transfers = self.earlier_transfers = none

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def begin(self, lease: int, rank: int) -> None:
        """This process begins a lease, as this rank."""
        self._lease, self._rank = lease, rank
        self.finish = self.complete = None

    def is_wanted(self) -> bool:
        try:
            return bool(self._desk.waited_for(self._lease).result())
        except PeerUnreachable:  # the next report fails
            return False

    def take(self, finish: Callable[[], None], nbytes: int, *, goes_on: bool) -> None:
        self.finish, self._nbytes, self.goes_on = finish, nbytes, goes_on

    def start(self) -> None:
        """Complete the lease's trial in another thread, if it has left anything behind, and tell the desk how it left.
        The group is free by now."""
        if (complete := self.complete) is None:
            return
        lease, rank = self._lease, self._rank

        def end() -> None:
            try:
                departure = complete()
            except BaseException as error:  # of its log, for example: the desk waits for its end
                text = "".join(traceback.format_exception(error))
                departure = Departure(outcome="errored", error=text, failure=failure_of(error, -1))
            if rank == 0:
                self._desk.tell("leave", lease, rank, departure)

        self._earlier, self.earlier_transfers = in_thread("dray-behind", end), self.transfers
        self.finish = self.complete = None

    @property
    def nbytes(self) -> int:
        """The size of the copy in memory."""
        is_held = self.finish is not None or (self._earlier is not None and not self._earlier.done())
        return self._nbytes if is_held else 0

    def wait(self) -> None:
        if self._earlier is not None:
            self._earlier.result()

    def call_after(self, work: Callable[[], object]) -> None:
        """Call a function once the earlier trial has ended."""
        if self._earlier is None:
            work()
        else:
            self._earlier.add_done_callback(lambda _: work())
