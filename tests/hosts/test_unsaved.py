"""Which rows a checkpoint carries: those since the last one that was committed, whenever that is known."""

from __future__ import annotations

from typing import Any

from dray.hosts.unsaved import Unsaved


def rows(*batches: int) -> list[dict[str, Any]]:
    return [{"batches": number} for number in batches]


def test_rows_are_carried_until_a_checkpoint_is_committed() -> None:
    unsaved = Unsaved()
    unsaved.add(rows(1, 2))
    assert unsaved.now() == rows(1, 2)
    unsaved.add(rows(3, 4))
    # That one found no room: the next carries its rows too.
    assert unsaved.now() == rows(1, 2, 3, 4)
    unsaved.saved = 4
    assert unsaved.now() == []


def test_what_was_reported_meanwhile_stays_and_the_checkpoints_own_report_does_not() -> None:
    """Published before or after the commit."""
    unsaved = Unsaved()
    unsaved.add(rows(1))
    unsaved.now()
    unsaved.add(rows(2, 3))
    unsaved.saved = 2
    assert unsaved.now() == rows(3)
    unsaved.saved = 4
    unsaved.add(rows(4))
    assert unsaved.now() == []


def test_a_run_that_begins_again_is_another_one() -> None:
    unsaved = Unsaved()
    unsaved.saved = 10
    unsaved.add(rows(5))
    unsaved.add(rows(6))
    assert unsaved.now() == rows(5, 6)
