"""Searches with several metrics: objectives to optimise, and constraints to keep.

`Objectives` alone knows directions and limits. It normalises a trial's metrics to `Losses`: smaller is better for each
objective, and a constraint's excess is relative to its limit, so that megabytes and milliseconds can be added up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from searchers.errors import FieldError, IllegalEvent
from searchers.events import Event, Losses, Measured, Reported


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """An objective, or a constraint if it has a limit."""

    name: str  # of the validation metric
    smaller_is_better: bool = True  # for objectives
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_constraint(self) -> bool:
        """Whether it has a limit."""
        return self.at_most is not None or self.at_least is not None

    def __str__(self) -> str:
        """Describe the metric: "val_loss, smaller is better", "memory_mb at most 8000"."""
        if not self.is_constraint:
            return f"{self.name}, {'smaller' if self.smaller_is_better else 'larger'} is better"
        limits = (("at least", self.at_least), ("at most", self.at_most))
        return f"{self.name} {' and '.join(f'{bound} {limit:g}' for bound, limit in limits if limit is not None)}"


@dataclass(frozen=True)
class Objectives:
    """The objectives and constraints of a search.

    Args:
        metrics: In the order in which trials' metrics are reported and recorded.

    Raises:
        FieldError: There is no objective, a metric is an objective or a constraint twice, or limits contradict each
            other. Paths begin with `searcher.metrics`.

    >>> objectives = Objectives((Metric(name="acc", smaller_is_better=False), Metric(name="mb", at_most=100)))
    >>> objectives.normalised((0.9, 150.0))
    Losses(values=(-0.9,), excesses=(0.5,))
    >>> objectives.normalised((float("nan"), 50.0)) is None
    True
    """

    metrics: tuple[Metric, ...]

    def __post_init__(self) -> None:
        faults = []
        for place, metric in enumerate(self.metrics):
            path, limits = f"searcher.metrics[{place}]", (metric.at_least, metric.at_most)
            if None not in limits and metric.at_least > metric.at_most:  # type: ignore[operator]
                faults.append((path, f"at_least must be <= at_most, got {metric.at_least:g} and {metric.at_most:g}"))
            before = self.metrics[:place]
            if any(each.name == metric.name and each.is_constraint == metric.is_constraint for each in before):
                kind = "a constraint" if metric.is_constraint else "an objective"
                faults.append((f"{path}.name", f"{metric.name!r} is {kind} twice; remove one"))
        if not self.objectives:
            message = "needs an objective, an entry without at_most and at_least: the metric to optimise"
            faults.append(("searcher.metrics", message))
        if faults:
            raise FieldError(faults)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(metric.name for metric in self.metrics)

    @cached_property
    def objectives(self) -> tuple[Metric, ...]:
        return tuple(metric for metric in self.metrics if not metric.is_constraint)

    @property
    def constraints(self) -> tuple[Metric, ...]:
        """The metrics that have a limit."""
        return tuple(metric for metric in self.metrics if metric.is_constraint)

    @property
    def num_limits(self) -> int:
        """The number of `Losses.excesses`."""
        return sum((metric.at_most is not None) + (metric.at_least is not None) for metric in self.constraints)

    @property
    def first(self) -> Metric:
        """The first objective, used where only one can be shown or compared."""
        return self.objectives[0]

    def measured(self, metrics: Mapping[str, object]) -> Measured:
        """Select the objectives' metrics in order, with None for those that are missing or not numbers."""
        found = (metrics.get(name) for name in self.names)
        return tuple(float(value) if isinstance(value, int | float) else None for value in found)

    def first_of(self, measured: Measured) -> float | None:
        """Return the value of the first objective."""
        return measured[self.metrics.index(self.first)]

    def normalised(self, measured: Measured) -> Losses | None:
        """Normalise measured metrics; None, the worst result, if one is missing or not finite."""
        values: list[float] = []
        excesses: list[float] = []
        for metric, value in zip(self.metrics, measured, strict=True):
            if value is None or not math.isfinite(value):
                return None
            if not metric.is_constraint:
                values.append(value if metric.smaller_is_better else -value)
            if metric.at_most is not None:
                excesses.append((value - metric.at_most) / (abs(metric.at_most) or 1.0))
            if metric.at_least is not None:
                excesses.append((metric.at_least - value) / (abs(metric.at_least) or 1.0))
        return Losses(tuple(values), tuple(excesses))

    def are_kept(self, measured: Measured) -> bool:
        """Whether all metrics are finite and all constraints kept."""
        losses = self.normalised(measured)
        return losses is not None and not losses.violation

    def to_json(self) -> list[dict[str, object]]:
        """Return the metrics with the fields that are set, for the journal."""
        return [
            {"name": metric.name}
            | ({} if metric.is_constraint else {"smaller_is_better": metric.smaller_is_better})
            | {limit: value for limit in ("at_most", "at_least") if (value := getattr(metric, limit)) is not None}
            for metric in self.metrics
        ]


def is_better(losses: Losses, other: Losses) -> bool:
    """Whether a report represents its trial better than another: by violation, then by the first objective."""
    return (losses.violation, losses.values[0]) < (other.violation, other.values[0])


def of_names(metrics: Sequence[Mapping[str, object]]) -> Objectives:
    """Build `Objectives` from entries such as {"name": "mb", "at_most": 100}; the inverse of `Objectives.to_json`."""
    return Objectives(tuple(Metric(**each) for each in metrics))  # type: ignore[arg-type]


def loss_of(value: float | None, *, smaller_is_better: bool = True) -> float:
    """Normalise a metric: smaller is better, and a missing, NaN or infinite value is the worst, +inf."""
    if value is None or not math.isfinite(value):
        return math.inf
    return value if smaller_is_better else -value


def normalised(event: Event, smaller_is_better: bool, objectives: Objectives | None) -> Event:
    """Normalise an event: smaller values are better, non-finite ones are +inf; with objectives, add the losses."""
    if not isinstance(event, Reported):
        return event
    if objectives is not None:
        losses = objectives.normalised(event.metrics) if event.metrics else None
        value = math.inf if losses is None or losses.violation else losses.values[0]
        return Reported(trial=event.trial, step=event.step, value=value, losses=losses)
    return replace(event, value=loss_of(event.value, smaller_is_better=smaller_is_better))


def with_first(event: Reported, objectives: Objectives | None) -> Reported:
    """Set the value of a report of several metrics to the first objective, or to None without metrics.

    Raises `IllegalEvent` if the number of metrics differs from the search's.
    """
    names = () if objectives is None else objectives.names
    if event.metrics and len(event.metrics) != len(names):
        expected = f"{len(names)}: {', '.join(names)}" if names else "one, its value"
        reported = f"trial {event.trial} reported {len(event.metrics)} metrics at step {event.step}"
        raise IllegalEvent(f"{reported}, but this search has {expected}")
    return replace(
        event, value=objectives.first_of(event.metrics) if objectives is not None and event.metrics else None
    )
