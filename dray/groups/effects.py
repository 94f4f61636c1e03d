"""Effects of `dray.groups.pool.Groups`, and the events that it receives: one class each.

`dray.groups.lender_shell.GroupsShell` carries out the first five effects, in order, and reports the events.
"""

from __future__ import annotations

from dataclasses import dataclass

from dray.cluster.view import ClusterView
from dray.groups.slots import Slots
from dray.leases.effects import Say
from dray.leases.messages import GroupEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGroup:
    """Start a group: request its slots, then start its processes there."""

    group: str
    start: int  # number of the start, unique among those of the group's owner
    slots: Slots
    bare: bool = False  # its processes load no code before their first trial


@dataclass(frozen=True, slots=True, kw_only=True)
class EndGroup:
    """End the processes of a group's start at once, and free its slots."""

    group: str
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Reserve slots until they are released, in steps from one size of a group to the next."""

    room: int  # number of the reservation
    slots: Slots
    sizes: tuple[int, ...]  # ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Release the slots of a reservation."""

    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAtCluster:
    """Look at the cluster; if groups wait for nodes, also at its free resources and the autoscaler's activity."""

    waiting: bool


@dataclass(frozen=True, slots=True)
class ShowWaiting:
    """Show the reason why groups wait; "" if none waits."""

    status: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No trial can run on these groups any more. The experiment can be resumed after the cause is fixed."""

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
class SlotsReserved:
    """The number of slots that a reservation has got."""

    room: int
    slots: int


@dataclass(frozen=True, slots=True)
class ClusterSeen:
    """A new view of the cluster."""

    view: ClusterView


@dataclass(frozen=True, slots=True)
class NodesDrain:
    """These nodes (Ray's ids) will be removed."""

    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class ShellFailed:
    """An unexpected error of the shell."""

    error: BaseException


GroupsEvent = GroupPlaced | GroupEnded | SlotsReserved | ClusterSeen | NodesDrain | ShellFailed
