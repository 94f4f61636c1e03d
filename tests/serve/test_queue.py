"""The queue of a server: what a server that is started again knows of its experiments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dray.serve.control import NotSubmitted, Share
from dray.serve.queue import Item, Queue
from searchers.errors import JournalError


def again(tmp_path: Path, do: Callable[[Queue], object]) -> dict[str, Item]:
    """What another server finds after this."""
    file = tmp_path / "queue.jsonl"
    queue = Queue(file)
    queue.add(tmp_path / "digits-1", Share(weight=2.0))
    queue.add(tmp_path / "digits-2", Share())
    before = queue.items()
    do(queue)
    after = {item.name: item for item in queue.items()}
    queue.close()
    queue = Queue(file)
    try:
        assert {item.name: item for item in queue.items()} == after
        assert [item.name for item in before][:1] == ["digits-1"]
    finally:
        queue.close()
    return after


def test_the_queue_keeps_what_was_submitted_in_order(tmp_path: Path) -> None:
    found = again(tmp_path, lambda queue: None)
    assert list(found) == ["digits-1", "digits-2"]
    assert (found["digits-1"].share, found["digits-1"].path) == (Share(weight=2.0), tmp_path / "digits-1")
    assert all(item.is_due for item in found.values())


def test_what_users_want_is_kept(tmp_path: Path) -> None:
    def do(queue: Queue) -> None:
        queue.want("digits-1", "pause")
        queue.set_share("digits-2", Share(priority=1, max_slots=4))
        queue.annotate("digits-2", ["best"], "lower rates\nare worse")

    found = again(tmp_path, do)
    assert [item.is_due for item in found.values()] == [False, True]
    second = found["digits-2"]
    assert (second.share, second.tags, second.notes) == (
        Share(priority=1, max_slots=4),
        ("best",),
        "lower rates\nare worse",
    )


def test_what_has_ended_does_not_run_again_until_it_is_wanted_or_extended(tmp_path: Path) -> None:
    def do(queue: Queue) -> None:
        queue.end("digits-1", "ERROR", "every trial failed")
        queue.end("digits-2", "COMPLETED")
        assert [item.is_due for item in queue.items()] == [False, False]
        queue.want("digits-1", "run")
        queue.extend("digits-2", {"max_trials": 8})

    found = again(tmp_path, do)
    assert [(item.is_due, item.error, item.extension) for item in found.values()] == [
        (True, "", {}),
        (True, "", {"max_trials": 8}),
    ]
    assert again_started(tmp_path).extension == {}


def again_started(tmp_path: Path) -> Item:
    queue = Queue(tmp_path / "queue.jsonl")
    queue.started("digits-2")
    queue.close()
    queue = Queue(tmp_path / "queue.jsonl")
    queue.close()
    return queue.item("digits-2")


def test_deaths_in_a_row_are_counted_from_the_last_that_trained(tmp_path: Path) -> None:
    def do(queue: Queue) -> None:
        for has_trained in (False, False, True, False):
            queue.died("digits-1", "killed", has_trained=has_trained)

    assert again(tmp_path, do)["digits-1"].restarts == 2


def test_one_that_was_deleted_is_forgotten(tmp_path: Path) -> None:
    assert list(again(tmp_path, lambda queue: queue.remove("digits-1"))) == ["digits-2"]
    queue = Queue(tmp_path / "queue.jsonl")
    with pytest.raises(NotSubmitted, match="digits-1 was not submitted to this server"):
        queue.item("digits-1")
    with pytest.raises(JournalError):
        Queue(tmp_path / "queue.jsonl")
    queue.close()


@pytest.mark.parametrize(
    ("state", "seen"),
    [
        ("QUEUED", {}),
        ("QUEUED", {"is_up": True, "waits": True}),
        ("RUNNING", {"is_up": True, "has_slots": True, "had_slots": True}),
        ("RUNNING", {"is_up": True, "had_slots": True}),  # between its trials, or as it ends
        ("PREEMPTED", {"is_up": True, "had_slots": True, "waits": True, "is_preempted": True}),
        ("RESTARTING", {"is_up": True, "had_slots": True, "waits": True}),  # its workers, or the desk, have died
    ],
)
def test_its_state_says_what_it_waits_for(state: str, seen: dict[str, bool], tmp_path: Path) -> None:
    item = Item(name="digits-1", path=tmp_path, submitted=0.0, share=Share())
    nothing = dict.fromkeys(("is_up", "has_slots", "had_slots", "waits", "is_preempted"), False)
    assert item.state(**{**nothing, **seen}) == state


def test_one_that_dies_again_and_again_is_restarting(tmp_path: Path) -> None:
    dies = again(tmp_path, lambda queue: queue.died("digits-1", "killed by signal 9", has_trained=False))["digits-1"]
    assert dies.state(is_up=True, has_slots=False, had_slots=False, waits=True, is_preempted=False) == "RESTARTING"
    assert dies.state(is_up=True, has_slots=True, had_slots=True, waits=False, is_preempted=False) == "RUNNING"
