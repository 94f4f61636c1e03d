"""Why processes of worker groups died, as far as Ray and the kernel know; the errors are Ray's own classes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayActorError

from dray.cluster import node_check as node
from dray.desk.failure import LOW_MEMORY
from dray.groups.group import oom_kills, why_it_died


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
