"""How the ranks of a trial agree: to stop, to leave and to fail.

They agree in exchanges, which all of them reach: after each stretch of training, validation and checkpoint. What ends
training on one rank ends it on all, for the same reason and at the same batch. Between two exchanges a rank may wait
for one that never comes: for its gradients. So on each rank a thread beside the training listens, through a store of
the ranks' own.

Stop: once a rank is asked to stop, each rank's thread publishes the number of batches that its training may have begun,
and holds it there. All stop at the greatest of these numbers: no rank has passed it, and each trains any batch that
another waits in. Without a request this costs training a comparison of two integers per batch.

Leave: a rank that leaves between two exchanges (an exception, ShouldExit, InvalidHP) publishes that it does. With gloo
it also closes the connections for gradients: the backward pass of the others fails at once, and no weight has changed.
With NCCL the others notice nothing. Their collectives are queued on the device, and the host runs ahead until it needs
a value from there. So all ranks abort their process groups, together, once one has failed, or if not all have left
within `LEAVE_S` seconds. Whatever is computed after an aborted collective is computed from garbage: none of it is
saved, and training resumes from the last checkpoint.

Fail: a rank that has failed waits `FAIL_S` seconds for the others to reach the exchange. Then it raises its error, and
its host ends the others, whatever they are doing.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from dray.training.errors import DataExhausted, InvalidHP, PeerFailed, ShouldExit
from dray.training.parallel import ddp
from dray.training.parallel.device import CPU
from dray.training.parallel.distributed import DistributedContext

log = logging.getLogger(__name__)

T = TypeVar("T")

LISTEN_S = 0.25
"""Seconds between checks of the store."""
AGREE_S = 0.01
"""The same while ranks agree on where to stop."""
LEAVE_S = 30.0
"""How long a rank may take to leave after another one, before the process groups are aborted. It matters only where one
rank leaves and others do not: then they would wait for ever."""
ABORT_S = 5.0
"""How long ranks wait for one another to be ready for an abort: one of them may have died."""
FAIL_S = 20.0
"""How long a rank that has failed waits for the others."""
NEVER = 1 << 62


# ------------------------------------------------------------------------------------------------- single exchanges
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
    _raise_any(error, _exchange(peers, _portable(error), error), doing)


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
    ranks = _exchange(peers, (value, _portable(error), mine), error)
    _raise_any(error, [row[1] for row in ranks], doing)
    return ranks[0][0], [row[2] for row in ranks]


def _exchange(peers: DistributedContext, mine: Any, error: BaseException | None) -> list[Any]:
    """An allgather; a rank that has failed does not wait long for the others, and raises its error."""
    if error is None or isinstance(error, (ShouldExit, InvalidHP)):
        return peers.allgather(mine)
    try:
        return peers.allgather(mine, timeout_s=FAIL_S)
    except TimeoutError:
        log.error("other ranks do not react within %g s to the failure of rank %d", FAIL_S, peers.rank)
        raise error from None


def _portable(error: BaseException | None) -> Exception | str | None:
    """What the other ranks get of an error: the error itself if it means something to all of them; else its repr, as it
    may not be picklable.
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
    """Raise this rank's error, or else the first of another rank."""
    if error is not None:
        raise error
    for rank, theirs in enumerate(ranks):
        if isinstance(theirs, Exception):
            raise theirs
        if theirs is not None:
            raise PeerFailed(f"rank {rank} failed while {doing}: {theirs}")


# ---------------------------------------------------------------------------------------------------- a training run
class Reason(enum.IntEnum):
    """Why a rank leaves the loop. Of several ranks' reasons the greatest counts."""

    #: Its collectives failed or were aborted, because another rank leaves.
    CUT_OFF = 0
    EXIT = 1
    EXHAUSTED = 2
    INVALID_HP = 3
    FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """What the other ranks learn of a rank that leaves.

    Args:
        reason: why it leaves.
        save: whether to save what was trained.
        message: what happened.
        aborted: whether its process groups were aborted: then its tensors may hold garbage.
    """

    reason: Reason
    save: bool = True
    message: str = ""
    aborted: bool = False


class Agreement:
    """One rank's part in the agreement on how a training run ends.

    Keeps the error that the run ends with until what was trained is saved.

    Attributes:
        limit: once so many batches are trained, `reached` must be called.

    Args:
        peers: the ranks.
        asked: whether this rank has been asked to stop; called in a thread.
        trained: how many batches this rank has trained; read in a thread.
        device: that of the training.
    """

    def __init__(
        self,
        peers: DistributedContext,
        *,
        asked: Callable[[], bool],
        trained: Callable[[], int],
        device: torch.device = CPU,
    ) -> None:
        self.limit = NEVER
        self._peers, self._asked, self._trained, self._device = peers, asked, trained, device
        self._error: BaseException | None = None
        self._store: Any = None
        self._prefix = ""
        self._agreed, self._over = threading.Event(), threading.Event()
        # Stretches between two exchanges are numbered, the same on all ranks.
        self._stretch, self._inside = 0, False
        self._stopping = self._aborted = False
        self._left: tuple[int, float] | None = None  # the stretch in which a rank leaves, and when we learnt of it
        self._abort_by = 0.0
        self._published: set[str] = set()

    # ------------------------------------------------------------------------------------------ beside the training
    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen while the block runs. All ranks enter it before any of them trains."""
        self._store = self._peers.side_store()
        self._prefix = "" if self._store is None else self._peers.broadcast(uuid.uuid4().hex)
        thread = threading.Thread(target=self._listen, name="dray-agreement", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            self._publish(f"begun/{self._peers.rank}", 0)  # so that no rank waits for this one
            raise
        finally:
            self._over.set()
            thread.join()

    def _listen(self) -> None:
        try:
            while not self._over.wait(AGREE_S if self._abort_by or self._is_agreeing() else LISTEN_S):
                if not self._agreed.is_set():
                    self._look_for_stop()
                if self._abort_by:
                    self._abort_together()
                elif self._store is not None and not self._aborted:
                    self._look_for_leave()
        except Exception as error:
            # Without the others there is nothing to agree on. Training will notice itself what happened to them.
            log.warning("no longer listening for requests to stop: %r", error)
            self.limit = NEVER
        finally:
            self._agreed.set()

    def _is_agreeing(self) -> bool:
        return self._stopping and not self._agreed.is_set()

    def _look_for_stop(self) -> None:
        store = self._store
        if not self._stopping:
            if self._asked():
                self._publish("asked", 1)
            elif store is None or not store.check([self._key("asked")]):
                return
            self._stopping = True
            # From now on training calls `reached` before each batch. The number is read after that, so that training
            # can have begun one more batch at most.
            self.limit = 0
            mine = self._trained() + 1
            if store is None:
                self.limit = mine
                self._agreed.set()
                return
            self._publish(f"begun/{self._peers.rank}", mine)
        keys = [self._key(f"begun/{rank}") for rank in range(self._peers.size)]
        if store.check(keys):
            self.limit = max(int(store.get(key)) for key in keys)
            self._agreed.set()

    def _look_for_leave(self) -> None:
        store = self._store
        failed = store.check([self._key("failed")])
        if self._left is None:
            if not failed and not store.check([self._key("left")]):
                return
            self._left = int(store.get(self._key("failed" if failed else "left"))), time.monotonic()
        stretch, since = self._left
        if self._stretch > stretch or (self._stretch == stretch and not self._inside):
            self._publish(f"out/{self._peers.rank}", 1)
        if store.check([self._key(f"out/{rank}") for rank in range(self._peers.size)]):
            return  # nobody waits for anybody
        if (failed or time.monotonic() > since + LEAVE_S) and ddp.queues_collectives(self._device):
            # First on all ranks, as the abort of one may end what another waits in: training must not take for sound
            # what it computes from now on.
            self._aborted, self.limit, self._abort_by = True, 0, time.monotonic() + ABORT_S
            self._agreed.set()
            self._publish(f"aborted/{self._peers.rank}", 1)

    def _abort_together(self) -> None:
        ready = True
        with contextlib.suppress(Exception):  # the chief has ended, and its store with it
            ready = self._store.check([self._key(f"aborted/{rank}") for rank in range(self._peers.size)])
        if ready or time.monotonic() > self._abort_by:
            self._abort_by = 0.0
            ddp.abort()

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _publish(self, name: str, value: int) -> None:
        if self._store is not None and name not in self._published:
            with contextlib.suppress(Exception):  # the chief has ended, and its store with it
                self._store.set(self._key(name), str(value).encode())
                self._published.add(name)

    def reached(self, trained: int) -> bool:
        """Whether training stops at so many batches. Waits for the other ranks' threads, not for their training."""
        self._agreed.wait()
        return self._aborted or trained >= self.limit

    # ---------------------------------------------------------------------------------------------- in the training
    def stretch(self, work: Callable[[], T], *, training: bool = False) -> tuple[T | None, Leave | None]:
        """Do this rank's part between two exchanges.

        Args:
            work: calls the user's code.
            training: ranks wait for one another's gradients in it.

        Returns:
            What `work` returned, or why this rank leaves: for the exchange, and then for `agree`.
        """
        self._stretch += 1
        self._inside = True
        try:
            value, leave = self.attempt(work)
            if leave is not None and not self._aborted:
                self._publish_leave(leave, training)
            elif self._aborted:
                # Whatever it raised, or none, is a consequence of the garbage that it got.
                leave = self._cut_off()
            if training:
                _, late = self.attempt(self._synchronise)  # an error of the device shows only here
                leave = leave or (self._cut_off() if self._aborted else late)
        finally:
            self._inside = False
        return value, replace(leave, aborted=True) if leave is not None and self._aborted else leave

    def _synchronise(self) -> None:
        torch.get_device_module(self._device).synchronize(self._device)

    def _publish_leave(self, leave: Leave, training: bool) -> None:
        if leave.reason is Reason.FAILED:
            self._publish("failed", self._stretch)
        elif training and leave.reason is not Reason.CUT_OFF:
            self._publish("left", self._stretch)
        if training and not ddp.queues_collectives(self._device):
            ddp.disconnect(self._device)

    def _cut_off(self) -> Leave:
        return Leave(reason=Reason.CUT_OFF, message=f"rank {self._peers.rank}, which was cut off by another")

    def exchange(self, mine: T, leave: Leave | None) -> list[T]:
        """An allgather. A rank that has failed does not wait long for the others.

        Raises:
            Exception: this rank's error, if it has failed, and the others do not come.
        """
        failed = leave is not None and leave.reason is Reason.FAILED
        return _exchange(self._peers, mine, self._error if failed else None)

    def agree(self, leaves: Sequence[Leave | None], *, training: bool = False) -> Leave | None:
        """The reason of all ranks to leave, from that of each; a failure is raised at once."""
        leave = max((leave for leave in leaves if leave is not None), key=lambda leave: leave.reason, default=None)
        if leave is None:
            return None
        if aborted := any(each is not None and each.aborted for each in leaves):
            ddp.abort()
        if aborted or (training and not ddp.queues_collectives(self._device)):
            ddp.disconnect(self._device)
        mine = leaves[self._peers.rank]
        if mine is not None and mine.reason is Reason.CUT_OFF < leave.reason:
            # This rank's error is only a consequence of another's leaving.
            self._error = None
        match leave.reason:
            case Reason.FAILED | Reason.CUT_OFF:
                raise self._error or PeerFailed(f"training failed on {leave.message}")
            case Reason.INVALID_HP:
                self._error = self._error or InvalidHP(leave.message)
            case Reason.EXHAUSTED:
                self._error = self._error or DataExhausted(leave.message)
        if aborted and leave.save and self._peers.rank == 0:
            log.warning(
                "one rank has left in the middle of a batch, which others waited for: what was trained since the last "
                "checkpoint is lost. To keep it, raise %s on all ranks at the same batch, or call "
                "context.set_stop_requested(True) on any of them",
                {Reason.EXIT: "ShouldExit", Reason.INVALID_HP: "InvalidHP"}.get(leave.reason, "the exception"),
            )
        return replace(leave, save=leave.save and not aborted, aborted=aborted)

    def together(self, work: Callable[[], T]) -> tuple[list[T], Leave | None]:
        """Call the user's code on all ranks: what it returned on each, or why all leave."""
        value, leave = self.stretch(work)
        ranks = self.exchange((value, leave), leave)
        return [row[0] for row in ranks], self.agree([row[1] for row in ranks])  # type: ignore[misc]

    def raise_error(self) -> None:
        """Raise the error that training ends with, if any."""
        if self._error is not None:
            raise self._error

    def attempt(self, work: Callable[[], T]) -> tuple[T | None, Leave | None]:
        """Call the user's code, and turn what it raises into a value that the other ranks can get."""
        try:
            return work(), None
        except ShouldExit as request:
            return None, Leave(reason=Reason.EXIT, save=not request.skip_exit_checkpoint)
        except InvalidHP as invalid:
            self._error = invalid
            return None, Leave(reason=Reason.INVALID_HP, message=invalid.msg)
        except DataExhausted as exhausted:
            self._error = exhausted
            return None, Leave(reason=Reason.EXHAUSTED, message=str(exhausted))
        except (Exception, SystemExit) as error:
            # SystemExit too: a program that exits in one process must not leave the others waiting.
            self._error = error
            reason = Reason.CUT_OFF if ddp.is_cut_off(error) else Reason.FAILED
            return None, Leave(reason=reason, message=f"rank {self._peers.rank}: {error!r}")
