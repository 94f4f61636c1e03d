"""The recommended search method: promotion ASHA that needs no settings.

It compares trials at up to five lengths of at least one unit. Uninformative rungs are skipped (see `searchers.rung`),
so that a short first rung does little harm. A report that crosses several rungs is ranked only at the last of them: if
it were ranked at two, only one in nine trials would continue on the same information.
"""

from __future__ import annotations

from searchers.events import Action
from searchers.method import Fields
from searchers.objectives import Losses
from searchers.promotion import PromotionASHA
from searchers.rung import rungs_that_fit

DIVISOR = 3
MAX_RUNGS = 5


class Auto(PromotionASHA):
    """Promotion ASHA with settings of its own.

    Args:
        max_trials, max_length, max_concurrent_trials, pareto: As in `ASHA`.

    >>> Auto(max_trials=64, max_length=27).rungs, Auto(max_trials=64, max_length=1000).rungs
    ((1, 3, 9, 27), (12, 37, 111, 333, 1000))
    """

    def __init__(
        self, *, max_trials: int, max_length: int, max_concurrent_trials: int = 16, pareto: bool = False
    ) -> None:
        check = Fields()
        check.integers(1, max_trials=max_trials, max_length=max_length)
        check.raise_faults()
        super().__init__(
            max_trials=max_trials,
            max_length=max_length,
            num_rungs=rungs_that_fit(length=max_length, divisor=DIVISOR, at_most=MAX_RUNGS),
            divisor=DIVISOR,
            max_concurrent_trials=max_concurrent_trials,
            skip_uninformative_rungs=not pareto,
            pareto=pareto,
        )

    def _report(self, number: int, step: float, value: float | Losses) -> list[Action]:
        if self._slots.has_slot(number):
            trial = self._trials[number]
            # It passes the rungs that it crossed, except the last of them, without being ranked there.
            while trial.next + 1 < len(self._rungs) and step >= self._rungs[trial.next + 1].length:
                self._unranked += trial.next == 0
                self._rungs[trial.next].num_approaching -= 1
                trial.next += 1
                self._rungs[trial.next].num_approaching += 1
        return super()._report(number, step, value)
