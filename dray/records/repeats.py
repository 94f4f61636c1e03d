"""Trials that were trained again with other seeds, compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from typing_extensions import TypedDict

from dray.records.trial_record import TrialRecord
from dray.text import counted, shown, some
from searchers.intervals import Interval, difference, mean_of
from searchers.views import NEVER_BEST

_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A trial that was trained again.

    Attributes:
        trial: its number.
        trials: its repeats by seed.
        values: the best value of each repeat that has completed, by seed.
        failed: the number of repeats that failed, or diverged.
        is_live: whether there are repeats that have not ended.
        mean: of the values; None without any.
        difference: of its values from those of the best finalist with the same seeds; None for the best itself.
        is_compared: whether its place among the finalists is known: none of its repeats has failed, and the others have
            values for the same seeds.
    """

    trial: int
    trials: Mapping[int, int]
    values: Mapping[int, float]
    failed: int
    is_live: bool
    mean: Interval | None
    difference: Interval | None = None
    is_compared: bool = False

    def to_json(self) -> FinalistRow:
        """What the commands and the API give."""
        mean, apart = self.mean, self.difference
        return {
            "trial": self.trial,
            "seeds": len(self.values),
            "of": len(self.trials),
            "failed": self.failed,
            "compared": self.is_compared,
            "mean": None if mean is None else mean.mean,
            "low": None if mean is None else mean.low,
            "high": None if mean is None else mean.high,
            "difference": None if apart is None else apart.mean,
            "difference_low": None if apart is None else apart.low,
            "difference_high": None if apart is None else apart.high,
            "distinguishable": None if apart is None or apart.low is None else apart.excludes_zero,
            "trials": [self.trials[seed] for seed in sorted(self.trials)],
            "text": interval_text(mean),
            "difference_text": interval_text(apart),
        }


class FinalistRow(TypedDict):
    """A trial that was trained again with other seeds."""

    trial: int
    seeds: int  # repeats that have completed
    of: int  # repeats
    failed: int  # repeats that failed or diverged
    compared: bool  # whether its place among these trials is known
    mean: float | None  # of the searcher's metric over the repeats
    low: float | None  # its 95% confidence interval; null with fewer than 2 seeds
    high: float | None
    difference: float | None  # from the best, by pairs with the same seed; null for the best
    difference_low: float | None
    difference_high: float | None
    distinguishable: bool | None  # whether that interval excludes 0; null for the best, and without an interval
    trials: list[int]  # the repeats
    text: str  # mean and interval
    difference_text: str


def compared(repeats: Mapping[int, Mapping[int, TrialRecord]], sign: int) -> list[Finalist]:
    """The finalists, best first, by the mean over the seeds that all of them have completed.

    A finalist with a failed repeat comes after the others, since the mean of the rest would be too good. One whose
    repeats were all stopped is not waited for, nor is one that became a finalist after others had been repeated.

    Args:
        repeats: the repeats of each trial, by seed.
        sign: 1 if smaller values are better, else -1.
    """
    found = [_finalist(trial, mine) for trial, mine in repeats.items()]
    complete = [max(each.trials.values()) for each in found if each.values and not each.is_live]
    newcomers = {
        each.trial for each in found if each.is_live and min(each.trials.values()) > min(complete, default=math.inf)
    }
    contenders = {each.trial for each in found if not each.failed and (each.values or each.is_live)} - newcomers
    of_each = [set(each.values) for each in found if each.trial in contenders]
    seeds = set.intersection(*of_each) if of_each else set()
    is_open = not seeds and any(each.is_live for each in found)

    def place(each: Finalist) -> tuple[bool, bool, float, int]:
        values = [sign * value for seed, value in each.values.items() if seed in seeds or each.trial not in contenders]
        values = values or [sign * value for value in each.values.values()]
        return each.trial not in contenders, not values, fmean(values) if values else 0.0, each.trial

    found.sort(key=place)
    return [
        replace(
            each,
            is_compared=each.trial in contenders and bool(each.values) and not is_open,
            difference=None if each is best else _difference(each, best),
        )
        for best in found[:1]
        for each in found
    ]


def best_run(trial: TrialRecord, finalists: Sequence[Finalist], trials: Mapping[int, TrialRecord]) -> TrialRecord:
    """The best run of a trial: itself, which the search may have stopped early, or a repeat that has completed."""
    again = [trials[each.trials[seed]] for each in finalists if each.trial == trial.id for seed in each.values]
    return min([trial, *again], key=lambda run: (math.inf,) if run.rank is None else (*run.rank, run.id))


def _difference(one: Finalist, other: Finalist) -> Interval | None:
    return difference(one.values, other.values) if one.values and other.values else None


def _finalist(trial: int, repeats: Mapping[int, TrialRecord]) -> Finalist:
    ended = {seed: each for seed, each in repeats.items() if each.has_ended}
    failed = {seed for seed, each in ended.items() if each.state in NEVER_BEST or each.nan_since is not None}
    values = {
        seed: each.best_metric
        for seed, each in ended.items()
        if seed not in failed and each.state == "COMPLETED" and each.best_metric is not None
    }
    return Finalist(
        trial=trial,
        trials={seed: each.id for seed, each in repeats.items()},
        values=values,
        failed=len(failed),
        is_live=len(ended) < len(repeats),
        mean=mean_of(list(values.values())) if values else None,
    )


def interval_text(found: Interval | None) -> str:
    """ "0.131 (0.121 .. 0.141)"; the mean alone if there are too few seeds for an interval; "" without any."""
    return "" if found is None else with_interval(found.mean, found.low, found.high)


def with_interval(mean: float, low: float | None, high: float | None) -> str:
    """A mean and its interval, with two digits of half its width."""
    if low is None or high is None:
        return shown(mean)
    text: Callable[[float], str] = shown
    if high > low:
        decimals = 1 - math.floor(math.log10((high - low) / 2))
        text = f"{{:.{min(max(decimals, 0), 15)}f}}".format
    return f"{text(mean)} ({text(low)} .. {text(high)})"


def table(finalists: Sequence[Finalist], metric: str) -> list[list[str]]:
    """The finalists as rows of text, after their headings."""
    rows = [["trial", f"{metric} over seeds", "seeds", "difference from the best", "repeats"]]
    for each in finalists:
        failed = f", {each.failed} failed" if each.failed else ""
        seeds = f"{len(each.values)} of {len(each.trials)}{failed}"
        repeats = some([each.trials[seed] for seed in sorted(each.trials)], _SHOWN)
        rows.append([str(each.trial), interval_text(each.mean), seeds, interval_text(each.difference), repeats])
    return rows


def summary(finalists: Sequence[Finalist]) -> str:
    """Whether the best finalist can be told from the others, as a sentence; "" without finalists."""
    if not finalists:
        return ""
    best, rest = finalists[0], finalists[1:]
    ended = sum(len(each.values) + each.failed for each in finalists)
    if not best.is_compared:
        names = some([each.trial for each in finalists], _SHOWN)
        trials = f"trial{'s' * (len(finalists) > 1)} {names}"
        return f"{ended} of {counted(sum(len(each.trials) for each in finalists), 'repeat')} of {trials} ended"
    seeds = counted(len(best.values), "seed")
    if not rest:
        return f"trial {best.trial} has {interval_text(best.mean)} over {seeds}"
    near = [each.trial for each in rest if not each.failed and not (each.difference and each.difference.excludes_zero)]
    what = f"trial {best.trial} is the best of {len(finalists)} over {seeds}"
    failed = [each.trial for each in rest if each.failed]
    but = f"; repeats of trial{'s' * (len(failed) > 1)} {some(failed, _SHOWN)} failed" if failed else ""
    if near:
        return f"{what}, but not distinguishable from trial{'s' * (len(near) > 1)} {some(near, _SHOWN)}{but}"
    return f"{what}, and distinguishable from the others{but}" if len(failed) < len(rest) else f"{what}{but}"
