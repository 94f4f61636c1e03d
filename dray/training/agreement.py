"""A failure of one rank becomes a failure of all, so that none waits for it forever."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dray.training.distributed import DistributedContext
from dray.training.errors import InvalidHP, PeerFailed, ShouldExit


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
    ranks = peers.allgather(None if error is None else told(error))
    if error is not None:
        raise error
    for rank, failure in enumerate(ranks):
        if failure is not None:
            raise heard(failure, f"rank {rank} failed while {doing}")


def told(error: BaseException) -> Exception | str:
    """What the other ranks are told of an error: the error itself if it means something to all of them; else its repr,
    as it may not be picklable.
    """
    match error:
        case ShouldExit():
            return ShouldExit(error.skip_exit_checkpoint)
        case InvalidHP():
            return InvalidHP(error.msg)
    return repr(error)


def heard(failure: Exception | str, prefix: str) -> Exception:
    """What a rank raises that was told of an error."""
    return failure if isinstance(failure, Exception) else PeerFailed(f"{prefix}: {failure}")
