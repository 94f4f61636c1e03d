"""Which rows a checkpoint carries: those since the last commit, whenever that becomes known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dray.hosts.unsaved import UnsavedRows


def rows(*batches: int) -> list[dict[str, Any]]:
    return [{"batches": number} for number in batches]


def carried(unsaved: UnsavedRows, staging: Path) -> list[dict[str, Any]]:
    """The rows that a checkpoint staged now carries."""
    unsaved.stage(staging)
    return list(unsaved.take(staging).rows)


def test_rows_are_carried_until_a_checkpoint_is_committed(tmp_path: Path) -> None:
    unsaved = UnsavedRows()
    unsaved.add(rows(1, 2))
    assert carried(unsaved, tmp_path) == rows(1, 2)
    unsaved.add(rows(3, 4))
    # That checkpoint found no room: the next carries its rows too.
    assert carried(unsaved, tmp_path) == rows(1, 2, 3, 4)
    unsaved.saved = 4
    assert carried(unsaved, tmp_path) == []


def test_rows_reported_between_staging_and_commit_stay_unsaved(tmp_path: Path) -> None:
    unsaved = UnsavedRows()
    unsaved.add(rows(1))
    unsaved.stage(tmp_path, 0.5)
    unsaved.add(rows(2, 3))
    assert unsaved.take(tmp_path)[:2] == (rows(1), 0.5)
    unsaved.saved = 2
    assert carried(unsaved, tmp_path) == rows(3)
    unsaved.saved = 4
    unsaved.add(rows(4))
    assert carried(unsaved, tmp_path) == [], "the report of a checkpoint may be published after its commit"


def test_a_checkpoint_that_failed_is_forgotten(tmp_path: Path) -> None:
    unsaved = UnsavedRows()
    unsaved.stage(tmp_path / "removed when writing failed")
    unsaved.stage(tmp_path)
    with pytest.raises(KeyError):
        unsaved.take(tmp_path / "removed when writing failed")


def test_a_run_that_begins_again_is_another_one(tmp_path: Path) -> None:
    unsaved = UnsavedRows()
    unsaved.saved = 10
    unsaved.add(rows(5))
    unsaved.add(rows(6))
    assert carried(unsaved, tmp_path) == rows(5, 6)
