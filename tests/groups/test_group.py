"""A group of worker processes when Ray ends before they do."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from dray.desk.messages import GroupEnded
from dray.groups import group as groups
from dray.groups.group import WorkerGroup
from dray.groups.slots import Slots


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
