"""Previews of searches: brackets and rungs, the number of trials at each rung, the total length trained, and the time.

What is not known beforehand is drawn for each simulated search, so that the ranges include it:

* A trial's value at a rung is its quality plus noise, both Gaussian. The scale of the noise is between `NOISE` times
  that of the quality, log-uniform: rungs predict each other well in some searches and poorly in others.
* A trial's time per unit of length is log-normal. The spread has an inverse chi-squared distribution, the posterior of
  `PRIOR_TRIALS` trials with `PRIOR_SPREAD` and of those that were measured.
* Good trials may be slower or faster than others: the correlation is between `SLOWER`, uniform.
* If the sampler learns from results, the mean quality grows with the logarithm of the number of trials with a result,
  so that more trials continue, but only up to `LEARNED` of them: then it has found the best region, and a search of
  three times as many trials is about three times as long. The factor is uniform up to `MAX_GROWTH`, because some
  searches learn little. Speed follows quality only up to `BEST`.

`MAX_GROWTH`, `LEARNED` and the larger `NOISE` were chosen for `auto` with bench/preview.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from random import Random
from statistics import median
from typing import NamedTuple

from searchers.adaptive_asha import AdaptiveASHA
from searchers.asha import SuccessiveHalving
from searchers.events import Action, Event, Exited, Pause, Reported, Started
from searchers.method import MAX_TRIALS, Method
from searchers.pbt import PBT
from searchers.random_search import RandomSearch
from searchers.repeats import Repeats
from searchers.simulate import Curve, simulate

WORKERS = 16  # the default of `max_concurrent_trials`
MAX_RUNS, MIN_RUNS = 200, 19  # searches that `expected` simulates; 19 is the fewest whose extremes are a 90% range
MAX_SIMULATED_TRIALS = 40_000  # in all these searches together, which takes up to six seconds
NOISE = 0.05, 3.0
PRIOR_SPREAD, PRIOR_TRIALS = 0.3, 4
SLOWER = -0.7, 0.7
MAX_GROWTH = 1.5
LEARNED = 50
BEST = -2.0  # smaller is better


@dataclass(frozen=True, slots=True, kw_only=True)
class RungPreview:
    """A rung. The numbers of trials are means if they depend on chance."""

    length: int | None  # None if the search does not set the length of its trials
    trials: float  # number of trials that reach the rung
    last: float  # number of trials that go no further


@dataclass(frozen=True, slots=True, kw_only=True)
class BracketPreview:
    """A bracket, a search without brackets, or the repeats after a search."""

    rungs: tuple[RungPreview, ...]

    @property
    def trials(self) -> float:
        """Number of trials, a mean if it depends on chance."""
        return self.rungs[0].trials

    @property
    def total(self) -> float | None:
        """Length trained by all trials of the bracket together; None if the search does not set lengths."""
        totals = [rung.length * rung.last for rung in self.rungs if rung.length is not None]
        return sum(totals) if totals else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The time that training takes, in seconds.

    Args:
        mean: Time per unit of length, or of a trial if the search sets no lengths; the mean of trials.
        spread: Standard deviation of the logarithm of that time, between the measured trials.
        measured: Number of trials that were measured; 0: `mean` is taken as exact, and `spread` as unknown.
        start: Time between a trial's getting a worker group and its first step, and after its last one.
        boot: Time in which a worker group starts.
    """

    mean: float = 1.0
    spread: float = 0.0
    measured: int = 0
    start: float = 0.0
    boot: float = 0.0

    def draw(self, rng: Random) -> tuple[float, float]:
        """A mean and a spread that agree with the measurements."""
        beyond_mean = max(self.measured - 1, 0)
        squares = PRIOR_TRIALS * PRIOR_SPREAD**2 + beyond_mean * self.spread**2
        spread = math.sqrt(squares / rng.gammavariate((PRIOR_TRIALS + beyond_mean) / 2, 2))
        error = rng.gauss(0, spread / math.sqrt(self.measured)) if self.measured else 0.0
        return self.mean * math.exp(error), spread


class Range(NamedTuple):
    """The median, and the 5th and 95th percentile, of simulated searches."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """The range that holds the value of another search with a probability of 90%; from 19 values or more."""
        ordered, cut = sorted(values), (len(values) + 1) // 20
        return cls(median(ordered), ordered[cut - 1], ordered[-cut])

    def times(self, factor: float) -> Range:
        return Range(self.median * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The expected course of a search whose trials are all valid and report values in random order."""

    brackets: tuple[BracketPreview, ...]
    likely: tuple[float, float] | None = None  # 5th and 95th percentile of `total`; None if it does not vary
    likely_trials: tuple[float, float] | None = None  # the same of `trials`
    wall_s: Range | None = None  # the search's duration; None if the rates are unknown, or it was not simulated
    busy_s: Range | None = None  # the time of all worker groups together
    cut: float = 0.0  # share of the simulated searches that did not end by themselves

    @property
    def trials(self) -> float:
        """Number of trials, a mean if it depends on chance."""
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
        case Repeats(method=search, seeds=seeds, top=top):
            found = preview(search)
            n = seeds * min(top, math.floor(found.trials))
            rung = RungPreview(length=int(method.rungs[-1]) if method.rungs else None, trials=n, last=n)
            return replace(found, brackets=(*found.brackets, BracketPreview(rungs=(rung,))))
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
            return _preview_of(method, _simulate(method, 0, _Conditions()).reached)
    raise TypeError(f"preview() needs a searchers.Method, got {method!r} of type {type(method).__name__}")


def is_certain(method: Method) -> bool:
    """Whether the total length of its trials does not depend on chance."""
    return isinstance(_repeated(method), RandomSearch | PBT)


def is_endless(method: Method) -> bool:
    """Whether the search creates trials until it is ended from outside, such as by a budget."""
    return getattr(method, "max_trials", None) == MAX_TRIALS


def is_simulated(method: Method) -> bool:
    """Whether `preview` simulates this method."""
    return not isinstance(_repeated(method), AdaptiveASHA | SuccessiveHalving | RandomSearch | PBT)


def _repeated(method: Method) -> Method:
    return method.method if isinstance(method, Repeats) else method


def _brackets(method: Method) -> list[tuple[float, ...]]:
    """The rungs of each bracket; of repeats, which are not ranked, only the last."""
    search = _repeated(method)
    found = [each.rungs for each in (search.brackets if isinstance(search, AdaptiveASHA) else (search,))]
    return found if search is method else [*found, method.rungs[-1:]]


def _bracket_of(method: Method, trial: int) -> int:
    if isinstance(method, Repeats) and method.is_repeat(trial):
        return -1
    search = _repeated(method)
    return search.bracket_of(trial) if isinstance(search, AdaptiveASHA) else 0


def _halving(asha: SuccessiveHalving) -> BracketPreview:
    rungs, n, divisor = [], asha.max_trials, Fraction(str(asha.divisor))
    for length in asha.rungs[:-1]:
        promoted = max(math.floor(n / divisor), 1)
        rungs.append(RungPreview(length=length, trials=n, last=n - promoted))
        n = promoted
    return BracketPreview(rungs=(*rungs, RungPreview(length=asha.rungs[-1], trials=n, last=n)))


def expected(
    make: Callable[[], Method],
    *,
    learns: bool = False,
    workers: int = WORKERS,
    rates: Rates | None = None,
    max_wall_s: float = math.inf,
    max_busy_s: float = math.inf,
) -> Preview:
    """Return the mean of simulated searches, and the likely ranges of their total length and, with `rates`, their time.

    `preview` gives a lower bound, as Determined does. With stopping ASHA more trials continue, because the first ones
    at a rung are compared with few others: small searches train half as much again. For a search of thousands of
    trials, which would take too long to simulate, and for one without an end, the result is that of `preview`.

    Args:
        make: Returns a new method at each call.
        learns: Whether the sampler learns from results, so that later trials are better.
        workers: Number of trials that train at the same time.
        rates: The time that training takes, if known.
        max_wall_s, max_busy_s: Duration, and time of all worker groups together, at which the search is ended. They
            need `rates`.

    The errors are those of `preview`.

    >>> from searchers import ASHA
    >>> found = expected(lambda: ASHA(max_trials=16, max_length=16, num_rungs=3))
    >>> [round(rung.trials) for rung in found.brackets[0].rungs], round(found.total)
    ([16, 5, 3], 65)
    """
    first = make()
    by_rule = preview(first)
    trials = by_rule.trials
    if rates is not None:
        shortest_s = rates.start + rates.mean * min(first.rungs, default=1)
        trials = min(trials, workers + min(max_busy_s, workers * max_wall_s) / shortest_s)
    count = min(MAX_RUNS, math.floor(MAX_SIMULATED_TRIALS / max(trials, 1)))
    if count < MIN_RUNS or (is_certain(first) and rates is None):
        return by_rule
    if is_endless(first):
        max_wall_s = min(max_wall_s, max_busy_s / workers)  # all workers are always busy
    conditions = _Conditions(workers, rates or Rates(), MAX_GROWTH if learns else 0.0, max_wall_s, max_busy_s)
    runs = [_simulate(make(), run, conditions) for run in range(count)]
    timed = replace(
        by_rule,
        wall_s=Range.of([run.wall_s for run in runs]) if rates else None,
        busy_s=Range.of([run.busy_s for run in runs]) if rates else None,
        cut=sum(run.is_cut for run in runs) / count,
    )
    if isinstance(first, PBT):  # the lengths that its trials reach include what their sources trained
        return timed
    totals = [total for run in runs if (total := _preview_of(first, run.reached).total) is not None]
    pooled = [[step for run in runs for step in run.reached[bracket]] for bracket in range(len(runs[0].reached))]
    return replace(
        timed,
        brackets=_preview_of(first, pooled, count).brackets,
        likely=_varying(totals),
        likely_trials=_varying([sum(map(len, run.reached)) for run in runs]),
    )


def _varying(values: Sequence[float]) -> tuple[float, float] | None:
    """The likely range; None if the values are equal."""
    return Range.of(values)[1:] if len(set(values)) > 1 else None


class _Conditions(NamedTuple):
    """Conditions of simulated searches; `expected` documents them."""

    workers: int = WORKERS
    rates: Rates = Rates()
    growth: float = 0.0
    max_wall_s: float = math.inf
    max_busy_s: float = math.inf


class _Run(NamedTuple):
    """A simulated search."""

    reached: list[list[float]]  # the lengths that its trials reach, by bracket; of a cut one, those with a report
    wall_s: float
    busy_s: float
    is_cut: bool


@dataclass(slots=True)
class _Course:
    """The course of a search up to the time when its workers have used `max_busy_s` together."""

    max_busy_s: float
    reached: dict[int, float] = field(default_factory=dict)  # the length of each trial
    running: set[int] = field(default_factory=set)
    time: float = 0.0
    busy_s: float = 0.0
    results: int = 0  # number of trials with a report
    is_spent: bool = False

    def on(self, time: float, event: Event, actions: list[Action]) -> None:
        self.advance(time)
        if self.is_spent:
            return
        match event:
            case Started(trial=number):
                self.reached.setdefault(number, 0)
                self.running.add(number)
            case Reported(trial=number, step=step):
                self.results += not self.reached[number]
                self.reached[number] = step
            case Exited(trial=number):
                self.running.discard(number)
        self.running.difference_update(action.trial for action in actions if isinstance(action, Pause))

    def advance(self, time: float) -> None:
        if self.is_spent:
            return
        left_s, added_s = self.max_busy_s - self.busy_s, len(self.running) * (time - self.time)
        if added_s > left_s:
            self.is_spent, added_s, time = True, left_s, self.time + left_s / len(self.running)
        self.time, self.busy_s = time, self.busy_s + added_s


def _simulate(method: Method, run: int, conditions: _Conditions) -> _Run:
    rng, workers, rates = Random(run), conditions.workers, conditions.rates
    noise = math.exp(rng.uniform(*map(math.log, NOISE)))
    slower = rng.uniform(*SLOWER)
    growth = conditions.growth * rng.random()
    mean, spread = rates.draw(rng)
    course = _Course(max(conditions.max_busy_s - workers * rates.boot, 0))

    def trial(_: Mapping[str, object]) -> Curve:
        quality = rng.gauss(0, 1) - growth * math.log(1 + min(course.results, LEARNED))
        speed = slower * max(quality, BEST) + math.sqrt(1 - slower**2) * rng.gauss(0, 1)
        return Curve(lambda _: quality + noise * rng.gauss(0, 1), cost=mean * math.exp(spread * speed - spread**2 / 2))

    found = simulate(
        method,
        workers,
        trial,
        reports=tuple(dict.fromkeys(method.rungs)) or (1,),
        start_cost=rates.start,
        resume_cost=rates.start,
        until=max(conditions.max_wall_s - rates.boot, 0),
        watch=course.on,
    )
    course.advance(found.time)
    is_cut = course.is_spent or found.done is None
    steps: list[list[float]] = [[] for _ in _brackets(method)]
    for number, step in course.reached.items():
        if step or not is_cut:
            steps[_bracket_of(method, number)].append(step)
    boot_s = min(workers, found.trials) * rates.boot
    return _Run(steps, course.time + rates.boot, course.busy_s + boot_s, is_cut)


def _preview_of(method: Method, reached: Sequence[Sequence[float]], runs: int = 1) -> Preview:
    """Count the trials at each rung from the lengths that they reached in `runs` simulations."""
    brackets: list[BracketPreview] = []
    for bracket, steps in zip(_brackets(method), reached, strict=True):
        lengths = tuple(dict.fromkeys(bracket))
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
