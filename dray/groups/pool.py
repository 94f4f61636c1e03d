"""The worker groups of a run on Ray: their number, starts and ends.

There should be as many groups as trials can run, but no more than fit after the cluster has scaled up fully
(`Capacity`). `Groups.reconcile` takes the next step. Groups that don't fit yet wait for nodes (`NodeWait`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dray.cluster.view import ClusterView
from dray.display.counts import Counts
from dray.groups import effects
from dray.groups.capacity import Capacity
from dray.groups.elastic import Elastic
from dray.groups.node_choice import NodeChoice
from dray.groups.slots import Slots
from dray.leases import messages
from dray.leases.desk import Desk
from dray.leases.effects import Say
from dray.leases.messages import Message
from dray.text import counted

LOOK_S = 1.0
"""How often the groups on a shared cluster are checked, and the greatest age of the view when groups start."""
IDLE_S = 15.0
"""How long there must be more groups than trials before some are ended, by default: about the time of a start, so that
a wrong guess costs at most twice as much as the right one (ski rental; Karlin et al. 1988)."""
MAX_FAILED_STARTS = 5  # a group that starts this many times without finishing a lease ends the experiment
BROKEN_AFTER = 2  # number of different trials ended by a node's GPU errors after which it gets no more
IN_TURN_S = 30.0
"""On a local cluster, the first group, Tune, and further groups start one after another; the next one starts at the
latest after this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsPlan:
    """Limits on the number of groups of a driver or a server."""

    max_slots: int | None = None  # most slots of all groups together; None: no limit
    sizes: tuple[int, ...] = ()  # the allowed sizes, ascending, if there is a single, elastic group
    own_cluster: bool = False  # the cluster was started just for this experiment, on this machine
    is_servers: bool = False  # several experiments share the cluster: their groups depend on its size, and none stays
    # the share of the search that is done, if it is known
    share_done: Callable[[], float | None] = field(default=lambda: None)
    idle_s: float = IDLE_S  # how long there must be more groups than trials before some are ended


class Groups:
    """The existing groups, each from its start to its end.

    Pure: no Ray, no threads, no clock. `owner`: the owner's name at the desk. `slots`: the slots of a group, or of the
    smallest group if it is elastic. `now` is the time in seconds, by any clock that does not go backwards. `names`
    and `starts` yield numbers for groups and their starts, unique at the desk.
    """

    def __init__(
        self,
        owner: str,
        slots: Slots,
        plan: GroupsPlan,
        view: ClusterView,
        now: float,
        *,
        desk: Desk,
        emit: Callable[[effects.GroupsEffect], None],
        counts: Counts,
        names: Iterator[int],
        starts: Iterator[int],
    ) -> None:
        self._owner, self._slots, self._plan = owner, slots, plan
        self._desk, self._emit, self._counts = desk, emit, counts
        max_slots = plan.sizes[0] if plan.sizes else plan.max_slots
        self._view, self._capacity = view, Capacity(view=view, slots=slots, max_slots=max_slots)
        self._elastic = Elastic(plan.sizes, emit) if plan.sizes else None
        self._node_wait, self._choice = NodeWait(slots), NodeChoice(slots, view.limits)
        self._gpu_faults: dict[str, set[int]] = {}
        self._names = (f"group-{number}" for number in names)
        self._starts = starts
        self._members: dict[str, Member] = {}
        self._in_state: Counter[GroupState] = Counter()
        self._to_replace: list[str] = []
        self._to_renew: set[str] = set()  # groups that end because a trial needs new processes
        self._starts_bare = False
        self._failed_starts: Counter[str] = Counter()
        self._few_cores = plan.own_cluster and self._capacity.max_concurrent_starts == 1
        self._began = self._seen_at = now
        self._trains_since: float | None = None
        self._done_before: float | None = None  # the share of the search then
        self._idle_since: float | None = None
        self._tried_at = self._checked_at = -math.inf
        self._is_looking = self._has_failed = False
        self._wanted = 0

    @property
    def count(self) -> int:
        """The number of groups, including those that are starting."""
        return len(self._members)

    @property
    def ready_count(self) -> int:
        """The number of groups that have started."""
        return self._in_state["ready"] + self._in_state["draining"]

    @property
    def has_waiting(self) -> bool:
        """Whether a group is still waiting for its slots."""
        return self._in_state["asked"] + self._in_state["waiting"] > 0

    @property
    def node_wait(self) -> str:
        """What groups that wait for nodes wait for; "" if none waits."""
        return self._node_wait.status

    # ------------------------------------------------------------------ events
    def on(self, event: Message | effects.GroupsEvent, now: float) -> None:
        """Handle a message of the desk or an event from the shell. Call `reconcile` afterwards."""
        match event:
            case messages.WorkerArrived():
                if (member := self._member(event.group, event.start)) is not None:
                    member.nodes.add(event.node)
                    if self._elastic is not None:
                        self._elastic.arrived(now)
            case messages.GroupReady():
                if (member := self._member(event.group, event.start)) is not None:
                    self._move(member, "ready")
                    self._counts.groups_started += 1
                    if self._elastic is not None:
                        self._elastic.ready(now)
            case messages.GroupEnded():
                self._ended(event.group, event.start, is_lost=event.is_lost, error=event.error)
            case messages.GroupRetired(reason=""):
                self._to_renew.add(event.group)
                self._starts_bare = True  # the trial's code may be another than the experiment's
            case messages.LeaseGranted():
                if self._trains_since is None:
                    self._trains_since, self._done_before = now, self._plan.share_done()
            case messages.TrialLeft():
                self._failed_starts.pop(event.group, None)  # the group works
                if event.failure is not None and event.failure.node:
                    self._gpu_failed(event.failure.node, event.trial)
            case messages.GpuFailed():
                self._gpu_failed(event.node, event.trial)
            case effects.GroupPlaced():
                if (member := self._member(event.group, event.start)) is not None:
                    self._move(member, "place")
            case effects.SlotsReserved():
                if self._elastic is not None:
                    self._elastic.reserved(event.room, event.slots)
            case effects.ClusterSeen():
                self._look(event.view, now)
            case effects.NodesDrain():
                for name in self._on_nodes(event.nodes):
                    self._say(f"a node of worker group {name} will be removed: its trial continues elsewhere")
                    self._drain(name)
            case effects.ShellFailed():
                self._fail(f"worker groups can't be started or ended: {event.error!r}")

    def _look(self, view: ClusterView, now: float) -> None:
        self._is_looking, self._seen_at = False, now
        self._view, self._capacity = view, replace(self._capacity, view=view.without(self._choice.broken))
        self._choice.look(view, now)

    def _member(self, name: str, start: int) -> Member | None:
        """A group, or None if this start of it has ended."""
        member = self._members.get(name)
        return member if member is not None and member.start == start else None

    def _move(self, member: Member, event: GroupEvent) -> None:
        before = member.state
        member.on(event)
        self._in_state[before] -= 1
        self._in_state[member.state] += 1

    def _gpu_failed(self, node: str, trial: int) -> None:
        """Handle the end of a trial by a GPU error. After two different trials, the node gets no more: a broken GPU
        fails faster than others train, and would end one trial after another."""
        trials = self._gpu_faults.setdefault(node, set())
        trials.add(trial)
        if len(trials) < BROKEN_AFTER or node in self._choice.broken:
            return
        self._choice.broken = frozenset({*self._choice.broken, node})
        self._capacity = replace(self._capacity, view=self._view.without(self._choice.broken))
        where = next((each.address for each in self._view.nodes if each.id == node), node)
        what = f"GPU errors ended trials {', '.join(map(str, sorted(trials)))} on node {where}"
        check = "see nvidia-smi and the Xid messages in its kernel log, and restart or replace it"
        if self._capacity.has_room:
            self._say(f"{what}: it gets no more trials; {check}")
        else:
            self._fail(f"{what}, and no other node has room for a trial; {check}")

    def _ended(self, name: str, start: int, *, is_lost: bool, error: str) -> None:
        """Handle the end of a group's processes. `is_lost`: it was unexpected, because of `error` if known."""
        if (member := self._member(name, start)) is None:
            return
        self._end_group(member)
        self._to_replace.append(name)
        if not is_lost:
            return
        self._counts.groups_lost += 1
        self._failed_starts[name] += 1
        if error:
            self._say(f"worker group {name} ended: {error}")
        if self._failed_starts[name] >= MAX_FAILED_STARTS:
            cause = error or "its processes died"
            self._fail(
                f"worker group {name} was started {MAX_FAILED_STARTS} times and never finished a trial, the last time "
                f"because {cause}; see Ray's logs"
            )

    # ------------------------------------------------------------------ while they run
    def reconcile(self, wanted: int, now: float) -> None:
        """Replace ended groups, end unneeded ones, and start more if they are wanted.

        Call it after events, and periodically, until the search is done; then groups end on their own. `wanted`: number
        of trials that could run now, including running ones.
        """
        self._wanted = wanted
        if self._has_failed:
            return
        self._replace_ended(now)
        if self._elastic is not None:
            self._size(self._elastic, now)
        if not self._plan.own_cluster and now >= self._checked_at + LOOK_S:
            self._check(now)
        self._start_more(now)

    def _replace_ended(self, now: float) -> None:
        wanted: float = self._wanted
        if self._choice.broken:  # groups from a broken node may not fit elsewhere
            wanted = min(wanted, self._capacity.max_groups_after_scale_up)
        while self._to_replace:
            name = self._to_replace.pop()
            if wanted > self.count or name in self._to_renew:
                self._start_group(name, now)
            self._to_renew.discard(name)

    def _start_more(self, now: float) -> None:
        """Start wanted groups, as many as may start at the same time."""
        if self._wanted <= self.count or not (self._more_may_start(now) or now >= self._tried_at + IN_TURN_S):
            return
        if not self._plan.own_cluster and now > self._seen_at + LOOK_S:
            self._ask_to_look()
            return
        self._tried_at = now
        capacity = self._capacity
        wanted = min(self._wanted, capacity.max_groups_after_scale_up)
        # Groups that wait for a node don't slow down those whose workers are starting.
        starting = sum(self._in_state[state] for state in ("sizing", "asked", "starting"))
        while self.count < wanted:
            if self.count < capacity.groups_now and starting >= capacity.max_concurrent_starts:
                return
            self._start_group(next(self._names), now)
            starting += 1

    def _more_may_start(self, now: float) -> bool:
        """Whether groups after the first may start: on a shared cluster at once, on a local one when the first one has
        a trial.

        With few cores, a starting group takes one from the training group. Whether that pays off depends on the
        remaining time of the search, which is unknown at first. So it starts when the first group has trained for as
        long as it took to start (ski rental: at most twice the time of the better of now and never; Karlin et al.
        1988), unless the search will then end before it has made up for its start.
        """
        if not self._plan.own_cluster or not self.count:
            return True
        if self._trains_since is None:
            return False
        start_s, trained_s = self._trains_since - self._began, now - self._trains_since
        return not self._few_cores or (trained_s >= start_s and self._left_s(trained_s) > 2 * start_s)

    def _left_s(self, trained_s: float) -> float:
        """Seconds until the search's end at the speed of the groups so far; infinite if it is not known."""
        before, done = self._done_before, self._plan.share_done()
        return (
            math.inf if before is None or done is None or done <= before else trained_s * (1 - done) / (done - before)
        )

    def _start_group(self, name: str, now: float, labels: Mapping[str, str] | None = None) -> None:
        slots = replace(self._slots, labels=self._choice.first(now) if labels is None else labels)
        state: GroupState = "asked" if self._elastic is None else "sizing"
        member = Member(name=name, start=next(self._starts), slots=slots, since=now, state=state)
        self._members[name] = member
        self._in_state[state] += 1
        if self._elastic is None:
            self._emit(effects.StartGroup(group=name, start=member.start, slots=slots, bare=self._starts_bare))
        else:
            self._elastic.start(slots, now)
            if not self._plan.own_cluster:
                self._ask_to_look()

    def _size(self, elastic: Elastic, now: float) -> None:
        """Start an elastic group once its size is known."""
        for member in self._members.values():
            if member.state == "sizing":
                is_seen = self._plan.own_cluster or self._seen_at >= member.since
                if size := elastic.size_when_stable(self._view if is_seen else None, now):
                    self._move(member, "ask")
                    member.slots, member.since = replace(member.slots, per_trial=size), now
                    self._emit(
                        effects.StartGroup(
                            group=member.name, start=member.start, slots=member.slots, bare=self._starts_bare
                        )
                    )

    def _on_nodes(self, nodes: Collection[str]) -> list[str]:
        """The groups to drain on these nodes. Starting groups have nothing to save; callers ask again in a second."""
        return [
            member.name
            for member in self._members.values()
            if member.state == "ready" and not member.nodes.isdisjoint(nodes)
        ]

    def _drain(self, name: str) -> None:
        """Let a group's trial save and continue in another group. This group ends, and is replaced."""
        self._move(self._members[name], "drain")
        self._desk.drain(name)

    def _end_group(self, member: Member) -> None:
        del self._members[member.name]
        self._move(member, "end")
        self._emit(effects.EndGroup(group=member.name, start=member.start))

    def _ask_to_look(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._emit(effects.LookAtCluster(waiting=self._in_state["waiting"] > 0))

    def _check(self, now: float) -> None:
        """Find groups that wait for nodes, end idle groups, and resize an elastic one."""
        self._checked_at = now
        for name in self._on_nodes(self._choice.broken):
            self._drain(name)
        for member in self._members.values():
            if member.state == "asked":
                self._move(member, "wait")
        if self._elastic is not None:
            self._resize(self._elastic, now)
        elif surplus := self._surplus(now):
            # First the groups that wait for nodes, then those that the desk finds idle.
            ends = sorted(self._waiting(), key=lambda member: member.name)[:surplus]
            for member in ends:
                self._end_group(member)
            self._desk.retire_idle(self._owner, surplus - len(ends))
        waiting, view, status = self._waiting(), self._view, self._node_wait.status
        if waiting or self._elastic is not None:
            self._ask_to_look()
        if news := self._node_wait.look(len(waiting), self.count, view, now):
            self._say(news)
        if self._node_wait.status != status:
            self._emit(effects.ShowWaiting(self._node_wait.status))
        if waiting and (view.limits is None or view.activity is not None):
            asked = {member.name: (member.slots.labels, now - member.since) for member in waiting}
            for name, labels in self._choice.others(asked, now).items():
                self._end_group(self._members[name])
                self._start_group(name, now, labels)

    def make_room(self, *, at_once: bool) -> None:
        """End superfluous groups to make room for others. `at_once`: their trials save and move; otherwise they train
        to their end first."""
        surplus = self.count - self._wanted
        for member in self._waiting()[: max(0, surplus)]:
            self._end_group(member)
            surplus -= 1
        if surplus > 0:
            self._desk.shrink(self._owner, max(0, self.ready_count - surplus), at_once=at_once)

    def _waiting(self) -> list[Member]:
        return [member for member in self._members.values() if member.state == "waiting"]

    def _surplus(self, now: float) -> int:
        """The number of groups that have been idle for too long."""
        surplus = self.count - max(0 if self._plan.is_servers else 1, self._wanted)
        if surplus <= 0:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since > self._plan.idle_s:
            self._idle_since = None
            return surplus
        return 0

    def _resize(self, elastic: Elastic, now: float) -> None:
        """Replace an elastic group with a larger one if there is room, or with a smaller one if its slots were
        taken."""
        for name, member in list(self._members.items()):
            if member.state == "waiting" and elastic.may_shrink(now):
                self._say(f"others took slots of worker group {name}: its trial continues with fewer")
                self._end_group(member)
                self._start_group(name, now)
            elif member.state == "ready" and (size := elastic.may_grow(now)):
                what = f"there is room for more slots than worker group {name} has"
                self._say(f"{what}: its trial continues with {size}")
                self._drain(name)

    # ------------------------------------------------------------------ the end
    def close(self) -> None:
        """End the groups that have not started. The desk ends the others."""
        if self._elastic is not None:
            self._elastic.close()
        for member in list(self._members.values()):
            if member.state in ("asked", "waiting", "starting"):
                self._end_group(member)

    def _say(self, line: str) -> None:
        self._emit(Say(line))

    def _fail(self, error: str) -> None:
        self._has_failed = True
        self._emit(effects.GiveUp(error))


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


SAY_AFTER_S = 10.0
"""How long a group must wait before that is reported: with free nodes it takes less than a second, and the autoscaler
acts every five seconds."""
SAY_EVERY_S = 5.0  # seconds between checks for changes after that


class NodeWait:
    """Follows the waiting groups of a run. `status`: a short summary; "" if none waits."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._since: float | None = None
        self._looked_at = 0.0
        self._said: object = None
        self.status = ""

    def look(self, waiting: int, groups: int, view: ClusterView, now: float) -> str:
        """A line about the waiting groups if their situation has changed, else "". Also "" if the view was not taken
        for waiting groups."""
        if not waiting:
            self._since, self._said, self.status = None, None, ""
            return ""
        self._since = now if self._since is None else self._since
        if now - self._since < SAY_AFTER_S or (self._said is not None and now - self._looked_at < SAY_EVERY_S):
            return ""
        if view.free is None:
            return ""
        self._looked_at = now
        which = f"{waiting} of {groups} worker groups wait" if groups > 1 else "the worker group waits"
        long, news, short = "no autoscaler is running to start more", "", ""
        if view.activity is not None:
            long, news, short = str(view.activity), str(sorted(view.activity.failed)), view.activity.short()
        self.status = f"{which} for nodes{short and f' ({short})'}"
        if self._said == news:
            return ""
        self._said = news
        return f"{which} for nodes. Each needs {self._slots}. The cluster has {_resources(view)}; {long}"


def _resources(view: ClusterView) -> str:
    """The cluster's GPUs and CPUs, and the free ones, as text."""
    has = {kind: sum(node.resources.get(kind, 0.0) for node in view.nodes) for kind in ("GPU", "CPU")}
    kinds = [f"{has[kind]:g} {kind}s ({(view.free or {}).get(kind, 0):g} free)" for kind in has if has[kind]]
    return f"{' and '.join(kinds) or 'no CPUs'} on {counted(len(view.nodes), 'node')}"
