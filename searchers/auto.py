"""The recommended search method: promotion ASHA with fixed settings.

It compares trials at up to five lengths of at least one unit. Uninformative rungs are skipped (see `searchers.rung`),
so that a short first rung does little harm.
"""

from __future__ import annotations

from dataclasses import replace

from searchers.asha_promotion import PromotionASHA
from searchers.events import Reported
from searchers.method import Fields
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

    def _lowest_rung(self, reported: Reported) -> int:
        return super()._lowest_rung(replace(reported, skips=True))  # in journals of all versions
