"""What both variants of asynchronous successive halving share: fields, slots, progress and extension.

Lengths and ranks are computed exactly, with the divisor as the decimal number that the user wrote. A value that is not
finite is the worst. A trial is ranked at most once in a rung: late and repeated reports change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from searchers.errors import IllegalEvent
from searchers.events import Action, Event, Exited, Reported, Started, assert_never
from searchers.method import Fields, check_extension
from searchers.objectives import Losses
from searchers.rung import ParetoRung, Rung, rung_lengths
from searchers.slots import TrialCounts, TrialSlots

_RANKED_LAST = ("errored", "diverged", "canceled")


class SuccessiveHalving:
    """The base class of `ASHA` (stopping) and `PromotionASHA`, which document the arguments."""

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
        check.whole("max_trials", max_trials, at_least=1)
        check.whole("max_length", max_length, at_least=1)
        check.whole("num_rungs", num_rungs, at_least=1)
        check.above("divisor", divisor, limit=1)
        check.whole("max_concurrent_trials", max_concurrent_trials, at_least=0)
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
