"""Worker groups without an experiment: real processes, on a real desk, whose trials are never loaded."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from dray.desk.actor import start_desk
from dray.desk.failure import LOW_MEMORY
from dray.desk.messages import GroupEnded, Message
from dray.groups import group as lending
from dray.groups.deaths import oom_kills, oom_kills_of
from dray.groups.group import Slots, WorkerGroup
from tests.ray.harness import wait_for
from tests.workers import worker_spec

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]


@dataclass
class Held:
    """Stands for what loads the trial: tells of its process, and does not return until a file is there."""

    directory: Path

    def place(self) -> None:
        import ray.train

        context = ray.train.get_context()
        told = {"pid": os.getpid(), "size": context.get_world_size(), "local": context.get_local_rank()}
        try:
            ray.train.report({"loss": 1.0})
        except RuntimeError as error:
            told["report"] = str(error)
        (self.directory / f"new.{context.get_world_rank()}").write_text(json.dumps(told))
        (self.directory / f"new.{context.get_world_rank()}").rename(self.directory / f"{context.get_world_rank()}.json")
        while not (self.directory / "raise").exists():
            time.sleep(0.01)
        raise SystemExit("told to")


class World:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.desk = start_desk(f"desk-of-{directory.name}", directory.name, runtime_env={})
        self.heard: list[Message] = []

    def start(self, *, slots: int, cpus: float, start: int = 1) -> WorkerGroup:
        where = {"owner": self.directory.name, "group": "g", "start": start, "load_trial": Held(self.directory)}
        spec = worker_spec(self.desk, SimpleNamespace(environment={}), **where)
        slot = Slots(per_trial=slots, gpu=False, cpus_per_slot=cpus, runtime_env={})
        return WorkerGroup(spec, slots=slot, directory=self.directory)

    def processes(self, count: int) -> list[dict[str, Any]]:
        """What they have told, by rank."""
        files = [self.directory / f"{rank}.json" for rank in range(count)]
        wait_for(lambda: all(file.exists() for file in files), f"{count} processes")
        return [json.loads(file.read_text()) for file in files]

    def end(self) -> GroupEnded:
        """The next end that the desk tells of."""
        while not any(isinstance(message, GroupEnded) for message in self.heard):
            self.heard += ray.get(self.desk.messages.remote(self.directory.name, {}), timeout=60)
        [end] = [message for message in self.heard if isinstance(message, GroupEnded)]
        self.heard.clear()
        return end


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    ray.kill(made.desk)


def is_over(group: WorkerGroup) -> bool:
    """Whether it has no thread and no slots any more."""
    states = {each["state"] for each in placement_group_table().values() if f"/{group.name}/" in each["name"]}
    return states <= {"REMOVED"} and not any(f"dray-{group.name}" in each.name for each in threading.enumerate())


def lives(process: dict[str, Any]) -> bool:
    return Path(f"/proc/{process['pid']}").exists()


def test_processes_have_trains_context_and_end_with_their_group(world: World) -> None:
    group = world.start(slots=2, cpus=0.5)
    both = world.processes(2)
    assert [(each["size"], each["local"]) for each in both] == [(2, 0), (2, 1)]
    assert all(
        "ray.train.report() and ray.train.collective don't work in trials of dray" in each["report"] for each in both
    )
    assert group.is_placed
    assert group.nodes == {ray.get_runtime_context().get_node_id()}
    group.end()
    end = world.end()
    assert (end.group, end.start, end.dead, end.error) == ("g", 1, (), "")
    wait_for(lambda: not any(map(lives, both)), "their end")
    group.end()
    wait_for(lambda: is_over(group), "its slots")


def test_a_group_that_is_ended_as_it_gets_its_slots_leaves_no_thread(world: World) -> None:
    # Ray never fails the calls of an actor whose slots go now (2.60).
    group = world.start(slots=2, cpus=0.5)
    while not group.is_placed:
        time.sleep(0.001)
    group.end()
    end = world.end()
    assert (end.dead, end.error) == ((), "")
    wait_for(lambda: is_over(group), "its thread and its slots")


def test_the_death_of_a_process_is_heard_of_with_its_rank(world: World) -> None:
    group = world.start(slots=2, cpus=0.5)
    both = world.processes(2)
    os.kill(both[1]["pid"], signal.SIGKILL)
    end = world.end()
    assert (end.dead, end.error) == ((1,), "")
    assert lives(both[0]), "it is for the driver to end it"
    group.end()
    wait_for(lambda: not lives(both[0]) and is_over(group), "the other's end")


def test_a_process_that_died_when_the_kernel_killed_one_of_its_node_was_out_of_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[Any, ...]] = []
    asked: list[str] = []
    group = world.start(slots=2, cpus=0.5)
    both = world.processes(2)
    desk = SimpleNamespace(group_ended=SimpleNamespace(remote=lambda *told: heard.append(told)))
    spec = replace(group._spec, desk=desk)  # noqa: SLF001 - the desk of the driver only, not of the process
    monkeypatch.setattr(group, "_spec", spec)
    monkeypatch.setattr(lending, "oom_kills_of", lambda node, runtime_env: asked.append(node) or oom_kills()[1] + 1)
    for process in both:
        os.kill(process["pid"], signal.SIGKILL)
    assert group.ended(by=time.monotonic() + 60)
    why = f"meanwhile the kernel has killed a process of {os.uname().nodename}, which was {LOW_MEMORY}"
    assert heard == [(world.directory.name, "g", 1, {0: why, 1: why}, "")]
    assert asked == [ray.get_runtime_context().get_node_id()], "once for both"
    group.end()
    wait_for(lambda: is_over(group), "its slots")


def test_another_node_says_what_its_kernel_has_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ray.get_runtime_context().get_node_id()
    assert oom_kills_of(here, {}) == oom_kills()[1]
    assert oom_kills_of(here[::-1], {}) is None, "there is no such node"
    elsewhere = SimpleNamespace(get_node_id=lambda: "elsewhere")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: elsewhere)
    assert oom_kills_of(here, {}) == oom_kills()[1], "asked as any other node is"


def test_an_error_of_what_processes_run_is_told(world: World) -> None:
    group = world.start(slots=1, cpus=0.5)
    world.processes(1)
    (world.directory / "raise").touch()
    end = world.end()
    assert (end.dead, end.error) == ((), "SystemExit: told to")
    group.end()
    wait_for(lambda: is_over(group), "its slots")


def test_a_group_that_waits_for_slots_has_no_process_and_can_be_ended(world: World) -> None:
    group = world.start(slots=1, cpus=0.5 + ray.cluster_resources()["CPU"])
    wait_for(lambda: any("PENDING" in each["state"] for each in placement_group_table().values()), "its request")
    assert not group.is_placed
    assert group.nodes == frozenset()
    group.end()
    assert (world.end().error, group.ended(by=0.0)) == ("", True)
    wait_for(lambda: is_over(group), "its thread")
