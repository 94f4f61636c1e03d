"""The part of the API that changes something."""

from __future__ import annotations

import errno
import io
import os
import socket
import tarfile
import threading
from pathlib import Path

import pytest

from dray.code.archive import pack
from dray.serve.app import listening
from dray.serve.control import ExperimentState, Submitted
from dray.serve.draft import Draft
from dray.serve.tokens import Tokens
from tests.report.simulated import simulated
from tests.serve.conftest import TOKEN, Reply, Served

CONFIG = """
name: digits
entrypoint: model_def:DigitsTrial
hyperparameters: {global_batch_size: 64}
searcher: {name: single, metric: loss, max_length: {batches: 4}}
resources: {priority: 10, weight: 2.0}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory."""
    root = tmp_path / "model"
    (root / "parts").mkdir(parents=True)
    (root / "model_def.py").write_text("class DigitsTrial(PyTorchTrial): ...\n")
    (root / "parts" / "layer.py").write_text("WIDTH = 16\n")
    return root


def put(served: Served, state: ExperimentState) -> Submitted:
    """The experiment ``digits-1``, in this state."""
    (served.results / "digits-1").mkdir()
    (served.results / "digits-1" / "experiment.yaml").write_text(CONFIG)
    return served.control.put("digits-1", state)


def submit(served: Served, config: str, code: bytes, token: dict[str, str] | None = None) -> Reply:
    part = '--b\r\nContent-Disposition: form-data; name="{}"\r\n\r\n'
    body = part.format("config").encode() + config.encode() + b"\r\n" + part.format("code").encode() + code
    headers = {**(token or served.headers), "Content-Type": "multipart/form-data; boundary=b"}
    return served.send("POST", "/api/v1/experiments", body + b"\r\n--b--\r\n", headers=headers)


def test_all_faults_of_a_config_come_back(served: Served, model: Path) -> None:
    reply = submit(served, CONFIG.replace("single", "asha").replace("batches: 4", "batches: -4"), pack(model))
    assert reply.status == 400
    assert {"searcher.max_length", "searcher.max_trials"} <= {field for field, _ in reply.json["faults"]}
    assert "errors" in reply.json["error"]
    assert "\n" not in reply.json["error"]


def test_bad_submissions_are_refused_in_words(served: Served, model: Path) -> None:
    reply = submit(served, CONFIG, b"no archive")
    assert (reply.status, "must be a .tar.gz" in reply.json["error"]) == (400, True), reply.body
    assert served.api("POST", "/experiments", {"config": CONFIG}).status == 400
    assert not any(served.results.iterdir())


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b"nothing"),
        ("multipart/form-data; boundary=b", b"nothing"),
        ("multipart/form-data; boundary=b", b"--b\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n\r\n--b--\r\n"),
    ],
)
def test_an_unreadable_form_is_bad_input(kind: str, body: bytes, served: Served) -> None:
    reply = served.send("POST", "/api/v1/experiments", body, headers={**served.headers, "Content-Type": kind})
    assert (reply.status, "form can't be read" in reply.json["error"]) == (400, True), reply.body


def test_a_link_to_a_file_of_the_server_is_refused(served: Served, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("horse\n")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        link = tarfile.TarInfo("model_def.py")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "password")
        archive.addfile(link)
    reply = submit(served, CONFIG, packed.getvalue())
    assert (reply.status, reply.json["error"][:56]) == (400, "the code has a link to a file of this machine: model_def")
    assert not any(served.results.iterdir())


def test_json_that_is_nested_too_deeply_is_bad_input(served: Served) -> None:
    put(served, "RUNNING")
    for depth in (100_000, 900):
        body = b'{"config": ' + b'{"a": ' * depth + b"1" + b"}" * depth + b"}"
        for method, path in (("PATCH", ""), ("POST", "/extend"), ("POST", "/fork")):
            reply = served.api(method, f"/experiments/digits-1{path}", body)
            assert reply.status == 400, (depth, path, reply.body)


def test_a_connection_without_a_request_ends(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dray.serve.app.REQUEST_S", 0.1)
    with listening(served.control, served.results, "127.0.0.1", 18700, Tokens(served.results, TOKEN)) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: loc", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET"):
            with socket.create_connection(address, timeout=30) as connection:
                connection.sendall(sent)
                while connection.recv(1 << 16):
                    pass


def test_a_full_disk_is_reported(served: Served, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(draft: Draft, code: Path, owner: str, request: str) -> Submitted:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/results/digits-1")

    monkeypatch.setattr(served.control, "submit", full)
    reply = submit(served, CONFIG, pack(model))
    assert reply.status == 507
    why = "can't write /results/digits-1 on the server: No space left on device; free some space, and try again"
    assert reply.json["error"] == why
    monkeypatch.undo()
    assert submit(served, CONFIG, pack(model)).status == 201


def test_what_can_not_be_done_says_why(served: Served) -> None:
    put(served, "COMPLETED")
    wrong = served.api("POST", "/experiments/digits-1/pause")
    assert (wrong.status, wrong.json["error"][:18]) == (409, "digits-1 has ended")
    assert served.api("POST", "/experiments/digits-2/pause").status == 404
    for body in ({}, {"max_trials": 0}, {"max_trials": True}, {"max_trials": 3, "max_time": 3}):
        assert served.api("POST", "/experiments/digits-1/extend", body).status == 400, body
    assert served.api("POST", "/experiments/digits-1/extend", b"[1]").status == 400
    assert served.api("POST", "/experiments/digits-1/extend", b"{").status == 400
    secret = served.results / "secret.yaml"
    secret.write_text("token: abc\n")
    of_a_file = served.api("POST", "/experiments/digits-1/extend", {"prices": str(secret)})
    assert (of_a_file.status, of_a_file.json["error"][:28]) == (400, "prices must be a JSON object")
    assert served.api("GET", "/nothing").status == 404
    assert served.api("PUT", "/status").status == 405


def test_a_patch_changes_only_what_is_given(served: Served) -> None:
    put(served, "RUNNING")
    served.api("PATCH", "/experiments/digits-1", {"priority": 7, "max_slots": 3, "notes": "baseline"})
    served.api("PATCH", "/experiments/digits-1", {"weight": 2, "tags": ["a", "b", "a"]})
    found = served.api("PATCH", "/experiments/digits-1", {"max_slots": None}).json
    assert found["share"] == {"priority": 7, "weight": 2.0, "max_slots": None}
    assert (found["tags"], found["notes"]) == (["a", "b"], "baseline")


@pytest.mark.parametrize(
    "change",
    [
        {"priority": 0},
        {"priority": 100},
        {"priority": True},
        {"priority": None},
        {"weight": 0},
        {"weight": "1"},
        {"max_slots": 1.5},
        {"tags": "one"},
        {"tags": [""]},
        {"notes": 3},
        {"state": "COMPLETED"},
    ],
)
def test_a_bad_patch_changes_nothing(served: Served, change: dict[str, object]) -> None:
    before = put(served, "RUNNING")
    reply = served.api("PATCH", "/experiments/digits-1", {"notes": "n", **change} if "notes" not in change else change)
    assert reply.status == 400
    assert next(iter(change)) in reply.json["error"]
    assert served.control.experiment("digits-1") == before


def test_weights_that_are_no_numbers_are_refused(served: Served) -> None:
    served.control.put("digits-1", "RUNNING")
    for weight in (b"NaN", b"Infinity", b"1e999"):
        assert served.api("PATCH", "/experiments/digits-1", b'{"weight": %s}' % weight).status == 400


def test_a_fork_has_the_same_code_and_a_changed_config(served: Served, model: Path) -> None:
    secret = CONFIG + "data: {secrets: {password: correct-horse}}\n"
    submit(served, secret, pack(model))
    reply = served.api("POST", "/experiments/digits-1/fork", {"config": {"searcher.max_length": {"batches": 8}}})
    assert reply.status == 201, reply.body
    new = served.results / reply.json["name"]
    assert "batches: 8" in (new / "experiment.yaml").read_text()
    assert "password: correct-horse" in (new / "secrets.yaml").read_text()
    assert (new / "code" / "parts" / "layer.py").exists()
    whole = served.api("POST", "/experiments/digits-1/fork", {"config": CONFIG.replace("name: digits", "name: other")})
    assert whole.json["name"].startswith("other")
    wrong = served.api("POST", "/experiments/digits-1/fork", {"config": {"searcher.max_trails": 3}})
    assert (wrong.status, wrong.json["faults"][0][0]) == (400, "searcher.max_trails")


# ------------------------------------------------------------------------------------------------------------- events
def test_events_are_followed_from_a_place(served: Served) -> None:
    directory = simulated(served.results / "digits-1", 4)
    served.control.put("digits-1", "COMPLETED")
    all_of_them = served.api("GET", "/experiments/digits-1/events").json
    assert len(all_of_them["lines"]) > 4
    assert "started" in all_of_them["lines"][0]
    assert all_of_them["next"] == directory.journal.stat().st_size
    then = served.api("GET", f"/experiments/digits-1/events?after={all_of_them['next']}&wait_s=20").json
    assert sorted(all_of_them["exited"]) == [0, 1, 2, 3]
    ended = {"lines": [], "exited": [], "next": all_of_them["next"], "state": "COMPLETED", "failed": 0, "error": ""}
    assert then == ended
    lost = served.api("GET", "/experiments/digits-1/events?after=5")
    assert (lost.status, "after=5 is not where a line begins" in lost.json["error"]) == (400, True)


def test_a_request_waits_for_events_and_passes_over_a_torn_line(served: Served) -> None:
    directory = simulated(served.results / "digits-1", 4)
    lines = directory.journal.read_text().splitlines(keepends=True)
    directory.journal.write_text("".join(lines[:5]) + lines[5][:7])
    served.control.put("digits-1", "RUNNING")
    seen = served.api("GET", "/experiments/digits-1/events").json
    assert seen["next"] == len("".join(lines[:5]))
    assert seen["failed"] is None
    assert served.api("GET", f"/experiments/digits-1/events?after={10**17}").json["next"] == seen["next"]
    later = threading.Timer(0.4, lambda: directory.journal.write_text("".join(lines)))
    later.start()
    news = served.api("GET", f"/experiments/digits-1/events?after={seen['next']}&wait_s=20").json
    later.join()
    assert news["lines"]
    assert news["state"] == "RUNNING"


def test_a_body_that_is_no_text_is_bad_input(served: Served) -> None:
    put(served, "RUNNING")
    for body in ('{"max_trials": 9}'.encode("utf-16"), b'{"max_trials": "\xff"}'):
        reply = served.send("POST", "/api/v1/experiments/digits-1/extend", body)
        assert (reply.status, reply.json["error"][:20]) == (400, "the body is not JSON"), reply.body


def test_a_request_that_is_no_http_leaves_no_traceback_in_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    reply = served.send("GET", f"/api/v1/status?{'x' * 20_000}")
    assert (reply.status, caplog.records) == (400, [])
