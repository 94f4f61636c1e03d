"""How many groups fit on a cluster, and what a slot is, without a cluster: nodes are given here."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from dray.cluster import autoscaler
from dray.cluster.autoscaler import Limits, NodeType
from dray.cluster.connection import Cluster
from dray.cluster.nodes import GPU_TYPE
from dray.config.resources import MAX_SHARES, Resources
from dray.errors import ConfigError
from dray.groups.capacity import Capacity, find_slots, gpu_types, groups_in, most_slots, slot_kind, slots_of
from dray.groups.group import Slots

HEAD = {autoscaler.HEAD: 1.0, "CPU": 4.0}
GPU_NODE = {"CPU": 8.0, "GPU": 2.0}
GPUS = Limits(types=(NodeType(resources=GPU_NODE, max_count=5),), max_count=3)
UNKNOWN = Limits(types=None)


def node(resources: dict[str, float], *, alive: bool = True, gpu_type: str = "") -> dict[str, Any]:
    """A node as Ray describes it."""
    labels = {GPU_TYPE: gpu_type} if gpu_type else {}
    return {"NodeID": "id", "NodeManagerAddress": "10.0.0.1", "Alive": alive, "Resources": resources, "Labels": labels}


class World:
    """A cluster of these nodes."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, float]] = [HEAD]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(ray, "nodes", lambda: [node(each) for each in world.nodes])
    return world


def slots(per_trial: int = 2, **fields: Any) -> Slots:
    return Slots(per_trial=per_trial, gpu=True, cpus_per_slot=1, runtime_env={}, **fields)


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


def test_a_grown_cluster_is_its_head_and_as_many_of_the_best_nodes_as_allowed(world: World) -> None:
    small = NodeType(resources={"CPU": 2}, max_count=10)
    large = NodeType(resources={"CPU": 16}, max_count=2)
    assert most_slots("cpu", 1, Limits(types=(small, large), max_count=3)) == [4, 16, 16, 2]
    assert most_slots("gpu", 1, GPUS) == [0, 2, 2, 2]
    world.nodes = [HEAD, GPU_NODE, GPU_NODE]
    assert most_slots("gpu", 1, GPUS) == [0, 2, 2, 2], "those that are there are among them"
    assert most_slots("gpu", 1, None) == [0, 2, 2]
    assert most_slots("gpu", 1, UNKNOWN) is None


def test_nodes_that_no_autoscaler_started_count(world: World) -> None:
    world.nodes = [HEAD, *[GPU_NODE] * 5]
    assert sum(most_slots("gpu", 1, GPUS) or []) == 10


def test_the_kind_of_a_slot_depends_on_nodes_that_may_start(world: World) -> None:
    assert slot_kind(None, GPUS) == "gpu"
    assert slot_kind("cpu", GPUS) == "cpu"
    assert slot_kind(None, None) == "cpu"
    assert slot_kind(None, UNKNOWN) is None
    assert slot_kind("gpu", UNKNOWN) == "gpu"
    world.nodes = [HEAD, GPU_NODE]
    assert slot_kind(None, UNKNOWN) == "gpu"


def test_as_many_groups_fit_as_the_cluster_can_grow_to(world: World) -> None:
    assert Capacity(slots(), GPUS).grown() == 3
    assert Capacity(slots(), UNKNOWN).grown() == float("inf"), "the config is believed"
    assert Capacity(slots(), None).grown() == 1
    assert Capacity(slots(4), GPUS).grown() == 1
    assert Capacity(slots(), GPUS).now() == 1, "the first one waits"
    world.nodes = [HEAD, GPU_NODE, GPU_NODE]
    assert Capacity(slots(), GPUS).now() == 2


def test_all_groups_together_have_at_most_max_slots(world: World) -> None:
    world.nodes = [HEAD, *[GPU_NODE] * 5]
    assert [Capacity(slots(), GPUS, most).now() for most in (2, 3, 4, 9, 99, None)] == [1, 1, 2, 4, 5, 5]
    assert [Capacity(slots(), GPUS, most).grown() for most in (2, 5, 99)] == [1, 2, 5]
    assert [Capacity(slots(), UNKNOWN, most).grown() for most in (2, 5, 99)] == [1, 2, 49]
    world.nodes = [HEAD]
    assert Capacity(slots(), GPUS, 4).grown() == 2, "nor does an autoscaler start nodes for them"


def test_n_groups_fit_into_a_slot_that_they_share(world: World) -> None:
    quarter = slots(1, shared_by=4)
    world.nodes = [HEAD, GPU_NODE, {"CPU": 1.0, "GPU": 4.0}]
    assert Capacity(quarter, None).now() == 4 * (2 + 1), "a slot has its CPUs, too"
    assert Capacity(quarter, GPUS).grown() == 4 * 6
    assert [Capacity(quarter, None, most).now() for most in (1, 2, 9)] == [4, 8, 12]
    assert Capacity(quarter, UNKNOWN, 2).grown() == 8


def test_slots_that_a_cluster_can_never_have_are_a_config_error(world: World) -> None:
    world.nodes = [{"CPU": 2.0}, {"CPU": 2.0}]
    cluster = Cluster(own=True, description="a Ray cluster")
    assert find_slots(cluster, Resources(slots_per_trial=4), 4) == ("cpu", None)
    with pytest.raises(ConfigError, match="5 slots requested, but a Ray cluster has, or can grow to, 4 cpu slots"):
        find_slots(cluster, Resources(slots_per_trial=5), 5)
    for kind in ("cpu", "gpu"):  # neither sends the user to the other
        with pytest.raises(ConfigError, match="request fewer, or add nodes"):
            find_slots(cluster, Resources(slots_per_trial=5, slot=kind), 5)
    with pytest.raises(ConfigError, match=r"request fewer, or set resources\.slot: cpu"):
        find_slots(cluster, Resources(slots_per_trial=4, slot="gpu"), 4)
    with pytest.raises(ConfigError, match="1/4 slot requested, but a Ray cluster has, or can grow to, 0 cpu slots"):
        find_slots(cluster, Resources(slots_per_trial=0.25, cpus_per_slot=4), 1)
    with pytest.raises(ConfigError, match="3 slots requested on one node"):
        find_slots(cluster, Resources(slots_per_trial=3, placement_strategy="STRICT_PACK"), 3)


# ------------------------------------------------------------------------------------------------- types of GPUs
@pytest.fixture
def two_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes, each with one GPU of another type."""
    nodes = [node({"CPU": 4.0, "GPU": 1.0}, gpu_type=each) for each in ("A100", "L4")]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)


def asks(*types: str, slots: int = 1) -> Resources:
    return Resources.model_validate({"slot_type": list(types), "slots_per_trial": slots})


@pytest.mark.usefixtures("two_types")
def test_only_gpus_of_the_types_asked_for_count_and_all_of_a_group_are_of_one() -> None:
    for types, per_trial, expected in [((), 1, 2), (("L4",), 1, 1), (("L4", "A100"), 1, 2), ((), 2, 1)]:
        assert Capacity(slots(per_trial, gpu_types=types), None).now() == expected
    with pytest.raises(ConfigError, match="2 slots requested"):  # one on each would be of two types
        find_slots(Cluster(own=True, description="the cluster"), asks("L4", "A100", slots=2), 2)


@pytest.mark.usefixtures("two_types")
def test_types_that_the_cluster_cannot_have_are_left_out_and_an_error_if_none_is_left() -> None:
    cluster = Cluster(own=True, description="the cluster")
    assert gpu_types(asks("H100", "L4"), None) == ("L4",)
    with pytest.raises(ConfigError, match=r"has no such GPUs, and can start none; .* of its nodes: A100, L4"):
        find_slots(cluster, asks("H100"), 1)
    h100 = NodeType(resources=GPU_NODE, max_count=5, labels={GPU_TYPE: "H100"})
    grown = Limits(types=(h100,), max_count=3)
    assert gpu_types(asks("H100", "L4"), grown) == ("H100", "L4")
    assert Capacity(slots(1, gpu_types=("H100", "L4")), grown).grown() == 6
    assert Capacity(slots(2, gpu_types=("H100", "L4")), grown).grown() == 3
    assert gpu_types(asks("H100", "L4"), UNKNOWN) == ("H100", "L4"), "Kubernetes does not tell the labels"


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
