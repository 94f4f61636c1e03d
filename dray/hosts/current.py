"""The host, and the peers, that a trial's code finds when it says nothing about them: all the state of dray that a
process has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from dray.training.distributed import DistributedContext
from dray.training.host import Host

_current: ContextVar[Host | None] = ContextVar("dray_host", default=None)
_peers: ContextVar[DistributedContext | None] = ContextVar("dray_peers", default=None)


def current_host() -> Host | None:
    """The host of the enclosing `use_host`, or None: then a run is local."""
    return _current.get()


def current_peers() -> DistributedContext | None:
    """The processes that the enclosing `use_host` has told of, or None."""
    return _peers.get()


@contextlib.contextmanager
def use_host(host: Host, peers: DistributedContext | None = None) -> Iterator[Host]:
    """Make `host` the one that `pytorch.init()` takes, in this thread, until the block ends.

    Args:
        host: where the run happens.
        peers: the processes that `pytorch.init()` trains with if it is told of no others. They stay open.
    """
    tokens = _current.set(host), _peers.set(peers)
    try:
        yield host
    finally:
        _current.reset(tokens[0])
        _peers.reset(tokens[1])
