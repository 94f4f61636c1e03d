"""How many worker groups a run has, and when they start and end, without Ray: nodes, times and ends are said here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from dray.cluster.demand import IDLE_S, Demand
from dray.cluster.failure import Failure
from dray.cluster.lending import Slots
from dray.cluster.messages import Message
from dray.cluster.ray_cluster import Cluster
from dray.experiment import groups as groups_module
from dray.experiment.config import ConfigError
from dray.experiment.counts import Counts
from dray.experiment.groups import CLUSTER_CHECK_S, IN_TURN_S, LOOK_S, SEEK_S, STARTS_IN_VAIN, Groups, OnEnd, find_slots
from dray.experiment.schema.resources import Resources
from dray.experiment.timeline import FILE, Timeline
from tests.cluster.test_demand import node


class FakeGroup:
    """A worker group that starts and ends when a test says so."""

    def __init__(self, name: str, slots: Slots, on_end: OnEnd) -> None:
        self.name, self.run, self.slots, self.on_end = name, f"run-{name}", slots, on_end
        self.abandoned = self.freed = False

    def abandon(self) -> None:
        self.abandoned = True

    def free(self) -> None:
        self.freed = True

    def ended(self, by: float) -> bool:
        return True


class Calls:
    """An actor that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Any:
        class Remote:
            @staticmethod
            def remote(*arguments: Any) -> None:
                self.told.append((method, *arguments))

        return Remote


class Said:
    """A display that keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.waits_for = ""

    def say(self, line: str) -> None:
        self.lines.append(line)

    def waits(self, told: str) -> None:
        self.waits_for = told


class World:
    """A cluster of nodes with so many CPUs each, an experiment with so many trials to run, and its groups."""

    def __init__(self, directory: Path, cpus: list[int], *, own: bool, slots: int = 1) -> None:
        self.now, self.trials, self.lacking = 100.0, 0, set[str]()
        self.nodes, self.own, self.directory = cpus, own, directory
        self.slots = Slots(per_trial=slots, gpu=False, cpus_per_slot=1, runtime_env={})
        self.made: dict[str, FakeGroup] = {}
        self.desk, self.display, self.counts = Calls(), Said(), Counts()
        self.timeline = Timeline(directory)

    def groups(self, **fields: Any) -> Groups:
        display: Any = self.display
        options: dict[str, Any] = {"demand": Demand(self.slots, None), "elastic": None, **fields}
        return Groups(
            self._make,
            desk=self.desk,
            slots=self.slots,
            own_cluster=self.own,
            runnable=lambda: self.trials,
            counts=self.counts,
            timeline=self.timeline,
            display=display,
            experiment=self.directory,
            **options,
        )

    def _make(self, name: str, slots: Slots, on_end: OnEnd) -> Any:
        self.made[name] = FakeGroup(name, slots, on_end)
        return self.made[name]

    def later(self, groups: Groups, seconds: float) -> None:
        """A time in which nothing happens."""
        self.now += seconds
        groups.look_after()


def hear(groups: Groups, *kinds: Any, group: str = "group-0", **fields: Any) -> None:
    """``placement``: of the process that arrived."""
    fields.setdefault("placement", SimpleNamespace(id=f"placement of {group}"))
    for kind in kinds:
        groups.hear(Message(kind=kind, group=group, **fields))


def comes_up(groups: Groups, group: str) -> None:
    hear(groups, "arrived", "joined", group=group)


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    worlds: list[World] = []

    def make(*cpus: int, own: bool = True, slots: int = 1) -> World:
        world = World(tmp_path, list(cpus), own=own, slots=slots)
        worlds.append(world)
        for module in ("dray.experiment.groups", "dray.cluster.demand"):
            monkeypatch.setattr(f"{module}.time.monotonic", lambda: world.now)
        monkeypatch.setattr(ray, "nodes", lambda: [node({"CPU": float(each)}) for each in world.nodes])
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(sum(world.nodes))})
        monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 0.0})
        monkeypatch.setattr(groups_module, "waiting", lambda groups: world.lacking & groups.keys())
        monkeypatch.setattr("os.cpu_count", lambda: 4)
        return world

    yield make
    for world in worlds:
        world.timeline.close()


# ------------------------------------------------------------------------------------------- on a machine of our own
def test_there_are_no_more_groups_than_trials_or_than_there_is_room_for(worlds: Any) -> None:
    world = worlds(32)
    groups = world.groups()
    world.trials = 3
    groups.start()
    assert list(world.made) == ["group-0", "group-1", "group-2"]
    world.trials = 50
    hear(groups, "rows")
    for _ in range(20):
        for name in list(world.made):
            comes_up(groups, name)
        world.later(groups, 2 * SEEK_S)
    assert groups.there == groups.up == len(world.made) == 32


def test_on_few_cores_the_first_group_trains_before_another_starts(worlds: Any) -> None:
    world = worlds(2)
    groups = world.groups()
    world.trials = 9
    groups.start()
    world.later(groups, 4)
    hear(groups, "arrived", "joined")
    world.later(groups, 2)
    assert (groups.there, groups.up) == (1, 1), "it has nothing to show yet"
    hear(groups, "rows")
    world.later(groups, 5)
    assert groups.there == 1
    world.later(groups, 2)
    assert groups.there == 2, "it has trained for as long as it took to come to that"


def test_where_the_first_group_does_not_come_to_train_others_start_all_the_same(worlds: Any) -> None:
    world = worlds(2)
    groups = world.groups()
    world.trials = 9
    groups.start()
    comes_up(groups, "group-0")
    world.later(groups, IN_TURN_S + 1)
    assert groups.there == 2


def test_groups_of_a_large_machine_start_several_at_once(worlds: Any) -> None:
    world = worlds(16)
    groups = world.groups()
    world.trials = 16
    groups.start()
    assert groups.there == 4
    world.later(groups, CLUSTER_CHECK_S + 1)
    assert groups.there == 4, "they are still starting, on a quarter of its cores"
    comes_up(groups, "group-2")
    hear(groups, "rows", group="group-2")
    groups.look_after()
    assert groups.there == 5, "the next one at once"


# ------------------------------------------------------------------------------------------------ groups that end
def test_a_group_whose_run_ends_is_told_of_freed_and_replaced(worlds: Any) -> None:
    world = worlds(1)
    groups = world.groups()
    world.trials = 2
    groups.start()
    comes_up(groups, "group-0")
    first = world.made["group-0"]
    hear(groups, "rows")
    first.on_end("group-0", RuntimeError("a controller died\nof a signal"))
    world.later(groups, IN_TURN_S + 1)
    assert first.freed
    assert world.display.lines == ["worker group group-0 ended: of a signal"]
    assert ("dismiss", "group-0") in world.desk.told
    assert list(world.made) == ["group-0", "group-1"]
    assert (groups.there, groups.up, groups.error) == (1, 0, None)


def test_groups_that_end_again_and_again_end_the_experiment(worlds: Any) -> None:
    world = worlds(1)
    groups = world.groups()
    world.trials = 2
    groups.start()
    for number in range(STARTS_IN_VAIN + 1):
        assert groups.error is None
        name = f"group-{number}"
        comes_up(groups, name)
        world.made[name].on_end(name, RuntimeError("no file descriptors"))
        world.later(groups, IN_TURN_S + 1)
    assert "6 worker groups in a row ended with errors, the last: no file descriptors" in str(groups.error)
    assert len(world.made) == STARTS_IN_VAIN + 1, "and no other is started"


def test_a_lease_that_ends_well_clears_groups_of_suspicion(worlds: Any) -> None:
    world = worlds(1)
    groups = world.groups()
    world.trials = 2
    groups.start()
    for number in range(3 * STARTS_IN_VAIN):
        name = f"group-{number}"
        comes_up(groups, name)
        hear(groups, "left", group=name, outcome="completed")
        world.made[name].on_end(name, RuntimeError("gone"))
        world.later(groups, IN_TURN_S + 1)
    assert groups.error is None


def test_processes_that_are_lost_again_and_again_end_the_experiment(worlds: Any) -> None:
    world = worlds(1)
    groups = world.groups()
    world.trials = 1
    groups.start()
    hear(groups, "joined", "left", outcome="errored", failure=Failure(kind="died"))
    for _ in range(STARTS_IN_VAIN):
        assert groups.error is None
        hear(groups, "joined", "lost")
    assert f"group-0 was started {STARTS_IN_VAIN} times and never finished a trial" in str(groups.error)
    assert str(world.directory) in str(groups.error), "it says how to go on"
    assert (world.counts.groups_started, world.counts.groups_lost) == (STARTS_IN_VAIN + 1, STARTS_IN_VAIN)


def test_processes_that_end_before_they_ask_for_a_trial_end_the_experiment(worlds: Any) -> None:
    world = worlds(1)
    groups = world.groups()
    world.trials = 1
    groups.start()

    def begin(number: int) -> None:
        hear(groups, "arrived", "arrived", placement=SimpleNamespace(id=number))  # both ranks of one start

    for number in range(STARTS_IN_VAIN):
        begin(number)
    hear(groups, "joined")
    for number in range(STARTS_IN_VAIN):
        begin(100 + number)
    assert groups.error is None, "it has asked between"
    begin(200)
    assert f"group-0 exited {STARTS_IN_VAIN} times before asking for a trial" in str(groups.error)
    assert str(world.directory) in str(groups.error), "it says how to go on"


# ------------------------------------------------------------------------------------------- on a cluster of others
def test_groups_that_wait_for_nodes_are_given_back_before_those_that_have_theirs(worlds: Any) -> None:
    world = worlds(4, own=False)
    groups = world.groups()
    world.trials = 3
    for _ in range(4):
        groups.start()
        for name in world.made:
            comes_up(groups, name)
    assert groups.up == 3
    world.lacking, world.trials = {"group-1"}, 1
    for _ in range(2):
        world.later(groups, IDLE_S + LOOK_S)
    assert [name for name, group in world.made.items() if group.abandoned] == ["group-1"]
    assert world.desk.told[-1] == ("spare", 1), "the desk knows which of the others has nothing to do"
    hear(groups, "spare", group="group-2")
    assert world.made["group-2"].abandoned


def test_a_group_that_was_given_up_ends_without_a_word(worlds: Any) -> None:
    world = worlds(4, own=False)
    groups = world.groups()
    world.trials = 1
    groups.start()
    comes_up(groups, "group-0")
    hear(groups, "spare")
    world.made["group-0"].on_end("group-0", RuntimeError("killed"))
    world.later(groups, LOOK_S)
    assert world.display.lines == []
    assert groups.there == 1, "and another one is there for the trial"
    assert list(world.made) == ["group-0", "group-1"]


def test_groups_of_many_small_nodes_start_at_once_each_on_its_own(worlds: Any) -> None:
    world = worlds(1, 1, 1, 1, own=False)
    groups = world.groups()
    world.trials = 4
    groups.start()
    assert groups.there == 4


def test_a_large_cluster_does_not_overrun_the_drivers_machine_with_controllers(worlds: Any) -> None:
    world = worlds(*[8] * 64, own=False)
    groups = world.groups()
    world.trials = 100
    groups.start()
    assert groups.there == 8, "twice as many as that machine has CPUs"
    for name in ("group-0", "group-1"):
        hear(groups, "arrived", group=name)
    groups.look_after()
    assert groups.there == 10, "whose workers run, its controller has done its part"


@pytest.mark.parametrize("own", [True, False])
def test_all_groups_together_never_have_more_slots_than_they_may(worlds: Any, own: bool) -> None:
    world = worlds(16, 16, own=own, slots=2)
    groups = world.groups(demand=Demand(world.slots, None, 5))
    world.trials = 30
    groups.start()
    for _ in range(30):
        for name in list(world.made):
            comes_up(groups, name)
            hear(groups, "rows", group=name)
        world.later(groups, CLUSTER_CHECK_S + 1)
        assert groups.there * world.slots.per_trial <= 5
    assert groups.there == len(world.made) == 2
    world.made["group-0"].on_end("group-0", RuntimeError("gone"))
    world.later(groups, CLUSTER_CHECK_S + 1)
    assert (groups.there, len(world.made)) == (2, 3), "what one had, the next may have"


@pytest.mark.parametrize("own", [True, False])
def test_n_groups_share_each_slot(worlds: Any, own: bool) -> None:
    world = worlds(1, 1, own=own)
    world.slots = replace(world.slots, shared_by=4)
    groups = world.groups()
    world.trials = 30
    groups.start()
    for _ in range(30):
        for name in list(world.made):
            comes_up(groups, name)
            hear(groups, "rows", group=name)
        world.later(groups, CLUSTER_CHECK_S + 1)
    starts = [json.loads(line) for line in (world.directory / FILE).read_text().splitlines()]
    assert [each["slots"] for each in starts if each["event"] == "starts"] == [0.25] * 8
    assert groups.there == 8


def test_what_waits_for_nodes_is_said(worlds: Any) -> None:
    world = worlds(2, own=False)
    groups = world.groups()
    world.trials = 1
    groups.start()
    world.lacking = {"group-0"}
    for _ in range(13):
        world.later(groups, LOOK_S)
    [line] = world.display.lines
    assert line.startswith("the worker group waits for nodes. Each needs 1 x (1 CPU).")
    assert world.display.waits_for == "the worker group waits for nodes"


def test_nodes_that_are_to_be_taken_away_are_left_once(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on = {"bundles_to_node_id": {0: "node-a", 1: "node-b"}}
    monkeypatch.setattr(groups_module, "placement_group_table", lambda placement: on)
    world = worlds(4, own=False)
    groups = world.groups()
    world.trials = 1
    groups.start()
    hear(groups, "arrived")
    groups.draining({"node-b"})
    assert world.desk.told == [], "there is nothing to save yet"
    hear(groups, "joined")
    groups.draining({"node-c"})
    assert world.desk.told == []
    for _ in range(2):
        groups.draining({"node-b"})
    assert world.desk.told == [("vacate", "group-0")]
    assert len(world.display.lines) == 1


# ------------------------------------------------------------------------------------------------------ an elastic one
class Sizes:
    """An elastic group's size, as a test says."""

    def __init__(self) -> None:
        self.size, self.grows_to, self.shrinks, self.heard = 2, 0, False, list[str]()

    def start(self) -> int:
        return self.size

    def arrived(self) -> None:
        self.heard.append("arrived")

    def joined(self) -> None:
        self.heard.append("joined")

    def may_grow(self) -> int:
        return self.grows_to

    def must_shrink(self, lacks: bool) -> bool:
        return self.shrinks and lacks

    def close(self) -> None:
        self.heard.append("closed")


def test_an_elastic_group_is_vacated_to_grow_and_its_place_taken_by_a_larger_one(worlds: Any) -> None:
    world, sizes = worlds(8, own=False), Sizes()
    groups = world.groups(elastic=sizes)
    world.trials = 5
    groups.start()
    comes_up(groups, "group-0")
    world.later(groups, LOOK_S)
    assert (groups.there, world.made["group-0"].slots.per_trial) == (1, 2)
    sizes.grows_to = 4
    world.later(groups, LOOK_S)
    assert world.desk.told == [("vacate", "group-0")]
    sizes.size, sizes.grows_to = 4, 0
    hear(groups, "vacated")
    assert world.made["group-0"].abandoned
    world.later(groups, LOOK_S)
    assert groups.there == 1, "its slots are not free before it has ended"
    world.made["group-0"].on_end("group-0", None)
    world.later(groups, LOOK_S)
    assert (groups.there, world.made["group-1"].slots.per_trial) == (1, 4)


def test_an_elastic_group_that_has_lost_a_node_is_given_up_for_a_smaller_one(worlds: Any) -> None:
    world, sizes = worlds(8, own=False), Sizes()
    groups = world.groups(elastic=sizes)
    world.trials = 1
    groups.start()
    comes_up(groups, "group-0")
    world.lacking, sizes.shrinks = {"group-0"}, True
    world.later(groups, LOOK_S)
    assert world.made["group-0"].abandoned
    assert world.display.lines == ["worker group group-0 lost some of its slots: its trial continues with fewer"]


# --------------------------------------------------------------------------------------------------------- at the end
def test_at_the_end_groups_that_start_are_given_up_and_others_end_by_themselves(worlds: Any) -> None:
    world = worlds(4, own=False)
    groups = world.groups()
    world.trials = 2
    groups.start()
    comes_up(groups, "group-0")
    groups.start()
    groups.end(at_once=False)
    assert {name: group.abandoned for name, group in world.made.items()} == {"group-0": False, "group-1": True}
    assert world.made["group-1"].freed


# ---------------------------------------------------------------------------------------------------------- the slots
def test_slots_that_a_cluster_can_never_have_are_refused_with_what_it_has(worlds: Any) -> None:
    worlds(2, 2)
    cluster = Cluster(own=True, told="a Ray cluster")
    assert find_slots(cluster, Resources(slots_per_trial=4), 4) == ("cpu", None)
    with pytest.raises(ConfigError, match="5 slots requested, but a Ray cluster has, or can grow to, 4 cpu slots"):
        find_slots(cluster, Resources(slots_per_trial=5), 5)
    with pytest.raises(ConfigError, match="1/4 slot requested, but a Ray cluster has, or can grow to, 0 cpu slots"):
        find_slots(cluster, Resources(slots_per_trial=0.25, cpus_per_slot=4), 1)
    with pytest.raises(ConfigError, match="3 slots requested on one node"):
        find_slots(cluster, Resources(slots_per_trial=3, placement_strategy="STRICT_PACK"), 3)
