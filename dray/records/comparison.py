"""Comparisons of two trials, also of two experiments."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from dray.errors import ExperimentError
from dray.records.reader import ExperimentReader
from dray.records.repeats import with_interval
from dray.text import counted, shown
from searchers.intervals import difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The difference between two trials.

    Attributes:
        a, b: the trials; of two experiments, with the experiment's name.
        metric: the compared metric.
        smaller_is_better: whether smaller values of it are better.
        difference: the value of ``a`` minus that of ``b``; means, if they were trained with several seeds.
        low, high: its 95% confidence interval; None if there are too few seeds for one.
        seeds: the number of seeds that both have; without any, the smaller number of their runs.
        paired: whether runs with the same seed were compared.
        better: the better one of ``a`` and ``b``; None if they can't be distinguished.
        text: "trial 7 is better than trial 12 by 0.013 (0.004 .. 0.022), 3 seeds".
    """

    a: int | str
    b: int | str
    metric: str
    smaller_is_better: bool
    difference: float
    low: float | None
    high: float | None
    seeds: int
    paired: bool

    ALSO: ClassVar = ("better", "text")

    @property
    def better(self) -> int | str | None:
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return None
        return self.a if (self.difference < 0) == self.smaller_is_better else self.b

    @property
    def text(self) -> str:
        a_leads = (self.difference < 0) == self.smaller_is_better
        one, other = (self.a, self.b) if a_leads else (self.b, self.a)
        if self.low is None or self.high is None:
            by = f"{shown(abs(self.difference))} in {counted(self.seeds, 'run')}"
            what = f"trial {one} is ahead of trial {other} by {by}, too few to tell whether it is better"
            return f"{what}; repeat them with other seeds"
        low, high = (self.low, self.high) if self.difference > 0 else (-self.high, -self.low)
        range_ = f"{with_interval(abs(self.difference), low, high)}, {counted(self.seeds, 'seed')}"
        range_ += "" if self.paired else " each, not the same"
        if self.better is None:
            return f"trial {one} is not distinguishable from trial {other}: ahead by {range_}"
        return f"trial {one} is better than trial {other} by {range_}"

    def __str__(self) -> str:
        return self.text


def compare(one: ExperimentReader, a: int, other: ExperimentReader, b: int) -> Comparison:
    """Compare two trials, of one experiment or of two, by their repeats or, without any, by their own run.

    Raises:
        ExperimentError: they can't be compared; the message says why.
    """
    if one is other and a == b:
        raise ExperimentError(f"trial {a} can't be compared with itself; give another one")
    if (one.metric, one.sign) != (other.metric, other.sign):
        raise ExperimentError(
            f"the experiments optimize different metrics, {_objective(one)} and {_objective(other)}; compare others"
        )
    runs = [_runs(reader, trial) for reader, trial in ((one, a), (other, b))]
    found = difference(*runs)
    names: list[int | str] = [a, b]
    if one is not other:
        names = [f"{trial} of {reader.overview().name}" for reader, trial in ((one, a), (other, b))]
    return Comparison(
        a=names[0],
        b=names[1],
        metric=one.metric,
        smaller_is_better=one.sign == 1,
        difference=found.mean,
        low=found.low,
        high=found.high,
        seeds=found.runs,
        paired=bool(runs[0].keys() & runs[1].keys()),
    )


def _objective(reader: ExperimentReader) -> str:
    return f"{reader.metric} ({'smaller' if reader.sign == 1 else 'larger'} is better)"


def _runs(reader: ExperimentReader, trial: int) -> dict[Hashable, float]:
    """The best values of a trial's repeats or, without any, of the trial itself, by what their seed is derived from."""
    if trial not in reader.trials:
        count = len(reader.trials)
        raise ExperimentError(
            f"there is no trial {trial}; the experiment has {counted(count, 'trial')}, numbered from 0"
        )
    seed, record = reader.config.reproducibility.experiment_seed, reader.trials[trial]
    values = next((each.values for each in reader.finalists() if each.trial == trial), {})
    if values:
        return {(seed, "repeat", number): value for number, value in values.items()}
    if record.best_metric is None:
        raise ExperimentError(f"trial {trial} has not validated yet, so it can't be compared")
    own = (seed, "trial", trial) if record.repeat is None else (seed, "repeat", record.repeat.seed)
    return {own: record.best_metric}
