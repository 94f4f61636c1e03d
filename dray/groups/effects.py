"""What `dray.groups.pool.Groups` has done, and what it hears of that: one class per effect and per event.

`dray.groups.shell.GroupsShell` carries out the first five effects, in order, and reports the events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dray.cluster.view import ClusterView
from dray.desk.effects import Say
from dray.groups.slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGroup:
    """Start a group: ask for its slots, then start its processes there."""

    group: str
    start: int  # number of the start, unique among those of the group's owner
    slots: Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class EndGroup:
    """End a group's processes from this start at once, unless they have ended, and free its slots."""

    group: str
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Reserve slots until they are released: together those of each step from one size of a group to the next."""

    room: int  # number of the reservation
    slots: Slots
    sizes: tuple[int, ...]  # ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Release the slots of a reservation."""

    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAtCluster:
    """Look at the cluster; if groups wait for nodes, also at free resources and at what the autoscaler is starting."""

    waiting: bool


@dataclass(frozen=True, slots=True)
class ShowWaiting:
    """Show from now on what groups wait for; "" if none waits."""

    status: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No trial can run on these groups any more; the experiment can be resumed once that is mended."""

    error: str


ShellEffect = StartGroup | EndGroup | Reserve | Release | LookAtCluster
GroupsEffect = ShellEffect | Say | ShowWaiting | GiveUp


# ----------------------------------------------------------------------------------------------------------- events
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlaced:
    """A group has its slots."""

    group: str
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesEnded:
    """A group's processes have ended, or could not start. For the desk, which sends a `GroupEnded`."""

    group: str
    start: int
    dead: Mapping[int, str] = field(default_factory=dict)
    """Ranks whose processes died, each with the cause as far as Ray and the kernel know it, or ""."""
    error: str = ""  # why they could not serve trials; "" if they could


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
    """The shell could not carry out an effect, by an error that it does not know."""

    error: BaseException


GroupsEvent = GroupPlaced | SlotsReserved | ClusterSeen | NodesDrain | ShellFailed
