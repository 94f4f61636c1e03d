"""The counters of a run of an experiment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counters for the display, benchmarks and tests.

    Attributes:
        restarts: number of restarts of each trial, including those in earlier runs of the experiment.
        reports: number of the trials' reports to the driver, each with any number of metrics.
        decisions: number of the search's answers to trials that reported or ended: "continue", "stop" or "pause".
    """

    handles_started: int = 0
    groups_started: int = 0
    groups_lost: int = 0
    restarts: Counter[int] = field(default_factory=Counter)
    reports: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
