"""How many groups are wanted, and what is said of those that wait, without a cluster: nodes and times are said here."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.autoscaler.v2.schema import LaunchRequest, NodeInfo
from ray.core.generated.autoscaler_pb2 import ClusterConfig

from dray.cluster import autoscaler
from dray.cluster.autoscaler import Doing, Limits, NodeType, limits_of
from dray.cluster.connection import groups_in, most_slots, slot_kind, slots_of
from dray.config.resources import MAX_SHARES
from dray.groups.demand import IDLE_S, LOOK_S, SAID_AFTER_S, Demand
from dray.groups.group import Slots

HEAD = {autoscaler.HEAD: 1.0, "CPU": 4.0}
GPU_NODE = {"CPU": 8.0, "GPU": 2.0}
GPUS = Limits(types=(NodeType(resources=GPU_NODE, most=5),), most=3)
UNKNOWN = Limits(types=None)
FILE = """
max_workers: 6
head_node_type: head
available_node_types:
  head: {resources: {CPU: 4, GPU: 0}, node_config: {}}
  spot: {resources: {CPU: 8, GPU: 2}, max_workers: 4, node_config: {}}
  other: {resources: {CPU: 16}, node_config: {}}
"""


def node(resources: dict[str, float], *, alive: bool = True) -> dict[str, Any]:
    """What Ray tells of a node."""
    return {"NodeID": "id", "NodeManagerAddress": "10.0.0.1", "Alive": alive, "Resources": resources}


class World:
    """A cluster of these nodes, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.nodes: list[dict[str, float]] = [HEAD]
        self.doing = Doing(starting={}, failed={})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr("dray.groups.demand.time.monotonic", lambda: world.now)
    monkeypatch.setattr(autoscaler, "doing", lambda: world.doing)
    monkeypatch.setattr(ray, "nodes", lambda: [node(each) for each in world.nodes])
    total = lambda: {kind: sum(node.get(kind, 0.0) for node in world.nodes) for kind in ("CPU", "GPU")}  # noqa: E731
    monkeypatch.setattr(ray, "cluster_resources", total)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    return world


def slots(per_trial: int = 2, **fields: Any) -> Slots:
    return Slots(per_trial=per_trial, gpu=True, cpus_per_slot=1, runtime_env={}, **fields)


# ---------------------------------------------------------------------------------------------------- what has room


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
def test_as_many_groups_have_room_as_one_finds_by_trying(nodes: list[int], slots: int, strategy: str) -> None:
    most = groups_in(nodes, slots, strategy)
    assert has_room(nodes, slots, most, strategy)
    assert not has_room(nodes, slots, most + 1, strategy)


def test_cluster_grows_to_its_head_and_as_many_of_the_best_nodes_as_it_may(world: World) -> None:
    small = NodeType(resources={"CPU": 2}, most=10)
    large = NodeType(resources={"CPU": 16}, most=2)
    assert most_slots("cpu", 1, Limits(types=(small, large), most=3)) == [4, 16, 16, 2]
    assert most_slots("gpu", 1, GPUS) == [0, 2, 2, 2]
    world.nodes = [HEAD, GPU_NODE, GPU_NODE]
    assert most_slots("gpu", 1, GPUS) == [0, 2, 2, 2], "those that are there are among them"
    assert most_slots("gpu", 1, None) == [0, 2, 2]
    assert most_slots("gpu", 1, UNKNOWN) is None


def test_nodes_that_no_autoscaler_has_started_count(world: World) -> None:
    world.nodes = [HEAD, *[GPU_NODE] * 5]
    assert sum(most_slots("gpu", 1, GPUS) or []) == 10


def test_what_a_slot_is_follows_from_what_may_come(world: World) -> None:
    assert slot_kind(None, GPUS) == "gpu"
    assert slot_kind("cpu", GPUS) == "cpu"
    assert slot_kind(None, None) == "cpu"
    assert slot_kind(None, UNKNOWN) is None
    assert slot_kind("gpu", UNKNOWN) == "gpu"
    world.nodes = [HEAD, GPU_NODE]
    assert slot_kind(None, UNKNOWN) == "gpu"


def test_as_many_groups_are_wanted_as_there_will_be_room_for(world: World) -> None:
    assert [Demand(slots(), GPUS).most(wanted) for wanted in (1, 2, 3, 9)] == [1, 2, 3, 3]
    assert Demand(slots(), UNKNOWN).most(9) == 9, "the config is believed"
    assert Demand(slots(), None).most(9) == 1
    assert Demand(slots(4), GPUS).most(9) == 1
    assert Demand(slots(), GPUS).room() == 1, "the first one waits"
    world.nodes = [HEAD, GPU_NODE, GPU_NODE]
    assert Demand(slots(), GPUS).room() == 2


def test_all_groups_together_have_no_more_slots_than_they_may(world: World) -> None:
    world.nodes = [HEAD, *[GPU_NODE] * 5]
    assert [Demand(slots(), GPUS, most).room() for most in (2, 3, 4, 9, 99, None)] == [1, 1, 2, 4, 5, 5]
    assert [Demand(slots(), GPUS, most).most(9) for most in (2, 5, 99)] == [1, 2, 5]
    assert [Demand(slots(), UNKNOWN, most).most(9) for most in (2, 5, 99)] == [1, 2, 9]
    world.nodes = [HEAD]
    assert Demand(slots(), GPUS, 4).most(9) == 2, "nor does an autoscaler start nodes for them"


def test_n_groups_fit_into_a_slot_that_they_share(world: World) -> None:
    quarter = slots(1, shared_by=4)
    world.nodes = [HEAD, GPU_NODE, {"CPU": 1.0, "GPU": 4.0}]
    assert Demand(quarter, None).room() == 4 * (2 + 1), "a slot has its CPUs, too"
    assert Demand(quarter, GPUS).most(99) == 4 * 6
    assert [Demand(quarter, None, most).room() for most in (1, 2, 9)] == [4, 8, 12]
    assert Demand(quarter, UNKNOWN, 2).most(99) == 8
    assert [Demand(quarter, None).most(wanted) for wanted in (1, 3, 5)] == [1, 3, 5]


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
def test_slots_in_words(gpu: bool, cpus: int, shared_by: int, group: str, share: str, taken: float) -> None:
    asked = Slots(
        per_trial=3 if shared_by == 1 else 1, gpu=gpu, cpus_per_slot=cpus, runtime_env={}, shared_by=shared_by
    )
    assert (str(asked), asked.share, asked.taken) == (group, share, taken)


# --------------------------------------------------------------------------------------------- the autoscaler's file


def test_limits_are_those_of_the_file() -> None:
    found = limits_of(FILE)
    assert found.types is not None
    assert [kind.most for kind in found.types] == [0, 4, 6], "Ray's defaults: none of the head, else as of all"
    assert found.most == 6
    assert sum(node.get("GPU", 0) for node in found.nodes()) == 8


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Any]:
    """Starts a process that looks like the autoscaler's."""
    script = tmp_path / "monitor.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    started = []

    def start(*arguments: str) -> None:
        started.append(subprocess.Popen([sys.executable, "-u", script, *arguments], stdout=subprocess.PIPE))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == b"up\n"

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_file_is_that_of_the_process_of_this_cluster(monitor: Any, tmp_path: Path) -> None:
    port = f"{os.getpid() + 100_000}"  # that no Ray of this machine has
    assert autoscaler._look(port) is None
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE)
    monitor("--gcs-address=10.0.0.1:1", f"--autoscaling-config={tmp_path / 'none.yaml'}")
    monitor(f"--gcs-address=10.0.0.1:{port}", f"--autoscaling-config={file}", "--logs-dir=a=b")
    assert autoscaler._look(port) == FILE


def test_process_without_a_file_starts_nothing(monitor: Any) -> None:
    port = f"{os.getpid() + 200_000}"
    monitor(f"--gcs-address=[::1]:{port}")
    assert autoscaler._look(port) == autoscaler._WITHOUT_A_FILE


@pytest.mark.parametrize(
    ("file", "states", "expected"),
    [
        (FILE, True, limits_of(FILE)),
        (autoscaler._WITHOUT_A_FILE, True, None),
        (None, True, UNKNOWN),  # it is elsewhere, as on Kubernetes
        (None, False, None),
    ],
)
def test_whether_there_is_an_autoscaler(
    file: str | None, states: bool, expected: Limits | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray._private.state.state, "get_cluster_config", lambda: None)
    monkeypatch.setattr(autoscaler, "_file_of_the_autoscaler", lambda: file)
    monkeypatch.setattr(autoscaler, "_states", lambda: states)
    assert autoscaler.limits() == expected


OWN_MACHINES = "provider: {type: local, head_ip: 10.0.0.1, worker_ips: [10.0.0.2, 10.0.0.3]}"


def test_machines_that_are_there_are_waited_for_and_no_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, dead = node({}), node({}, alive=False)
    seen = [[alive, dead], [alive, dead, alive, alive]]
    monkeypatch.setattr(ray._private.state.state, "get_cluster_config", lambda: None)
    monkeypatch.setattr(autoscaler, "_file_of_the_autoscaler", lambda: OWN_MACHINES)
    monkeypatch.setattr(ray, "nodes", lambda: seen.pop(0))
    assert autoscaler.limits() is None
    assert not seen


def test_a_machine_that_does_not_join_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray._private.state.state, "get_cluster_config", lambda: None)
    monkeypatch.setattr(autoscaler, "_file_of_the_autoscaler", lambda: OWN_MACHINES)
    monkeypatch.setattr(ray, "nodes", lambda: [node({}), node({})])
    monkeypatch.setattr(autoscaler, "JOIN_S", -1.0)
    assert autoscaler.limits() is None
    assert "only 2 of 3 machines" in caplog.text


def test_what_a_platform_has_told_the_cluster_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ClusterConfig()
    told.node_group_configs.add(resources={"CPU": 8, "GPU": 1}, max_count=3)
    told.node_group_configs.add(resources={"CPU": 4}, max_count=-1)
    monkeypatch.setattr(ray._private.state.state, "get_cluster_config", lambda: told)
    found = autoscaler.limits()
    assert found is not None
    assert found.types is not None
    assert [(dict(kind.resources), kind.most) for kind in found.types] == [
        ({"CPU": 8, "GPU": 1}, 3),
        ({"CPU": 4}, autoscaler.FAR),
    ]


# ---------------------------------------------------------------------------------------------------- what it is doing


def launch(kind: str, count: int, *, failed: int | None = None, details: str | None = None) -> LaunchRequest:
    status = LaunchRequest.Status.PENDING if failed is None else LaunchRequest.Status.FAILED
    return LaunchRequest(
        instance_type_name="",
        ray_node_type_name=kind,
        count=count,
        state=status,
        request_ts_s=0,
        failed_ts_s=failed,
        details=details,
    )


def test_what_the_second_version_tells() -> None:
    node = NodeInfo(instance_type_name="", ray_node_type_name="spot", instance_id="i", ip_address="")
    failed = [launch("b", 1, failed=9, details="second\n  try"), launch("b", 1, failed=2, details="first")]
    found = autoscaler._by_the_second([launch("spot", 2)], [node], failed)
    assert found == Doing(starting={"spot": 3}, failed={"b": "second try"})


@pytest.mark.parametrize("details", [None, "", "Failed to launch 1 nodes of type b with request id 7: "])
def test_where_the_second_version_tells_no_reason_its_log_is_named(details: str | None) -> None:
    told = str(autoscaler._by_the_second([], [], [launch("b", 1, failed=1, details=details)]))
    assert told.endswith("it could not start b: see monitor.log in Ray's logs on the head")


def test_what_the_first_version_tells() -> None:
    no_capacity = {"category": "InsufficientInstanceCapacity", "description": "none\nin this zone"}
    report = {
        "pending_launches": {"spot": 2},
        "pending_nodes": [["10.0.0.2", "spot", "setting-up"], ["10.0.0.3", "cpu", "waiting-for-ssh"]],
        "node_availability_summary": {
            "node_availabilities": {
                "spot": {"is_available": True, "unavailable_node_information": None},
                "gone": {"is_available": False, "unavailable_node_information": no_capacity},
            }
        },
    }
    found = autoscaler._by_the_first(json.loads(json.dumps(report)))
    assert found == Doing(
        starting={"spot": 3, "cpu": 1}, failed={"gone": "InsufficientInstanceCapacity none in this zone"}
    )
    assert autoscaler._by_the_first({}) == Doing(starting={}, failed={})


def test_doing_in_words() -> None:
    assert str(Doing(starting={}, failed={})) == "the autoscaler is starting none"
    both = Doing(starting={"spot": 2, "cpu": 1}, failed={"b": "no capacity"})
    assert str(both) == "the autoscaler is starting 1 cpu, 2 spot; it could not start b: no capacity"
    assert both.short() == "1 cpu, 2 spot starting, b not available"
    again = Doing(starting={"b": 1}, failed={"b": "no capacity"})
    assert str(again) == "the autoscaler is starting 1 b; it could not start b: no capacity"
    assert again.short() == "b not available"


# ------------------------------------------------------------------------------------------------------- what is said


def test_waiting_is_said_once_with_what_is_asked_what_there_is_and_what_is_done(world: World) -> None:
    wanted, said = Demand(slots(), GPUS), []
    world.doing = Doing(starting={"spot": 2}, failed={})
    for _ in range(200):
        said.append(wanted.wait(2, 3))
        world.now += 1
    assert [said.index(each) for each in said if each] == [SAID_AFTER_S]
    assert said[int(SAID_AFTER_S)] == (
        "2 of 3 worker groups wait for nodes. Each needs 2 x (1 GPU and 1 CPU). "
        "The cluster has 4 CPUs (1 free) on 1 node; the autoscaler is starting 2 spot"
    )
    assert wanted.now == "2 of 3 worker groups wait for nodes (2 spot starting)"
    assert wanted.wait(0, 3) == wanted.now == ""


def test_that_nodes_are_not_to_be_had_is_news_and_said_once(world: World) -> None:
    wanted = Demand(slots(), GPUS)
    wanted.wait(1, 1)
    world.now += SAID_AFTER_S
    assert "the worker group waits" in wanted.wait(1, 1)
    world.doing = Doing(starting={}, failed={"spot": "no capacity"})
    assert wanted.wait(1, 1) == ""
    world.now += LOOK_S
    assert "it could not start spot: no capacity" in wanted.wait(1, 1)
    assert wanted.now == "the worker group waits for nodes (spot not available)"
    world.now += LOOK_S
    assert wanted.wait(1, 1) == ""


def test_where_nothing_starts_nodes_that_is_said(world: World) -> None:
    wanted = Demand(slots(), None)
    world.nodes = [HEAD, GPU_NODE]
    wanted.wait(1, 2)
    world.now += SAID_AFTER_S
    assert wanted.wait(1, 2) == (
        "1 of 2 worker groups wait for nodes. Each needs 2 x (1 GPU and 1 CPU). "
        "The cluster has 2 GPUs (0 free) and 12 CPUs (1 free) on 2 nodes; no autoscaler is running to start more"
    )


def test_a_group_that_had_nodes_soon_waited_for_nothing_worth_saying(world: World) -> None:
    wanted = Demand(slots(), GPUS)
    for waiting in [1, 0] * 50:
        assert wanted.wait(waiting, 1) == wanted.now == ""
        world.now += SAID_AFTER_S - 1


# --------------------------------------------------------------------------------------------------- what is given back


def test_groups_without_trials_are_given_back_after_a_while(world: World) -> None:
    wanted = Demand(slots(), GPUS)
    assert wanted.too_many(4, 2) == 0
    world.now += IDLE_S
    assert wanted.too_many(4, 2) == 0
    world.now += 0.1
    assert wanted.too_many(4, 2) == 2
    assert wanted.too_many(4, 2) == 0, "told once"


def test_none_is_given_back_that_is_needed_again_within_the_while(world: World) -> None:
    wanted = Demand(slots(), GPUS)
    for _ in range(10):
        assert wanted.too_many(4, 2) == 0
        world.now += IDLE_S - 1
        assert wanted.too_many(4, 4) == 0


def test_one_group_stays_though_no_trial_can_run(world: World) -> None:
    wanted = Demand(slots(), GPUS)
    wanted.too_many(1, 0)
    world.now += IDLE_S + 1
    assert wanted.too_many(1, 0) == 0
    assert wanted.too_many(3, 0) == 0
    world.now += IDLE_S + 1
    assert wanted.too_many(3, 0) == 2
