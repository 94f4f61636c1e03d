"""The life of a worker group, from the request for its slots to its end, as a state machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dray.groups.slots import Slots

GroupState = Literal["sizing", "asked", "waiting", "starting", "ready", "draining", "ended"]
"""sizing: it is elastic, and its size depends on slots that are being reserved. asked: it has asked for its slots.
waiting: it had none when the cluster was last checked. starting: it has them, and its processes start. ready: all its
processes can train. draining: its trial saves and continues in another group; then its processes end. ended: another
start may take its place."""

GroupEvent = Literal["ask", "wait", "place", "ready", "drain", "end"]

TRANSITIONS: Mapping[GroupState, Mapping[GroupEvent, GroupState]] = {
    "sizing": {"ask": "asked", "end": "ended"},
    # The desk may hear of its processes before the shell has reported its slots.
    "asked": {"wait": "waiting", "place": "starting", "ready": "ready", "end": "ended"},
    "waiting": {"place": "starting", "ready": "ready", "end": "ended"},
    "starting": {"ready": "ready", "end": "ended"},
    "ready": {"place": "ready", "drain": "draining", "end": "ended"},
    "draining": {"place": "draining", "end": "ended"},
    "ended": {},
}


@dataclass(slots=True, kw_only=True)
class Member:
    """One start of a group, numbered; since when it asks for its slots; and the ids of its nodes, as far as
    processes have arrived."""

    name: str
    start: int
    slots: Slots
    since: float
    state: GroupState
    nodes: set[str] = field(default_factory=set)

    def on(self, event: GroupEvent) -> None:
        """Take an event. One that is not allowed in this state is an AssertionError, and changes nothing."""
        allowed = TRANSITIONS[self.state]
        assert event in allowed, f"worker group {self.name}, start {self.start}, is {self.state}: no {event!r} now"
        self.state = allowed[event]
