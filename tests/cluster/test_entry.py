"""How many processes the kernel has killed for their memory, as it tells itself."""

from __future__ import annotations

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
