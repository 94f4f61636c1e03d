"""Asynchronous successive halving (ASHA): what both variants share, and the stopping one.

Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning" (arXiv 1810.05934); stopping instead of
promoting is Determined's `async_halving`: a trial that reaches a rung continues only if it is among the best 1/divisor
there. Lengths and ranks are computed exactly, with the divisor as the decimal number that the user wrote. A value that
is not finite is the worst. A trial is ranked at most once in a rung: late and repeated reports change nothing.

Deliberate differences from Determined:

* every trial that ends is followed by a new one, even if it ended by itself below the top rung;
* a trial that reports at the top rung gets no `Stop`: it trains to `max_length` and completes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from searchers.errors import IllegalEvent
from searchers.events import Action, Event, Exited, Reported, Started, Stop, assert_never
from searchers.method import Fields, check_extension
from searchers.objectives import Losses
from searchers.rung import ParetoRung, Rung, longer_rungs, rung_lengths
from searchers.slots import TrialCounts, TrialSlots

_RANKED_LAST = ("errored", "diverged", "canceled")


class SuccessiveHalving:
    """The base class of `ASHA`, which documents the arguments, and of `PromotionASHA`."""

    _least = 1  # trials among the best of fewer than `divisor`

    def __init__(
        self,
        *,
        max_trials: int,
        max_length: int,
        num_rungs: int,
        divisor: float = 4,
        max_concurrent_trials: int = 16,
        skip_uninformative_rungs: bool = False,
        pareto: bool = False,
    ) -> None:
        check = Fields()
        check.whole(1, max_trials=max_trials, max_length=max_length, num_rungs=num_rungs)
        check.above("divisor", divisor, limit=1)
        check.whole(0, max_concurrent_trials=max_concurrent_trials)
        if pareto and skip_uninformative_rungs:
            check.fault("skip_uninformative_rungs", "compares trials by one metric, not by several objectives")
        check.done()
        self.divisor, self.pareto = divisor, pareto
        self._learns = skip_uninformative_rungs
        self._rungs = self._new_rungs(rung_lengths(max_length=max_length, num_rungs=num_rungs, divisor=divisor))
        self._set_up()
        self._max_concurrent_trials = max_concurrent_trials
        self._slots = TrialSlots(max_trials=max_trials, max_concurrent=self._max_concurrent())
        self._unranked = 0  # trials that ended by themselves before the first rung

    def _new_rungs(self, lengths: Sequence[int]) -> list[Rung]:
        kind = ParetoRung if self.pareto else Rung
        return [kind(length=length, divisor=self.divisor, least=self._least) for length in lengths]

    def _set_up(self) -> None:
        raise NotImplementedError

    def _fill(self) -> list[Action]:
        """Actions for the free slots, or `Done`."""
        return self._slots.fill()

    def _report(self, trial: int, step: float, value: float | Losses) -> list[Action]:
        """What follows from a live trial's report. The worst value is +inf."""
        raise NotImplementedError

    def _exit(self, exited: Exited) -> None:
        raise NotImplementedError

    def extend_to(self, max_trials: int, max_length: int) -> list[Action]:
        """`extend` with values that were checked, for a bracket of `AdaptiveASHA`."""
        raise NotImplementedError

    @property
    def rungs(self) -> tuple[int, ...]:
        return tuple(rung.length for rung in self._rungs)

    @property
    def max_trials(self) -> int:
        return self._slots.max_trials

    @property
    def ranked(self) -> tuple[Mapping[int, float | Losses], ...]:
        """For each rung, its trials and the values they reported there."""
        return tuple(rung.values for rung in self._rungs)

    def _max_concurrent(self) -> int:
        return self._max_concurrent_trials or math.floor(Fraction(str(self.divisor)) ** (len(self._rungs) - 1))

    def start(self) -> list[Action]:
        return self._fill()

    def on(self, event: Event) -> list[Action]:
        """The decision about the trial, and new or resumed trials for the slots that became free."""
        if not self._slots.is_live(event.trial):
            return []
        match event:
            case Reported() if self.pareto:
                return self._report(event.trial, event.step, _losses(event))
            case Reported():
                value = event.value
                return self._report(event.trial, event.step, math.inf if value is None or math.isnan(value) else value)
            case Exited():
                self._exit(event)
                return self._fill()
            case Started():
                return []
            case _:
                assert_never(event)

    def _rank(self, trial: int, number: int, value: float | Losses) -> bool:
        """Rank the trial at this rung. Returns whether it continues."""
        if self._learns and number:
            assert not isinstance(value, Losses)
            self._rungs[number - 1].compare(trial, value)
        return self._rungs[number].rank(trial, value)

    def _rank_exit(self, exited: Exited, *, next_rung: int) -> None:
        """Remove an invalid trial from its rungs; rank one that failed, diverged or was canceled last at its next."""
        if exited.reason == "invalid_hp":
            for rung in self._rungs[:next_rung]:
                rung.withdraw(exited.trial)
        elif exited.reason in _RANKED_LAST and self._slots.has_slot(exited.trial) and next_rung < len(self._rungs):
            self._rungs[next_rung].rank(exited.trial, math.inf)
        elif next_rung == 0:
            self._unranked += 1

    def progress(self, trained: Mapping[int, float]) -> float:
        """Determined's estimate: trials past the first rung, or trials that have ended, as a share of all.

        The former count for 1 / 1.2, since some of them have far to go.
        """
        past_the_first = (len(self._rungs[0].values) + self._unranked) / 1.2
        return self._slots.progress(max(past_the_first, self._slots.ended) / self.max_trials)

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        """Allow more trials, or add rungs above the others (see `longer_rungs`).

        With a greater length the best 1/divisor of the trials at the old top rung continue, including those that have
        completed. `ASHA` never resumes a trial that it stopped at a rung.
        """
        check_extension(max_trials=(max_trials, self.max_trials), max_length=(max_length, self._rungs[-1].length))
        trials = max_trials or self.max_trials
        self._slots.counts.extend(trials)
        return self.extend_to(trials, max_length or self._rungs[-1].length)

    def share(self, counts: TrialCounts) -> None:
        """Number trials, and count the invalid ones, together with the other brackets of a search."""
        self._slots.counts = counts


def _losses(reported: Reported) -> Losses | float:
    if reported.losses is None and reported.value is not None and reported.value < math.inf:
        what = f"trial {reported.trial} reported a value, but the method ranks by losses"
        raise IllegalEvent(f"{what}; give Search its objectives, or leave out pareto")
    return math.inf if reported.losses is None else reported.losses


class ASHA(SuccessiveHalving):
    """Asynchronous successive halving, stopping.

    Args:
        max_trials: Trials to create, >= 1. Trials with invalid hyperparameters are replaced and don't count.
        max_length: Length of a trial that is never stopped, >= 1.
        num_rungs: Lengths at which trials are compared, the last being max_length, >= 1.
        divisor: Ratio of lengths between rungs, and of trials to those that continue; > 1, may be fractional.
        max_concurrent_trials: Most trials at a time that were created and have neither been stopped nor ended.
            0 = `divisor ** (num_rungs - 1)`, so that one of the first trials is expected to reach the top rung.
        skip_uninformative_rungs: Let more trials continue at a rung that ranks them otherwise than the next one does,
            and all of them where it says nothing: see `searchers.rung`.
        pareto: Rank trials by several objectives and constraints (`searchers.pareto`), which a `Search` with
            `objectives` reports as losses.

    Attributes:
        rungs: Lengths of the rungs, ascending.
        divisor, pareto: As given.

    Raises:
        MethodError: A field is invalid; all are named.

    >>> from searchers import Reported
    >>> asha = ASHA(max_trials=8, max_length=16, num_rungs=3, divisor=4, max_concurrent_trials=2)
    >>> asha.rungs
    (1, 4, 16)
    >>> asha.start()
    [Create(trial=0), Create(trial=1)]
    >>> asha.on(Reported(trial=0, step=1, value=0.5)), asha.on(Reported(trial=1, step=1, value=0.6))
    ([], [Stop(trial=1), Create(trial=2)])
    """

    def _set_up(self) -> None:
        self._next: dict[int, int] = {}  # the next rung of each live trial that was ranked

    def _report(self, trial: int, step: float, value: float | Losses) -> list[Action]:
        """Rank the trial at each rung it has reached, up to the one that stops it."""
        top = len(self._rungs) - 1
        if not self._slots.has_slot(trial):  # a report from a trial that is being stopped
            return []
        while (rung := self._next.get(trial, 0)) <= top and step >= self._rungs[rung].length:
            self._next[trial] = rung + 1
            continues = self._rank(trial, rung, value)
            if rung < top and not (continues and value != math.inf):
                self._slots.release(trial)
                return [Stop(trial=trial), *self._fill()]
        return []

    def _exit(self, exited: Exited) -> None:
        self._rank_exit(exited, next_rung=self._next.pop(exited.trial, 0))
        self._slots.end(exited.trial, exited.reason)

    def extend_to(self, max_trials: int, max_length: int) -> list[Action]:
        stops: list[Action] = []
        to_resume: list[int] = []
        if max_length > self._rungs[-1].length:
            stops, to_resume = self._add_rungs(max_length)
        self._slots.extend(max_trials=max_trials, max_concurrent=self._max_concurrent(), to_resume=to_resume)
        return [*stops, *self._fill()]

    def _add_rungs(self, max_length: int) -> tuple[list[Action], list[int]]:
        """Add rungs on top, for the best trials at the old top rung.

        Returns:
            `Stop`s for the other live trials there, and those of the best that completed and are to be resumed.
        """
        old_top, num_old = self._rungs[-1], len(self._rungs)
        lengths = longer_rungs(self.rungs, max_length=max_length, divisor=self.divisor)
        self._rungs += self._new_rungs(lengths[num_old:])
        best, completed = old_top.best(), self._slots.completed
        to_resume = [trial for trial in best if trial in completed]
        stops: list[Action] = []
        for trial, rung in sorted(self._next.items()):
            if rung == num_old and self._slots.has_slot(trial) and trial not in best:
                self._slots.release(trial)
                stops.append(Stop(trial=trial))
        self._next.update((trial, num_old) for trial in to_resume)
        return stops, to_resume
