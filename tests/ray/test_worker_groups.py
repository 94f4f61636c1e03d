"""Worker groups without an experiment: real processes, whose trials are never loaded, and real reservations."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import ray
from ray.util.placement_group import placement_group_table

from dray.cluster import internals
from dray.cluster.connection import Cluster
from dray.groups import group as lending
from dray.groups.effects import (
    ClusterSeen,
    EndGroup,
    GroupPlaced,
    LookAtCluster,
    Release,
    Reserve,
    SlotsReserved,
    StartGroup,
)
from dray.groups.group import WorkerGroup, oom_kills, oom_kills_of
from dray.groups.lender_shell import GroupsShell
from dray.groups.on_ray import OnRay
from dray.groups.slots import Slots
from dray.groups.train_workers import WITHOUT_TRAIN
from dray.leases.failure import LOW_MEMORY
from dray.leases.messages import GroupEnded
from dray.rpc.event_loop import EventLoop
from tests.ray.harness import wait_for
from tests.workers import worker_spec

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]


@dataclass
class Held:
    """Stands for what loads the trial: tells of its process, and does not return until a file is there."""

    directory: Path

    def place(self) -> None:
        import ray.train

        told, rank = {"pid": os.getpid()}, 0
        try:
            context = ray.train.get_context()
            rank = context.get_world_rank()
            told |= {"size": context.get_world_size(), "local": context.get_local_rank()}
            ray.train.report({"loss": 1.0})
        except RuntimeError as error:
            told["error"] = str(error)
        (self.directory / f"new.{rank}").write_text(json.dumps(told))
        (self.directory / f"new.{rank}").rename(self.directory / f"{rank}.json")
        while not (self.directory / "raise").exists():
            time.sleep(0.01)
        raise SystemExit("told to")


Event = TypeVar("Event")


class World:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.heard = SimpleQueue[Any]()
        on_ray = OnRay(Cluster(own=True, local=True, description="this one"))
        self.shell = GroupsShell(self._make, self.heard.put, on_ray=on_ray, limits=None)
        self.loop = EventLoop("dray-loop")  # which answers nothing
        self.loop.listen(on_ray.host())

    def _make(self, start: StartGroup, report: Any) -> WorkerGroup:
        where = {"owner": self.directory.name, "group": start.group, "start": start.start}
        settings = SimpleNamespace(environment={})
        spec = worker_spec(self.loop.endpoint, settings, load_trial=Held(self.directory), **where)
        return WorkerGroup(spec, slots=start.slots, report=report)

    def start(self, *, slots: int, cpus: float) -> None:
        slot = Slots(per_trial=slots, gpu=False, cpus_per_slot=cpus, runtime_env={})
        self.shell.perform(StartGroup(group="g", start=1, slots=slot))

    def end(self) -> None:
        self.shell.perform(EndGroup(group="g", start=1))

    def processes(self, count: int) -> list[dict[str, Any]]:
        """What they have told, by rank."""
        files = [self.directory / f"{rank}.json" for rank in range(count)]
        wait_for(lambda: all(file.exists() for file in files), f"{count} processes")
        return [json.loads(file.read_text()) for file in files]

    def hears(self, kind: type[Event]) -> Event:
        """The next event, which is of this kind."""
        event = self.heard.get(timeout=60)
        assert isinstance(event, kind), event
        return event

    def ended(self) -> tuple[dict[int, str], str]:
        """The ranks that died, and the error, as the end of the group's processes is reported."""
        end = self.hears(GroupEnded)
        assert (end.group, end.start) == ("g", 1)
        return dict(end.dead), end.error

    def is_over(self) -> bool:
        """Whether the group has no thread and no slots any more."""
        name = f"{self.directory.name}/g/"
        states = {each["state"] for each in placement_group_table().values() if each["name"].startswith(name)}
        return states <= {"REMOVED"} and not any(each.name.startswith("dray-g") for each in group_threads())


def group_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if not each.name.startswith("dray-groups")]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.shell.close(0.0)
    made.loop.close()


def lives(process: dict[str, Any]) -> bool:
    return Path(f"/proc/{process['pid']}").exists()


def test_processes_have_trains_context_and_the_death_of_one_is_reported_with_its_rank(world: World) -> None:
    world.start(slots=2, cpus=0.5)
    both = world.processes(2)
    assert [(each["size"], each["local"]) for each in both] == [(2, 0), (2, 1)]
    assert all(
        "ray.train.report() and ray.train.collective don't work in trials of dray" in each["error"] for each in both
    )
    assert world.hears(GroupPlaced) == GroupPlaced(group="g", start=1)
    os.kill(both[1]["pid"], signal.SIGKILL)
    assert world.ended() == ({1: ""}, "")
    assert lives(both[0]), "it is for the driver to end it"
    for _ in range(2):
        world.end()
    wait_for(lambda: not lives(both[0]) and world.is_over(), "the other's end, and its slots")


@pytest.mark.long
def test_groups_start_without_trains_context_where_ray_has_changed_it(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ray.train.v2._internal.execution.worker_group", None)
    monkeypatch.setattr(internals, "_reported", set())
    world.start(slots=1, cpus=0.5)
    [process] = world.processes(1)
    assert "size" not in process
    assert process["error"]
    [line] = [line for line in caplog.messages if line.startswith(WITHOUT_TRAIN)]
    assert "has no attribute 'init_train_context'" in line
    os.kill(process["pid"], signal.SIGKILL)
    world.hears(GroupPlaced)
    assert world.ended() == ({0: ""}, "")


def test_a_group_that_is_ended_as_it_gets_its_slots_leaves_no_thread(world: World) -> None:
    # Ray never fails the calls of an actor whose slots go now (2.60).
    world.start(slots=2, cpus=0.5)
    world.hears(GroupPlaced)
    world.end()
    assert world.ended() == ({}, "")
    wait_for(world.is_over, "its thread and its slots")


@pytest.mark.long
def test_a_death_beside_a_kill_of_the_kernel_is_out_of_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("dray.groups.group.SURVIVORS_S", 60.0)  # both deaths, however late Ray reports the second
    world.start(slots=2, cpus=0.5)
    both = world.processes(2)
    monkeypatch.setattr(lending, "oom_kills_of", lambda node, runtime_env: asked.append(node) or oom_kills()[1] + 1)
    for process in both:
        os.kill(process["pid"], signal.SIGKILL)
    why = f"meanwhile the kernel has killed a process of {os.uname().nodename}, which was {LOW_MEMORY}"
    world.hears(GroupPlaced)
    assert world.ended() == ({0: why, 1: why}, "")
    assert asked == [ray.get_runtime_context().get_node_id()], "once for both"


def test_another_node_says_what_its_kernel_has_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ray.get_runtime_context().get_node_id()
    assert oom_kills_of(here, {}) == oom_kills()[1]
    assert oom_kills_of(here[::-1], {}) is None, "there is no such node"
    monkeypatch.setattr(lending, "ANSWER_TIMEOUT_S", 60.0)
    elsewhere = SimpleNamespace(get_node_id=lambda: "elsewhere")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: elsewhere)
    assert oom_kills_of(here, {}) == oom_kills()[1], "asked as any other node is"


def test_an_error_of_what_processes_run_is_reported(world: World) -> None:
    world.start(slots=1, cpus=0.5)
    world.processes(1)
    (world.directory / "raise").touch()
    world.hears(GroupPlaced)
    assert world.ended() == ({}, "SystemExit: told to")


def test_a_group_that_waits_for_slots_has_no_process_and_can_be_ended(world: World) -> None:
    world.start(slots=1, cpus=0.5 + ray.cluster_resources()["CPU"])
    wait_for(lambda: any("PENDING" in each["state"] for each in placement_group_table().values()), "its request")
    world.end()
    assert world.ended() == ({}, ""), "it never had its slots"
    wait_for(world.is_over, "its thread")


def test_available_slots_are_reserved_until_they_are_released(world: World) -> None:
    cpus = int(ray.cluster_resources()["CPU"])
    slot = Slots(per_trial=1, gpu=False, cpus_per_slot=1, runtime_env={})
    world.shell.perform(Reserve(room=1, slots=slot, sizes=(0, 1, cpus, 2 * cpus)))
    while world.hears(SlotsReserved) != SlotsReserved(room=1, slots=cpus):
        pass
    world.shell.perform(LookAtCluster(waiting=True))
    view = world.hears(ClusterSeen).view
    assert [node.id for node in view.nodes] == [ray.get_runtime_context().get_node_id()]
    assert (view.limits, view.activity, (view.free or {}).get("CPU", 0)) == (None, None, 0)
    world.shell.perform(Release(room=1))
    wait_for(lambda: ray.available_resources().get("CPU") == cpus, "the slots to be free again")
