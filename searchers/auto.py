"""The recommended search method: promotion ASHA that needs no settings, and begins with freeze-thaw.

The rungs are chosen here, and skipped as far as they are uninformative (see `searchers.rung`). While the trials have
trained for less than eight full trainings together, too few have been compared for ASHA's rule: then the search asks a
model for each free slot which paused trial, or a new one, promises the largest improvement at the last rung per unit of
length that it still has to train. A trial thus pauses at each rung, and may continue even if it is not one of the best
1/divisor there.

Source: Swersky, Snoek and Adams, "Freeze-Thaw Bayesian Optimization" (arXiv 1406.3896).
"""

from __future__ import annotations

from searchers.events import Action
from searchers.method import Choose
from searchers.objectives import Losses
from searchers.promotion import PromotionASHA
from searchers.rung import rungs_that_fit

DIVISOR = 3
NUM_RUNGS = 4
THAWING = 8
"""Full trainings during which the model chooses."""


class Auto(PromotionASHA):
    """Promotion ASHA with settings of its own.

    Args:
        max_trials, max_length, max_concurrent_trials, pareto: As in `ASHA`.

    Attributes:
        choose: Set by a `Search` whose sampler can choose. Without it, ASHA's rule applies from the beginning.
    """

    def __init__(
        self, *, max_trials: int, max_length: int, max_concurrent_trials: int = 16, pareto: bool = False
    ) -> None:
        self.choose: Choose | None = None
        self._trained: dict[int, float] = {}  # last step by trial
        super().__init__(
            max_trials=max_trials,
            max_length=max_length,
            num_rungs=rungs_that_fit(length=max_length, divisor=DIVISOR, at_most=NUM_RUNGS),
            divisor=DIVISOR,
            max_concurrent_trials=max_concurrent_trials,
            skip_uninformative_rungs=not pareto,
            pareto=pareto,
        )
        self._left: float = 0 if pareto else THAWING * max_length  # length to train until ASHA's rule applies

    def _report(self, number: int, step: float, value: float | Losses) -> list[Action]:
        if self._left > 0 and step > (before := self._trained.get(number, 0.0)):
            self._left -= step - before
            self._trained[number] = step
        return super()._report(number, step, value)

    def _promotable(self) -> int | None:
        if self.choose is not None and self._slots.may_create and self._left > 0:
            paused = [trial for rung in self._rungs for trial in rung.paused]
            return self.choose(self._slots.counts.created, paused) if paused else None
        return super()._promotable()

    def _add_rungs(self, max_length: int) -> tuple[list[Action], list[int]]:
        self._left = 0  # the sampler does not know the new rungs yet
        return super()._add_rungs(max_length)
