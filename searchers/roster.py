"""Who was created, who holds a place, who has ended: the bookkeeping that every method shares.

A trial holds one of `width` places from its creation until it is told to stop or to pause, or ends by itself, whichever
is first. `settle()` fills free places with new trials while the budget lasts, and ends the search when nobody is left.
So the search neither shrinks (any end gives a successor) nor grows (places are never more than at the start), and it
ends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import cast, get_args

from searchers.errors import IllegalEvent
from searchers.events import Action, Create, Done, DoneReason, Reason, Resume

MAX_AT_ONCE = 1_000_000
"""Most places, also where nothing limits them: each takes memory from the start on."""


class Roster:
    """Trials of one search.

    Args:
        max_trials: Trials to create; those with invalid hyperparameters don't count, their replacements do.
        width: Places, i.e. trials created and not yet stopped, paused or ended; at most `MAX_AT_ONCE` are used.
        max_invalid: How many invalid trials are replaced. After one more no trial is created, live ones go on to their
            end, and the search is done with the reason "invalid_hp". None: an invalid trial counts like any other.
    """

    def __init__(self, *, max_trials: int, width: int, max_invalid: int | None) -> None:
        self.max_trials, self._width, self._max_invalid = max_trials, min(width, MAX_AT_ONCE), max_invalid
        self._created = 0
        self._live: set[int] = set()  # created and not ended
        self._placed: set[int] = set()  # live and not told to stop or pause
        self._ended: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)
        self._completed: set[int] = set()  # ended, and an extension may take them up again
        self._again: deque[int] = deque()  # ended, to be resumed when there is a place
        self._done = False
        self._shown = 0.0

    def is_live(self, trial: int) -> bool:
        """Whether the trial has not ended yet.

        Raises:
            IllegalEvent: It was never created.
        """
        if not 0 <= trial < self._created:
            raise IllegalEvent(f"trial {trial} was never created; {self._created} were so far, numbered from 0")
        return trial in self._live

    def holds_place(self, trial: int) -> bool:
        """Whether the trial is live and was not told to stop or to pause."""
        return trial in self._placed

    @property
    def placed(self) -> frozenset[int]:
        """Trials that hold a place."""
        return frozenset(self._placed)

    def free_place(self, trial: int) -> None:
        """The trial is told to stop or to pause. Its place is free at once, while it winds down."""
        self._placed.remove(trial)

    def take_place(self, trial: int) -> Resume:
        """The trial, which is paused or has ended, goes on in a free place."""
        if trial in self._completed:
            self._completed.remove(trial)
            self._ended["completed"] -= 1
        elif trial not in self._live:
            self._ended["stopped"] -= 1
        self._live.add(trial)
        self._placed.add(trial)
        return Resume(trial=trial)

    def end(self, trial: int, reason: Reason) -> None:
        """The live trial has ended."""
        self._live.remove(trial)
        self._placed.discard(trial)
        self._ended[reason] += 1
        if reason == "completed":
            self._completed.add(trial)

    @property
    def completed(self) -> set[int]:
        """Trials that ended by themselves, but for those waiting to be resumed."""
        return self._completed.difference(self._again)

    @property
    def ended(self) -> int:
        """How many trials have ended, without those that were replaced."""
        return self._created - len(self._live) - (0 if self._max_invalid is None else self._ended["invalid_hp"])

    def trained(self, shares: Mapping[int, float]) -> float:
        """The sum of these shares over live trials, each clipped to 0 to 1."""
        found = (shares.get(trial, 0.0) for trial in self._live)
        return sum(min(max(share, 0.0), 1.0) for share in found if not math.isnan(share))

    @property
    def exhausted(self) -> bool:
        """Whether no more trials are created because too many were invalid."""
        return self._max_invalid is not None and self._ended["invalid_hp"] > self._max_invalid

    @property
    def is_full(self) -> bool:
        """Whether every place is taken."""
        return len(self._placed) >= self._width

    @property
    def may_create(self) -> bool:
        """Whether the budget allows one more trial."""
        invalid = self._ended["invalid_hp"]
        if self._max_invalid is None:
            return self._created < self.max_trials
        return invalid <= self._max_invalid and self._created - invalid < self.max_trials

    def create(self) -> Create:
        """Create one more trial, in a free place."""
        trial = self._created
        self._created += 1
        self._live.add(trial)
        self._placed.add(trial)
        return Create(trial=trial)

    def settle(self) -> list[Action]:
        """Trials for free places, or `Done`, or nothing."""
        actions: list[Action] = []
        while self._again and not self.is_full:
            actions.append(self.take_place(self._again.popleft()))
        while not self.is_full and self.may_create:
            actions.append(self.create())
        return actions + self.finish()

    def finish(self) -> list[Action]:
        """`Done` if nobody is left, once."""
        if self._live or self._done:
            return []
        self._done = True
        return [Done(reason=self._outcome())]

    def give_up(self) -> None:
        """Create nothing more, as if too many trials had been invalid."""
        self._max_invalid = GIVEN_UP

    def extend(self, *, max_trials: int, width: int, max_invalid: int | None, again: Iterable[int] = ()) -> None:
        """Enlarge the budget. The trials `again`, which have ended, are resumed first. The search is live again."""
        self.max_trials, self._width, self._max_invalid = max_trials, min(width, MAX_AT_ONCE), max_invalid
        self._again.extend(again)
        self._done = False
        self._shown = 0.0

    def progress(self, share: float) -> float:
        """`share`, but never less than before, and 1.0 exactly when the search is done."""
        if self._done:
            return 1.0
        self._shown = max(self._shown, min(share, ALMOST))
        return self._shown

    def _outcome(self) -> DoneReason:
        if self.exhausted:
            return "invalid_hp"
        if not self._created or any(self._ended[reason] for reason in ("completed", "stopped", "diverged")):
            return "completed"
        if self._ended["errored"]:
            return "errored"
        return "canceled" if self._ended["canceled"] else "invalid_hp"

    def dump(self) -> dict[str, object]:
        return {
            "max_trials": self.max_trials,
            "width": self._width,
            "max_invalid": self._max_invalid,
            "created": self._created,
            "live": sorted(self._live),
            "placed": sorted(self._placed),
            "ended": dict(self._ended),
            "completed": sorted(self._completed),
            "again": list(self._again),
            "done": self._done,
        }

    def load(self, state: dict[str, object]) -> None:
        self.max_trials = cast(int, state["max_trials"])
        self._width = cast(int, state["width"])
        self._max_invalid = cast("int | None", state["max_invalid"])
        self._created = cast(int, state["created"])
        self._live = set(cast("list[int]", state["live"]))
        self._placed = set(cast("list[int]", state["placed"]))
        self._ended = dict(cast("dict[Reason, int]", state["ended"]))
        self._completed = set(cast("list[int]", state["completed"]))
        self._again = deque(cast("list[int]", state["again"]))
        self._done = bool(state["done"])


ALMOST = math.nextafter(1.0, 0.0)  # the largest progress of a search that is not done
GIVEN_UP = -1  # as `max_invalid`: nothing is created any more


def default_max_invalid(max_trials: int) -> int:
    """`max_invalid` by default: enough for a space a fifth of which is valid, and at least 16."""
    return max(16, 4 * max_trials)
