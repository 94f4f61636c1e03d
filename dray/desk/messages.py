"""The messages between the desk, the worker groups, the Tune handle and the driver."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from dray.desk.failure import Failure

Decision = Literal["continue", "stop", "pause"]
"""The search's decision on a report: go on; end; leave until the search resumes the trial."""
Verdict = Literal["continue", "stop", "pause", "interrupt", "fenced"]
"""What to do after a report: the search's decision; save and leave, to be resumed later; drop everything."""
Outcome = Literal["completed", "stopped", "diverged", "paused", "interrupted", "errored", "invalid_hp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the Tune handle gives Tune, and so the search: a report to decide on, or the end of a trial."""

    number: int
    trial: int
    step: float | None = None
    value: float | None = None
    outcome: Outcome | None = None
    """Set when the trial ends with this result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """An event that the driver is told of, in order."""

    kind: Literal[
        "arrived",
        "broken",
        "joined",
        "retired",
        "ended",
        "granted",
        "rows",
        "saved",
        "damaged",
        "left",
        "handle",
    ]
    group: str = ""
    start: int = -1
    """Of "ended": the number of the group's start."""
    trial: int = -1
    lease: int = -1
    outcome: Outcome | None = None
    error: str = ""
    """Of "left"; of "retired": why; of "ended": why its processes could not serve trials."""
    fatal: bool = False
    """No restart and no other trial can do better, as with an error of the config."""
    failure: Failure | None = None
    """Of "left" with an error."""
    dead: tuple[int, ...] = ()
    """Of "left" and "ended": the ranks whose processes died, as far as Ray knows."""
    report: dict[str, Any] | None = None
    cause: Exception | None = None
    """Of "broken"."""
    node: str = ""
    """Of "arrived": Ray's id of the node."""
    process: int = -1
    """Of "handle": the process id."""
    checkpoint: str = ""
    """Of "saved" and "damaged": its id."""
    batches: int = -1
    value: float | None = None
    """Of "saved": the search's metric at the checkpoint."""
    time: float = field(default_factory=time.time)
    """When it happened, in seconds since the epoch."""

    @property
    def lost(self) -> bool:
        """Whether it tells that a group has ended against its will."""
        return self.kind == "ended" and bool(self.dead or self.error)
