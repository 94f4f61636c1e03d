"""Asynchronous successive halving (ASHA): the stopping variant, and the base class of both variants.

The source is Li et al., "A System for Massively Parallel Hyperparameter Tuning" (arXiv 1810.05934). Stopping instead of
promoting is Determined's `async_halving`: a trial that reaches a rung continues only if it is among the best 1/divisor
there. Lengths and ranks are computed exactly, with the divisor as the decimal number that the user wrote. Non-finite
values rank last. A trial is ranked at most once per rung: late and repeated reports change nothing.

A trial is ranked by its first report from one rung to the next. A report that passes several rungs counts only for the
highest of them: its value comes from longer training than the values at the lower ones. Equal rungs, as short trials
have, count as one.

There are three deliberate differences from Determined:

* every trial that ends is replaced by a new one, even if it ended by itself below the top rung;
* a trial that reports at the top rung gets no `Stop`: it trains to `max_length` and completes;
* a report that passes several rungs is not ranked at all of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import cast

from searchers.errors import IllegalEvent
from searchers.events import (
    REPLACED,
    Action,
    Create,
    Event,
    Exited,
    Losses,
    Reported,
    Requested,
    Started,
    Stop,
    assert_never,
)
from searchers.method import Fields, check_extension
from searchers.objectives import loss_of
from searchers.pareto import ParetoOrder
from searchers.rung import Rung, longer_rungs, rung_lengths
from searchers.rung_correlation import RungCorrelation, less_strict
from searchers.slots import TrialCounts, TrialSlots

_RANKED_LAST = ("errored", "diverged", "canceled")


class SuccessiveHalving:
    """The base class of `ASHA`, which documents the arguments, and of `PromotionASHA`."""

    _min_best = 1  # number of trials that continue from a rung with fewer than `divisor`

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
        check.integers(1, max_trials=max_trials, max_length=max_length, num_rungs=num_rungs)
        check.above("divisor", divisor, limit=1)
        check.integers(0, max_concurrent_trials=max_concurrent_trials)
        if pareto and skip_uninformative_rungs:
            check.fault("skip_uninformative_rungs", "compares trials by one metric, not by several objectives")
        check.raise_faults()
        self.divisor, self.pareto = divisor, pareto
        self._learns = skip_uninformative_rungs
        self._set_up()
        self._rungs: list[Rung] = []
        self._correlations: list[RungCorrelation] = []  # of each rung with the next
        self._add_rungs(rung_lengths(max_length=max_length, num_rungs=num_rungs, divisor=divisor))
        self._max_concurrent_trials = max_concurrent_trials
        self._slots = TrialSlots(max_trials=max_trials, max_concurrent=self._max_concurrent())
        self._unranked = 0  # trials that passed the first rung, or ended by themselves, without being ranked there

    def _add_rungs(self, lengths: Sequence[int]) -> None:
        for length in lengths:
            order = ParetoOrder() if self.pareto else None
            self._rungs.append(Rung(length=length, divisor=self.divisor, min_best=self._min_best, order=order))
            self._correlations.append(RungCorrelation())

    def _lengthen(self, max_length: int) -> None:
        self._add_rungs(longer_rungs(self.rungs, max_length=max_length, divisor=self.divisor)[len(self._rungs) :])

    def _set_up(self) -> None:
        raise NotImplementedError

    def _fill(self) -> list[Action]:
        """Fill the free slots, or return `Done`."""
        return self._slots.fill()

    def _report(self, trial: int, step: float, value: float | Losses, lowest: int) -> list[Action]:
        """Decide on a live trial's report. Smaller values are better; the worst is +inf.

        Args:
            lowest: The lowest rung at which the report may be ranked.
        """
        raise NotImplementedError

    def _exit(self, exited: Exited) -> None:
        raise NotImplementedError

    def _begin_at(self, trial: int, rung: int) -> None:
        """Let a requested trial begin below this rung, the first at which it is ranked."""
        raise NotImplementedError

    def extend_to(self, max_trials: int, max_length: int) -> list[Action]:
        """Extend a bracket of `AdaptiveASHA`; like `extend`, but with values that were already checked."""
        raise NotImplementedError

    def _create(self) -> Create:
        return self._slots.create()

    def create_one(self) -> list[Action]:
        """Create a trial, if a slot is free and one may be created."""
        return [] if self._slots.is_full or not self._slots.may_create else [self._create()]

    def limit_points(self, points: int) -> None:
        self._slots.limit_points(points)

    @property
    def rungs(self) -> tuple[int, ...]:
        return tuple(rung.length for rung in self._rungs)

    @property
    def max_trials(self) -> int:
        return self._slots.max_trials

    @property
    def ranked(self) -> tuple[Mapping[int, float | Losses], ...]:
        """The values reported at each rung, by trial."""
        return tuple(rung.values for rung in self._rungs)

    def _max_concurrent(self) -> int:
        return self._max_concurrent_trials or math.floor(Fraction(str(self.divisor)) ** (len(self._rungs) - 1))

    def start(self) -> list[Action]:
        return self._fill()

    def on(self, event: Event) -> list[Action]:
        """Decide on the trial, and fill the slots that became free with new or resumed trials."""
        if not self._slots.is_live(event.trial):
            return []
        match event:
            case Reported() if self.pareto:
                return self._report(event.trial, event.step, _losses(event), self._lowest_rung(event))
            case Reported():
                return self._report(event.trial, event.step, loss_of(event.value), self._lowest_rung(event))
            case Exited():
                self._exit(event)
                return self._fill()
            case Started():
                return []
            case _:
                assert_never(event)

    def requested(self, request: Requested) -> list[Action]:
        """Create the trial. It is ranked at the rungs above the checkpoint that it begins from."""
        created = self._slots.create_requested(request)
        step = 0 if request.source is None else request.source.step
        self._begin_at(created.trial, sum(rung.length <= step for rung in self._rungs))
        return [created]

    def _lowest_rung(self, reported: Reported) -> int:
        """Return the index of the highest rung that the report has reached; of equal rungs, the first."""
        lengths = self.rungs
        reached = bisect_right(lengths, reported.step)
        return bisect_left(lengths, lengths[reached - 1]) if reported.skips and reached else 0

    def _rank(self, trial: int, number: int, value: float | Losses) -> bool:
        """Rank the trial at this rung, and return whether it continues."""
        if self._learns and number and trial in (before := self._rungs[number - 1]).values:
            values, correlation = cast("Mapping[int, float]", before.values), self._correlations[number - 1]
            if correlation.add(values[trial], cast("float", value), values.values()):
                before.divisor = less_strict(self.divisor, correlation.estimate)
        return self._rungs[number].rank(trial, value)

    def _rank_exit(self, exited: Exited, *, next_rung: int) -> None:
        """Withdraw a replaced trial from its rungs; rank a failed, diverged or canceled one last at its next rung."""
        if exited.reason in REPLACED:
            for rung in self._rungs[:next_rung]:
                if exited.trial in rung.values:
                    rung.withdraw(exited.trial)
        elif exited.reason in _RANKED_LAST and self._slots.has_slot(exited.trial) and next_rung < len(self._rungs):
            self._rungs[next_rung].rank(exited.trial, math.inf)
        elif next_rung == 0:
            self._unranked += 1

    def progress(self, trained: Mapping[int, float]) -> float:
        """Return Determined's estimate: the share of trials past the first rung or, if larger, of those that ended.

        The former is divided by 1.2, because some of these trials still have far to go.
        """
        past_the_first = (len(self._rungs[0].values) + self._unranked) / 1.2
        return self._slots.progress(max(past_the_first, self._slots.ended) / (self.max_trials or 1))

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        """Add trials, or rungs above the present ones (see `longer_rungs`).

        With a greater length the best 1/divisor of the trials at the old top rung continue, including those that have
        completed. `ASHA` never resumes a trial that it stopped at a rung.

        Raises:
            MethodError: The budget does not grow. The search is unchanged.
        """
        check_extension(max_trials=(max_trials, self.max_trials), max_length=(max_length, self._rungs[-1].length))
        trials = max_trials or self.max_trials
        self._slots.counts.extend(trials)
        return self.extend_to(trials, max_length or self._rungs[-1].length)

    def share(self, counts: TrialCounts) -> None:
        """Share the numbering of trials and the count of replaced ones with the other brackets of a search."""
        self._slots.counts = counts


def _losses(reported: Reported) -> Losses | float:
    if reported.losses is None and reported.value is not None and reported.value < math.inf:
        message = f"trial {reported.trial} reported a value, but the method ranks by losses"
        raise IllegalEvent(f"{message}; pass objectives to Search, or leave out pareto")
    return math.inf if reported.losses is None else reported.losses


class ASHA(SuccessiveHalving):
    """Asynchronous successive halving, stopping.

    Args:
        max_trials: Number of trials, >= 1. Trials with invalid hyperparameters, and trials that run out of memory, are
            replaced and don't count.
        max_length: Length of a trial that is never stopped, >= 1.
        num_rungs: Number of lengths at which trials are compared, the last of which is `max_length`; >= 1.
        divisor: Ratio of the lengths of neighbouring rungs; one in `divisor` trials continues. > 1, may be fractional.
        max_concurrent_trials: Maximum number of trials that were created and have neither been stopped nor ended.
            0 = `divisor ** (num_rungs - 1)`, so that one of the first trials is expected to reach the top rung.
        skip_uninformative_rungs: Let more trials continue from a rung whose ranking differs from the next rung's, and
            all trials from one whose ranking is uncorrelated with it: see `searchers.rung`.
        pareto: Rank trials by several objectives and constraints (`searchers.pareto`). These come from a `Search` with
            `objectives`.

    Attributes:
        rungs: Lengths of the rungs, ascending.

    Raises:
        MethodError: At least one argument is invalid; the message names each.

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

    def _begin_at(self, trial: int, rung: int) -> None:
        self._next[trial] = rung

    def _report(self, trial: int, step: float, value: float | Losses, lowest: int) -> list[Action]:
        """Rank the trial at each rung it has reached, up to the one that stops it."""
        top = len(self._rungs) - 1
        if not self._slots.has_slot(trial):  # the trial is being stopped
            return []
        if (passed := self._next.get(trial, 0)) < lowest:
            self._unranked += passed == 0
            self._next[trial] = lowest
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
            stops, to_resume = self._continue_above(max_length)
        self._slots.extend(max_trials=max_trials, max_concurrent=self._max_concurrent(), to_resume=to_resume)
        return [*stops, *self._fill()]

    def _continue_above(self, max_length: int) -> tuple[list[Action], list[int]]:
        """Add rungs on top, for the best trials at the old top rung.

        Returns:
            `Stop`s for the other live trials at that rung, and the completed trials to resume.
        """
        old_top, num_old = self._rungs[-1], len(self._rungs)
        self._lengthen(max_length)
        best, completed = old_top.best(), self._slots.completed
        to_resume = [trial for trial in best if trial in completed]
        stops: list[Action] = []
        for trial, rung in sorted(self._next.items()):
            if rung == num_old and self._slots.has_slot(trial) and trial not in best:
                self._slots.release(trial)
                stops.append(Stop(trial=trial))
        self._next.update((trial, num_old) for trial in to_resume)
        return stops, to_resume
