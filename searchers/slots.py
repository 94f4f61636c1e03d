"""The bookkeeping of trials that all methods share: created, live and ended trials, and the slots that they hold.

A trial holds one of `max_concurrent` slots from its creation until the method stops or pauses it, or until it ends by
itself. `fill()` gives free slots to new trials while the budget lasts, and ends the search when no trial is left. The
number of concurrent trials therefore stays constant until the budget is used up.

Invariants: a trial that holds a slot is live, a live trial was created and has not ended, and trials are numbered
0, 1, 2, ... in the order of creation, in all brackets of a search together.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence, Set

from searchers.errors import never_created
from searchers.events import REPLACED, Action, Create, Done, DoneReason, Reason, Replaced, Requested, Resume
from searchers.method import MAX_TRIALS

MAX_CONCURRENT = 10_000
"""Maximum number of slots whatever the limit, as each of the first trials takes memory, and a record of the journal,
from the start: more than there are slots of any cluster. A constant, as clusters grow and searches do not know them."""
NEARLY_DONE = math.nextafter(1.0, 0.0)  # the largest progress of a search that is not done


class TrialCounts:
    """The numbers of created and of replaced trials, in all brackets of a search together.

    Trials are replaced up to max(16, 4 * max_trials) times, enough for a space of which a fifth is valid; in a search
    without an end, 4 times for each other trial so far. After one more the search gives up: it creates no more trials,
    live ones run to their end, and it is done with the most frequent reason.
    """

    def __init__(self, max_trials: int) -> None:
        self.created = 0
        self.drawn = 0  # those whose hyperparameters the search draws
        self.num_points = math.inf  # points of the space, each of which is drawn once; see `limit_points`
        self._replaced: Counter[Replaced] = Counter()
        self.extend(max_trials)

    def extend(self, max_trials: int) -> None:
        self._max_trials = max_trials

    def add_replaced(self, reason: Replaced) -> None:
        self._replaced[reason] += 1

    @property
    def gave_up(self) -> Replaced | None:
        """The most frequent reason, if too many trials were replaced."""
        replaced = self._replaced.total()
        others = self.created - replaced if self._max_trials == MAX_TRIALS else self._max_trials
        return None if replaced <= max(16, 4 * others) else self._replaced.most_common(1)[0][0]

    def check(self, trial: int) -> None:
        """Raise an `IllegalEvent` if the trial was never created."""
        if not 0 <= trial < self.created:
            raise never_created(trial, created=self.created)


class TrialSlots:
    """The trials of a search or bracket, and the `max_concurrent` slots that they hold (0 = `MAX_CONCURRENT`).

    A trial that ends for one of the reasons in `replaces` is replaced and doesn't count.

    >>> slots = TrialSlots(max_trials=3, max_concurrent=2)
    >>> slots.fill()
    [Create(trial=0), Create(trial=1)]
    >>> slots.end(0, "completed")
    >>> slots.fill()
    [Create(trial=2)]
    """

    def __init__(self, *, max_trials: int, max_concurrent: int, replaces: Sequence[Replaced] = REPLACED) -> None:
        self.counts = TrialCounts(max_trials)  # brackets share one
        self.max_trials, self._num_slots = max_trials, num_slots(max_concurrent)
        self._replaces = replaces
        self._counted = 0  # created trials that were not replaced
        self._live: set[int] = set()
        self._with_slot: set[int] = set()
        self._requested: set[int] = set()  # these count neither for the budget nor for the slots
        self._ended: Counter[Reason] = Counter()
        self._completed: set[int] = set()  # an extension may resume these
        self._to_resume: deque[int] = deque()  # completed trials that wait for a slot in an extension
        self._done = False
        self._progress = 0.0

    def is_live(self, trial: int) -> bool:
        if trial in self._live:
            return True
        self.counts.check(trial)
        return False

    def has_slot(self, trial: int) -> bool:
        """Whether the trial is live and was neither stopped nor paused."""
        return trial in self._with_slot

    @property
    def occupants(self) -> Set[int]:
        """Trials that hold the `max_concurrent` slots, without those that were requested."""
        return self._with_slot - self._requested

    @property
    def is_full(self) -> bool:
        return len(self._with_slot) - len(self._requested & self._with_slot) >= self._num_slots

    @property
    def may_create(self) -> bool:
        """Whether the budget and the space allow one more trial."""
        counts = self.counts
        return self._counted < self.max_trials and counts.drawn < counts.num_points and counts.gave_up is None

    @property
    def completed(self) -> set[int]:
        """Completed trials, except those waiting to be resumed."""
        return self._completed.difference(self._to_resume)

    @property
    def ended(self) -> int:
        """Number of trials that have ended, except those that were replaced or requested."""
        return self._counted - len(self._live) + len(self._requested & self._live)

    def create(self) -> Create:
        trial = self.counts.created
        self.counts.created += 1
        self.counts.drawn += 1
        self._counted += 1
        self._live.add(trial)
        self._with_slot.add(trial)
        return Create(trial=trial)

    def limit_points(self, points: int) -> None:
        """Create no more trials than the space has points."""
        self.counts.num_points = points
        self.max_trials = min(self.max_trials, points)

    def create_requested(self, request: Requested) -> Create:
        """Create a trial beyond the budget and the slots, also when the search is done."""
        trial = self.counts.created
        self.counts.created += 1
        self._requested.add(trial)
        self._live.add(trial)
        self._with_slot.add(trial)
        self._done = False
        return Create(trial=trial, source=request.source, hparams=request.hparams or {})

    def release(self, trial: int) -> None:
        """Free the slot of a trial that is being stopped or paused, before its workers have left."""
        self._with_slot.remove(trial)

    def resume(self, trial: int) -> Resume:
        """Give a free slot to a trial that is paused or, in an extension, has ended."""
        if trial in self._completed:
            self._completed.remove(trial)
            self._ended["completed"] -= 1
        elif trial not in self._live:
            self._ended["stopped"] -= 1
        self._live.add(trial)
        self._with_slot.add(trial)
        return Resume(trial=trial)

    def end(self, trial: int, reason: Reason) -> None:
        self._live.remove(trial)
        self._with_slot.discard(trial)
        self._ended[reason] += 1
        if reason == "completed":
            self._completed.add(trial)
        elif reason in REPLACED and reason in self._replaces and trial not in self._requested:
            self._counted -= 1
            self.counts.add_replaced(reason)

    def fill(self) -> list[Action]:
        """Resume or create trials for the free slots; return `Done` if no trial is left."""
        actions: list[Action] = []
        while self._to_resume and not self.is_full:
            actions.append(self.resume(self._to_resume.popleft()))
        while not self.is_full and self.may_create:
            actions.append(self.create())
        return actions + self.finish()

    def finish(self) -> list[Action]:
        """Return `Done` if no trial is live, only once until the next extension."""
        if self._live or self._done:
            return []
        self._done = True
        return [Done(reason=self._outcome())]

    def _outcome(self) -> DoneReason:
        if self.counts.gave_up is not None:
            return self.counts.gave_up
        if not self._ended or any(self._ended[reason] for reason in ("completed", "stopped", "diverged")):
            return "completed"
        if self._ended["errored"] or self._ended["out_of_memory"]:
            return "errored"
        return "canceled" if self._ended["canceled"] else "invalid_hp"

    def extend(self, *, max_trials: int, max_concurrent: int, to_resume: Iterable[int] = ()) -> None:
        """Increase the budget, and queue completed trials to be resumed before new ones are created."""
        self.max_trials, self._num_slots = max_trials, num_slots(max_concurrent)
        self._to_resume.extend(to_resume)
        self._done = False
        self._progress = 0.0

    def trained(self, shares: Mapping[int, float]) -> float:
        """Sum the shares of live trials, each clipped to [0, 1], except those of requested ones."""
        found = (shares.get(trial, 0.0) for trial in self._live - self._requested)
        return sum(min(max(share, 0.0), 1.0) for share in found if not math.isnan(share))

    def progress(self, share: float) -> float:
        """Return the largest share so far, but below 1.0 until the search is done, and then exactly 1.0."""
        if self._done:
            return 1.0
        self._progress = max(self._progress, min(share, NEARLY_DONE))
        return self._progress


def num_slots(max_concurrent: int) -> int:
    """The number of trials that hold slots at a time; 0 stands for no limit of the user's."""
    return min(max_concurrent or MAX_CONCURRENT, MAX_CONCURRENT)
