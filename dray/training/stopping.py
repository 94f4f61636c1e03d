"""Requests to stop, which any rank may get at any moment, and the batch after which all ranks then stop.

Ranks run at their own speed, and one that waits for another's gradients can't be told anything. So on each rank a
thread beside the training listens and agrees. Once a rank is asked to stop, each rank's thread tells the others the
number of batches that its training may have begun, and holds it there. All stop at the greatest of these numbers: no
rank has passed it, and each trains any batch that another waits in. Without a request this costs training a comparison
of two integers per batch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from dray.training.distributed import DistributedContext

log = logging.getLogger(__name__)

LISTEN_S = 0.25
"""Seconds between checks for a request."""
AGREE_S = 0.01
"""Seconds between checks for the other ranks' numbers, after a request."""
NEVER = 1 << 62


class StopLine:
    """Where training stops.

    Attributes:
        limit: once so many batches are trained, `reached` must be called.

    Args:
        peers: the ranks.
        asked: whether this rank has been asked to stop; called in a thread.
        trained: how many batches this rank has trained; read in a thread.
    """

    def __init__(self, peers: DistributedContext, asked: Callable[[], bool], trained: Callable[[], int]) -> None:
        self.limit = NEVER
        self._peers, self._asked, self._trained = peers, asked, trained
        self._agreed, self._over = threading.Event(), threading.Event()

    def reached(self, trained: int) -> bool:
        """Whether training stops at so many batches. Waits for the other ranks' threads, not for their training."""
        self._agreed.wait()
        return trained >= self.limit

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Listen while the block runs. All ranks enter it before any of them trains."""
        store = self._peers.side_store()
        prefix = "" if store is None else self._peers.broadcast(uuid.uuid4().hex)
        thread = threading.Thread(target=self._watch, args=(store, prefix), name="dray-stop-line", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            if store is not None:  # so that no rank waits for this one
                with contextlib.suppress(Exception):  # the chief has ended, and its store with it
                    store.set(f"{prefix}/{self._peers.rank}", b"0")
            raise
        finally:
            self._over.set()
            thread.join()

    def _watch(self, store: Any, prefix: str) -> None:
        try:
            while not self._over.wait(LISTEN_S):
                asked = self._asked()
                if store is not None:
                    if asked:
                        store.set(f"{prefix}/asked", b"1")
                    asked = asked or store.check([f"{prefix}/asked"])
                if asked:
                    self._agree(store, prefix)
                    return
        except Exception as error:
            # Without the others there is nothing to agree on. Training will notice itself what happened to them.
            log.warning("no longer listening for requests to stop: %r", error)
            self.limit = NEVER
        finally:
            self._agreed.set()

    def _agree(self, store: Any, prefix: str) -> None:
        # From now on training calls `reached` before each batch. The number is read after that, so that training can
        # have begun one more batch at most.
        self.limit = 0
        mine = self._trained() + 1
        if store is None:
            self.limit = mine
            return
        store.set(f"{prefix}/{self._peers.rank}", str(mine).encode())
        keys = [f"{prefix}/{rank}" for rank in range(self._peers.size)]
        while not store.check(keys):
            if self._over.wait(AGREE_S):  # this rank's training is over
                return
        self.limit = max(int(store.get(key)) for key in keys)
