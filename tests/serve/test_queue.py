"""The queue of a server: what a server that is started again knows of its experiments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from dray.serve.control import Share
from dray.serve.queue import Item, ItemState, Queue
from dray.serve.refusals import NotSubmitted, WrongState


def again(do: Callable[[Queue], object]) -> dict[str, Item]:
    """What another server finds after this."""
    records: list[Mapping[str, Any]] = []
    queue = Queue([], records.append, clock=lambda: 7.0)
    queue.add(Path("/results/digits-1"), Share(weight=2.0))
    queue.add(Path("/results/digits-2"), Share())
    do(queue)
    found = Queue(records, records.append).items()
    assert found == queue.items()
    return {item.name: item for item in found}


def test_the_queue_keeps_what_was_submitted_in_order() -> None:
    found = again(lambda queue: None)
    assert list(found) == ["digits-1", "digits-2"]
    first = found["digits-1"]
    assert (first.share, first.path, first.submitted) == (Share(weight=2.0), Path("/results/digits-1"), 7.0)
    assert all(item.state == "run" for item in found.values())


def test_what_users_want_is_kept() -> None:
    share = Share(priority=1, max_slots=4)

    def do(queue: Queue) -> None:
        queue.move("digits-1", "pause")
        queue.change("digits-2", {"priority": 1, "max_slots": 4})
        queue.change("digits-2", {"tags": ("best",), "notes": "lower rates\nare worse"})

    first, second = again(do).values()
    assert (first.state, second.state) == ("pause", "run")
    assert (second.share, second.tags, second.notes) == (share, ("best",), "lower rates\nare worse")


@pytest.mark.parametrize("state", get_args(ItemState))
def test_after_its_end_it_can_only_run_again(state: ItemState) -> None:
    for new in get_args(ItemState):
        records: list[Mapping[str, Any]] = []
        queue = Queue([], records.append)
        queue.add(Path("/results/digits-1"), Share())
        queue.move("digits-1", state)
        if new == "run" or state not in ("COMPLETED", "ERROR"):
            queue.move("digits-1", new)
            assert queue.item("digits-1").state == new
        else:
            with pytest.raises(WrongState, match="digits-1 has ended; to continue it: dray exp"):
                queue.move("digits-1", new)
            assert (queue.item("digits-1").state, len(records)) == (state, 2)


def test_what_has_ended_does_not_run_again_until_it_is_wanted_or_extended() -> None:
    def end(queue: Queue) -> None:
        queue.move("digits-1", "ERROR", "every trial failed")
        queue.move("digits-2", "COMPLETED")

    def do(queue: Queue) -> None:
        end(queue)
        queue.move("digits-1", "run")
        queue.extend("digits-2", {"max_trials": 8})

    assert [item.state for item in again(end).values()] == ["ERROR", "COMPLETED"]
    found = again(do).values()
    assert [(item.state, item.error, item.extension) for item in found] == [
        ("run", "", {}),
        ("run", "", {"max_trials": 8}),
    ]
    assert again(lambda queue: (do(queue), queue.opened("digits-2")))["digits-2"].extension == {}


def test_deaths_in_a_row_are_counted_from_the_last_that_trained() -> None:
    def do(queue: Queue) -> None:
        for has_trained in (False, False, True, False):
            queue.died("digits-1", "killed", has_trained=has_trained)

    assert again(do)["digits-1"].restarts == 2


def test_one_that_was_deleted_is_forgotten() -> None:
    def do(queue: Queue) -> None:
        queue.remove("digits-1")
        with pytest.raises(NotSubmitted, match="digits-1 was not submitted to this server"):
            queue.item("digits-1")

    assert list(again(do)) == ["digits-2"]
