"""Exchanges between ranks. If one rank fails, they raise an error on all.

A rank leaves for a `Reason`, which the others learn in their next exchange. A rank that has failed waits `FAIL_S`
seconds for the others to reach that exchange. Then it raises its error, and its host ends the other processes. Before
it waits it passes the error to `on_failure`, since NCCL's watchdog may end its process meanwhile.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from dray.training.errors import DataExhausted, InvalidHP, PeerFailed, ShouldExit
from dray.training.parallel.distributed import DistributedContext

log = logging.getLogger(__name__)

T = TypeVar("T")

FAIL_S = 20.0  # the time that a failed rank waits for the others


class Reason(enum.IntEnum):
    """The reason why a rank leaves. If ranks have different reasons, the greatest counts."""

    DISCONNECTED = 0  # its collectives failed or were aborted, because another rank leaves
    EXIT = 1
    EXHAUSTED = 2
    INVALID_HP = 3
    FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Describes an exception, which may not be picklable, with which a rank leaves, to the other ranks."""

    reason: Reason
    save: bool = True  # the training so far
    message: str = ""
    aborted: bool = False  # the process groups were aborted, so tensors may contain garbage

    @classmethod
    def because_of(cls, error: BaseException) -> Leave:
        match error:
            case ShouldExit():
                return cls(reason=Reason.EXIT, save=not error.skip_exit_checkpoint)
            case InvalidHP():
                return cls(reason=Reason.INVALID_HP, message=error.msg)
            case DataExhausted():
                return cls(reason=Reason.EXHAUSTED, message=str(error))
        return cls(reason=Reason.FAILED, message=repr(error))

    def as_error(self, rank: int, doing: str) -> Exception:
        match self.reason:
            case Reason.EXIT:
                return ShouldExit(skip_exit_checkpoint=not self.save)
            case Reason.INVALID_HP:
                return InvalidHP(self.message)
            case Reason.EXHAUSTED:
                return DataExhausted(self.message)
        return PeerFailed(f"rank {rank} failed while {doing}: {self.message}")


@contextlib.contextmanager
def all_or_none(peers: DistributedContext, doing: str) -> Iterator[list[Any]]:
    """A block that all ranks run, without communicating in it. If one rank fails, all raise at the end of the block.

    Yields an empty list, to which a rank may append one value. After the block, the list has the values of all ranks.

    Raises:
        ShouldExit, InvalidHP: raised on every rank if one rank raises them.
        PeerFailed: on the ranks that did not fail, for any other error: "rank 1 failed while <doing>".
    """
    error: BaseException | None = None
    values: list[Any] = []
    try:
        yield values
    except (Exception, SystemExit) as caught:
        error = caught
    leave = None if error is None else leave_by(peers, error)
    ranks = exchange(peers, (values[0] if values else None, leave), leave, error)
    if error is not None:
        raise error
    for rank, (_, other) in enumerate(ranks):
        if other is not None:
            raise other.as_error(rank, doing)
    values[:] = [value for value, _ in ranks]


def on_all(peers: DistributedContext, doing: str, work: Callable[[], T]) -> list[T]:
    """Call a function on each rank, and return all results on all ranks. If one rank fails, all raise."""
    with all_or_none(peers, doing) as results:
        results.append(work())
    return results


def on_chief(peers: DistributedContext, doing: str, work: Callable[[], T], message: Any = None) -> tuple[T, list[Any]]:
    """Call a function on the chief. All ranks get its result, and the list of all ranks' `message`.

    If the function fails, all ranks raise. There is just one exchange, since each takes a millisecond.
    """
    ranks: list[Any] = on_all(peers, doing, lambda: (work() if peers.rank == 0 else None, message))
    return ranks[0][0], [row[1] for row in ranks]


_report: Callable[[BaseException], None] | None = None


@contextlib.contextmanager
def on_failure(report: Callable[[BaseException], None]) -> Iterator[None]:
    """Within the block, call `report` with this rank's error as soon as it fails, unless it is the only rank."""
    global _report
    before, _report = _report, report
    try:
        yield
    finally:
        _report = before


def leave_by(peers: DistributedContext, error: BaseException) -> Leave:
    """Describe this rank's error to the other ranks. A failure is also reported, see `on_failure`."""
    leave = Leave.because_of(error)
    if leave.reason is Reason.FAILED and peers.size > 1 and _report is not None:
        _report(error)
    return leave


def exchange(peers: DistributedContext, message: T, leave: Leave | None, error: BaseException | None) -> list[T]:
    """Allgather. A rank that has failed does not wait long for the others, and raises its own error if they don't
    come."""
    has_failed = leave is not None and leave.reason is Reason.FAILED
    try:
        return peers.allgather(message, timeout_s=FAIL_S if has_failed else None)
    except Exception as failure:
        if error is None or isinstance(error, ShouldExit):
            raise
        log.error("rank %d failed, and so did the exchange with the other ranks: %s", peers.rank, failure)
    # Raised outside of the handler, so that `failure` does not become the error's context.
    raise error
