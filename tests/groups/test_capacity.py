"""How many groups fit on a cluster, what a slot is, and which nodes groups ask for: nodes and times are given here."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dray.cluster.view import GPU_TYPE, NODE_TYPE, Activity, AutoscalerLimits, ClusterView, NodeType
from dray.config.resources import MAX_SHARES, Resources
from dray.errors import ConfigError
from dray.groups.capacity import Capacity, find_slots, gpu_types, groups_in, most_slots, slot_kind, slots_of
from dray.groups.node_choice import PATIENCE_S, RETRY_S, NodeChoice
from dray.groups.slots import Slots
from tests.groups.clusters import GPU_NODE, GPUS, HEAD_NODE, UNKNOWN, cluster, gpus, node


def groups_now(view: ClusterView, slots: Slots, max_slots: int | None = None) -> int:
    return Capacity(view=view, slots=slots, max_slots=max_slots).groups_now


def grown(
    limits: AutoscalerLimits | None, slots: Slots, max_slots: int | None = None, view: ClusterView | None = None
) -> float:
    view = view or cluster(HEAD_NODE, limits=limits)
    return Capacity(view=view, slots=slots, max_slots=max_slots).max_groups_after_scale_up


@pytest.mark.parametrize(
    ("resources", "kind", "cpus", "expected"),
    [
        ({"CPU": 8}, "cpu", 1, 8),
        ({"CPU": 8}, "cpu", 3, 2),
        ({"CPU": 8, "GPU": 2}, "gpu", 1, 2),
        ({"CPU": 8, "GPU": 4}, "gpu", 4, 2),
        ({"CPU": 8}, "gpu", 1, 0),
        ({"GPU": 2}, "gpu", 1, 0),
        ({}, "cpu", 1, 0),
    ],
)
def test_a_slot_needs_its_cpus_too(resources: dict[str, float], kind: str, cpus: int, expected: int) -> None:
    assert slots_of(resources, kind, cpus) == expected


def has_room(nodes: list[int], slots: int, groups: int, strategy: str) -> bool:
    """By trying: each group in turn takes its slots in every way that there is."""
    if groups == 0:
        return True
    for places in itertools.combinations_with_replacement(range(len(nodes)), slots):
        taken = [places.count(node) for node in range(len(nodes))]
        if any(take > has for take, has in zip(taken, nodes, strict=True)):
            continue
        if strategy == "STRICT_PACK" and len(set(places)) > 1:
            continue
        if strategy == "STRICT_SPREAD" and len(set(places)) < slots:
            continue
        left = [has - take for take, has in zip(taken, nodes, strict=True)]
        if has_room(left, slots, groups - 1, strategy):
            return True
    return False


@given(
    nodes=st.lists(st.integers(0, 3), max_size=3),
    slots=st.integers(1, 3),
    strategy=st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
)
def test_as_many_groups_fit_as_an_exhaustive_search_finds(nodes: list[int], slots: int, strategy: str) -> None:
    most = groups_in(nodes, slots, strategy)
    assert has_room(nodes, slots, most, strategy)
    assert not has_room(nodes, slots, most + 1, strategy)


def test_a_grown_cluster_is_its_head_and_the_best_allowed_nodes() -> None:
    small = NodeType(resources={"CPU": 2}, max_count=10)
    large = NodeType(resources={"CPU": 16}, max_count=2)
    both = AutoscalerLimits(types=(small, large), max_count=3)
    assert most_slots(cluster(HEAD_NODE, limits=both), "cpu", 1) == [4, 16, 16, 2]
    assert most_slots(cluster(HEAD_NODE, limits=GPUS), "gpu", 1) == [0, 2, 2, 2]
    nodes = (HEAD_NODE, GPU_NODE, GPU_NODE)
    assert most_slots(cluster(*nodes, limits=GPUS), "gpu", 1) == [0, 2, 2, 2], "those that are there are among them"
    assert most_slots(cluster(*nodes), "gpu", 1) == [0, 2, 2]
    assert most_slots(cluster(*nodes, limits=UNKNOWN), "gpu", 1) is None


def test_nodes_that_no_autoscaler_started_count() -> None:
    assert sum(most_slots(cluster(HEAD_NODE, *[GPU_NODE] * 5, limits=GPUS), "gpu", 1) or []) == 10


def test_the_kind_of_a_slot_depends_on_nodes_that_may_start() -> None:
    for asked, limits, kind in [
        (None, GPUS, "gpu"), ("cpu", GPUS, "cpu"), (None, None, "cpu"), (None, UNKNOWN, None), ("gpu", UNKNOWN, "gpu")
    ]:  # fmt: skip
        assert slot_kind(asked, cluster(HEAD_NODE, limits=limits)) == kind
    assert slot_kind(None, cluster(HEAD_NODE, GPU_NODE, limits=UNKNOWN)) == "gpu"


def test_as_many_groups_fit_as_the_cluster_can_grow_to() -> None:
    assert [grown(limits, gpus(2)) for limits in (GPUS, None)] == [3, 1]
    assert grown(UNKNOWN, gpus(2)) == float("inf"), "the config is believed"
    assert grown(GPUS, gpus(4)) == 1
    assert groups_now(cluster(HEAD_NODE), gpus(2)) == 1, "the first one waits"
    assert groups_now(cluster(HEAD_NODE, GPU_NODE, GPU_NODE), gpus(2)) == 2


def test_all_groups_together_have_at_most_max_slots() -> None:
    five = cluster(HEAD_NODE, *[GPU_NODE] * 5, limits=GPUS)
    assert [groups_now(five, gpus(2), most) for most in (2, 3, 4, 9, 99, None)] == [1, 1, 2, 4, 5, 5]
    assert [grown(GPUS, gpus(2), most, five) for most in (2, 5, 99)] == [1, 2, 5]
    assert [grown(UNKNOWN, gpus(2), most) for most in (2, 5, 99)] == [1, 2, 49]
    assert grown(GPUS, gpus(2), 4) == 2, "nor does an autoscaler start nodes for them"


def test_n_groups_fit_into_a_slot_that_they_share() -> None:
    quarter, nodes = gpus(shared_by=4), (HEAD_NODE, GPU_NODE, {"CPU": 1.0, "GPU": 4.0})
    assert groups_now(cluster(*nodes), quarter) == 4 * (2 + 1), "a slot has its CPUs, too"
    assert grown(GPUS, quarter, view=cluster(*nodes, limits=GPUS)) == 4 * 6
    assert [groups_now(cluster(*nodes), quarter, most) for most in (1, 2, 9)] == [4, 8, 12]
    assert grown(UNKNOWN, quarter, 2) == 8


@pytest.mark.parametrize(
    ("asked", "least", "fault"),
    [
        ({"slots_per_trial": 5}, 5, r"4 cpu slots \(with 1 CPU each\) on 2 nodes"),
        # Neither kind sends the user to the other.
        ({"slots_per_trial": 5, "slot": "cpu"}, 5, "request fewer, or add nodes"),
        ({"slots_per_trial": 5, "slot": "gpu"}, 5, "request fewer, or add nodes"),
        ({"slots_per_trial": 4, "slot": "gpu"}, 4, r"request fewer, or set resources\.slot: cpu"),
        ({"slots_per_trial": 0.25, "cpus_per_slot": 4}, 1, "1/4 slot requested, .* can grow to, 0 cpu slots"),
        ({"slots_per_trial": 3, "placement_strategy": "STRICT_PACK"}, 3, "3 slots requested on one node"),
    ],
)
def test_slots_that_a_cluster_can_never_have_are_a_config_error(asked: Any, least: int, fault: str) -> None:
    view = cluster({"CPU": 2.0}, {"CPU": 2.0})
    assert find_slots(view, Resources(slots_per_trial=4), 4, "a cluster") == "cpu"
    with pytest.raises(ConfigError, match=fault):
        find_slots(view, Resources(**asked), least, "a cluster")


# ------------------------------------------------------------------------------------------------- types of GPUs
TWO_TYPES = ClusterView(nodes=tuple(node({"CPU": 4.0, "GPU": 1.0}, gpu_type) for gpu_type in ("A100", "L4")))


def asks(*types: str, slots: int = 1) -> Resources:
    return Resources.model_validate({"slot_type": list(types), "slots_per_trial": slots})


def test_a_groups_gpus_are_of_one_of_the_types_asked_for() -> None:
    for types, per_trial, expected in [((), 1, 2), (("L4",), 1, 1), (("L4", "A100"), 1, 2), ((), 2, 1)]:
        assert groups_now(TWO_TYPES, gpus(per_trial, gpu_types=types)) == expected
    with pytest.raises(ConfigError, match="2 slots requested"):  # one on each would be of two types
        find_slots(TWO_TYPES, asks("L4", "A100", slots=2), 2, "the cluster")


def test_gpu_types_that_the_cluster_cannot_have_are_left_out() -> None:
    assert gpu_types(asks("H100", "L4"), TWO_TYPES) == ("L4",)
    with pytest.raises(ConfigError, match=r"has no such GPUs, and can start none; .* of its nodes: A100, L4"):
        find_slots(TWO_TYPES, asks("H100"), 1, "the cluster")
    h100 = NodeType(resources=GPU_NODE, max_count=5, labels={GPU_TYPE: "H100"})
    may_grow = ClusterView(nodes=TWO_TYPES.nodes, limits=AutoscalerLimits(types=(h100,), max_count=3))
    assert gpu_types(asks("H100", "L4"), may_grow) == ("H100", "L4")
    assert [grown(None, gpus(each, gpu_types=("H100", "L4")), view=may_grow) for each in (1, 2)] == [6, 3]
    unknown = ClusterView(nodes=TWO_TYPES.nodes, limits=UNKNOWN)
    assert gpu_types(asks("H100", "L4"), unknown) == ("H100", "L4"), "Kubernetes does not tell the labels"


@pytest.mark.parametrize("gpu", [True, False])
def test_ray_has_room_for_n_shares_of_a_slot(gpu: bool) -> None:
    for trials, cpus in itertools.product(range(2, MAX_SHARES + 1), (1, 2, 3, 7)):
        share = Slots(per_trial=1, gpu=gpu, cpus_per_slot=cpus, runtime_env={}, shared_by=trials).resources
        units = {name: round(10_000 * amount) for name, amount in share.items()}  # Ray counts in these
        assert units.keys() == ({"CPU", "GPU"} if gpu else {"CPU"})
        assert trials * units["CPU"] <= 10_000 * cpus
        assert units["CPU"] > 0
        if gpu:
            assert trials * units["GPU"] <= 10_000 < (trials + 1) * units["GPU"]


@pytest.mark.parametrize(
    ("gpu", "cpus", "shared_by", "group", "share", "taken"),
    [
        (True, 2, 1, "3 x (1 GPU and 2 CPUs)", "", 3),
        (False, 1, 1, "3 x (1 CPU)", "", 3),
        (True, 1, 4, "1 x (1/4 GPU and 1/4 CPU)", "1/4 GPU", 0.25),
        (True, 8, 4, "1 x (1/4 GPU and 2 CPUs)", "1/4 GPU", 0.25),
        (False, 1, 3, "1 x (1/3 CPU)", "1/3 CPU", 1 / 3),
        (False, 4, 2, "1 x (2 CPUs)", "2 CPUs", 0.5),
    ],
)
def test_slots_as_text(gpu: bool, cpus: int, shared_by: int, group: str, share: str, taken: float) -> None:
    asked = Slots(
        per_trial=3 if shared_by == 1 else 1, gpu=gpu, cpus_per_slot=cpus, runtime_env={}, shared_by=shared_by
    )
    assert (str(asked), asked.share, asked.taken) == (group, share, taken)


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
