"""One lease of a trial to a worker group, and the group: what the desk knows about each.

A lease begins when a queued trial is matched to a free group, and is over when every rank has left the trial, or the
group's processes are gone::

    GRANTED ──rank 0 takes it up──▶ RUNNING ──its group is to end──▶ MOVING
       │                               │                               │
       │                               ├──a rank fails──▶ FAILED ◀─────┤
       │                               └──rank 0 leaves──▶ CONCLUDED ◀─┘
       └───────────────▶ OVER ◀── from every state ────────────────────
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from dray.desk.failure import LOST_NODE, LOW_MEMORY, Failure, FailureKind
from dray.desk.messages import Departure, LeaseOutcome

if TYPE_CHECKING:
    from dray.desk.client import Client
    from searchers.events import Decision


class State(Enum):
    """What a lease waits for."""

    GRANTED = "the driver's parameters, and rank 0 to take it up"
    RUNNING = "rank 0 to leave"
    MOVING = "rank 0 to save and leave, so that another group can continue the trial"
    CONCLUDED = "the other ranks to leave; the driver knows the outcome, and later errors don't count"
    FAILED = "the other ranks to leave; the driver knows the error, and may start the trial elsewhere"
    OVER = "nothing: whatever its processes still say is fenced off"


@dataclass(eq=False, slots=True, kw_only=True)
class Lease:
    number: int
    client: Client
    trial: int
    group: Group
    state: State = State.GRANTED
    parameters: Any = None
    """What the driver gives to the ranks; None until it has."""
    left: dict[int, LeaseOutcome] = field(default_factory=dict)
    """Ranks that have left, and how."""
    deferred: Departure | None = None
    """A rank's departure by an error in a collective: another rank's end may have caused it."""
    stale: str = ""
    """Why the group's processes can't be reused."""
    unrecorded: int = 0
    """Reports that the driver has not recorded yet."""
    decisions: dict[int, Decision | None] = field(default_factory=dict)
    """By number of each result that rank 0 waits for; None until the search has decided."""

    @property
    def holds_trial(self) -> bool:
        """Whether no other group may have the trial yet: it continues from what it saves here."""
        return self.state not in (State.FAILED, State.OVER)

    def conclude(self, departure: Departure) -> bool:
        """The trial ends here, like this. Returns whether the driver needs a message about it."""
        is_news = self.state not in (State.CONCLUDED, State.FAILED)
        if is_news:
            self.state = State.FAILED if departure.is_failure else State.CONCLUDED
        return is_news or departure.outcome == "completed"


@dataclass(eq=False, slots=True, kw_only=True)
class Group:
    owner: Client
    name: str
    shape: str
    """Equal groups have equal shapes: a trial can run on any of them."""
    start: int
    """Number of the start that its processes belong to."""
    size: int
    idle: set[int] = field(default_factory=set)
    """Ranks that wait for a trial."""
    lease: Lease | None = None
    retiring: bool = False
    """It gets no other trial: its processes end, and a new group may take its place."""

    @property
    def is_free(self) -> bool:
        """Whether all its ranks wait for a trial."""
        return self.lease is None and not self.retiring and len(self.idle) == self.size

    def death(self, dead: Mapping[int, str], batches: int) -> Departure:
        """How a trial ended whose processes died.

        Args:
            dead: ranks whose processes died, each with the cause if known, or "".
            batches: trained until then, according to a surviving rank; -1 if unknown.
        """
        ranks = ", ".join(map(str, sorted(dead)))
        who = "a process"
        if ranks and self.size > 1:
            who = f"the processes of ranks {ranks}" if len(dead) > 1 else f"the process of rank {ranks}"
        cause = next((each for each in dead.values() if each), "")
        kind: FailureKind = "oom" if LOW_MEMORY in cause else "node" if LOST_NODE in cause else "died"
        return Departure(
            outcome="errored",
            error=f"{who} of worker group {self.name} died{cause and f': {cause}'}",
            failure=Failure(kind=kind, batches=batches),
        )
