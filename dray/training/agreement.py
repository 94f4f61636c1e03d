"""A failure of one rank becomes a failure of all, so that none waits for it forever."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from dray.training.distributed import DistributedContext
from dray.training.errors import InvalidHP, PeerFailed, ShouldExit

T = TypeVar("T")


@contextlib.contextmanager
def all_or_none(peers: DistributedContext, doing: str) -> Iterator[None]:
    """A block that all ranks run and leave together. They must not communicate in it.

    Args:
        doing: for the message on the other ranks: "rank 1 failed while <doing>".

    Raises:
        ShouldExit, InvalidHP: on every rank, if one raised it.
        PeerFailed: on the ranks that did not fail.
    """
    error: BaseException | None = None
    try:
        yield
    except (Exception, SystemExit) as caught:
        error = caught
    _raise_any(error, peers.allgather(_told(error)), doing)


def on_chief(peers: DistributedContext, doing: str, work: Callable[[], T], mine: Any = None) -> tuple[T, list[Any]]:
    """Call a function on the chief; returns, on all ranks, its result and the list of all ranks' `mine`.

    If it fails, all ranks raise, as with `all_or_none`. There is a single exchange, since each takes a millisecond.
    """
    value, error = None, None
    if peers.rank == 0:
        try:
            value = work()
        except (Exception, SystemExit) as caught:
            error = caught
    ranks = peers.allgather((value, _told(error), mine))
    _raise_any(error, [row[1] for row in ranks], doing)
    return ranks[0][0], [row[2] for row in ranks]  # type: ignore[return-value]


def _told(error: BaseException | None) -> Exception | str | None:
    """What the other ranks are told of an error: the error itself if it means something to all of them; else its repr,
    as it may not be picklable.
    """
    match error:
        case None:
            return None
        case ShouldExit():
            return ShouldExit(error.skip_exit_checkpoint)
        case InvalidHP():
            return InvalidHP(error.msg)
    return repr(error)


def _raise_any(error: BaseException | None, ranks: Sequence[Exception | str | None], doing: str) -> None:
    """Raise this rank's error, or else the first that a rank has told of."""
    if error is not None:
        raise error
    for rank, told in enumerate(ranks):
        if isinstance(told, Exception):
            raise told
        if told is not None:
            raise PeerFailed(f"rank {rank} failed while {doing}: {told}")
