"""A start of workers whose driver has lost its Ray, without one."""

from __future__ import annotations

import pytest
import ray

from dray.groups import train_workers
from dray.groups.train_workers import StartAbandoned


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
