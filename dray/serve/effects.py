"""What the server's scheduler wants done."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dray.config.notify import Outcome
from dray.leases.effects import Say


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start a process for an experiment and apply its extension."""

    name: str
    path: Path
    extension: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SignalProcess:
    """Send a signal to an experiment's process."""

    name: str
    number: signal.Signals


@dataclass(frozen=True, slots=True)
class SetShare:
    """Set a run's claim to GPUs or CPUs at the desk."""

    run: str
    priority: int
    weight: float
    max_slots: float | None


@dataclass(frozen=True, slots=True)
class RemoveRun:
    """Let the desk forget a run once its trials have left, and then call `Scheduler.left`."""

    run: str


@dataclass(frozen=True, slots=True)
class Evict:
    """End the worker groups that train a run's trials, at once."""

    run: str


@dataclass(frozen=True, slots=True)
class ReadSpent:
    """Read what an experiment has spent, as its process and its trials have ended, and call `Scheduler.settle`."""

    name: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Tell that an experiment has ended, which is recorded. `by_server`: its own process could not tell."""

    name: str
    outcome: Outcome
    error: str = ""
    by_server: bool = False


SchedulerEffect = StartProcess | SignalProcess | SetShare | RemoveRun | Evict | ReadSpent | Ended | Say
