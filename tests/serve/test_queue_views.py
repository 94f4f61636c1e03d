"""The routes of the queue: what they say, to whom, and that they refuse what its holder may not do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dray.serve.app import listening
from dray.serve.client import Server
from dray.serve.tokens import Tokens
from tests.serve.conftest import PORT, TOKEN, Served
from tests.serve.scene import SceneControl
from tests.serve.test_tokens import bearer


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
