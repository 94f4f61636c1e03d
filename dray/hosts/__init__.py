"""Hosts, which run a trial: here on a laptop or under torchrun; `dray.worker.host` is that of a Ray worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from dray.hosts.local import LocalHost
from dray.training.host import Host
from dray.training.parallel.distributed import DistributedContext

__all__ = ["LocalHost", "current_host", "current_peers", "use_host"]

_current: ContextVar[tuple[Host | None, DistributedContext | None]] = ContextVar("dray_host", default=(None, None))


def current_host() -> Host | None:
    """The host of the enclosing `use_host`; None outside of one: the run is local."""
    return _current.get()[0]


def current_peers() -> DistributedContext | None:
    """The peers of the enclosing `use_host`, or None."""
    return _current.get()[1]


@contextlib.contextmanager
def use_host(host: Host, peers: DistributedContext | None = None) -> Iterator[Host]:
    """Within the block and in this thread, `pytorch.init()` uses `host`, and trains with `peers` by default. Neither is
    closed."""
    token = _current.set((host, peers))
    try:
        yield host
    finally:
        _current.reset(token)
