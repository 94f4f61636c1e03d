"""ASHA, the stopping variant: a trial that reaches a rung goes on only if it is among the best 1/divisor there.

Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning" (arXiv 1810.05934); the rule for stopping
instead of promoting is Determined's `async_halving`. Differences from Determined, each on purpose:

* a trial that ends makes room for a successor however it ends, also by itself below the top rung;
* a trial is ranked at most once in a rung: late and repeated reports change nothing;
* a value that is not finite is the worst, and its trial is stopped at the rung;
* a trial that reports at the top rung gets no `Stop`: it is trained to `max_length` and ends by itself ("completed");
* lengths and ranks are computed exactly, with the divisor as the decimal number that the user wrote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import cast

from searchers.events import Action, Event, Exited, Reported, Started, Stop, assert_never
from searchers.method import Fields, check_extension, check_state
from searchers.roster import Roster, default_max_invalid
from searchers.rung import Rung


class ASHA:
    """Asynchronous successive halving, stopping.

    Args:
        max_trials: Trials to create, >= 1. Trials with invalid hyperparameters are replaced and don't count.
        max_length: Length of a trial that is never stopped, >= 1.
        num_rungs: Lengths at which trials are compared, the last being max_length, >= 1.
        divisor: Ratio of lengths between rungs, and of trials to those that go on; > 1, may be fractional.
        max_concurrent_trials: Most trials at a time that were created and have neither been stopped nor ended.
            0 = divisor ** (num_rungs - 1), so that one of the first trials is expected to reach the top rung.
        max_invalid: Invalid trials that are replaced before the search gives up, >= 0.
            By default 4 per trial, and 16 at least.

    Attributes:
        rungs: Lengths of the rungs, ascending.
        divisor: As given.

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

    _name = "asha"
    _least = 1  # the first trial at a rung goes on

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
        self.divisor = divisor
        self.rungs = rung_lengths(max_length=max_length, num_rungs=num_rungs, divisor=divisor)
        self._max_concurrent, self._max_invalid = max_concurrent_trials, max_invalid
        self._rungs = [Rung(divisor=divisor, least=self._least) for _ in self.rungs]
        self._next: dict[int, int] = {}  # the next rung of each trial that was ranked and goes on
        self._unranked = 0  # trials that ended by themselves before the first rung
        self._roster = Roster(
            max_trials=max_trials, width=self._width(max_trials), max_invalid=self._invalid_bound(max_trials)
        )
        self._prepare()

    def _prepare(self) -> None:
        """The rest of a subclass's `__init__`."""

    @property
    def max_trials(self) -> int:
        """Trials to create, as given or extended to."""
        return self._roster.max_trials

    def _width(self, max_trials: int) -> int:
        return min(self._max_concurrent or math.floor(Fraction(str(self.divisor)) ** (len(self.rungs) - 1)), max_trials)

    def _invalid_bound(self, max_trials: int) -> int:
        return default_max_invalid(max_trials) if self._max_invalid is None else self._max_invalid

    def start(self) -> list[Action]:
        """One `Create` for each place, as far as there are trials."""
        return self._settle()

    def on(self, event: Event) -> list[Action]:
        """`Stop` for the trial that reported, or nothing; and successors for the places that became free."""
        if not self._roster.is_live(event.trial):
            return []
        match event:
            case Reported():
                return self._report(event)
            case Exited():
                self._leave(event)
                return self._settle()
            case Started():
                return []
            case _:
                assert_never(event)

    def progress(self, trained: Mapping[int, float]) -> float:
        """Determined's estimate: trials past the first rung, and trials that have ended, as shares of all.

        The first counts for 1 / 1.2, since some of these trials have far to go yet.
        """
        first = (len(self._rungs[0]) + self._unranked) / 1.2
        return self._roster.progress(max(first, self._roster.ended) / self.max_trials)

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        """More trials, or rungs on top of the others (see `longer_rungs`).

        For a greater length the best 1/divisor of the trials at the old top rung go on, also those that have ended
        there. No stopped trial is revived.

        Raises:
            MethodError: The budget does not grow. Nothing has changed.
        """
        check_extension(max_trials=(max_trials, self.max_trials), max_length=(max_length, self.rungs[-1]))
        trials = max_trials or self.max_trials
        return self.grow(trials, max_length or self.rungs[-1], self._invalid_bound(trials))

    def grow(self, max_trials: int, max_length: int, max_invalid: int) -> list[Action]:
        """`extend` for a search that is a bracket of another."""
        actions: list[Action] = []
        again: list[int] = []
        if max_length > self.rungs[-1]:
            actions, again = self._lengthen(max_length)
        self._roster.extend(max_trials=max_trials, width=self._width(max_trials), max_invalid=max_invalid, again=again)
        return [*actions, *self._settle()]

    def give_up(self) -> None:
        """Create nothing more, for a search that is a bracket of another: too many trials were invalid in all."""
        self._roster.give_up()

    def is_live(self, trial: int) -> bool:
        """Whether the trial has not ended.

        Raises:
            IllegalEvent: It was never created.
        """
        return self._roster.is_live(trial)

    def _lengthen(self, max_length: int) -> tuple[list[Action], list[int]]:
        """Add rungs on top. The best trials at the old top go on: live ones as they are, ended ones (the second result)
        are resumed. The other live ones are stopped (the first)."""
        top = len(self.rungs)
        self.rungs = longer_rungs(self.rungs, max_length=max_length, divisor=self.divisor)
        best = self._rungs[-1].best()
        self._rungs += [Rung(divisor=self.divisor, least=self._least) for _ in self.rungs[top:]]
        completed = self._roster.completed
        again = [trial for trial in best if trial in completed]
        stops: list[Action] = []
        for trial, rung in sorted(self._next.items()):
            if rung == top and self._roster.holds_place(trial) and trial not in best:
                self._roster.free_place(trial)
                stops.append(Stop(trial=trial))
        self._next.update((trial, top) for trial in again)
        return stops, again

    def _settle(self) -> list[Action]:
        return self._roster.settle()

    def _report(self, report: Reported) -> list[Action]:
        """File the report at each rung it has crossed, up to the one that ends the trial."""
        trial, step, top = report.trial, report.step, len(self.rungs) - 1
        if not self._roster.holds_place(trial):  # told to stop; what it reports while it winds down is not ranked
            return []
        value = math.inf if report.value is None or math.isnan(report.value) else report.value
        while (rung := self._next.get(trial, 0)) <= top and step >= self.rungs[rung]:
            self._next[trial] = rung + 1
            among_the_best = self._rungs[rung].offer(trial, value)
            if rung < top and not (among_the_best and value < math.inf):
                self._roster.free_place(trial)
                return [Stop(trial=trial), *self._settle()]
        return []

    def _leave(self, event: Exited) -> None:
        """The trial ends: an invalid one leaves its rungs, one that failed or diverged is the worst of the next."""
        trial, rung = event.trial, self._next.pop(event.trial, 0)
        if event.reason == "invalid_hp":
            for passed in self._rungs[:rung]:
                passed.withdraw(trial)
        elif event.reason in _WORST and self._roster.holds_place(trial) and rung < len(self._rungs):
            self._rungs[rung].offer(trial, math.inf)
        elif rung == 0:
            self._unranked += 1
        self._roster.end(trial, event.reason)

    def dump(self) -> dict[str, object]:
        """The state as JSON."""
        return {
            "method": self._name,
            "lengths": self.rungs,
            "roster": self._roster.dump(),
            "next": sorted(self._next.items()),
            "rungs": [rung.dump() for rung in self._rungs],
            "unranked": self._unranked,
        }

    def load(self, state: dict[str, object]) -> None:
        """Continue from a dump."""
        check_state(self._name, state)
        self.rungs = tuple(cast("list[int]", state["lengths"]))
        self._roster.load(cast("dict[str, object]", state["roster"]))
        self._next = dict(cast("list[tuple[int, int]]", state["next"]))
        self._unranked = cast(int, state["unranked"])
        self._rungs = [Rung(divisor=self.divisor, least=self._least) for _ in self.rungs]
        for rung, values in zip(self._rungs, cast("list[list[list[object]]]", state["rungs"]), strict=True):
            rung.load(values)


_WORST = ("errored", "diverged", "canceled")


def rung_lengths(*, max_length: int, num_rungs: int, divisor: float) -> tuple[int, ...]:
    """max(floor(max_length / divisor ** (num_rungs - 1 - r)), 1) for r = 0, 1, ...; the last one is max_length.

    Lengths are absolute. Where max_length is short for so many rungs, the first ones are equal:

    >>> rung_lengths(max_length=100, num_rungs=5, divisor=4)
    (1, 1, 6, 25, 100)
    """
    exact = Fraction(str(divisor))
    return tuple(max(math.floor(max_length / exact**power), 1) for power in reversed(range(num_rungs)))


def longer_rungs(rungs: tuple[int, ...], *, max_length: int, divisor: float) -> tuple[int, ...]:
    """These rungs, and above them max_length / divisor ** k, rounded down, as long as it exceeds the last of them.

    >>> longer_rungs((1, 4, 16), max_length=256, divisor=4), longer_rungs((1, 4, 16), max_length=100, divisor=4)
    ((1, 4, 16, 64, 256), (1, 4, 16, 25, 100))
    """
    exact, added = Fraction(str(divisor)), [max_length]
    while (length := math.floor(max_length / exact ** len(added))) > rungs[-1]:
        added.append(length)
    return (*rungs, *reversed(added))


def rungs_that_fit(*, length: int, divisor: float, at_most: int | None = None) -> int:
    """floor(log(length) / log(divisor)) + 1: so many rungs have lengths >= 1 without rounding up.

    It is exact, unlike a quotient of two float logarithms:

    >>> rungs_that_fit(length=1000, divisor=10), math.floor(math.log(1000) / math.log(10)) + 1
    (4, 3)
    """
    exact, rungs = Fraction(str(divisor)), 1
    shortest = exact  # max_length that has one rung more
    while shortest <= length and rungs != at_most:
        rungs += 1
        shortest *= exact
    return rungs
