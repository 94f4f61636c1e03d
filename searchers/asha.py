"""ASHA, the stopping variant: a trial that comes to a rung goes on only if it is among the best 1/divisor there.

Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning" (arXiv 1810.05934); the rule for stopping
instead of promoting is Determined's `async_halving`. Differences from Determined, each on purpose:

* any end of a trial makes room for a successor, also one by itself below the top rung;
* a trial is ranked at most once in a rung: late and repeated reports change nothing;
* a value that is not finite is the worst, wherever it comes, and its trial is stopped at the rung;
* a trial that reports at the top rung gets no `Stop`: it is trained to `max_length` and ends by itself ("completed");
* lengths and ranks are computed exactly, with the divisor as the decimal number that the user wrote.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import cast

from searchers.events import Action, Event, Exited, Reported, Started, Stop, assert_never
from searchers.method import Fields, check_state
from searchers.roster import Roster, default_max_invalid
from searchers.rung import Rung


class ASHA:
    """Asynchronous successive halving, stopping.

    Args:
        max_trials: Trials to create, >= 1. Trials with invalid hyperparameters are replaced and don't count.
        max_length: Length of a trial that is never stopped, >= 1.
        num_rungs: Lengths at which trials are compared, the last being max_length, >= 1.
        divisor: Ratio of lengths between rungs, and of trials to those that go on; > 1, may be fractional.
        max_concurrent_trials: Trials created and not yet stopped or ended at any time.
            0 = divisor ** (num_rungs - 1), so that one of the first ones is expected to come to the top.
        max_invalid: Invalid trials that are replaced before the search gives up, >= 0.
            By default 4 per trial, and 16 at least.

    Raises:
        MethodError: A field is invalid; all are named.

    >>> asha = ASHA(max_trials=8, max_length=16, num_rungs=3, divisor=4, max_concurrent_trials=2)
    >>> asha.rungs
    (1, 4, 16)
    >>> asha.start()
    [Create(trial=0), Create(trial=1)]
    >>> asha.on(Reported(trial=0, step=1, value=0.5)), asha.on(Reported(trial=1, step=1, value=0.6))
    ([], [Stop(trial=1), Create(trial=2)])
    """

    def __init__(
        self,
        *,
        max_trials: int,
        max_length: int,
        num_rungs: int,
        divisor: float = 4,
        max_concurrent_trials: int = 16,
        max_invalid: int | None = None,
    ) -> None:
        check = Fields()
        check.whole("max_trials", max_trials, at_least=1)
        check.whole("max_length", max_length, at_least=1)
        check.whole("num_rungs", num_rungs, at_least=1)
        check.above("divisor", divisor, limit=1)
        check.whole("max_concurrent_trials", max_concurrent_trials, at_least=0)
        if max_invalid is not None:
            check.whole("max_invalid", max_invalid, at_least=0)
        check.done()
        self.rungs = rung_lengths(max_length=max_length, num_rungs=num_rungs, divisor=divisor)
        self._rungs = [Rung(divisor=divisor) for _ in self.rungs]
        self._next: dict[int, int] = {}  # of each live trial that was ranked: the rung it comes to next
        self._roster = Roster(
            max_trials=max_trials,
            width=min(max_concurrent_trials or math.floor(Fraction(str(divisor)) ** (num_rungs - 1)), max_trials),
            max_invalid=default_max_invalid(max_trials) if max_invalid is None else max_invalid,
        )

    def start(self) -> list[Action]:
        """One `Create` for each place, as far as there are trials."""
        return self._roster.settle()

    def on(self, event: Event) -> list[Action]:
        """`Stop` for the trial that reported, or nothing; and successors for the places that became free."""
        if not self._roster.is_live(event.trial):
            return []
        match event:
            case Started():
                return []
            case Reported():
                goes_on = self._rank(event)
                return [] if goes_on else [Stop(trial=event.trial), *self._roster.settle()]
            case Exited():
                self._leave(event)
                return self._roster.settle()
            case _:
                assert_never(event)

    def _rank(self, report: Reported) -> bool:
        """File the report at each rung it has crossed, up to the one that ends the trial; False if one does."""
        trial, top = report.trial, len(self.rungs) - 1
        value = math.inf if report.value is None or math.isnan(report.value) else report.value
        if not self._roster.holds_place(trial):  # told to stop before; what it reports winding down is not ranked
            return True
        while (rung := self._next.get(trial, 0)) <= top and report.step >= self.rungs[rung]:
            self._next[trial] = rung + 1
            among_the_best = self._rungs[rung].offer(trial, value)
            if rung < top and not (among_the_best and value < math.inf):
                self._roster.free_place(trial)
                return False
        return True

    def _leave(self, event: Exited) -> None:
        """The trial ends: an invalid one was never there, a failed one is the worst of the rung it was to come to."""
        trial, rung = event.trial, self._next.pop(event.trial, 0)
        if event.reason == "invalid_hp":
            for passed in self._rungs[:rung]:
                passed.withdraw(trial)
        elif event.reason in ("errored", "canceled") and self._roster.holds_place(trial) and rung < len(self._rungs):
            self._rungs[rung].offer(trial, math.inf)
        self._roster.end(trial, event.reason)

    def dump(self) -> dict[str, object]:
        """The state as JSON."""
        return {
            "method": "asha",
            "roster": self._roster.dump(),
            "next": sorted(self._next.items()),
            "rungs": [rung.dump() for rung in self._rungs],
        }

    def load(self, state: dict[str, object]) -> None:
        """Continue from a dump."""
        check_state("asha", state)
        self._roster.load(cast("dict[str, object]", state["roster"]))
        self._next = dict(cast("list[tuple[int, int]]", state["next"]))
        for rung, values in zip(self._rungs, cast("list[list[list[object]]]", state["rungs"]), strict=True):
            rung.load(values)


def rung_lengths(*, max_length: int, num_rungs: int, divisor: float) -> tuple[int, ...]:
    """max(floor(max_length / divisor ** (num_rungs - 1 - r)), 1) for r = 0, 1, ...; the last one is max_length.

    Lengths are absolute. Where max_length is short for so many rungs, the first ones are equal:

    >>> rung_lengths(max_length=100, num_rungs=5, divisor=4)
    (1, 1, 6, 25, 100)
    """
    exact = Fraction(str(divisor))
    return tuple(max(math.floor(max_length / exact**power), 1) for power in reversed(range(num_rungs)))


def rungs_that_fit(*, length: int, divisor: float) -> int:
    """floor(log(length) / log(divisor)) + 1: as many rungs have lengths of 1 or more without rounding up.

    Exact, where a quotient of two float logarithms is not:

    >>> rungs_that_fit(length=1000, divisor=10), math.floor(math.log(1000) / math.log(10)) + 1
    (4, 3)
    """
    power = round(math.log(length) / math.log(divisor)) + 1
    while Fraction(str(divisor)) ** power > length:  # the estimate is off by one, or by two
        power -= 1
    return power + 1
