"""Previews of searches: brackets and rungs, the number of trials at each rung, and the total length trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random

from searchers.adaptive_asha import AdaptiveASHA
from searchers.asha import SuccessiveHalving
from searchers.events import Action, Event, Reported, Started
from searchers.method import Method
from searchers.pbt import PBT
from searchers.random_search import RandomSearch
from searchers.simulate import Curve, simulate

WORKERS = 16  # in simulations; the default of `max_concurrent_trials`
MAX_RUNS, MIN_RUNS = 100, 5  # searches that `expected` simulates
MAX_SIMULATED_TRIALS = 10_000  # in all these searches together, which takes about a second


@dataclass(frozen=True, slots=True, kw_only=True)
class RungPreview:
    """A rung. The numbers of trials are means if they depend on chance."""

    length: int | None  # None if the search does not set the length of its trials
    trials: float  # number of trials that reach the rung
    last: float  # number of trials that go no further


@dataclass(frozen=True, slots=True, kw_only=True)
class BracketPreview:
    """A bracket, or a search without brackets."""

    rungs: tuple[RungPreview, ...]

    @property
    def trials(self) -> float:
        return self.rungs[0].trials

    @property
    def total(self) -> float | None:
        """Length trained by all trials of the bracket together; None if the search does not set lengths."""
        totals = [rung.length * rung.last for rung in self.rungs if rung.length is not None]
        return sum(totals) if totals else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The expected course of a search whose trials are all valid and report values in random order."""

    brackets: tuple[BracketPreview, ...]
    likely: tuple[float, float] | None = None  # 5th and 95th percentile of `total`; None if it does not vary

    @property
    def trials(self) -> float:
        return sum(bracket.trials for bracket in self.brackets)

    @property
    def total(self) -> float | None:
        """Length trained by all trials together; None if the search does not set lengths."""
        known = [bracket.total for bracket in self.brackets if bracket.total is not None]
        return sum(known) if len(known) == len(self.brackets) else None


def preview(method: Method) -> Preview:
    """Preview a new method by Determined's rule: max(floor(n / divisor), 1) of n trials at a rung continue.

    A custom method is simulated once, with random values at each rung, so its numbers of trials are one random outcome.
    The simulation starts the method; create another one to run.

    Raises:
        TypeError: `method` is not a search method.
        RuntimeError: A custom method broke a rule in the simulation; see `searchers.testing.check_method`.

    >>> from searchers import ASHA
    >>> found = preview(ASHA(max_trials=64, max_length=16, num_rungs=3))
    >>> [(rung.length, rung.trials, rung.last) for rung in found.brackets[0].rungs], found.total
    ([(1, 64, 48), (4, 16, 12), (16, 4, 4)], 160)
    """
    match method:
        case AdaptiveASHA(brackets=brackets):
            return Preview(brackets=tuple(_halving(bracket) for bracket in brackets))
        case SuccessiveHalving():
            return Preview(brackets=(_halving(method),))
        case RandomSearch(max_trials=n, rungs=rungs):
            rung = RungPreview(length=rungs[-1] if rungs else None, trials=n, last=n)
            return Preview(brackets=(BracketPreview(rungs=(rung,)),))
        case PBT(population=n, rungs=rungs):  # a replacement trains only what the trial that it replaces has left
            rung = RungPreview(length=int(rungs[-1]), trials=n, last=n)
            return Preview(brackets=(BracketPreview(rungs=(rung,)),))
        case Method():
            return _preview_of(method, _simulate_lengths(method, 0))
    raise TypeError(f"preview() needs a searchers.Method, got {method!r} of type {type(method).__name__}")


def is_certain(method: Method) -> bool:
    """Whether the total length of its trials does not depend on chance."""
    return isinstance(method, RandomSearch | PBT)


def is_simulated(method: Method) -> bool:
    """Whether `preview` simulates this method."""
    return not isinstance(method, AdaptiveASHA | SuccessiveHalving | RandomSearch | PBT)


def _halving(asha: SuccessiveHalving) -> BracketPreview:
    rungs, n, divisor = [], asha.max_trials, Fraction(str(asha.divisor))
    for length in asha.rungs[:-1]:
        promoted = max(math.floor(n / divisor), 1)
        rungs.append(RungPreview(length=length, trials=n, last=n - promoted))
        n = promoted
    return BracketPreview(rungs=(*rungs, RungPreview(length=asha.rungs[-1], trials=n, last=n)))


def expected(make: Callable[[], Method]) -> Preview:
    """Return the mean of simulated searches, and the likely range of their total length.

    `preview` gives a lower bound, as Determined does. With stopping ASHA more trials continue, because the first ones
    at a rung are compared with few others: small searches train half as much again. In these simulations a trial's rank
    mostly stays the same from rung to rung, as in training. For a search of thousands of trials, which would take too
    long to simulate, the lower bound is returned.

    `make` returns a new method at each call. The errors are those of `preview`.

    >>> from searchers import ASHA
    >>> found = expected(lambda: ASHA(max_trials=16, max_length=16, num_rungs=3))
    >>> [round(rung.trials) for rung in found.brackets[0].rungs], round(found.total)
    ([16, 5, 3], 68)
    """
    first = make()
    by_rule = preview(first)
    runs = min(MAX_RUNS, MAX_SIMULATED_TRIALS // max(round(by_rule.trials), 1))
    if is_certain(first) or runs < MIN_RUNS:
        return by_rule
    reached = [_simulate_lengths(make(), run) for run in range(runs)]
    totals = sorted(total for each in reached if (total := _preview_of(first, each).total) is not None)
    pooled = [[step for each in steps for step in each] for steps in zip(*reached, strict=True)]
    mean = _preview_of(first, pooled, runs)
    return replace(mean, likely=(totals[len(totals) // 20], totals[-1 - len(totals) // 20]) if totals else None)


def _simulate_lengths(method: Method, run: int) -> list[list[float]]:
    """Simulate a search, and return the lengths that its trials reach, by bracket."""
    reached: dict[int, float] = {}

    def trial(hparams: Mapping[str, object]) -> Curve:
        number = hparams["trial"]
        quality = Random(f"{run}:{number}").random()
        return Curve(lambda step: quality + 0.3 * Random(f"{run}:{number}:{step}").random())

    def watch(time: float, event: Event, actions: list[Action]) -> None:
        match event:
            case Started(trial=number):
                reached.setdefault(number, 0)
            case Reported(trial=number, step=step):
                reached[number] = step

    simulate(method, WORKERS, trial, reports=tuple(dict.fromkeys(method.rungs)) or (1,), watch=watch)
    if not isinstance(method, AdaptiveASHA):
        return [list(reached.values())]
    steps: list[list[float]] = [[] for _ in method.brackets]
    for number in range(method.created):
        steps[method.bracket_of(number)].append(reached.get(number, 0))
    return steps


def _preview_of(method: Method, reached: Sequence[Sequence[float]], runs: int = 1) -> Preview:
    """Count the trials at each rung from the lengths that they reached in `runs` simulations."""
    brackets: list[BracketPreview] = []
    for bracket, steps in zip(method.brackets if isinstance(method, AdaptiveASHA) else (method,), reached, strict=True):
        lengths = tuple(dict.fromkeys(bracket.rungs))
        counts = [sum(max(step, lengths[0]) >= length for step in steps) for length in lengths] or [len(steps)]
        rungs = zip(lengths or (None,), counts, [*counts[1:], 0], strict=True)
        brackets.append(
            BracketPreview(
                rungs=tuple(
                    RungPreview(
                        length=None if length is None else int(length),
                        trials=_mean(n, runs),
                        last=_mean(n - further, runs),
                    )
                    for length, n, further in rungs
                )
            )
        )
    return Preview(brackets=tuple(brackets))


def _mean(total: int, runs: int) -> float:
    return total / runs if total % runs else total // runs
