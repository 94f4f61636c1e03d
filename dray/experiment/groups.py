"""The worker groups of a run on Ray: how many there are, when one starts, and when it is given back.

`dray.cluster` knows what a group is made of, and how many a cluster has or may get; the search knows how many trials
can run. Here the two meet: there are as many groups as both allow.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from dray.cluster import autoscaler
from dray.cluster.autoscaler import Limits
from dray.cluster.demand import Demand
from dray.cluster.elastic import Elastic
from dray.cluster.lending import Slots, WorkerGroup, end_groups, waiting
from dray.cluster.messages import Message
from dray.cluster.ray_cluster import Cluster, groups_in, most_slots, slot_kind
from dray.experiment.counts import Counts
from dray.experiment.display import Display
from dray.experiment.errors import ConfigError, ExperimentError
from dray.experiment.schema.resources import Resources
from dray.experiment.timeline import Timeline

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

OnEnd: TypeAlias = Callable[[str, BaseException | None], None]
"""Called in any thread when a group has ended: its name, and the error that ended it."""


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
    make: starts a group with this name, on these slots.
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
        make: Callable[[str, Slots, OnEnd], WorkerGroup],
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
        self._numbers = itertools.count()
        self._groups: dict[str, WorkerGroup] = {}
        self._booting: set[str] = set()
        self._waiting: set[str] = set()
        self._given_up: set[str] = set()
        self._placements: dict[str, PlacementGroup] = {}
        self._taken_away: set[Any] = set()
        self._ended: list[tuple[str, BaseException | None]] = []
        self._failed = 0
        self._starts: Counter[str] = Counter()
        self._silent: defaultdict[str, set[Any]] = defaultdict(set)
        self._few_cores = own_cluster and demand.at_once() == 1
        self._began = time.monotonic()
        self._first_rows: float | None = None
        self._sought_at = self._looked_at = -math.inf
        self._came_up = False

    @property
    def there(self) -> int:
        """The number of groups, including those that are starting or ending."""
        return len(self._groups)

    @property
    def up(self) -> int:
        """The number of groups that have started."""
        return len(self._groups) - len(self._booting)

    # ------------------------------------------------------------------ what is heard of them
    def hear(self, message: Message) -> None:
        """Take note of a message from the desk."""
        self._timeline.hear(message)
        group = message.group
        self._came_up = self._came_up or message.kind in ("arrived", "joined")
        match message.kind:
            case "arrived":
                self._placements[group] = message.placement
                # Each start has its own placement group, which all its processes are in.
                self._silent[group].add(message.placement.id)
                if len(self._silent[group]) > STARTS_IN_VAIN:
                    self.error = ExperimentError(
                        f"the processes of worker group {group} exited {STARTS_IN_VAIN} times before asking for a "
                        f"trial; see Ray's logs, and resume with: dray experiment resume {self._experiment}"
                    )
                if self._elastic is not None:
                    self._elastic.arrived()
            case "joined":
                self._booting.discard(group)
                self._silent.pop(group, None)
                self._starts[group] += 1
                self._counts.groups_started += 1
                if self._elastic is not None:
                    self._elastic.joined()
            case "vacated":
                if self._elastic is not None:
                    self._give_up(group)
            case "spare":
                self._give_up(group)
            case "lost":
                self._counts.groups_lost += 1
                if self._starts[group] >= STARTS_IN_VAIN:
                    self.error = ExperimentError(
                        f"worker group {group} was started {self._starts[group]} times and never finished a trial; "
                        f"see Ray's logs, and resume with: dray experiment resume {self._experiment}"
                    )
            case "rows":
                self._first_rows = self._first_rows or time.monotonic()
            case "left":
                self._starts[group] = 0
                if message.outcome != "errored":
                    self._failed = 0

    def draining(self, nodes: Collection[str]) -> None:
        """These nodes are to be taken away: the trials on them save, and go on elsewhere. Called from any thread."""
        for group, placement in list(self._placements.items()):
            if group in self._booting:  # this is called again in a second, when there may be something to save
                continue
            on = placement_group_table(placement).get("bundles_to_node_id", {}).values()
            if placement.id not in self._taken_away and not set(on).isdisjoint(nodes):
                self._taken_away.add(placement.id)
                self._display.say(f"a node of worker group {group} will be removed: its trial continues elsewhere")
                self._desk.vacate.remote(group)

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
            name = f"group-{next(self._numbers)}"
            self._booting.add(name)
            slots = replace(self._slots, per_trial=self._elastic.start()) if self._elastic else self._slots
            self._timeline.starts(name, slots.taken)
            self._groups[name] = self._make(name, slots, lambda name, error: self._ended.append((name, error)))

    def _another_may_start(self, room: int) -> bool:
        starting = self._booting - self._waiting
        # A group's controller runs on the driver's machine, and keeps half a CPU busy until its workers run.
        if len(starting - self._placements.keys()) >= 2 * (os.cpu_count() or 1):
            return False
        # A group that waits for a node does not slow down those whose workers start.
        return len(self._groups) >= room or len(starting) < self._demand.at_once()

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
        while self._ended:
            self._has_ended(*self._ended.pop())
        if self.error is not None:
            return
        looked = self._look_at_cluster()
        # Not for every message: it asks Ray for its nodes, and goes through all trials.
        pause = IN_TURN_S
        if self._more_may_start():
            pause = 0.0 if looked or self._came_up else CLUSTER_CHECK_S if self._booting else SEEK_S
        if time.monotonic() - self._sought_at >= pause:
            self.start()

    def _has_ended(self, name: str, error: BaseException | None) -> None:
        """The group's Train run has ended: we gave it up, or its controller has died. Another one replaces it."""
        if (group := self._groups.pop(name, None)) is not None:
            group.free()
        self._timeline.ends(name)
        self._placements.pop(name, None)
        self._booting.discard(name)
        self._desk.dismiss.remote(name)
        if name in self._given_up:
            return
        self._failed += 1
        self._display.say(f"worker group {name} ended: {str(error).strip().splitlines()[-1] if error else 'no error'}")
        if self._failed > STARTS_IN_VAIN:
            self.error = ExperimentError(f"{self._failed} worker groups in a row ended with errors, the last: {error}")

    def _look_at_cluster(self) -> bool:
        """Find groups that wait for nodes, and give up those of the wrong size or without a trial.

        False if it is too early for that.
        """
        if self._own_cluster or time.monotonic() < self._looked_at + LOOK_S:
            return False
        self._looked_at = time.monotonic()
        there = {name: group for name, group in self._groups.items() if name not in self._given_up}
        self._waiting = waiting(there)
        if self._elastic is not None:
            self._look_at_size(self._elastic, there)
        elif spare := self._demand.too_many(len(there), self._runnable()):
            # First those that wait for nodes. If one of them has lost its node, its trial goes on in another group.
            ends = sorted(self._waiting)[:spare]
            for name in ends:
                self._give_up(name)
            self._desk.spare.remote(spare - len(ends))
        if told := self._demand.wait(len(self._waiting), len(there)):
            self._display.say(told)
        self._display.waits(self._demand.now)
        return True

    def _look_at_size(self, elastic: Elastic, groups: Mapping[str, WorkerGroup]) -> None:
        """Give up an elastic group that should have another size; one of that size replaces it."""
        for name in groups:
            if elastic.must_shrink(name in self._waiting):
                self._display.say(f"worker group {name} lost some of its slots: its trial continues with fewer")
                self._give_up(name)
            elif name not in self._booting and (size := elastic.may_grow()):
                self._display.say(
                    f"there is room for more slots than worker group {name} has: its trial continues with {size}"
                )
                self._desk.vacate.remote(name)

    def _give_up(self, name: str) -> None:
        """End a group on purpose."""
        if name in self._groups and name not in self._given_up:
            self._given_up.add(name)
            self._groups[name].abandon()

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
            if not at_once:
                for name in waiting(self._groups) | self._booting:  # what they wait for is not needed any more
                    self._give_up(name)
        end_groups(self._groups.values(), within_s=0 if at_once else END_S)


def _placed(placement_strategy: str) -> str:
    """What the strategy asks of nodes, in words."""
    return {"STRICT_PACK": " on one node", "STRICT_SPREAD": " on as many nodes"}.get(placement_strategy, "")
