"""Who was created, who holds a place, who has ended: the bookkeeping that every method shares.

A trial holds one of `width` places from its creation until it is told to stop or ends by itself, whichever is first.
`settle()` fills free places with new trials while the budget lasts, and ends the search when nobody is left. So the
search neither shrinks (any end gives a successor) nor grows (places are never more than at the start), and it ends.
"""

from __future__ import annotations

from typing import cast, get_args

from searchers.errors import IllegalEvent
from searchers.events import Action, Create, Done, DoneReason, Reason


class Roster:
    """Trials of one search.

    Args:
        max_trials: Trials to create; those with invalid hyperparameters don't count, their replacements do.
        width: Places, i.e. trials created and not yet stopped or ended.
        max_invalid: So many invalid trials are replaced. At one more nothing is created any more, live trials go on
            to their end, and the search is done with the reason "invalid_hp".
    """

    def __init__(self, *, max_trials: int, width: int, max_invalid: int) -> None:
        self._max_trials, self._width, self._max_invalid = max_trials, width, max_invalid
        self._created = 0
        self._live: set[int] = set()  # created and not ended
        self._placed: set[int] = set()  # live and not told to stop
        self._ended: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)
        self._done = False

    def is_live(self, trial: int) -> bool:
        """Whether the trial has not ended yet.

        Raises:
            IllegalEvent: It was never created.
        """
        if not 0 <= trial < self._created:
            raise IllegalEvent(f"trial {trial} was never created; so far there are {self._created}, numbered from 0")
        return trial in self._live

    def holds_place(self, trial: int) -> bool:
        """Whether the trial is live and was not told to stop."""
        return trial in self._placed

    def free_place(self, trial: int) -> None:
        """The trial is told to stop: a successor may come at once, while it winds down."""
        self._placed.remove(trial)

    def end(self, trial: int, reason: Reason) -> None:
        """The live trial has ended."""
        self._live.remove(trial)
        self._placed.discard(trial)
        self._ended[reason] += 1

    def settle(self) -> list[Action]:
        """Successors for free places, or `Done`, or nothing."""
        actions: list[Action] = []
        exhausted = self._ended["invalid_hp"] > self._max_invalid
        while len(self._placed) < self._width and not exhausted and self._counted < self._max_trials:
            actions.append(Create(trial=self._created))
            self._live.add(self._created)
            self._placed.add(self._created)
            self._created += 1
        if not self._live and not self._done:
            self._done = True
            actions.append(Done(reason="invalid_hp" if exhausted else self._outcome()))
        return actions

    @property
    def _counted(self) -> int:
        return self._created - self._ended["invalid_hp"]

    def _outcome(self) -> DoneReason:
        if self._ended["completed"] or self._ended["stopped"]:
            return "completed"
        return "errored" if self._ended["errored"] else "canceled"

    def dump(self) -> dict[str, object]:
        return {
            "created": self._created,
            "live": sorted(self._live),
            "placed": sorted(self._placed),
            "ended": dict(self._ended),
            "done": self._done,
        }

    def load(self, state: dict[str, object]) -> None:
        self._created = cast(int, state["created"])
        self._live = set(cast("list[int]", state["live"]))
        self._placed = set(cast("list[int]", state["placed"]))
        self._ended = dict(cast("dict[Reason, int]", state["ended"]))
        self._done = bool(state["done"])


def default_max_invalid(max_trials: int) -> int:
    """Replacements granted unless told otherwise: enough for a space of which a fifth is valid, and 16 at least."""
    return max(16, 4 * max_trials)
