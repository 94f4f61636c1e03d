"""What the desk knows about a worker group and its lease."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dray.desk.failure import LOW_MEMORY, Failure, FailureKind
from dray.desk.messages import Outcome, Verdict
from dray.desk.wakeup import Signal


@dataclass(slots=True, kw_only=True)
class Lease:
    number: int
    trial: int
    group: str
    spec: dict[str, Any] | None = None
    begun: bool = False
    pausing: bool = False
    left: dict[int, Outcome] = field(default_factory=dict)
    told: bool = False
    hearsay: tuple[str, Failure] | None = None
    """A rank's error in a collective, as text and as a failure: another rank's end may have caused it."""
    stale: str = ""
    leaves: bool = False
    """A node of its group is about to be taken away."""
    over: Signal = field(default_factory=Signal)
    """Fires when the lease is to end, and when it has ended."""
    unrecorded: int = 0
    waiting: dict[int, asyncio.Future[Verdict]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Group:
    name: str
    start: int
    """Number of the start that its processes are of."""
    size: int
    idle: set[int] = field(default_factory=set)
    lease: Lease | None = None
    retires: bool = False
    """Its processes serve no other trial: they end, and others take their place."""
    changed: Signal = field(default_factory=Signal)

    @property
    def is_free(self) -> bool:
        """Whether all its ranks are waiting for a trial."""
        return self.lease is None and not self.retires and len(self.idle) == self.size

    def death(self, dead: Mapping[int, str], batches: int) -> tuple[str, Failure]:
        """The failure of a trial whose processes died, as text and as a `Failure`.

        Args:
            dead: ranks whose processes have died, and the cause as far as it is known, or "".
            batches: trained until then, according to a surviving rank; -1 if none says so.
        """
        ranks = ", ".join(map(str, sorted(dead)))
        who = "a process"
        if ranks and self.size > 1:
            who = f"the processes of ranks {ranks}" if len(dead) > 1 else f"the process of rank {ranks}"
        why = next((told for told in dead.values() if told), "")
        kind: FailureKind = "oom" if LOW_MEMORY in why else "died"
        return f"{who} of worker group {self.name} died{why and f': {why}'}", Failure(kind=kind, batches=batches)
