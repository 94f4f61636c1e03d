"""The worker groups of a run on Ray: how many there are, when one starts, and when it is given back.

`dray.cluster` knows what a group is made of, and how many a cluster has or may get; the search knows how many trials
can run. Here the two meet: there are as many groups as both allow.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from dray.cluster import autoscaler
from dray.cluster.autoscaler import Limits
from dray.cluster.connection import Cluster, groups_in, most_slots, slot_kind
from dray.config.resources import Resources
from dray.desk.messages import Message
from dray.display.counts import Counts
from dray.display.display import Display
from dray.errors import ConfigError, ExperimentError
from dray.groups.demand import Demand
from dray.groups.elastic import Elastic
from dray.groups.group import Slots, WorkerGroup, end_groups
from dray.records.timeline import Timeline

SEEK_S = 0.25
"""How often room for another group is looked for, when nothing happens."""
CLUSTER_CHECK_S = 5.0
"""The same while a group starts."""
LOOK_S = 1.0
"""How often, on a cluster, groups are checked: which wait for nodes, and which are needed."""
STARTS_IN_VAIN = 5
"""A group that starts this many times without finishing a lease ends the experiment."""
IN_TURN_S = 30.0
"""On a local cluster the first group, then Tune, then further groups start in turn: the time given to each."""
END_S = 30.0
"""How long all groups together may take to shut down on a cluster that stays up."""


def find_slots(cluster: Cluster, asked: Resources, least: int) -> tuple[str, Limits | None]:
    """The kind of a slot, "gpu" or "cpu", and what an autoscaler may start; None without one.

    Args:
        asked: the config's ``resources``.
        least: slots of the smallest group.

    Raises:
        ConfigError: the cluster can't have room for one group.
    """
    limits = None if cluster.own else autoscaler.limits()
    kind = slot_kind(asked.slot, limits)
    if kind is None:
        told = (
            f"required, as {cluster.told} has an autoscaler that does not report its node types; set it to gpu or cpu"
        )
        raise ConfigError([("resources.slot", told)])
    most = most_slots(kind, asked.cpus_per_slot, limits)
    if most is not None and not groups_in(most, least, asked.placement_strategy):
        other = "cpu" if kind == "gpu" else "gpu"
        told = (
            f"{asked.share or f'{least} slots'} requested{_placed(asked.placement_strategy)}, "
            f"but {cluster.told} has, or can grow to, {sum(most)} {kind} slots (with {asked.cpus_per_slot} CPUs each) "
            f"on {sum(map(bool, most))} nodes; request fewer, or set resources.slot: {other}"
        )
        raise ConfigError([("resources.slots_per_trial", told)])
    return kind, limits


class Groups:
    """Args:
    make: starts a group with this name, as the start with this number, on these slots.
    desk: the desk's actor.
    slots: what a group is made of.
    demand: how many groups there may be.
    elastic: the size of the only group, if it is elastic.
    own_cluster: the cluster was started for this experiment alone.
    runnable: how many trials could run now, including those that do.
    counts: the run's counters.
    experiment: the experiment's directory, for errors that say how to go on.

    Attributes:
        error: why the experiment can't go on; None as long as it can.
    """

    def __init__(
        self,
        make: Callable[[str, int, Slots], WorkerGroup],
        *,
        desk: Any,
        slots: Slots,
        demand: Demand,
        elastic: Elastic | None,
        own_cluster: bool,
        runnable: Callable[[], int],
        counts: Counts,
        timeline: Timeline,
        display: Display,
        experiment: Path,
    ) -> None:
        self.error: ExperimentError | None = None
        self._make, self._desk, self._slots, self._runnable = make, desk, slots, runnable
        self._demand, self._elastic, self._own_cluster = demand, elastic, own_cluster
        self._counts, self._timeline, self._display, self._experiment = counts, timeline, display, experiment
        self._names = (f"group-{number}" for number in itertools.count())
        self._starts = itertools.count(1)
        self._groups: dict[str, WorkerGroup] = {}
        self._booting: set[str] = set()
        self._waiting: set[str] = set()
        self._leaving: set[WorkerGroup] = set()
        self._ended: list[str] = []
        self._in_vain: Counter[str] = Counter()
        self._few_cores = own_cluster and demand.at_once() == 1
        self._began = time.monotonic()
        self._first_rows: float | None = None
        self._sought_at = self._looked_at = -math.inf
        self._came_up = False

    @property
    def there(self) -> int:
        """The number of groups, including those that are starting."""
        return len(self._groups)

    @property
    def up(self) -> int:
        """The number of groups that have started."""
        return len(self._groups) - len(self._booting)

    # ------------------------------------------------------------------ what is heard of them
    def hear(self, message: Message) -> None:
        """Take note of a message from the desk."""
        self._timeline.record(message)
        group = message.group
        self._came_up = self._came_up or message.kind in ("arrived", "joined")
        match message.kind:
            case "arrived":
                if self._elastic is not None:
                    self._elastic.arrived()
            case "joined":
                self._booting.discard(group)
                self._counts.groups_started += 1
                if self._elastic is not None:
                    self._elastic.joined()
            case "ended":
                self._has_ended(message)
            case "rows":
                self._first_rows = self._first_rows or time.monotonic()
            case "left":
                self._in_vain[group] = 0

    def _has_ended(self, message: Message) -> None:
        """A group has ended, and we have not ended it."""
        name = message.group
        group = self._groups.get(name)
        if group is None or group.start != message.start:
            return
        self._drop(name)
        self._ended.append(name)
        if not message.lost:
            return
        self._counts.groups_lost += 1
        self._in_vain[name] += 1
        if message.error:
            self._display.say(f"worker group {name} ended: {message.error}")
        if self._in_vain[name] >= STARTS_IN_VAIN:
            why = message.error or "its processes died"
            self.error = ExperimentError(
                f"worker group {name} was started {STARTS_IN_VAIN} times and never finished a trial, the last time "
                f"because {why}; see Ray's logs, and resume with: dray experiment resume {self._experiment}"
            )

    def draining(self, nodes: Collection[str]) -> None:
        """These nodes are to be taken away: the trials on them save, and go on elsewhere. Called from any thread."""
        for name, group in list(self._groups.items()):
            # While it starts, there is nothing to save; this is called again in a second.
            if name not in self._booting and group not in self._leaving and not group.nodes.isdisjoint(nodes):
                self._leaving.add(group)
                self._display.say(f"a node of worker group {name} will be removed: its trial continues elsewhere")
                self._desk.vacate.remote(name)

    # ------------------------------------------------------------------ starting
    def start(self) -> None:
        """Start as many groups as the search has trials for and the cluster has, or may get, room for."""
        self._sought_at, self._came_up = time.monotonic(), False
        runnable = self._runnable()
        if runnable <= len(self._groups):  # the usual case; the rest asks Ray for its nodes
            return
        room = 1 if self._elastic else self._demand.room()
        wanted = min(runnable, room) if self._own_cluster or self._elastic else self._demand.most(runnable)
        while len(self._groups) < wanted and self._another_may_start(room):
            self._begin(next(self._names))

    def _begin(self, name: str) -> None:
        slots = replace(self._slots, per_trial=self._elastic.start()) if self._elastic else self._slots
        self._timeline.starts(name, slots.taken)
        self._booting.add(name)
        self._groups[name] = self._make(name, next(self._starts), slots)

    def _drop(self, name: str) -> None:
        """End a group, and forget it."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.end()
            self._leaving.discard(group)
            self._booting.discard(name)
            self._waiting.discard(name)
            self._timeline.ends(name)

    def _another_may_start(self, room: int) -> bool:
        # A group that waits for a node does not slow down those whose workers start.
        return len(self._groups) >= room or len(self._booting - self._waiting) < self._demand.at_once()

    def _more_may_start(self) -> bool:
        """Whether groups after the first may start: on a cluster at once, on a local one when the first group trains.

        With few cores, a group that starts takes one from the group that trains. Whether that pays depends on how long
        the search still runs, which is unknown. So it starts when the first group has trained for as long as it took to
        its first report (ski rental: at most twice as long as the better of now and never; Karlin et al. 1988).
        """
        if not self._own_cluster:
            return True
        if self._first_rows is None:
            return False
        took = self._first_rows - self._began
        return not self._few_cores or time.monotonic() - self._first_rows > took

    # ------------------------------------------------------------------ while they run
    def look_after(self) -> None:
        """Replace groups that have ended, give back those without use, start more that are wanted.

        Not to be called when the search is done: then groups end by themselves.
        """
        while self._ended and self.error is None:
            name = self._ended.pop()
            if self._runnable() > len(self._groups):
                self._begin(name)
        if self.error is not None:
            return
        looked = self._look_at_cluster()
        # Not for every message: it asks Ray for its nodes, and goes through all trials.
        pause = IN_TURN_S
        if self._more_may_start():
            pause = 0.0 if looked or self._came_up else CLUSTER_CHECK_S if self._booting else SEEK_S
        if time.monotonic() - self._sought_at >= pause:
            self.start()

    def _look_at_cluster(self) -> bool:
        """Find groups that wait for nodes, and give up those of the wrong size or without a trial.

        False if it is too early for that.
        """
        if self._own_cluster or time.monotonic() < self._looked_at + LOOK_S:
            return False
        self._looked_at = time.monotonic()
        self._waiting = {name for name in self._booting if not self._groups[name].is_placed}
        if self._elastic is not None:
            self._look_at_size(self._elastic)
        elif spare := self._demand.too_many(len(self._groups), self._runnable()):
            # First those that wait for nodes. The desk knows which of the others have no trial.
            ends = sorted(self._waiting)[:spare]
            for name in ends:
                self._drop(name)
            self._desk.spare.remote(spare - len(ends))
        if told := self._demand.wait(len(self._waiting), len(self._groups)):
            self._display.say(told)
        self._display.waits(self._demand.now)
        return True

    def _look_at_size(self, elastic: Elastic) -> None:
        """Replace an elastic group that should have another size by one of that size."""
        for name, group in list(self._groups.items()):
            if elastic.must_shrink(name in self._waiting):
                self._display.say(f"worker group {name} lost some of its slots: its trial continues with fewer")
                self._drop(name)
                self._begin(name)
            elif name not in self._booting and group not in self._leaving and (size := elastic.may_grow()):
                self._display.say(
                    f"there is room for more slots than worker group {name} has: its trial continues with {size}"
                )
                self._leaving.add(group)
                self._desk.vacate.remote(name)

    # ------------------------------------------------------------------ the end
    def end(self, *, at_once: bool) -> None:
        """End all groups.

        Args:
            at_once: without waiting for them to give back what they hold: they have no desk any more, or the cluster
                ends with them.
        """
        with contextlib.suppress(ray.exceptions.RayError):  # Ray may be gone
            if self._elastic is not None:
                self._elastic.close()
            for name in self._booting:  # what they wait for is not needed any more
                self._groups[name].end()
            end_groups(self._groups.values(), within_s=0 if at_once else END_S)


def _placed(placement_strategy: str) -> str:
    """What the strategy asks of nodes, in words."""
    return {"STRICT_PACK": " on one node", "STRICT_SPREAD": " on as many nodes"}.get(placement_strategy, "")
