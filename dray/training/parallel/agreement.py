"""The ranks of a trial agree on the batch at which training ends, and on the reason.

They agree in exchanges, which every rank reaches after each section of training, validation and checkpointing. If
training ends on one rank, it ends on all, for the same reason and at the same batch. Between two exchanges a rank may
wait for the gradients of another that never sends them. So each rank has a thread that listens for the others, through
a store that only these threads use.

Stop: after a request, each rank's thread posts the number of batches that its training may have begun, and holds the
training there. All ranks stop at the maximum of these numbers: no rank has passed it, and each trains every batch in
which another waits. Without a request this costs one comparison of two integers per batch.

Leave: a rank that leaves between two exchanges (by an exception, ShouldExit, InvalidHP) posts that. With gloo it also
closes the connections for gradients, so that the others' backward pass fails at once, before any weight has changed.
With NCCL the others notice nothing: their collectives are queued on the device, and the host runs ahead until it needs
a value from there. So all ranks abort their process groups together, as soon as one has failed, or when not all have
left within `LEAVE_S` seconds. Anything computed after an aborted collective is garbage: it is not saved, and training
resumes from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from dray.training.parallel import ddp
from dray.training.parallel.device import CPU, on_this_gpu
from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.exchange import Leave, Reason, exchange, leave_by

log = logging.getLogger(__name__)

T = TypeVar("T")

LISTEN_S = 0.25  # between checks of the store
AGREE_S = 0.01  # between checks while ranks agree on the batch to stop at
LEAVE_S = 30.0  # from one rank's leaving until the process groups are aborted, if not all have left
ABORT_S = 5.0  # to wait for all ranks before an abort, since one may have died
NEVER = 1 << 62


_DISCONNECTED = Leave(reason=Reason.DISCONNECTED, message="its collectives were aborted")


class _Board:
    """Numbers that ranks post by name, for the others to read.

    `post` works in any thread. Only the listening thread uses the store: a call may wait for a chief that has stopped,
    which must not block another thread. So `has` and `read` also send the numbers that were posted.
    """

    def __init__(self, store: Any, prefix: str = "") -> None:
        self._store, self._prefix = store, prefix
        self._posted: dict[str, int] = {}
        self._sent = 0

    def post(self, name: str, value: int = 1) -> None:
        """Post a number, unless this rank has already posted one under this name."""
        self._posted.setdefault(name, value)

    def send(self) -> None:
        for name in list(self._posted)[self._sent :]:
            self._store.set(self._prefix + name, str(self._posted[name]).encode())
            self._sent += 1

    def has(self, *names: str) -> bool:
        self.send()
        return bool(self._store.check([self._prefix + name for name in names]))

    def read(self, name: str) -> int:
        return int(self._store.get(self._prefix + name))


class Agreement:
    """One rank's part in the agreement on the end of a training run.

    Keeps the error that ends the run until the training so far is saved. A separate thread calls `stop_requested` and
    `trained`. After `stop_at` batches, call `must_stop`.
    """

    def __init__(
        self,
        peers: DistributedContext,
        *,
        stop_requested: Callable[[], bool],
        trained: Callable[[], int],
        device: torch.device = CPU,
    ) -> None:
        self.stop_at = NEVER
        self._peers, self._stop_requested, self._trained, self._device = peers, stop_requested, trained, device
        self._error: BaseException | None = None
        self.board = _Board(HashStore())  # for this rank alone, until `connect`
        self._stop_agreed, self._wake, self._over = threading.Event(), threading.Event(), False
        # Sections between two exchanges have the same numbers on all ranks.
        self._section, self._inside = 0, False
        self._stopping = self._aborted = False
        self._left: tuple[int, float] | None = None  # the section in which a rank leaves, and when this one noticed
        self._abort_by = 0.0

    # ----------------------------------------------------------------------------------------- in a separate thread
    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A block that all ranks enter before any of them trains. It runs the listening thread."""
        self.connect()
        thread = threading.Thread(target=on_this_gpu(self._listen), name="dray-agreement", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            self.board.post(self._name("begun"), 0)  # so that no rank waits for this one
            raise
        finally:
            self._over = True
            self._wake.set()
            thread.join(LEAVE_S)  # it may wait for a chief that has stopped

    def connect(self) -> None:
        """Connect the ranks, which call this together."""
        if (store := self._peers.side_store()) is not None:
            self.board = _Board(store, f"{self._peers.broadcast(uuid.uuid4().hex)}/")

    def _name(self, topic: str) -> str:
        return f"{topic}/{self._peers.rank}"

    def _all(self, topic: str) -> list[str]:
        return [f"{topic}/{rank}" for rank in range(self._peers.size)]

    def _listen(self) -> None:
        try:
            while True:
                is_agreeing = self._stopping and not self._stop_agreed.is_set()
                self._wake.wait(AGREE_S if self._abort_by or is_agreeing else LISTEN_S)
                self._wake.clear()
                if self._over:
                    break
                if not self._stop_agreed.is_set():
                    self._check_stop()
                if self._abort_by:
                    self._abort_together()
                elif self._peers.size > 1 and not self._aborted:
                    self._check_leave()
            with contextlib.suppress(Exception):  # the chief has ended, and its store with it
                self.board.send()
        except Exception as error:
            # Without the others there is nothing to agree on. The training itself will notice that they are gone.
            log.warning("no longer listening for requests to stop: %r", error)
            self.stop_at = NEVER
        finally:
            self._stop_agreed.set()

    def _check_stop(self) -> None:
        if not self._stopping:
            if self._stop_requested():
                self.board.post("stop")
            elif not self.board.has("stop"):
                return
            self._stopping = True
            # From now on training calls `must_stop` before each batch. The number is read after that, so training can
            # have begun at most one more batch.
            self.stop_at = 0
            self.board.post(self._name("begun"), self._trained() + 1)
        if self.board.has(*self._all("begun")):
            self.stop_at = max(self.board.read(name) for name in self._all("begun"))
            self._stop_agreed.set()

    def _check_leave(self) -> None:
        failed = self.board.has("failed")
        if self._left is None:
            if not failed and not self.board.has("left"):
                return
            self._left = self.board.read("failed" if failed else "left"), time.monotonic()
        section, since = self._left
        if self._section > section or (self._section == section and not self._inside):
            self.board.post(self._name("out"))
        if self.board.has(*self._all("out")):
            return  # no rank waits for another
        if (failed or time.monotonic() > since + LEAVE_S) and ddp.queues_collectives(self._device):
            # All ranks are marked before any of them aborts: one rank's abort may end a collective on another, whose
            # training must know that its results are garbage.
            self._aborted, self.stop_at, self._abort_by = True, 0, time.monotonic() + ABORT_S
            self._stop_agreed.set()
            self.board.post(self._name("aborted"))

    def _abort_together(self) -> None:
        ready = True
        with contextlib.suppress(Exception):  # the chief has ended, and its store with it
            ready = self.board.has(*self._all("aborted"))
        if ready or time.monotonic() > self._abort_by:
            self._abort_by = 0.0
            ddp.abort()
            if not self._inside:  # others may also wait in gloo (offloaded weights), which can't be aborted
                ddp.disconnect(self._device)

    def must_stop(self, trained: int) -> bool:
        """Whether training stops after this number of batches. Waits for the other ranks' threads, not for their
        training."""
        self._stop_agreed.wait()
        return self._aborted or trained >= self.stop_at

    # ---------------------------------------------------------------------------------------------- in the training
    def section(self, work: Callable[[], T], *, training: bool = False) -> tuple[T | None, Leave | None]:
        """Do this rank's part between two exchanges. Returns the result of `work`, or the reason why this rank leaves.
        In `training`, ranks wait for one another's gradients, or for the weights of a sharded model."""
        self._section += 1
        self._inside = True
        try:
            value, leave = self.catch(work)
            if leave is not None and not self._aborted:
                self._post_leave(leave, training)
            if training:
                synchronize = torch.get_device_module(self._device).synchronize
                _, late = self.catch(lambda: synchronize(self._device))  # errors of the device surface only here
                leave = leave or late
            if self._aborted:
                leave = replace(leave or _DISCONNECTED, aborted=True)
        finally:
            self._inside = False
        return value, leave

    def _post_leave(self, leave: Leave, training: bool) -> None:
        if leave.reason is Reason.FAILED:
            self.board.post("failed", self._section)
        elif training and leave.reason is not Reason.DISCONNECTED:
            self.board.post("left", self._section)
        self._wake.set()
        if training and not ddp.queues_collectives(self._device):
            ddp.disconnect(self._device)

    def exchange(self, message: T, leave: Leave | None) -> list[T]:
        """Allgather. A rank that has failed raises its error if the others do not arrive soon."""
        return exchange(self._peers, message, leave, self._error)

    def agree(self, leaves: Sequence[Leave | None], *, training: bool = False) -> Leave | None:
        """Agree on one reason to leave from those of all ranks. A failure is raised at once."""
        rank = max(range(len(leaves)), key=lambda rank: -1 if (each := leaves[rank]) is None else each.reason)
        if (leave := leaves[rank]) is None:
            return None
        if aborted := any(each is not None and each.aborted for each in leaves):
            ddp.abort()
        if aborted or (training and not ddp.queues_collectives(self._device)):
            ddp.disconnect(self._device)
        own = leaves[self._peers.rank]
        if own is not None and own.reason is Reason.DISCONNECTED < leave.reason:
            self._error = None  # a mere consequence of another rank's leaving
        if leave.reason is not Reason.EXIT:
            self._error = self._error or leave.as_error(rank, "training")
        if leave.reason in (Reason.FAILED, Reason.DISCONNECTED):
            self.raise_error()
        if aborted and leave.save and self._peers.rank == 0:
            log.warning(
                "one rank left in the middle of a batch for which others waited: training since the last checkpoint "
                "is lost. To keep it, raise %s on all ranks at the same batch, or call "
                "context.set_stop_requested(True) on any of them",
                {Reason.EXIT: "ShouldExit", Reason.INVALID_HP: "InvalidHP"}.get(leave.reason, "the exception"),
            )
        return replace(leave, save=leave.save and not aborted, aborted=aborted)

    def on_all(self, work: Callable[[], T], *, training: bool = False) -> tuple[list[T], Leave | None]:
        """Call the user's code on all ranks. Returns each rank's result, and the reason if all leave."""
        value, leave = self.section(work, training=training)
        ranks = self.exchange((value, leave), leave)
        return [row[0] for row in ranks], self.agree([row[1] for row in ranks], training=training)  # type: ignore[misc]

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def catch(self, work: Callable[[], T]) -> tuple[T | None, Leave | None]:
        """Call the user's code, and turn exceptions into a value for the other ranks."""
        try:
            return work(), None
        except (Exception, SystemExit) as error:
            # SystemExit too: a program that exits in one process must not leave the others waiting.
            if self._aborted:  # caused by garbage
                return None, _DISCONNECTED
            if ddp.is_disconnected(error):
                leave = replace(_DISCONNECTED, message=repr(error))
            else:
                # A failed device fails again at each call; only the first error has the user's line.
                leave = Leave.because_of(error) if self._error else leave_by(self._peers, error)
            if leave.reason is not Reason.EXIT:
                self._error = self._error or error
            return None, leave
