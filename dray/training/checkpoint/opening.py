"""Opens a checkpoint on all ranks: each machine downloads and verifies it once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.exchange import all_or_none


def open_together(peers: DistributedContext, open_one: Callable[[], Path], doing: str) -> Path:
    """The directory that `open_one` returns on the first rank of this machine; the others read there unverified.

    All ranks call this together.

    Args:
        open_one: opens and verifies the checkpoint; called on the first rank of each machine.
        doing: for the message on the other ranks, as in `all_or_none`.

    Raises:
        PeerFailed: on the ranks that did not fail, if it can't be opened on any machine.
    """
    directory = None
    with all_or_none(peers, doing):
        if peers.local_rank == 0:
            directory = open_one()
    found = peers.broadcast_local(directory)
    assert found is not None
    return found
