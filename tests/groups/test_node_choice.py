"""Which nodes groups ask for, without a cluster: the autoscaler's activity and times are given."""

from __future__ import annotations

from typing import Any

import pytest

from dray.cluster import autoscaler
from dray.cluster.autoscaler import NODE_TYPE, Activity, Limits, NodeType
from dray.cluster.nodes import GPU_TYPE
from dray.groups.group import Slots
from dray.groups.node_choice import LOOK_S, PATIENCE_S, RETRY_S, NodeChoice

Labels = dict[str, str]
LONG = PATIENCE_S + 1


class World:
    """An autoscaler that may start these types of machines, each with the type of its GPUs, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.starting: dict[str, int] = {}
        self.failed_at: dict[str, float] = {}
        self.booting: dict[str, int] = {}
        monkeypatch.setattr("dray.groups.node_choice.time.monotonic", lambda: self.now)
        monkeypatch.setattr("dray.groups.node_choice.time.time", lambda: self.now)
        monkeypatch.setattr(autoscaler, "activity", self._activity)

    def _activity(self) -> Activity:
        return Activity(starting={**self.starting}, failed={}, failed_at={**self.failed_at}, booting={**self.booting})

    def choice(self, *gpu_types: str, **node_types: str) -> NodeChoice:
        slots = Slots(per_trial=1, gpu=True, cpus_per_slot=1, runtime_env={}, gpu_types=gpu_types)
        types = [
            NodeType(
                name=name, resources={"CPU": 4, "GPU": 1}, max_count=2, labels={NODE_TYPE: name, GPU_TYPE: gpu_type}
            )
            for name, gpu_type in node_types.items()
        ]
        cpus = NodeType(name="cpus", resources={"CPU": 4}, max_count=2, labels={NODE_TYPE: "cpus"})
        return NodeChoice(slots, Limits(types=(*types, cpus)))

    def fails(self, name: str, after_s: float = LOOK_S) -> None:
        self.now += after_s
        self.failed_at[name] = self.now


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def other(choice: NodeChoice, labels: Labels, waited_s: float) -> Labels | None:
    """What the only group that waits should ask for."""
    return choice.others({"group": (labels, waited_s)}).get("group")


def without(*names: str) -> Labels:
    return {NODE_TYPE: f"!in({','.join(names)})"}


def test_without_failures_ray_chooses(world: World) -> None:
    choice = world.choice(spot="L4", on_demand="L4")
    assert choice.first() == {}
    world.starting = {"spot": 1}
    for waited_s in (1, LONG, 1000 * LONG):
        world.now += LOOK_S
        assert other(choice, {}, waited_s) is None


def test_a_refused_type_is_not_asked_for_until_a_minute_later(world: World) -> None:
    choice = world.choice(spot="L4", on_demand="L4")
    assert other(choice, {}, 1) is None
    world.fails("spot")
    assert other(choice, {}, 1) == choice.first() == without("spot")
    world.starting = {"on_demand": 1}
    world.now += RETRY_S - 1
    assert other(choice, without("spot"), RETRY_S) is None
    world.now += 2
    assert choice.first() == {}, "a new group tries it again"
    assert other(choice, without("spot"), RETRY_S) is None, "while another machine starts, a group waits for that"
    world.starting, world.now = {}, world.now + LOOK_S
    assert other(choice, without("spot"), RETRY_S) == {}, "as when there are no more of the others"


def test_if_the_cloud_has_no_machine_each_type_is_asked_for_in_turn(world: World) -> None:
    choice = world.choice(reserved="L4", spot="L4", on_demand="L4")
    asked, expected = choice.first(), []
    for name in ("reserved", "spot", "on_demand", "reserved", "spot"):
        world.fails(name)
        asked = other(choice, asked, 1) or {}
        expected.append(asked)
    assert expected == [
        without("reserved"),
        without("reserved", "spot"),
        without("on_demand", "spot"),
        without("on_demand", "reserved"),
        without("reserved", "spot"),
    ]


def test_groups_that_machines_boot_for_keep_waiting(world: World) -> None:
    choice = world.choice(spot="L4", on_demand="L4")
    world.booting, world.starting = {"spot": 2}, {"spot": 5}
    world.fails("spot")
    waiting: dict[str, tuple[Labels, float]] = {name: ({}, LONG) for name in "abcd"}
    assert choice.others(waiting) == {name: without("spot") for name in "cd"}


class Counted(dict[str, float]):
    """Counts how often all of it is read."""

    reads = 0

    def items(self) -> Any:
        Counted.reads += 1
        return super().items()


def test_what_to_ask_for_instead_is_found_once_for_groups_that_ask_for_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = world.choice(spot="L4", on_demand="L4")
    world.fails("spot")
    failed = Counted(world.failed_at)
    activity = Activity(starting={}, failed={}, failed_at=failed, booting={"spot": 1})
    monkeypatch.setattr(autoscaler, "activity", lambda: activity)
    waiting: dict[str, tuple[Labels, float]] = {f"group-{n}": ({}, float(n)) for n in range(1000)}
    found = choice.others(waiting)
    assert found == {f"group-{n}": without("spot") for n in range(1, 1000)}, "but one, for which a machine boots"
    assert failed.reads < 30


def test_failures_of_types_without_slots_do_not_matter(world: World) -> None:
    choice = world.choice(spot="L4")
    world.fails("cpus")
    assert other(choice, {}, 1) is None
    assert choice.first() == {}


def test_types_without_a_label_cannot_be_avoided(world: World) -> None:
    slots = Slots(per_trial=1, gpu=True, cpus_per_slot=1, runtime_env={})
    types = [NodeType(name=name, resources={"CPU": 4, "GPU": 1}, max_count=2, labels={}) for name in ("a", "b")]
    choice = NodeChoice(slots, Limits(types=tuple(types)))
    world.fails("a")
    assert other(choice, {}, LONG) is None


# ------------------------------------------------------------------------------------------------- types of GPUs
def test_without_an_autoscaler_a_group_that_gets_no_gpu_asks_for_the_next_type(world: World) -> None:
    slots = Slots(per_trial=2, gpu=True, cpus_per_slot=1, runtime_env={}, gpu_types=("A100", "L4"))
    choice = NodeChoice(slots, None)
    assert choice.first() == {GPU_TYPE: "A100"}
    assert other(choice, {GPU_TYPE: "A100"}, PATIENCE_S - 1) is None
    assert other(choice, {GPU_TYPE: "A100"}, LONG) == {GPU_TYPE: "L4"}
    assert other(choice, {GPU_TYPE: "L4"}, LONG) == {GPU_TYPE: "A100"}


def test_another_machine_with_the_same_gpu_comes_before_another_gpu(world: World) -> None:
    choice = world.choice("A100", "L4", spot="A100", on_demand="A100", small="L4")
    asked = choice.first()
    assert asked == {GPU_TYPE: "A100"}
    world.fails("spot")
    asked = other(choice, asked, 1) or {}
    assert asked == {GPU_TYPE: "A100", **without("spot")}
    world.fails("on_demand")
    assert other(choice, asked, 1) == choice.first() == {GPU_TYPE: "L4"}
    world.now += LOOK_S + RETRY_S
    assert other(choice, {GPU_TYPE: "L4"}, LONG) == {GPU_TYPE: "A100"}
    assert choice.first() == {GPU_TYPE: "A100"}


def test_a_group_waits_for_a_machine_that_starts(world: World) -> None:
    choice = world.choice("A100", "L4", large="A100", small="L4")
    world.starting = {"large": 1}
    world.now += LOOK_S
    assert other(choice, {GPU_TYPE: "A100"}, LONG) is None
    world.starting, world.now = {"small": 1}, world.now + LOOK_S
    assert other(choice, {GPU_TYPE: "A100"}, LONG) == {GPU_TYPE: "L4"}
