"""How many worker groups a run has, and when they start and end, without Ray: nodes, times and events are given."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from dray.cluster.nodes import GPU_TYPE, NODE_ID
from dray.desk.failure import Failure
from dray.desk.messages import TrialLeft
from dray.display.counts import Counts
from dray.groups.capacity import Capacity
from dray.groups.group import Slots
from dray.groups.pool import IDLE_S, IN_TURN_S, LOOK_S, MAX_FAILED_STARTS, START_EVERY_S, START_SLOWLY_EVERY_S, Groups
from dray.records.timeline import FILE, Timeline
from tests.groups.test_capacity import node


class FakeGroup:
    """A worker group that starts and ends when a test says so."""

    def __init__(self, name: str, start: int, slots: Slots) -> None:
        self.name, self.start, self.slots = name, start, slots
        self.is_placed, self.nodes = True, frozenset[str]()
        self.was_ended = self.was_waited_for = False

    def end(self) -> None:
        self.was_ended = True

    def ended(self, by: float) -> bool:
        self.was_waited_for = not self.was_ended
        return True

    def join(self, by: float) -> None:
        assert self.was_ended


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
        self.now, self.trials = 100.0, 0
        self.nodes, self.own, self.directory = cpus, own, directory
        self.slots = Slots(per_trial=slots, gpu=False, cpus_per_slot=1, runtime_env={})
        self.made: list[FakeGroup] = []
        """All groups that were ever started."""
        self.desk, self.display, self.counts = Calls(), Said(), Counts()
        self.timeline = Timeline(directory)

    def groups(self, **fields: Any) -> Groups:
        display: Any = self.display
        options: dict[str, Any] = {
            "capacity": Capacity(self.slots, None),
            "elastic": None,
            "runnable": lambda: self.trials,
            **fields,
        }
        return Groups(
            self._make,
            desk=self.desk,
            owner="run",
            slots=self.slots,
            own_cluster=self.own,
            counts=self.counts,
            timeline=self.timeline,
            display=display,
            experiment=self.directory,
            **options,
        )

    def _make(self, name: str, start: int, slots: Slots) -> Any:
        self.made.append(FakeGroup(name, start, slots))
        return self.made[-1]

    @property
    def names(self) -> list[str]:
        return [group.name for group in self.made]

    def later(self, groups: Groups, seconds: float) -> None:
        """A time in which nothing happens."""
        self.now += seconds
        groups.reconcile()


def started(world: World, *, trials: int) -> tuple[World, Groups]:
    """With its first groups for so many trials."""
    groups = world.groups()
    world.trials = trials
    groups.start()
    return world, groups


def comes_up(groups: Groups, group: str) -> None:
    groups.worker_arrived()
    groups.ready(group)


def bring_up(world: World, groups: Groups, count: int) -> None:
    """As many trials, each in a group that trains."""
    world.trials = count
    while groups.ready_count < count:
        groups.start()
        for name in world.names:
            comes_up(groups, name)


def ends(groups: Groups, group: FakeGroup, *, lost: bool = False, error: str = "") -> None:
    """It has ended by itself."""
    groups.ended(group.name, group.start, is_lost=lost or bool(error), error=error)


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    worlds: list[World] = []

    def make(*cpus: int, own: bool = True, slots: int = 1) -> World:
        world = World(tmp_path, list(cpus), own=own, slots=slots)
        worlds.append(world)
        for module in ("dray.groups.pool", "dray.groups.waiting"):
            monkeypatch.setattr(f"{module}.time.monotonic", lambda: world.now)
        monkeypatch.setattr(ray, "nodes", lambda: [node({"CPU": float(each)}) for each in world.nodes])
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(sum(world.nodes))})
        monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 0.0})
        return world

    yield make
    for world in worlds:
        world.timeline.close()


# ------------------------------------------------------------------------------------------- on a machine of our own
def test_there_are_no_more_groups_than_trials_or_than_fit(worlds: Any) -> None:
    world, groups = started(worlds(32), trials=3)
    assert world.names == ["group-0", "group-1", "group-2"]
    world.trials = 50
    groups.trains()
    for _ in range(20):
        for name in world.names:
            comes_up(groups, name)
        world.later(groups, 2 * START_EVERY_S)
    assert groups.count == groups.ready_count == len(world.made) == 32


def test_on_few_cores_the_first_group_trains_before_another_starts(worlds: Any) -> None:
    world, groups = started(worlds(2), trials=9)
    world.later(groups, 4)
    comes_up(groups, "group-0")
    world.later(groups, 2)
    assert (groups.count, groups.ready_count) == (1, 1), "it has nothing to show yet"
    groups.trains()
    world.later(groups, 5)
    assert groups.count == 1
    world.later(groups, 2)
    assert groups.count == 2, "it has trained for as long as it took to come to that"


def test_others_start_even_if_the_first_group_does_not_train(worlds: Any) -> None:
    world, groups = started(worlds(2), trials=9)
    comes_up(groups, "group-0")
    world.later(groups, IN_TURN_S + 1)
    assert groups.count == 2


def test_groups_of_a_large_machine_start_several_at_once(worlds: Any) -> None:
    world, groups = started(worlds(16), trials=16)
    assert groups.count == 4
    world.later(groups, START_SLOWLY_EVERY_S + 1)
    assert groups.count == 4, "they are still starting, on a quarter of its cores"
    comes_up(groups, "group-2")
    groups.trains()
    groups.reconcile()
    assert groups.count == 5, "the next one at once"


# ------------------------------------------------------------------------------------------------ groups that end
def test_a_group_that_ends_is_freed_and_replaced_at_once(worlds: Any) -> None:
    world, groups = started(worlds(1), trials=2)
    [first] = world.made
    ends(groups, first, error="no file descriptors")
    groups.reconcile()
    assert first.was_ended, "its slots are free"
    assert world.display.lines == ["worker group group-0 ended: no file descriptors"]
    assert [(group.name, group.start) for group in world.made] == [("group-0", 1), ("group-0", 2)]
    assert (groups.count, groups.ready_count, groups.error) == (1, 0, None)
    ends(groups, first, lost=True)
    groups.reconcile()
    assert len(world.made) == 2, "it was the one before"


def test_a_group_that_ended_is_not_replaced_if_no_trial_needs_it(worlds: Any) -> None:
    world, groups = started(worlds(4, own=False), trials=1)
    comes_up(groups, "group-0")
    world.trials = 0
    ends(groups, world.made[0])
    world.later(groups, LOOK_S)
    assert (groups.count, world.counts.groups_lost, world.display.lines) == (0, 0, [])


def test_a_group_that_keeps_dying_without_a_trial_ends_the_experiment(worlds: Any) -> None:
    world, groups = started(worlds(1), trials=1)
    comes_up(groups, "group-0")
    groups.trial_left("group-0")
    for number in range(MAX_FAILED_STARTS):
        assert groups.error is None
        comes_up(groups, "group-0")
        ends(groups, world.made[-1], lost=True, error="no file descriptors" if number else "")
        groups.reconcile()
    assert f"group-0 was started {MAX_FAILED_STARTS} times and never finished a trial" in str(groups.error)
    assert "because no file descriptors" in str(groups.error)
    assert str(world.directory) in str(groups.error), "it says how to go on"
    assert (world.counts.groups_started, world.counts.groups_lost) == (MAX_FAILED_STARTS + 1, MAX_FAILED_STARTS)
    assert len(world.made) == MAX_FAILED_STARTS, "and no other is started"


def test_a_trial_that_leaves_resets_the_failed_starts_of_its_group(worlds: Any) -> None:
    world, groups = started(worlds(1), trials=2)
    for _ in range(3 * MAX_FAILED_STARTS):
        comes_up(groups, "group-0")
        groups.trial_left("group-0")
        ends(groups, world.made[-1], lost=True)
        groups.reconcile()
    assert groups.error is None


def test_groups_that_are_replaced_on_purpose_are_not_lost(worlds: Any) -> None:
    world, groups = started(worlds(1), trials=2)
    for _ in range(2 * MAX_FAILED_STARTS):
        comes_up(groups, "group-0")
        ends(groups, world.made[-1])
        groups.reconcile()
    assert (groups.error, world.counts.groups_lost, groups.count) == (None, 0, 1)


# ------------------------------------------------------------------------------------------- on a cluster of others
def test_groups_that_wait_for_nodes_end_before_those_with_nodes(worlds: Any) -> None:
    world = worlds(4, own=False)
    groups = world.groups()
    bring_up(world, groups, 3)
    ends(groups, world.made[1], lost=True)
    groups.reconcile()
    world.made[3].is_placed = False  # its node is gone
    world.trials = 1
    for _ in range(2):
        world.later(groups, IDLE_S + LOOK_S)
    assert [group.name for group in world.made if group.was_ended] == ["group-1", "group-1"]
    assert world.desk.told[-1] == ("retire_idle", "run", 1), "the desk knows which of the others has nothing to do"
    ends(groups, world.made[2])
    world.later(groups, LOOK_S)
    assert (groups.count, len(world.made)) == (1, 4)


def test_idle_groups_are_retired_after_a_while_except_one(worlds: Any) -> None:
    world = worlds(4, own=False)
    groups = world.groups()
    bring_up(world, groups, 4)
    world.trials = 2
    world.later(groups, LOOK_S)
    world.later(groups, IDLE_S)
    assert world.desk.told == []
    world.later(groups, LOOK_S)
    assert world.desk.told == [("retire_idle", "run", 2)]
    world.later(groups, LOOK_S)
    assert len(world.desk.told) == 1, "once"
    world.trials = 0
    world.later(groups, IDLE_S + LOOK_S)
    assert world.desk.told[1:] == [("retire_idle", "run", 3)]


def test_groups_that_are_soon_needed_again_stay(worlds: Any) -> None:
    world = worlds(4, own=False)
    groups = world.groups()
    bring_up(world, groups, 4)
    for world.trials in (2, 4) * 10:
        world.later(groups, IDLE_S - 1)
    assert world.desk.told == []
    assert groups.count == 4


def test_groups_on_many_small_nodes_all_start_at_once(worlds: Any) -> None:
    _, groups = started(worlds(1, 1, 1, 1, own=False), trials=4)
    assert groups.count == 4


@pytest.mark.parametrize("own", [True, False])
def test_all_groups_together_never_exceed_max_slots(worlds: Any, own: bool) -> None:
    world = worlds(16, 16, own=own, slots=2)
    groups = world.groups(capacity=Capacity(world.slots, None, 5))
    world.trials = 30
    groups.start()
    for _ in range(30):
        for name in world.names:
            comes_up(groups, name)
            groups.trains()
        world.later(groups, START_SLOWLY_EVERY_S + 1)
        assert groups.count * world.slots.per_trial <= 5
    assert groups.count == len(world.made) == 2
    ends(groups, world.made[0], lost=True)
    world.later(groups, START_SLOWLY_EVERY_S + 1)
    assert (groups.count, len(world.made)) == (2, 3), "what one had, the next may have"


@pytest.mark.parametrize("own", [True, False])
def test_n_groups_share_each_slot(worlds: Any, own: bool) -> None:
    world = worlds(1, 1, own=own)
    world.slots = replace(world.slots, shared_by=4)
    groups = world.groups()
    world.trials = 30
    groups.start()
    for _ in range(30):
        for name in world.names:
            comes_up(groups, name)
            groups.trains()
        world.later(groups, START_SLOWLY_EVERY_S + 1)
    starts = [json.loads(line) for line in (world.directory / FILE).read_text().splitlines()]
    assert [each["slots"] for each in starts if each["event"] == "starts"] == [0.25] * 8
    assert groups.count == 8


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self) -> Any:
        self.calls += 1
        return self.function()


def test_ray_is_asked_for_its_nodes_as_often_for_a_thousand_groups_as_for_one(
    worlds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(*[4] * 1000, own=False)
    monkeypatch.setattr(ray, "nodes", nodes := Counted(ray.nodes))
    world.slots = replace(world.slots, cpus_per_slot=4)
    groups, world.trials = world.groups(), 2000
    groups.start()
    assert groups.count == 1000
    assert nodes.calls <= 5
    world.later(groups, LOOK_S)
    nodes.calls = 0
    for name in world.names:  # what the desk sends while they start
        comes_up(groups, name)
        groups.reconcile()
    assert groups.ready_count == 1000
    assert nodes.calls == 0, "all groups exist that fit; it looks again after a while"
    world.nodes += [4]
    world.later(groups, LOOK_S)
    assert groups.count == 1001


@pytest.mark.parametrize("own", [True, False])
def test_groups_that_were_not_needed_start_again_when_they_are(worlds: Any, own: bool) -> None:
    world = worlds(16, own=own)
    groups = world.groups()
    groups.trains()
    bring_up(world, groups, 16)
    world.trials = 20
    world.later(groups, LOOK_S)
    world.trials = 2
    for group in world.made[2:]:
        ends(groups, group)
    world.later(groups, LOOK_S)
    assert groups.count == 2
    world.trials = 6
    world.later(groups, START_EVERY_S)
    assert groups.count == 6


def test_trials_are_counted_once_for_all_groups_that_are_lost_together(worlds: Any) -> None:
    world = worlds(*[4] * 100, own=False)
    runnable = Counted(lambda: world.trials)
    groups = world.groups(runnable=runnable)
    bring_up(world, groups, 100)
    for group in world.made[:50]:
        ends(groups, group, lost=True)
    world.trials, runnable.calls = 80, 0
    groups.reconcile()
    assert groups.count == 80, "as many as there are trials"
    assert runnable.calls <= 3


def test_the_display_shows_what_groups_wait_for(worlds: Any) -> None:
    world, groups = started(worlds(2, own=False), trials=1)
    world.made[0].is_placed = False
    for _ in range(13):
        world.later(groups, LOOK_S)
    [line] = world.display.lines
    assert line.startswith("the worker group waits for nodes. Each needs 1 x (1 CPU).")
    assert world.display.waits_for == "the worker group waits for nodes"


def test_a_group_that_gets_no_gpu_of_a_type_asks_for_one_of_the_next(worlds: Any) -> None:
    world = worlds(2, own=False)
    world.slots = replace(world.slots, gpu_types=("A100", "L4"))
    world, groups = started(world, trials=1)
    world.made[0].is_placed = False
    for _ in range(15):
        world.later(groups, LOOK_S)
    asked = [(group.name, group.slots.labels, group.was_ended) for group in world.made]
    first, second = {GPU_TYPE: "A100"}, {GPU_TYPE: "L4"}
    assert asked == [("group-0", first, True), ("group-0", second, False)]
    ends(groups, world.made[0])  # which is reported late
    assert groups.count == 1


def test_a_group_on_a_draining_node_is_drained_once(worlds: Any) -> None:
    world, groups = started(worlds(4, own=False), trials=1)
    world.made[0].nodes = frozenset(["node-a", "node-b"])
    groups.nodes_drain({"node-b"})
    assert world.desk.told == [], "there is nothing to save yet"
    groups.ready("group-0")
    groups.nodes_drain({"node-c"})
    assert world.desk.told == []
    for _ in range(2):
        groups.nodes_drain({"node-b"})
    assert world.desk.told == [("drain_group", "group-0")]
    assert len(world.display.lines) == 1


def gpu_fails(groups: Groups, trial: int, node: str) -> None:
    failure = Failure(kind="device", node=node)
    groups.on(TrialLeft(lease=trial, group="group-0", trial=trial, outcome="errored", failure=failure))


def on_gpus(worlds: Any, monkeypatch: pytest.MonkeyPatch, *ids: str) -> tuple[World, Groups]:
    """A group that trains on each of these nodes."""
    world = worlds(*[1] * len(ids), own=False)
    nodes = [{**node({"CPU": 1.0}), "NodeID": name, "NodeManagerAddress": f"address-of-{name}"} for name in ids]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    groups = world.groups()
    bring_up(world, groups, len(ids))
    for group, name in zip(world.made, ids, strict=True):
        group.nodes = frozenset([name])
    return world, groups


def test_a_node_gets_no_more_trials_once_its_gpus_have_ended_two(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world, groups = on_gpus(worlds, monkeypatch, "a", "b", "c")
    for trial, name in ((3, "a"), (3, "a"), (5, "b")):
        gpu_fails(groups, trial, name)
    world.later(groups, LOOK_S)
    assert (world.display.lines, world.desk.told) == ([], []), "two errors of one trial may be the trial's"
    for trial in (7, 8):
        gpu_fails(groups, trial, "a")
    [line] = world.display.lines
    assert line.startswith("GPU errors ended trials 3, 7 on node address-of-a: it gets no more trials; see nvidia-smi")
    for _ in range(2):
        world.later(groups, LOOK_S)
    assert world.desk.told == [("drain_group", "group-0")]
    ends(groups, world.made[0])
    world.later(groups, LOOK_S)
    assert groups.count == 2, "there is no room for a third"
    ends(groups, world.made[1], lost=True)
    world.later(groups, LOOK_S)
    assert world.made[-1].slots.labels == {NODE_ID: "!in(a)"}
    assert groups.error is None


def test_a_search_ends_when_gpus_of_all_nodes_have_ended_trials(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, groups = on_gpus(worlds, monkeypatch, "a", "b")
    for trial, name in enumerate(("a", "a", "b")):
        gpu_fails(groups, trial, name)
    assert groups.error is None
    gpu_fails(groups, 3, "b")
    assert "GPU errors ended trials 2, 3 on node address-of-b, and no other node has room" in str(groups.error)


# ------------------------------------------------------------------------------------------------------ an elastic one
class Sizes:
    """An elastic group's size, as a test says."""

    def __init__(self) -> None:
        self.size, self.grows_to, self.shrinks = 2, 0, False

    def start(self, labels: Mapping[str, str]) -> int:
        assert labels == {}
        return self.size

    def arrived(self) -> None:
        """It has no use for that."""

    ready = close = arrived

    def may_grow(self) -> int:
        return self.grows_to

    def may_shrink(self) -> bool:
        return self.shrinks


def test_an_elastic_group_is_drained_to_grow_and_replaced_by_a_larger_one(worlds: Any) -> None:
    world, sizes = worlds(8, own=False), Sizes()
    groups = world.groups(elastic=sizes, capacity=Capacity(world.slots, None, 1))
    world.trials = 5
    groups.start()
    comes_up(groups, "group-0")
    world.later(groups, LOOK_S)
    assert (groups.count, world.made[0].slots.per_trial) == (1, 2)
    sizes.grows_to = 4
    for _ in range(2):
        world.later(groups, LOOK_S)
    assert world.desk.told == [("drain_group", "group-0")], "once"
    sizes.size = 4
    assert len(world.made) == 1, "its slots are not free before it has ended"
    ends(groups, world.made[0])
    world.later(groups, LOOK_S)
    assert (groups.count, world.made[1].slots.per_trial) == (1, 4)


def test_an_elastic_group_that_has_lost_a_node_is_replaced_by_a_smaller_one(worlds: Any) -> None:
    world, sizes = worlds(8, own=False), Sizes()
    groups = world.groups(elastic=sizes, capacity=Capacity(world.slots, None, 1))
    world.trials = 1
    groups.start()
    comes_up(groups, "group-0")
    sizes.size = 1
    ends(groups, world.made[0], lost=True)
    groups.reconcile()
    assert (groups.count, world.made[1].slots.per_trial) == (1, 1)


def test_an_elastic_group_whose_slots_others_took_is_replaced_by_a_smaller_one(worlds: Any) -> None:
    world, sizes = worlds(8, own=False), Sizes()
    groups = world.groups(elastic=sizes, capacity=Capacity(world.slots, None, 1))
    world.trials = 1
    groups.start()
    sizes.shrinks, sizes.size = True, 1
    world.later(groups, LOOK_S)
    assert len(world.made) == 1, "it has its slots"
    world.made[0].is_placed = False
    world.later(groups, LOOK_S)
    assert world.made[0].was_ended
    assert world.made[1].slots.per_trial == 1
    assert world.display.lines == ["others took slots of worker group group-0: its trial continues with fewer"]


# --------------------------------------------------------------------------------------------------------- at the end
def test_at_the_end_starting_groups_are_ended_and_others_end_by_themselves(worlds: Any) -> None:
    world, groups = started(worlds(4, own=False), trials=2)
    comes_up(groups, "group-0")
    groups.start()
    groups.end(at_once=False)
    assert [group.was_waited_for for group in world.made] == [True, False]
    assert [group.was_ended for group in world.made] == [True, True]


# ------------------------------------------------------------------------------------------- a server's groups
def test_a_server_keeps_idle_groups_for_as_long_as_it_was_told_and_then_none(worlds: Any) -> None:
    world = worlds(4, own=False)
    groups = world.groups(idle_s=300.0, least=0)
    bring_up(world, groups, 2)
    world.trials = 0
    world.later(groups, LOOK_S)
    world.later(groups, 299.0)
    assert world.desk.told == []
    world.later(groups, LOOK_S)
    world.later(groups, LOOK_S)
    assert world.desk.told == [("retire_idle", "run", 2)]


def test_groups_make_room_by_those_without_slots_first(worlds: Any) -> None:
    world = worlds(4, own=False)
    groups = world.groups(least=0)
    bring_up(world, groups, 3)
    ends(groups, world.made[1], lost=True)
    groups.reconcile()
    world.made[3].is_placed = False
    world.later(groups, LOOK_S)
    world.trials = 1
    groups.make_room(at_once=True)
    assert world.made[3].was_ended
    assert world.desk.told == [("shrink", "run", 1, True)]


def test_names_and_starts_of_two_owners_differ(worlds: Any) -> None:
    world, numbers = worlds(4, own=False), itertools.count(1)
    for _ in range(2):
        groups = world.groups(numbers=numbers)
        world.trials = 2
        groups.start()
    assert len({group.name for group in world.made}) == len(world.made)
    assert len({group.start for group in world.made}) == len(world.made)
