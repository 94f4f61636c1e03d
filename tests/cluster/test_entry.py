"""Where the processes of a group enter: what they tell of their machine, and what they import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dray.cluster import entry


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
    monkeypatch.setattr(entry, "Path", lambda place: tmp_path / Path(place).name)
    assert entry._oom_kills() == kills


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "without"),
    [
        # Ray Train's controller, and each worker before it comes to its own code.
        (
            "dray.cluster.train_run, dray.cluster.deaths, dray.cluster.entry, dray.hosts.ray_worker",
            {"ray.tune", "rich", "searchers", "torch"},
        ),
        ("dray.cluster.worker", {"ray.tune", "rich", "searchers", "ray.train.v2._internal.execution.controller"}),
    ],
    ids=["controller", "worker"],
)
def test_processes_of_a_group_import_little(modules: str, without: set[str]) -> None:
    """It is all in the way of the first batch."""
    program = f"import sys, {modules}; print({without} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "set()\n"
