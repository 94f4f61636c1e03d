"""The queue of a server: what a server that is started again knows of its experiments, and its routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from dray.serve.app import listening
from dray.serve.client import Server
from dray.serve.control import Share
from dray.serve.queue import Item, ItemState, Queue
from dray.serve.refusals import NotSubmitted, WrongState
from dray.serve.tokens import Tokens
from tests.serve.conftest import PORT, TOKEN, Served
from tests.serve.scene import SceneControl
from tests.serve.test_tokens import bearer


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
        with pytest.raises(NotSubmitted, match="digits-1 was not submitted to the server"):
            queue.item("digits-1")

    assert list(again(do)) == ["digits-2"]


@pytest.fixture
def scene(results: Path) -> SceneControl:
    scene = SceneControl(results, 4)
    scene.run("theirs", 9, owner="other")
    scene.run("mine", 9, owner="agent")
    scene.run("ours", 9)
    return scene


@pytest.fixture
def queued(scene: SceneControl, results: Path) -> Iterator[Served]:
    with listening(scene, results, "127.0.0.1", PORT, Tokens(results, TOKEN)) as url:
        yield Served(int(url.rpartition(":")[2]), scene, results)


def preview(queued: Served, headers: dict[str, str] | None = None, **query: Any) -> Any:
    text = "&".join(f"{name}={value}" for name, value in query.items())
    return queued.send("GET", f"/api/v1/queue/preview?{text}", headers=headers or queued.headers)


def test_the_queue_is_in_order_with_reasons_and_lanes(queued: Served) -> None:
    found = queued.api("GET", "/queue").json
    assert [(each["name"], each["slots"], each["why"]) for each in found["entries"]] == [
        ("theirs", 4, "it has all slots itself"),
        ("mine", 0, "gets slots of theirs as trials end"),
        ("ours", 0, "gets slots of theirs as trials end"),
    ]
    assert (found["refused"], found["next"], found["slots"]) == ({}, "mine", 4)
    assert {bar["experiment"] for bar in found["lanes"]["bars"]} == {"theirs"}
    assert found["lanes"]["from"] == found["lanes"]["since"], "the server is younger than an hour"


def test_the_client_asks_for_both(queued: Served) -> None:
    server = Server(queued.url, TOKEN)
    assert [each["name"] for each in server.queue(60)["entries"]] == ["theirs", "mine", "ours"]
    assert server.preview("mine", before="")["order"] == ["theirs", "ours", "mine"]


def test_a_preview_says_what_to_change_and_changing_it_does_that(queued: Served, scene: SceneControl) -> None:
    found = preview(queued, name="ours", before="mine").json
    assert found["changes"] == {"mine": {"priority": 43}}
    assert found["order"] == ["theirs", "ours", "mine"]
    assert found["refused"] == ""
    assert "mine waits longer." in found["lines"]
    assert scene.has() == {"theirs": 4, "mine": 0, "ours": 0}
    for name, change in found["changes"].items():
        assert queued.api("PATCH", f"/experiments/{name}", change).status == 200
    assert [each["name"] for each in queued.api("GET", "/queue").json["entries"]] == found["order"]


def test_a_preview_of_a_share(queued: Served) -> None:
    found = preview(queued, name="ours", priority=10, max_slots=2).json
    assert found["changes"] == {"ours": {"priority": 10, "max_slots": 2}}
    assert (
        found["lines"][0] == "ours goes from 0 to 2 slots, at once: trials of theirs save, leave, and continue later."
    )
    assert preview(queued, name="ours", priority=42, max_slots="none").json["lines"] == ["Nothing changes."]


def test_a_paused_one_keeps_its_new_share_for_later(queued: Served, scene: SceneControl) -> None:
    scene.act("ours", "pause")
    found = preview(queued, name="ours", priority=10).json
    assert (found["changes"], found["lines"]) == (
        {"ours": {"priority": 10}},
        ["It takes effect when ours is queued again."],
    )
    assert found["order"] == ["theirs", "mine"]
    assert preview(queued, name="ours", before="mine").status == 400


def test_a_token_reads_all_and_moves_only_its_own(queued: Served) -> None:
    agent, reader = bearer(queued, "agent", priority=20), bearer(queued, "reader", "read")
    refused = queued.send("GET", "/api/v1/queue", headers=agent).json["refused"]
    assert set(refused) == {"theirs", "ours"}
    assert "submitted with token other" in refused["theirs"]
    assert set(queued.send("GET", "/api/v1/queue", headers=reader).json["refused"]) == {"theirs", "mine", "ours"}
    # Of the ways to move it, the token gets the one that changes only what is its own.
    assert preview(queued, agent, name="mine", before="theirs").json["changes"] == {"mine": {"priority": 41}}
    assert preview(queued, agent, name="mine", before="").json["changes"] == {"mine": {"priority": 43}}
    found = preview(queued, agent, name="ours", before="theirs").json
    assert found["changes"] == {"ours": {"priority": 41}}
    assert "was submitted with the server's own token" in found["refused"]
    assert "must be 20 or more" in preview(queued, agent, name="mine", priority=10).json["refused"]
    assert "scope submit" in preview(queued, reader, name="mine", priority=10).json["refused"]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({"name": "none"}, 404),
        ({}, 400),
        ({"name": "mine", "before": "none"}, 400),
        ({"name": "mine", "before": "mine"}, 400),
        ({"name": "mine", "priority": 0}, 400),
        ({"name": "mine", "priority": ""}, 400),
        ({"name": "mine", "weight": "nan"}, 400),
        ({"name": "mine", "weight": "%3Cb%3E"}, 400),
        ({"name": "mine", "max_slots": 1.5}, 400),
    ],
)
def test_bad_input_is_refused(queued: Served, query: dict[str, Any], status: int) -> None:
    assert preview(queued, **query).status == status
