"""The life of a worker group, from the request for its slots to its end, as a state machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dray.groups.slots import Slots

GroupState = Literal["sizing", "asked", "waiting", "starting", "ready", "draining", "ended"]
"""sizing: an elastic group, whose slots are being reserved. asked: it has requested its slots. waiting: it had no slots
at the last check of the cluster. starting: it has its slots, and its processes are starting. ready: all its processes
can train. draining: its trial saves and continues in another group; then its processes end. ended: another start may
take its place."""

GroupEvent = Literal["ask", "wait", "place", "ready", "drain", "end"]

TRANSITIONS: Mapping[GroupState, Mapping[GroupEvent, GroupState]] = {
    "sizing": {"ask": "asked", "end": "ended"},
    # Its processes may reach the desk before the shell reports its slots.
    "asked": {"wait": "waiting", "place": "starting", "ready": "ready", "end": "ended"},
    "waiting": {"place": "starting", "ready": "ready", "end": "ended"},
    "starting": {"ready": "ready", "end": "ended"},
    "ready": {"place": "ready", "drain": "draining", "end": "ended"},
    "draining": {"place": "draining", "end": "ended"},
    "ended": {},
}


@dataclass(slots=True, kw_only=True)
class Member:
    """One start of a group. `since`: the time of its request for slots; `nodes`: ids of the nodes from which processes
    have arrived."""

    name: str
    start: int
    slots: Slots
    since: float
    state: GroupState
    nodes: set[str] = field(default_factory=set)

    def on(self, event: GroupEvent) -> None:
        """Move to the next state. An event that the state does not allow is an AssertionError, and changes nothing."""
        allowed = TRANSITIONS[self.state]
        assert event in allowed, f"worker group {self.name}, start {self.start}, is {self.state}: no {event!r} now"
        self.state = allowed[event]
