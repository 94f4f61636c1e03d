"""What a run of an experiment did, in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Counts:
    """Shown to the user while it runs, printed by benchmarks, and looked at by tests.

    Attributes:
        restarts: of each trial, also in earlier runs of the experiment.
    """

    handles_started: int = 0
    groups_started: int = 0
    groups_lost: int = 0
    groups_retired: int = 0
    restarts: Counter[int] = field(default_factory=Counter)
