"""The counters of a run of an experiment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Counts:
    """Shown to the user while it runs, printed by benchmarks, and checked by tests.

    Attributes:
        restarts: of each trial, including those in earlier runs of the experiment.
        reports: what trials have sent to the driver, each with any number of metrics.
        decisions: answers of the search to trials that reported or ended: "continue", "stop" or "pause".
    """

    handles_started: int = 0
    groups_started: int = 0
    groups_lost: int = 0
    restarts: Counter[int] = field(default_factory=Counter)
    reports: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
