"""A request that is sent again, because its answer was lost, is carried out once."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dray.code.archive import pack
from dray.serve import client
from dray.serve import requests as asking
from dray.serve.app import listening
from dray.serve.client import AnswerLost, Server, Unreachable
from dray.serve.control import Share
from dray.serve.queue import Queue
from dray.serve.scheduler import Scheduler
from dray.serve.tokens import STATE, Tokens
from searchers.journal import Journal
from tests.report.simulated import simulated
from tests.serve.conftest import PORT, TOKEN, Reply, Served
from tests.serve.test_api import CONFIG, model, submit

__all__ = ["model"]


def keyed(served: Served, key: str = "key-1") -> dict[str, str]:
    return {**served.headers, "Idempotency-Key": key}


def names(served: Served) -> list[str]:
    return [each.name for each in served.control.experiments()]


@contextmanager
def restarted(served: Served) -> Iterator[Served]:
    """Another server in the results directory, with the same queue."""
    with listening(served.control, served.results, "127.0.0.1", PORT, Tokens(served.results, TOKEN)) as url:
        yield Served(int(url.rpartition(":")[2]), served.control, served.results)


def kill(served: Served, *, answered: bool = False) -> None:
    """Leave the file of keys as a server does that is killed, before it answers or after."""
    file = served.results / STATE / "keys.jsonl"
    kept = [line for line in file.read_text().splitlines(keepends=True) if '"id"' in line or answered]
    file.unlink()
    (served.results / STATE / "keys.jsonl.lock").unlink()
    file.write_text("".join(kept))


def test_a_submission_that_is_sent_twice_is_one_experiment(served: Served, model: Path) -> None:
    code = pack(model)
    first, second = (submit(served, CONFIG, code, keyed(served)) for _ in range(2))
    assert (first.status, second.status, second.json) == (201, 201, first.json)
    assert names(served) == [first.json["name"]]
    other = submit(served, CONFIG, code, keyed(served, "key-2"))
    assert names(served) == [first.json["name"], other.json["name"]], "each key is an experiment"


def test_attempts_at_the_same_time_are_one_experiment(
    served: Served, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, slow, begun = pack(model), threading.Event(), threading.Event()
    submitted = served.control.submit

    def waits(*given: Any) -> Any:
        begun.set()
        assert slow.wait(30)
        return submitted(*given)

    monkeypatch.setattr(served.control, "submit", waits)
    with ThreadPoolExecutor(3) as pool:
        attempts = [pool.submit(submit, served, CONFIG, code, keyed(served)) for _ in range(3)]
        assert begun.wait(30)
        slow.set()
        replies = [each.result() for each in attempts]
    assert {each.status for each in replies} == {201}
    assert len({each.json["name"] for each in replies}) == len(names(served)) == 1


def test_a_key_is_good_for_one_request_only(served: Served, model: Path) -> None:
    submit(served, CONFIG, pack(model), keyed(served))
    name = names(served)[0]
    for reply in (
        submit(served, CONFIG + "description: other\n", pack(model), keyed(served)),
        served.send("POST", f"/api/v1/experiments/{name}/fork", {}, headers=keyed(served)),
    ):
        assert (reply.status, "was sent with another request" in reply.json["error"]) == (422, True)
    assert len(names(served)) == 1
    assert submit(served, CONFIG, pack(model), keyed(served, "k" * 201)).status == 400


def test_nothing_is_created_before_its_key_is_on_the_disk(
    served: Served, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(journal: Journal, record: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "append", full)
    assert submit(served, CONFIG, pack(model), keyed(served)).status == 507
    assert names(served) == []


def test_what_was_refused_can_be_sent_again_with_its_key(served: Served, model: Path) -> None:
    wrong = CONFIG.replace("single", "nonsense")
    assert [submit(served, wrong, pack(model), keyed(served)).status for _ in range(2)] == [400, 400]
    assert names(served) == []


@pytest.mark.parametrize("answered", [True, False])
def test_a_server_that_was_killed_meanwhile_finds_what_the_request_has_created(
    served: Served, model: Path, answered: bool
) -> None:
    code = pack(model)
    first = submit(served, CONFIG, code, keyed(served))
    fork = served.send("POST", f"/api/v1/experiments/{first.json['name']}/fork", {}, headers=keyed(served, "fork"))
    kill(served, answered=answered)
    with restarted(served) as again:
        second = submit(again, CONFIG, code, keyed(served))
        path = f"/api/v1/experiments/{first.json['name']}/fork"
        forked = again.send("POST", path, {}, headers=keyed(served, "fork"))
    assert (second.status, second.json["name"]) == (201, first.json["name"])
    assert (forked.status, forked.json["name"]) == (201, fork.json["name"])
    assert len(names(served)) == 2


def test_a_key_is_forgotten_after_a_day_and_its_lines_are_removed_when_a_server_starts(
    served: Served, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, file = pack(model), served.results / STATE / "keys.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr("dray.serve.keys.time.time", lambda: 0.0)
        submit(served, CONFIG, code, keyed(served))
    kept = submit(served, CONFIG, code, keyed(served, "key-2"))
    kill(served, answered=True)
    with restarted(served) as again:
        assert submit(again, CONFIG, code, keyed(served, "key-2")).json == kept.json
        [line] = file.read_text().splitlines()
        assert kept.json["name"] in line
        submit(again, CONFIG, code, keyed(served))
    assert len(names(served)) == 3


def test_a_trial_is_added_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking.ServedTrials, "answer_s", 0.0)
    directory = simulated(served.results / "digits-1", 4)
    served.control.put("digits-1", "PAUSED")

    def add(where: Served) -> Reply:
        return where.send("POST", "/api/v1/experiments/digits-1/trials", {"hparams": {}}, headers=keyed(served))

    assert [add(served).json for _ in range(2)] == [{"trial": None}] * 2
    [waiting] = directory.path.glob("requests/*.json")
    # Its driver carries it out, but the server is killed before it can answer.
    waiting.unlink()
    with Journal(directory.journal) as journal:
        create = {"action": "create", "trial": 4, "hparams": {}}
        journal.append({"event": "requested", "id": waiting.stem, "actions": [create], "time": 0.0})
    kill(served)
    with restarted(served) as again:
        assert add(again).json["trial"] == 4
    assert list(directory.path.glob("requests/*.json")) == []


def test_the_id_of_a_request_is_in_the_queue_with_its_experiment() -> None:
    records: list[Any] = []
    queue = Queue([], records.append, clock=lambda: 0.0)
    scheduler = Scheduler(queue, lambda effect: None, is_preempted=lambda demand: False)
    scheduler.submit(Path("a"), Share(), has_process=False, request="id-1")
    scheduler.submit(Path("b"), Share(), has_process=False)
    later = Scheduler(Queue(records, records.append), lambda effect: None, is_preempted=lambda demand: False)
    found = later.of_request("id-1")
    assert (found is not None and found.name, later.of_request("id-2")) == ("a", None)


# ------------------------------------------------------------------------------------------------------------ client
class Lossy:
    """A proxy that passes requests on, and loses the answers of the first POSTs."""

    def __init__(self, port: int, losses: int, answer: bytes = b"") -> None:
        self._to, self._losses, self._answer = port, losses, answer
        self.posts = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                ours, _ = self._socket.accept()
            except OSError:
                return
            with ours, socket.create_connection(("127.0.0.1", self._to)) as theirs:
                request = _message(ours)
                theirs.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                answer = b"".join(iter(lambda: theirs.recv(1 << 16), b""))
                is_lost = request.startswith(b"POST") and self.posts < self._losses
                self.posts += request.startswith(b"POST")
                ours.sendall(self._answer if is_lost else answer)

    def close(self) -> None:
        self._socket.close()


def _message(connection: socket.socket) -> bytes:
    got = b""
    while b"\r\n\r\n" not in got:
        got += connection.recv(1 << 16)
    head, _, body = got.partition(b"\r\n\r\n")
    lengths = [each.split(b":")[1] for each in head.lower().split(b"\r\n") if each.startswith(b"content-length:")]
    while len(body) < sum(map(int, lengths)):
        body += connection.recv(1 << 16)
    return head + b"\r\n\r\n" + body


BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 4\r\nConnection: close\r\n\r\nlost"


@pytest.mark.parametrize("answer", [b"", BAD_GATEWAY])
def test_the_client_finds_its_experiment_after_its_answer_was_lost(
    served: Served, model: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(client, "RESEND_S", (0.0, 0.0, 0.0))
    proxy = Lossy(served.port, 2, answer)
    try:
        sent = Server(proxy.url, TOKEN).submit(CONFIG, pack(model))
    finally:
        proxy.close()
    assert (names(served), proxy.posts) == ([sent.name], 3)


def test_a_client_whose_answers_are_all_lost_says_that_it_may_have_been_accepted(
    served: Served, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RESEND_S", (0.0,))
    proxy = Lossy(served.port, 9)
    try:
        with pytest.raises(AnswerLost, match="the request may have been carried out: look before you send it again"):
            Server(proxy.url, TOKEN).submit(CONFIG, pack(model))
    finally:
        proxy.close()
    assert len(names(served)) == 1


def test_a_server_that_is_not_there_is_told_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RESEND_S", (600.0,))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unreachable, match="no dray server answers"):
        Server(f"http://127.0.0.1:{port}", TOKEN).submit(CONFIG, pack(model))
