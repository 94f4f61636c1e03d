"""The end of a `Lending`, which the event loop and the thread of the caller share."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from dray.groups.lending import Lending


class Shells(dict[str, Any]):
    """Whoever sees it empty joins the threads."""

    threads: list[threading.Thread]

    def pop(self, owner: str, default: Any = None) -> Any:
        found = super().pop(owner, default)
        for thread in self.threads:
            thread.join()
        assert self.threads
        return found


def test_nobody_joins_a_thread_that_has_not_started() -> None:
    lending: Any = Lending.__new__(Lending)
    closed: list[float] = []
    shells = Shells({"groups-0": SimpleNamespace(close=closed.append)})
    shells.threads = []
    vars(lending).update(_shells=shells, _closing=shells.threads, _end_s=2.0)
    for _ in range(2):  # by both
        lending._close("groups-0")  # noqa: SLF001
    assert closed == [2.0]
    assert not shells
