"""A group of worker processes: its states, why its processes died, and what happens when Ray ends before they do."""

from __future__ import annotations

import time
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayActorError

from dray.cluster import node_check as node
from dray.groups import group as groups
from dray.groups import train_workers
from dray.groups.group import WorkerGroup, oom_kills, why_it_died
from dray.groups.pool import TRANSITIONS, GroupEvent, GroupState, Member
from dray.groups.slots import Slots
from dray.groups.train_workers import StartAbandoned
from dray.leases.failure import LOW_MEMORY
from dray.leases.messages import GroupEnded
from tests.groups.clusters import cpus


class Called:
    """A call of an actor, which has failed."""

    def remote(self, function: object) -> Called:
        return self

    def options(self, **options: Any) -> Called:
        return self

    def future(self) -> Future[None]:
        failed = Future[None]()
        failed.set_exception(ConnectionError())
        return failed


@pytest.mark.parametrize(("is_initialized", "error"), [(True, "its owner is unknown"), (False, "")])
def test_a_group_that_ray_no_longer_knows_has_ended(
    is_initialized: bool, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(*arguments: Any, **options: Any) -> None:
        raise ValueError("its owner is unknown")

    worker = SimpleNamespace(node="a", actor=SimpleNamespace(execute=Called()))
    placed = SimpleNamespace(wait=lambda within_s: True)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(groups, "placement_group", lambda *arguments, **options: placed)
    monkeypatch.setattr(groups, "start_workers", lambda *arguments, **options: [worker])
    heard: list[Any] = []
    spec: Any = SimpleNamespace(owner="o", group="g", start=1)
    slots = Slots(per_trial=1, gpu=False, cpus_per_slot=1, runtime_env={})
    group = WorkerGroup(spec, slots=slots, report=heard.append)
    assert group.ended(by=time.monotonic() + 10)
    [_, ended] = heard
    assert (type(ended), ended.start, ended.dead, ended.error) == (GroupEnded, 1, {}, error)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ActorDiedError(), ""),
        (RayActorError(error_msg="The actor died because its node has died. Node Id: 0f"), "Ray has lost the node"),
        (
            OutOfMemoryError(f"Task was killed due to the node {LOW_MEMORY}."),
            f"Ray killed it, because its node was {LOW_MEMORY}",
        ),
        (ActorUnavailableError("no route", actor_id=None), ""),
    ],
    ids=["died", "with its node", "killed by Ray", "out of reach"],
)
def test_rays_reason_for_a_death_is_summarised(error: Exception, why: str) -> None:
    assert why_it_died(error) == why


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"memory.events": "low 0\noom 2\noom_kill 5\noom_group_kill 0\n", "vmstat": "oom_kill 9\n"}, 5),
        ({"vmstat": "nr_free_pages 7\noom_kill 9\n"}, 9),
        ({"vmstat": "nr_free_pages 7\n"}, 0),
        ({}, 0),
    ],
)
def test_kills_of_the_container_count_else_those_of_the_machine(
    files: dict[str, str], kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(node, "Path", lambda place: tmp_path / Path(place).name)
    assert oom_kills()[1] == kills


@pytest.mark.parametrize(("state", "event"), [*product(get_args(GroupState), get_args(GroupEvent))])
def test_a_groups_events_change_its_state_as_the_table_says(state: GroupState, event: GroupEvent) -> None:
    member = Member(name="group-0", start=1, slots=cpus(), since=0.0, state=state)
    if (after := TRANSITIONS[state].get(event)) is not None:
        member.on(event)
        assert member.state == after
    else:
        with pytest.raises(AssertionError, match=f"group-0, start 1, is {state}: no '{event}' now"):
            member.on(event)
        assert member.state == state


def test_a_group_can_end_in_each_state_and_then_nothing_happens_to_it() -> None:
    assert {state for state, events in TRANSITIONS.items() if events.get("end") == "ended"} == {
        *get_args(GroupState)
    } - {"ended"}
    assert TRANSITIONS["ended"] == {}


def test_a_start_whose_ray_was_shut_down_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own functions start a cluster, with its default settings, if there is none."""
    asked: list[float] = []
    live = iter([True, False])

    def get(calls: list[object], timeout: float) -> list[object]:
        asked.append(timeout)
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "is_initialized", lambda: next(live))
    with pytest.raises(StartAbandoned):
        train_workers._get([], lambda: False)  # noqa: SLF001 - its callers need a cluster
    assert len(asked) == 1
