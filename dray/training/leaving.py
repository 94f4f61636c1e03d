"""Leaving the training loop: for whatever reason one rank leaves, all leave, and for the same one."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dray.training.distributed import DistributedContext
from dray.training.errors import DataExhausted, InvalidHP, PeerFailed, ShouldExit
from dray.training.spread import is_hung_up

T = TypeVar("T")


class Reason(enum.IntEnum):
    """Why a rank leaves the loop. Of several ranks' reasons the greatest counts."""

    #: Another rank has cut the connection, for one of the other reasons.
    HUNG_UP = 0
    EXIT = 1
    EXHAUSTED = 2
    INVALID_HP = 3
    FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """What a rank tells the others: why it leaves, whether to save what it has trained, and what happened."""

    reason: Reason
    save: bool = True
    message: str = ""


class Leaving:
    """One rank's part in the agreement on leaving. Keeps its error until what was trained is saved."""

    def __init__(self, peers: DistributedContext) -> None:
        self._peers = peers
        self._error: BaseException | None = None

    def attempt(self, work: Callable[[], T]) -> tuple[T | None, Leave | None]:
        """Call the user's code, and turn what it raises into a value that the other ranks can be told."""
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
            reason = Reason.HUNG_UP if is_hung_up(error) else Reason.FAILED
            return None, Leave(reason=reason, message=f"rank {self._peers.rank}: {error!r}")

    def agree(self, leaves: Sequence[Leave | None]) -> Leave | None:
        """The reason of all ranks to leave, from that of each; a failure is raised at once."""
        leave = max((leave for leave in leaves if leave is not None), key=lambda leave: leave.reason, default=None)
        if leave is None:
            return None
        mine = leaves[self._peers.rank]
        if mine is not None and mine.reason is Reason.HUNG_UP < leave.reason:
            # This rank's error is only a consequence of another's leaving.
            self._error = None
        match leave.reason:
            case Reason.FAILED | Reason.HUNG_UP:
                raise self._error or PeerFailed(f"training failed on {leave.message}")
            case Reason.INVALID_HP:
                self._error = self._error or InvalidHP(leave.message)
            case Reason.EXHAUSTED:
                self._error = self._error or DataExhausted(leave.message)
        return leave

    def attempt_together(self, work: Callable[[], T]) -> tuple[list[T], Leave | None]:
        """Call the user's code on all ranks: what it returned on each, or why all leave."""
        ranks = self._peers.allgather(self.attempt(work))
        leave = self.agree([row[1] for row in ranks])
        return [row[0] for row in ranks], leave  # type: ignore[misc]

    def raise_error(self) -> None:
        """Raise the error that training ends with, if any."""
        if self._error is not None:
            raise self._error
