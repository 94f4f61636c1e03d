"""The host that a trial's code finds when it says nothing about one: the only state of dray that a process has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from dray.training.host import Host

_current: ContextVar[Host | None] = ContextVar("dray_host", default=None)


def current_host() -> Host | None:
    """The host of the enclosing `use_host`, or None: then a run is local."""
    return _current.get()


@contextlib.contextmanager
def use_host(host: Host) -> Iterator[Host]:
    """Make `host` the one that `pytorch.init()` takes, in this thread, until the block ends."""
    token = _current.set(host)
    try:
        yield host
    finally:
        _current.reset(token)
