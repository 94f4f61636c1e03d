"""Watches a run's cluster for a process that does not answer, and for nodes that will be removed."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Collection, Iterable

import ray

from dray.cluster.internals import draining_nodes

log = logging.getLogger(__name__)

EVERY_S = 1.0
SILENT_FOR = 5
"""After this many failed attempts in a row, a silent head is reported. After a minute Ray ends the driver's process
without a message; if the head is back before that, the driver reconnects."""
END_S = 5.0  # how long to wait for the end of the thread


def knock(address: str, timeout_s: float) -> None:
    """Raises `OSError` if nothing accepts a TCP connection at an address, `host:port`, within the timeout."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()


class Watch:
    """A thread that watches a cluster until `close()`. Its head, then other processes of it that nobody replaces,
    listen at `addresses` (`host:port`).

    `draining` is called with the ids of draining nodes, every second while there are any; None means that this
    cluster's nodes are never removed. `silent` is called when one of the addresses does not answer.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        *,
        draining: Callable[[Collection[str]], None] | None,
        silent: Callable[[], None],
    ) -> None:
        self._addresses, self._draining, self._silent = list(addresses), draining, silent
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dray-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, unless it is stuck waiting for a head that does not answer."""
        self._closed.set()
        self._thread.join(END_S)

    def _run(self) -> None:
        silent_for, failed = 0, False
        while not self._closed.wait(EVERY_S):
            # This comes first, because a call to Ray does not return while its head is gone.
            if not self.answers():
                silent_for += 1
                if silent_for == SILENT_FOR:
                    self._silent()
                continue
            silent_for = 0
            try:
                if self._draining is not None and (nodes := draining_nodes()):
                    self._draining(nodes)
                failed = False
            except ray.exceptions.RayError:  # the head has gone meanwhile: try again in a second
                continue
            except Exception:
                if not failed:
                    log.exception("can't save the trials on nodes that will be removed; will try again every second")
                failed = True

    def answers(self, *, only_head: bool = False) -> bool:
        try:
            for address in self._addresses[: 1 if only_head else None]:
                knock(address, EVERY_S)
        except OSError:
            return False
        return True
