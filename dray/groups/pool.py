"""The worker groups of a run on Ray: how many there should be, when one starts, and when one ends.

There should be as many groups as trials can run, and no more than fit once the cluster has grown as far as it can
(`Capacity`). `Groups.reconcile` takes the next step there. Groups that don't fit yet wait for nodes (`NodeWait`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import ray

from dray.cluster.nodes import known_nodes
from dray.desk import messages
from dray.desk.messages import Message
from dray.display.counts import Counts
from dray.errors import ExperimentError
from dray.groups.capacity import Capacity
from dray.groups.elastic import Elastic
from dray.groups.group import Slots, WorkerGroup, end_groups
from dray.groups.node_choice import NodeChoice
from dray.groups.waiting import NodeWait
from dray.records.timeline import Timeline

START_EVERY_S = 0.25
"""How often to look for room for another group, if nothing happens."""
START_SLOWLY_EVERY_S = 5.0
"""The same while a group starts."""
LOOK_S = 1.0
"""How often, on a cluster, groups are checked: which wait for nodes, and which are needed."""
IDLE_S = 15.0
"""How long there must have been more groups than trials before some are ended, by default: about as long as a start
takes, so that a wrong guess costs at most twice as much as the right one (ski rental; Karlin et al. 1988)."""
MAX_FAILED_STARTS = 5
"""A group that starts this many times without finishing a lease ends the experiment."""
BROKEN_AFTER = 2
"""Once errors of its GPUs have ended this many different trials, a node gets no more."""
IN_TURN_S = 30.0
"""On a local cluster the first group, Tune, and further groups start one after another: how long each may take before
the next starts anyway."""
END_S = 30.0
"""How long all groups together may take to shut down on a cluster that stays up."""


class Announcer(Protocol):
    """Where a run's groups are announced, such as its display."""

    def say(self, line: str) -> None:
        """Print a line."""

    def waits(self, status: str) -> None:
        """Show what groups wait for; "" if none waits."""


@dataclass(slots=True)
class _Member:
    group: WorkerGroup
    labels: Mapping[str, str]
    """The label selector of its nodes."""
    since: float
    """When it asked for them."""
    is_ready: bool = False
    """All its processes can train."""
    is_waiting: bool = False
    """It had no slots when it was last checked."""
    is_draining: bool = False
    """Its trial saves and continues in another group; then its processes end."""


class Groups:
    """The groups that exist, each from its start to its end.

    Args:
        make: starts a group with this name, as the start with this number, on these slots.
        desk: the desk's actor handle.
        owner: name of the groups' owner, at the desk.
        slots: what a group is made of.
        capacity: how many groups fit.
        elastic: the size of the only group, if it is elastic.
        own_cluster: the cluster was started for this experiment alone.
        runnable: how many trials could run now, including those that do.
        counts, timeline, display: of the run; groups are counted, recorded and announced there.
        experiment: the experiment's directory, for errors that say how to resume it.
        numbers: for names and starts of groups, if others have groups at the same desk.
        idle_s: how long there must have been more groups than trials before some are ended.
        least: how many stay even then.

    Attributes:
        error: why the experiment can't continue; None as long as it can.
    """

    def __init__(
        self,
        make: Callable[[str, int, Slots], WorkerGroup],
        *,
        desk: Any,
        owner: str,
        slots: Slots,
        capacity: Capacity,
        elastic: Elastic | None,
        own_cluster: bool,
        runnable: Callable[[], int],
        counts: Counts,
        timeline: Timeline,
        display: Announcer,
        experiment: Path,
        numbers: Iterator[int] | None = None,
        idle_s: float = IDLE_S,
        least: int = 1,
    ) -> None:
        self.error: ExperimentError | None = None
        self._make, self._desk, self._owner, self._slots, self._runnable = make, desk, owner, slots, runnable
        self._capacity, self._elastic, self._own_cluster = capacity, elastic, own_cluster
        self._counts, self._timeline, self._display, self._experiment = counts, timeline, display, experiment
        self._node_wait = NodeWait(slots, has_autoscaler=capacity.may_grow)
        self._choice = NodeChoice(slots, capacity.limits, capacity.broken)
        self._gpu_faults: dict[str, set[int]] = {}
        self._names = (f"group-{number}" for number in numbers or itertools.count())
        self._starts = numbers or itertools.count(1)
        self._idle_s, self._least = idle_s, least
        self._groups: dict[str, _Member] = {}
        self._ended: list[str] = []
        self._failed_starts: Counter[str] = Counter()
        self._few_cores = own_cluster and capacity.starts_at_once() == 1
        self._began = time.monotonic()
        self._trains_since: float | None = None
        self._idle_since: float | None = None
        self._tried_at = self._looked_at = -math.inf
        self._has_news = False
        # There was no room for more groups when there were so many trials; 0 once that may have changed.
        self._full_for = 0

    @property
    def count(self) -> int:
        """The number of groups, including those that are starting."""
        return len(self._groups)

    @property
    def ready_count(self) -> int:
        """The number of groups that have started."""
        return sum(member.is_ready for member in self._groups.values())

    # ------------------------------------------------------------------ events
    def on(self, message: Message) -> None:
        """The desk has sent this message."""
        match message:
            case messages.WorkerArrived():
                self.worker_arrived()
            case messages.GroupReady():
                self.ready(message.group)
            case messages.GroupEnded():
                self.ended(message.group, message.start, is_lost=message.is_lost, error=message.error)
            case messages.ReportReceived():
                self.trains()
            case messages.TrialLeft():
                self.trial_left(message.group)
                if message.failure is not None and message.failure.node:
                    self.gpu_failed(message.failure.node, message.trial)

    def worker_arrived(self) -> None:
        """A process of a group runs."""
        self._has_news = True
        if self._elastic is not None:
            self._elastic.arrived()

    def ready(self, name: str) -> None:
        """All processes of a group can train."""
        self._has_news = True
        if (member := self._groups.get(name)) is not None:
            member.is_ready, member.is_waiting = True, False
        self._counts.groups_started += 1
        if self._elastic is not None:
            self._elastic.ready()

    def trains(self) -> None:
        """A trial has reported."""
        self._trains_since = self._trains_since or time.monotonic()

    def trial_left(self, name: str) -> None:
        """A trial has left this group, so the group works."""
        self._failed_starts[name] = 0

    def gpu_failed(self, node: str, trial: int) -> None:
        """A GPU of this node has ended a trial. After two different ones the node gets no more: a broken GPU fails
        faster than others train, and would end one trial after another."""
        trials = self._gpu_faults.setdefault(node, set())
        trials.add(trial)
        if len(trials) < BROKEN_AFTER or node in self._capacity.broken:
            return
        self._capacity.broken.add(node)
        self._full_for = 0
        where = next((each.address for each in known_nodes() if each.id == node), node)
        what = f"GPU errors ended trials {', '.join(map(str, sorted(trials)))} on node {where}"
        check = "see nvidia-smi and the Xid messages in its kernel log, and restart or replace it"
        if self._capacity.has_room:
            self._display.say(f"{what}: it gets no more trials; {check}")
        else:
            self.error = ExperimentError(
                f"{what}, and no other node has room for a trial; {check}, then resume with: dray experiment resume "
                f"{self._experiment}"
            )

    def ended(self, name: str, start: int, *, is_lost: bool, error: str) -> None:
        """A group's processes, from this start of it, have ended; ``is_lost``: unexpectedly, by ``error`` if known."""
        member = self._groups.get(name)
        if member is None or member.group.start != start:
            return
        self._end_group(name)
        self._ended.append(name)
        if not is_lost:
            return
        self._counts.groups_lost += 1
        self._failed_starts[name] += 1
        if error:
            self._display.say(f"worker group {name} ended: {error}")
        if self._failed_starts[name] >= MAX_FAILED_STARTS:
            self.error = ExperimentError(
                f"worker group {name} was started {MAX_FAILED_STARTS} times and never finished a trial, the last time "
                f"because {error or 'its processes died'}; see Ray's logs, and resume with: dray experiment resume "
                f"{self._experiment}"
            )

    def nodes_drain(self, nodes: Collection[str]) -> None:
        """These nodes will be removed: the trials on them save, and continue elsewhere. Called from any thread."""
        for name in self._on_nodes(nodes):
            self._display.say(f"a node of worker group {name} will be removed: its trial continues elsewhere")
            self._drain(name)

    # ------------------------------------------------------------------ while they run
    def reconcile(self) -> None:
        """Replace groups that have ended, end those without use, and start more that are wanted.

        Not to be called when the search is done: then groups end by themselves.
        """
        if self.error is not None:
            return
        if self._ended:
            runnable: float = self._runnable()
            if self._capacity.broken:  # groups that leave a broken node may find no room elsewhere
                runnable = min(runnable, self._capacity.grown())
            while self._ended:
                name = self._ended.pop()
                if runnable > len(self._groups):
                    self._start_group(name)
        looked = self._look_at_cluster()
        # Not for every message: it goes through all trials.
        if not self._more_may_start():
            pause_s = IN_TURN_S
        elif looked or self._has_news:
            pause_s = 0.0
        else:
            pause_s = START_EVERY_S if self.ready_count == self.count else START_SLOWLY_EVERY_S
        if time.monotonic() - self._tried_at >= pause_s:
            self.start()

    def start(self) -> None:
        """Start groups that are wanted, as many as may start at the same time."""
        self._tried_at, self._has_news = time.monotonic(), False
        runnable = self._runnable()
        # The usual cases; the rest asks Ray for its nodes, which takes 20 ms for 1,000.
        if runnable <= max(len(self._groups), self._full_for):
            return
        wanted = min(runnable, self._capacity.grown())
        if len(self._groups) >= wanted:
            self._full_for = runnable
            return
        fit, at_once = self._capacity.now(), self._capacity.starts_at_once()
        # Groups that wait for a node do not slow down those whose workers start.
        starting = sum(not member.is_ready and not member.is_waiting for member in self._groups.values())
        while len(self._groups) < wanted:
            if len(self._groups) < fit and starting >= at_once:
                return
            self._start_group(next(self._names))
            starting += 1

    def _start_group(self, name: str, labels: Mapping[str, str] | None = None) -> None:
        labels = self._choice.first() if labels is None else labels
        slots = replace(self._slots, labels=labels)
        if self._elastic is not None:
            slots = replace(slots, per_trial=self._elastic.start(labels))
        self._timeline.starts(name, slots.taken)
        self._groups[name] = _Member(self._make(name, next(self._starts), slots), labels, time.monotonic())

    def _on_nodes(self, nodes: Collection[str]) -> list[str]:
        """Groups to drain there. While one starts, there is nothing to save; callers ask again in a second."""
        return [
            name
            for name, member in list(self._groups.items())
            if member.is_ready and not member.is_draining and not member.group.nodes.isdisjoint(nodes)
        ]

    def _drain(self, name: str) -> None:
        """Have a group's trial save and continue in another group; this one ends, and is replaced."""
        self._groups[name].is_draining = True
        self._desk.drain_group.remote(name)

    def _end_group(self, name: str) -> None:
        self._groups.pop(name).group.end()
        self._timeline.ends(name)
        self._full_for = 0

    def _more_may_start(self) -> bool:
        """Whether groups after the first may start: on a cluster at once, on a local one when the first group trains.

        With few cores, a group that starts takes one from the group that trains. Whether that pays depends on how long
        the search still runs, which is unknown. So it starts when the first group has trained for as long as it took to
        its first report (ski rental: at most twice as long as the better of now and never; Karlin et al. 1988).
        """
        if not self._own_cluster:
            return True
        if self._trains_since is None:
            return False
        start_took = self._trains_since - self._began
        return not self._few_cores or time.monotonic() - self._trains_since > start_took

    def _look_at_cluster(self) -> bool:
        """Find groups that wait for nodes, end those without a trial, and resize an elastic one.

        False if it is too early for that.
        """
        if self._own_cluster or time.monotonic() < self._looked_at + LOOK_S:
            return False
        self._looked_at, self._full_for = time.monotonic(), 0
        for name in self._on_nodes(self._capacity.broken):
            self._drain(name)
        for member in self._groups.values():
            member.is_waiting = not member.is_ready and not member.group.is_placed
        if self._elastic is not None:
            self._resize(self._elastic)
        elif surplus := self._surplus():
            # First those that wait for nodes. The desk knows which of the others have no trial.
            ends = sorted(self._waiting())[:surplus]
            for name in ends:
                self._end_group(name)
            self._desk.retire_idle.remote(self._owner, surplus - len(ends))
        if news := self._node_wait.look(len(self._waiting()), len(self._groups)):
            self._display.say(news)
        self._display.waits(self._node_wait.status)
        waiting = {name: self._groups[name] for name in self._waiting()}
        asked = {name: (each.labels, self._looked_at - each.since) for name, each in waiting.items()}
        for name, labels in self._choice.others(asked).items():
            self._end_group(name)
            self._start_group(name, labels)
        return True

    def make_room(self, *, at_once: bool) -> None:
        """End groups beyond what trials need, for groups of others.

        Args:
            at_once: trials in them save and move; else they train to their end first.
        """
        surplus = len(self._groups) - self._runnable()
        for name in self._waiting()[: max(0, surplus)]:
            self._end_group(name)
            surplus -= 1
        starting = sum(not member.is_ready for member in self._groups.values())
        if surplus > 0:
            self._desk.shrink.remote(self._owner, max(0, len(self._groups) - starting - surplus), at_once)

    @property
    def has_waiting(self) -> bool:
        """Whether a group has no slots yet."""
        return any(not member.is_ready and not member.group.is_placed for member in self._groups.values())

    def _waiting(self) -> list[str]:
        return [name for name, member in self._groups.items() if member.is_waiting]

    def _surplus(self) -> int:
        """How many groups have had no trial for so long that they are to end."""
        surplus, now = len(self._groups) - max(self._least, self._runnable()), time.monotonic()
        if surplus <= 0:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since > self._idle_s:
            self._idle_since = None
            return surplus
        return 0

    def _resize(self, elastic: Elastic) -> None:
        """Replace an elastic group by a larger one if there is room, or by a smaller one if others took its slots."""
        for name, member in list(self._groups.items()):
            if member.is_waiting and elastic.may_shrink():
                self._display.say(f"others took slots of worker group {name}: its trial continues with fewer")
                self._end_group(name)
                self._start_group(name)
            elif member.is_ready and not member.is_draining and (size := elastic.may_grow()):
                what = f"there is room for more slots than worker group {name} has"
                self._display.say(f"{what}: its trial continues with {size}")
                self._drain(name)

    # ------------------------------------------------------------------ the end
    def end(self, *, at_once: bool) -> None:
        """End all groups.

        Args:
            at_once: without waiting for them to shut down: their desk is gone, or the cluster ends with them.
        """
        with contextlib.suppress(ray.exceptions.RayError):  # Ray may be gone
            if self._elastic is not None:
                self._elastic.close()
            for member in self._groups.values():
                if not member.is_ready:  # what it waits for is no longer needed
                    member.group.end()
            end_groups([member.group for member in self._groups.values()], within_s=0 if at_once else END_S)
