"""Exchanges between ranks, which a failure of one rank ends on all.

A rank that leaves does so for a `Reason`, which the others learn in their next exchange. A rank that has failed waits
`FAIL_S` seconds for the others to reach it. Then it raises its error, and its host ends the others, whatever they are
doing. It passes its error to `on_failure` before it waits: NCCL's watchdog may end its process meanwhile.
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

FAIL_S = 20.0  # how long a rank that has failed waits for the others


class Reason(enum.IntEnum):
    """Why a rank leaves. Of several ranks' reasons the greatest counts."""

    DISCONNECTED = 0  # its collectives failed or were aborted, because another rank leaves
    EXIT = 1
    EXHAUSTED = 2
    INVALID_HP = 3
    FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """What the other ranks get of the exception that a rank leaves with, which may not be picklable."""

    reason: Reason
    save: bool = True  # what was trained
    message: str = ""
    aborted: bool = False  # its process groups: then its tensors may hold garbage

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
    """A block that all ranks run. If one fails in it, all raise at its end. They must not communicate in it.

    Yields an empty list: what a rank adds in the block, at most one value, all ranks have after it, by rank.

    ShouldExit and InvalidHP of one rank are raised on every rank; for other errors the ranks that did not fail raise
    PeerFailed: "rank 1 failed while <doing>".
    """
    error: BaseException | None = None
    found: list[Any] = []
    try:
        yield found
    except (Exception, SystemExit) as caught:
        error = caught
    leave = None if error is None else leave_by(peers, error)
    ranks = exchange(peers, (found[0] if found else None, leave), leave, error)
    if error is not None:
        raise error
    for rank, (_, other) in enumerate(ranks):
        if other is not None:
            raise other.as_error(rank, doing)
    found[:] = [value for value, _ in ranks]


def on_all(peers: DistributedContext, doing: str, work: Callable[[], T]) -> list[T]:
    """Call a function on each rank; returns, on all ranks, the list of its results. If one fails, all raise."""
    with all_or_none(peers, doing) as found:
        found.append(work())
    return found


def on_chief(peers: DistributedContext, doing: str, work: Callable[[], T], mine: Any = None) -> tuple[T, list[Any]]:
    """Call a function on the chief; returns, on all ranks, its result and the list of all ranks' `mine`.

    If it fails, all ranks raise. There is a single exchange, since each takes a millisecond.
    """
    ranks: list[Any] = on_all(peers, doing, lambda: (work() if peers.rank == 0 else None, mine))
    return ranks[0][0], [row[1] for row in ranks]


_report: Callable[[BaseException], None] | None = None


@contextlib.contextmanager
def on_failure(report: Callable[[BaseException], None]) -> Iterator[None]:
    """In the block, call `report` with the error of this rank as soon as it fails, if there are others."""
    global _report
    before, _report = _report, report
    try:
        yield
    finally:
        _report = before


def leave_by(peers: DistributedContext, error: BaseException) -> Leave:
    """What the other ranks get of this rank's error, which is reported if it is a failure."""
    leave = Leave.because_of(error)
    if leave.reason is Reason.FAILED and peers.size > 1 and _report is not None:
        _report(error)
    return leave


def exchange(peers: DistributedContext, mine: T, leave: Leave | None, error: BaseException | None) -> list[T]:
    """An allgather; a rank that has failed does not wait long for the others, and raises its own error if they have
    died by then."""
    has_failed = leave is not None and leave.reason is Reason.FAILED
    try:
        return peers.allgather(mine, timeout_s=FAIL_S if has_failed else None)
    except Exception as failure:
        if error is None or isinstance(error, ShouldExit):
            raise
        log.error("rank %d failed, and so did the exchange with the other ranks: %s", peers.rank, failure)
    # Not while `failure` is handled: it is not the context of the error.
    raise error
