"""Finds the change of a program after which a metric is worse, from runs of some of its versions.

`bisect` is a pure generator: it yields the next runs, and returns the verdict. Runs of two versions with the same seed
are compared, so changes that change nothing train bit by bit alike, and the rest of the noise is small. A second and a
third seed are used only where a value is in doubt.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TypeAlias

LEAST = 0.01
"""The least difference that counts as a regression, as a share of the first version's loss, by default."""
MAX_SEEDS = 3
CERTAIN = 3.0
"""The difference of the ends needs no second seed if it is this many times larger, or smaller, than the least one."""
STANDARD_ERRORS = 2.0
"""With several seeds, the mean difference of the ends must also be this many of its standard errors above 0."""
DOUBT = 1 / 6
"""A version is in doubt if its place between the ends, 0 at the first and 1 at the last, is this close to 1/2."""


@dataclass(frozen=True, slots=True)
class Run:
    """A short run of a version, named by anything that equal versions share, with a seed."""

    version: str
    seed: int


Results: TypeAlias = Mapping[Run, float | None]
"""Losses: smaller is better, infinite if the run diverged, None if it failed."""


@dataclass(frozen=True, slots=True)
class Regression:
    """The version `bad` is worse than `good`, by their places; those between them do not run.

    Attributes:
        difference: by how much the last version's loss is above the first's.
        step: by how much that of `bad` is above that of `good`.
        seeds: with how many seeds `good` and `bad` both ran.
    """

    good: int
    bad: int
    difference: float
    step: float
    seeds: int


@dataclass(frozen=True, slots=True)
class NoRegression:
    """The last version is not worse than the first by the least difference that counts."""

    difference: float
    seeds: int


@dataclass(frozen=True, slots=True)
class EndFails:
    """The first or the last version does not run."""

    version: int


Verdict: TypeAlias = Regression | NoRegression | EndFails


def bisect(versions: Sequence[str], *, least: float = LEAST) -> Generator[tuple[Run, ...], Results, Verdict]:
    """Yield runs to do, each once, and return the verdict. It is sent the losses of the runs that it has yielded.

    Args:
        versions: the first, which is good, to the last, which may be bad.
        least: see `LEAST`.
    """
    if versions[0] == versions[-1]:
        return NoRegression(0.0, 0)
    runs, last = _Runs(versions), len(versions) - 1
    ends = yield from runs.losses((0, last), 0)
    if None in ends:
        return EndFails(0 if ends[0] is None else last)
    counts = least * abs(ends[0]) if ends[0] is not None and math.isfinite(ends[0]) else 0.0
    above = yield from _above_of_last(runs, last, counts)
    difference = fmean(above)
    if difference <= 0 or difference < max(counts, STANDARD_ERRORS * _standard_error(above)):
        return NoRegression(difference, len(above))
    good, bad, failing = 0, last, set[int]()
    while between := [each for each in range(good + 1, bad) if each not in failing]:
        middle = min(between, key=lambda each: abs(2 * each - good - bad))
        place = yield from _place(runs, middle, last, counts)
        if place is None:
            failing.add(middle)
        elif place > 0.5:
            bad = middle
        else:
            good = middle
    step, seeds = runs.step(good, bad)
    return Regression(good, bad, difference, step, seeds)


def _above_of_last(runs: _Runs, last: int, counts: float) -> Generator[tuple[Run, ...], Results, list[float]]:
    """By how much the last version's loss is above the first's, with as many seeds as it takes to see if it counts."""
    above = yield from runs.above(last, [0])
    if counts / CERTAIN <= above[0] < counts * CERTAIN:
        above += yield from runs.above(last, [1])
        if max(above) >= counts:
            above += yield from runs.above(last, range(2, MAX_SEEDS))
    return above


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 and all(map(math.isfinite, values)) else 0.0


def _place(runs: _Runs, version: int, last: int, counts: float) -> Generator[tuple[Run, ...], Results, float | None]:
    """The place of a version's loss between those of the ends: 0 is the first's, 1 the last's. None: it fails."""
    place = 0.5
    for seeds in range(1, MAX_SEEDS + 1):
        if (yield from runs.losses((version,), 0)) == [None]:
            return None
        above = yield from runs.above_first(version, seeds)
        of_last = yield from runs.above_first(last, seeds)
        place = above / max(of_last, counts, math.ulp(0.0)) if math.isfinite(above) else above
        if abs(place - 0.5) > DOUBT:
            break
    return place


class _Runs:
    """The results so far."""

    def __init__(self, versions: Sequence[str]) -> None:
        self._versions = versions
        self._results: dict[Run, float | None] = {}

    def losses(self, versions: Sequence[int], seed: int) -> Generator[tuple[Run, ...], Results, list[float | None]]:
        """The losses of versions, after they have run."""
        runs = [Run(self._versions[each], seed) for each in versions]
        if missing := tuple(dict.fromkeys(run for run in runs if run not in self._results)):
            self._results |= yield missing
        return [self._results[run] for run in runs]

    def above(self, version: int, seeds: Sequence[int]) -> Generator[tuple[Run, ...], Results, list[float]]:
        """By how much a version's loss is above the first version's, for each seed."""
        found = []
        for seed in seeds:
            found.append(_difference(*(yield from self.losses((0, version), seed))))
        return found

    def above_first(self, version: int, seeds: int) -> Generator[tuple[Run, ...], Results, float]:
        return fmean((yield from self.above(version, range(seeds))))

    def step(self, good: int, bad: int) -> tuple[float, int]:
        """By how much the loss of one version is above that of another, in the mean over the seeds that both ran with,
        and their number."""
        losses = [
            [self._results.get(Run(self._versions[each], seed)) for each in (good, bad)] for seed in range(MAX_SEEDS)
        ]
        common = [_difference(*pair) for pair in losses if None not in pair]
        return fmean(common), len(common)


def _difference(before: float | None, after: float | None) -> float:
    """The difference of two losses; a run that fails with one seed only counts as diverged."""
    one, other = (math.inf if loss is None else loss for loss in (before, after))
    return 0.0 if one == other else other - one
