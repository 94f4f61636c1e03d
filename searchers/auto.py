"""The recommended search method: promotion ASHA that needs no settings.

It compares trials at up to five lengths of at least one unit. Uninformative rungs are skipped (see `searchers.rung`),
so that a short first rung does little harm. A report that crosses several rungs is ranked only at the last of them: if
it were ranked at two, only one in nine trials would continue on the same information.

A short `max_length` leaves room for three rungs or fewer. ASHA then promotes its first trials late, and the search
begins with freeze-thaw: while all trials together have trained for less than eight full trainings, a model chooses for
each free slot the paused trial, or a new one, that promises the largest improvement at the last rung per unit of length
that it still has to train. A trial thus pauses at each rung, and may continue even if it is not one of the best
1/divisor there. With more rungs, promotions by rank were better from the beginning.

Source: Swersky, Snoek and Adams, "Freeze-Thaw Bayesian Optimization" (arXiv 1406.3896).
"""

from __future__ import annotations

from searchers.events import Action
from searchers.method import Choose
from searchers.objectives import Losses
from searchers.promotion import PromotionASHA, Trial
from searchers.rung import rungs_that_fit

DIVISOR = 3
MAX_RUNGS = 5

THAWED_RUNGS = 3
"""The most rungs with which a search begins with freeze-thaw."""
THAWED_TRAININGS = 8
"""Full trainings for which it does so."""


class Auto(PromotionASHA):
    """Promotion ASHA with settings of its own.

    Args:
        max_trials, max_length, max_concurrent_trials, pareto: As in `ASHA`.

    Attributes:
        choose: Set by a `Search` whose sampler can choose. Without it, or with several objectives, ASHA's rule applies
            from the beginning.

    >>> Auto(max_trials=64, max_length=27).rungs, Auto(max_trials=64, max_length=1000).rungs
    ((1, 3, 9, 27), (12, 37, 111, 333, 1000))
    """

    def __init__(
        self, *, max_trials: int, max_length: int, max_concurrent_trials: int = 16, pareto: bool = False
    ) -> None:
        self.choose: Choose | None = None
        self._trained: dict[int, float] = {}  # last step by trial
        super().__init__(
            max_trials=max_trials,
            max_length=max_length,
            num_rungs=rungs_that_fit(length=max_length, divisor=DIVISOR, at_most=MAX_RUNGS),
            divisor=DIVISOR,
            max_concurrent_trials=max_concurrent_trials,
            skip_uninformative_rungs=not pareto,
            pareto=pareto,
        )
        thaws = len(self._rungs) <= THAWED_RUNGS and not pareto
        self._left: float = THAWED_TRAININGS * max_length if thaws else 0  # length to train until ASHA's rule applies

    @property
    def thaws(self) -> bool:
        """Whether a model, if there is one, still chooses the trials that continue."""
        return self._left > 0 and self._slots.may_create

    def _report(self, number: int, step: float, value: float | Losses) -> list[Action]:
        if self._slots.has_slot(number):
            self._skip_crossed(self._trials[number], step)
        if self._left > 0 and step > (before := self._trained.get(number, 0.0)):
            self._left -= step - before
            self._trained[number] = step
        return super()._report(number, step, value)

    def _skip_crossed(self, trial: Trial, step: float) -> None:
        """Let a running trial pass the rungs that it crossed, except the last of them, without being ranked there."""
        while trial.next + 1 < len(self._rungs) and step >= self._rungs[trial.next + 1].length:
            self._unranked += trial.next == 0
            self._rungs[trial.next].num_approaching -= 1
            trial.next += 1
            self._rungs[trial.next].num_approaching += 1

    def _promotable(self) -> int | None:
        if self.choose is None or not self.thaws:
            return super()._promotable()
        paused = [trial for rung in self._rungs for trial in rung.paused]
        return self.choose(self._slots.counts.created, paused) if paused else None

    def _add_rungs(self, max_length: int) -> tuple[list[Action], list[int]]:
        self._left = 0  # the sampler does not know the new rungs yet
        return super()._add_rungs(max_length)
