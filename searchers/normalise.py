"""Reports as a method and a sampler get them: smaller is better, and what is not finite is the worst."""

from __future__ import annotations

import math
from dataclasses import replace

from searchers.errors import IllegalEvent
from searchers.events import Event, Reported
from searchers.objectives import Objectives


def normalised(event: Event, smaller_is_better: bool, objectives: Objectives | None) -> Event:
    """The event with smaller values better, +inf if not finite; and with losses if there are objectives."""
    if not isinstance(event, Reported):
        return event
    if objectives is not None:
        losses = objectives.normalised(event.metrics) if event.metrics else None
        value = math.inf if losses is None or losses.violation else losses.values[0]
        return Reported(trial=event.trial, step=event.step, value=value, losses=losses)
    if event.value is None or not math.isfinite(event.value):
        return replace(event, value=math.inf)
    return replace(event, value=event.value if smaller_is_better else -event.value)


def with_first(event: Reported, objectives: Objectives | None) -> Reported:
    """The report of several metrics with the first objective as its value; None if it has no metrics.

    Raises:
        IllegalEvent: The search has another number of metrics.
    """
    names = () if objectives is None else objectives.names
    if event.metrics and len(event.metrics) != len(names):
        wanted = f"{len(names)}: {', '.join(names)}" if names else "one, its value"
        given = f"trial {event.trial} reported {len(event.metrics)} metrics at step {event.step}"
        raise IllegalEvent(f"{given}, but this search has {wanted}")
    return replace(
        event, value=objectives.first_of(event.metrics) if objectives is not None and event.metrics else None
    )
