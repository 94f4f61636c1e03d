"""What `dray.groups.pool.Groups` has done, and what it hears of that: one class per effect and per event.

`dray.groups.shell.GroupsShell` carries out the effects, in order, and reports the events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dray.cluster.view import ClusterView
from dray.groups.slots import Slots


# ---------------------------------------------------------------------------------------------------------- effects
@dataclass(frozen=True, slots=True, kw_only=True)
class StartGroup:
    """Start a group: ask for its slots, then start its processes there."""

    group: str
    start: int
    """Number of the start, unique among those of the group's owner."""
    slots: Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class EndGroup:
    """End a group's processes from this start at once, unless they have ended, and free its slots."""

    group: str
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Reserve slots for an elastic group that is to start or to grow, until they are released.

    Attributes:
        room: number of the reservation.
        slots: what a slot is made of.
        sizes: ascending; the slots of each step from one size to the next are reserved together.
    """

    room: int
    slots: Slots
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Release reserved slots."""

    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAtCluster:
    """Look at the cluster, and report it as `ClusterSeen`.

    Attributes:
        waiting: groups wait for nodes: also look at free resources, and at what the autoscaler is starting.
    """

    waiting: bool


@dataclass(frozen=True, slots=True)
class Say:
    """Print a line for the user."""

    line: str


@dataclass(frozen=True, slots=True)
class ShowWaiting:
    """Show what groups wait for, from now on; "" if none waits."""

    status: str


@dataclass(frozen=True, slots=True)
class Fail:
    """No trial can run on these groups any more; the experiment can be resumed once that is mended."""

    error: str


ShellEffect = StartGroup | EndGroup | Reserve | Release | LookAtCluster
GroupsEffect = ShellEffect | Say | ShowWaiting | Fail


# ----------------------------------------------------------------------------------------------------------- events
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlaced:
    """A group has its slots."""

    group: str
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesEnded:
    """A group's processes have ended, or never started. For the desk, which fences off what they still send."""

    group: str
    start: int
    dead: Mapping[int, str] = field(default_factory=dict)
    """Ranks whose processes died, each with the cause as far as Ray and the kernel know it, or ""."""
    error: str = ""
    """Why they could not serve trials; "" if they could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsReserved:
    """A reservation has so many slots now."""

    room: int
    slots: int


@dataclass(frozen=True, slots=True)
class ClusterSeen:
    """What the cluster looks like."""

    view: ClusterView


@dataclass(frozen=True, slots=True)
class NodesDrain:
    """These nodes (Ray's ids) will be removed."""

    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class ShellFailed:
    """An effect could not be carried out, which is a bug of dray's or an unknown state of Ray's."""

    error: Exception


GroupsEvent = GroupPlaced | SlotsReserved | ClusterSeen | NodesDrain | ShellFailed
