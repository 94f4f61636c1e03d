"""Which nodes groups ask for, without a cluster: the autoscaler's activity and times are given."""

from __future__ import annotations

from dray.cluster.view import GPU_TYPE, NODE_TYPE, Activity, AutoscalerLimits, ClusterView, NodeType
from dray.groups.node_choice import PATIENCE_S, RETRY_S, NodeChoice
from dray.groups.slots import Slots
from tests.groups.clusters import gpus

Labels = dict[str, str]
LONG = PATIENCE_S + 1
EPOCH = 1.7e9  # how far the autoscaler's clock is ahead


class World:
    """What groups with such slots ask for, where an autoscaler may start these types of machines."""

    def __init__(self, slots: Slots, limits: AutoscalerLimits | None) -> None:
        self.now = 1000.0
        self.starting: dict[str, int] = {}
        self.failed_at: dict[str, float] = {}
        self.booting: dict[str, int] = {}
        self.choice = NodeChoice(slots, limits)

    def fails(self, name: str) -> None:
        self.now += 2
        self.failed_at[name] = EPOCH + self.now

    def look(self) -> None:
        activity = Activity(starting=self.starting, failed={}, failed_at=self.failed_at, booting=self.booting)
        self.choice.look(ClusterView(nodes=(), activity=activity, time=EPOCH + self.now), self.now)

    def first(self) -> Labels:
        self.look()
        return self.choice.first(self.now)

    def others(self, waiting: dict[str, tuple[Labels, float]]) -> dict[str, Labels]:
        self.look()
        return self.choice.others(waiting, self.now)

    def other(self, labels: Labels, waited_s: float) -> Labels | None:
        """What the only group that waits should ask for."""
        return self.others({"group": (labels, waited_s)}).get("group")


def world(*gpu_types: str, **node_types: str) -> World:
    """Types of machines, each with the type of its GPUs, and one without GPUs."""
    types = [
        NodeType(name=name, resources={"CPU": 4, "GPU": 1}, max_count=2, labels={NODE_TYPE: name, GPU_TYPE: gpu_type})
        for name, gpu_type in node_types.items()
    ]
    cpus = NodeType(name="cpus", resources={"CPU": 4}, max_count=2, labels={NODE_TYPE: "cpus"})
    return World(gpus(gpu_types=gpu_types), AutoscalerLimits(types=(*types, cpus)))


def without(*names: str) -> Labels:
    return {NODE_TYPE: f"!in({','.join(names)})"}


def test_without_failures_ray_chooses() -> None:
    here = world(spot="L4", on_demand="L4")
    assert here.first() == {}
    here.starting = {"spot": 1}
    assert [here.other({}, waited_s) for waited_s in (1, LONG, 1000 * LONG)] == [None] * 3


def test_a_refused_type_is_not_asked_for_until_a_minute_later() -> None:
    here = world(spot="L4", on_demand="L4")
    assert here.other({}, 1) is None
    here.fails("spot")
    assert here.other({}, 1) == here.first() == without("spot")
    here.starting = {"on_demand": 1}
    here.now += RETRY_S - 1
    assert here.other(without("spot"), RETRY_S) is None
    here.now += 2
    assert here.choice.first(here.now) == {}, "a new group tries it again"
    assert here.other(without("spot"), RETRY_S) is None, "while another machine starts, a group waits for that"
    here.starting = {}
    assert here.other(without("spot"), RETRY_S) == {}, "as when there are no more of the others"


def test_if_the_cloud_has_no_machine_each_type_is_asked_for_in_turn() -> None:
    here = world(reserved="L4", spot="L4", on_demand="L4")
    asked, expected = here.first(), []
    for name in ("reserved", "spot", "on_demand", "reserved", "spot"):
        here.fails(name)
        asked = here.other(asked, 1) or {}
        expected.append(asked)
    assert expected == [
        without("reserved"),
        without("reserved", "spot"),
        without("on_demand", "spot"),
        without("on_demand", "reserved"),
        without("reserved", "spot"),
    ]


def test_groups_that_machines_boot_for_keep_waiting() -> None:
    here = world(spot="L4", on_demand="L4")
    here.booting, here.starting = {"spot": 2}, {"spot": 5}
    here.fails("spot")
    assert here.others({name: ({}, LONG) for name in "abcd"}) == {name: without("spot") for name in "cd"}


def test_types_without_a_label_cannot_be_avoided() -> None:
    types = [NodeType(name=name, resources={"CPU": 4, "GPU": 1}, max_count=2, labels={}) for name in ("a", "b")]
    here = World(gpus(), AutoscalerLimits(types=tuple(types)))
    here.fails("a")
    assert here.other({}, LONG) is None


# ------------------------------------------------------------------------------------------------- types of GPUs
def test_without_an_autoscaler_a_group_asks_for_the_next_gpu_type() -> None:
    here = World(gpus(2, gpu_types=("A100", "L4")), None)
    assert here.choice.first(0.0) == {GPU_TYPE: "A100"}
    for gpu_type, waited_s, instead in [
        ("A100", PATIENCE_S - 1, None), ("A100", LONG, {GPU_TYPE: "L4"}), ("L4", LONG, {GPU_TYPE: "A100"})
    ]:  # fmt: skip
        assert here.choice.others({"group": ({GPU_TYPE: gpu_type}, waited_s)}, 0.0).get("group") == instead


def test_another_machine_with_the_same_gpu_comes_before_another_gpu() -> None:
    here = world("A100", "L4", spot="A100", on_demand="A100", small="L4")
    asked = here.first()
    assert asked == {GPU_TYPE: "A100"}
    here.fails("spot")
    asked = here.other(asked, 1) or {}
    assert asked == {GPU_TYPE: "A100", **without("spot")}
    here.fails("on_demand")
    assert here.other(asked, 1) == here.first() == {GPU_TYPE: "L4"}
    here.now += RETRY_S + 2
    assert here.other({GPU_TYPE: "L4"}, LONG) == here.first() == {GPU_TYPE: "A100"}


def test_a_group_waits_for_a_machine_that_starts() -> None:
    here = world("A100", "L4", large="A100", small="L4")
    here.starting = {"large": 1}
    assert here.other({GPU_TYPE: "A100"}, LONG) is None
    here.starting = {"small": 1}
    assert here.other({GPU_TYPE: "A100"}, LONG) == {GPU_TYPE: "L4"}
