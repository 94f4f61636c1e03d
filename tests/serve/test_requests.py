"""Requests to searches through the server: its API, its client, and the commands that use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dray.errors import Invalid
from dray.experiment import request_files as files
from dray.records.numbering import take_number
from dray.serve import address, api, experiments
from dray.serve import requests as serve_requests
from dray.serve.client import Server
from dray.serve.verbs import on_server
from dray.serve.verbs.on_server import OnServer
from tests.cli.conftest import dray
from tests.cli.said import Said
from tests.experiment.test_requests import answering
from tests.records.test_result import Story, config, told
from tests.serve.conftest import TOKEN, Served

__all__ = ["dray"]

ONE = "/experiments/experiment"
NEW = {"trial": 5, "source": {"trial": 3, "step": 10, "batches": 10}, "hparams": {}}


@pytest.fixture
def story(served: Served) -> Story:
    """An experiment on the server; trial 3 runs, with a checkpoint at batch 10, where it was validated."""
    found = told(served.results, config())
    served.control.put("experiment", "RUNNING")
    return found


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/trials/3/fork", {"lr": 0.1}, 400, "lr is not expected; give at, hparams"),
        ("/trials", {"hparams": [1]}, 400, "hparams must be a JSON object, got [1]"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    path: str, body: dict[str, object], status: int, says: str, served: Served, story: Story
) -> None:
    with answering(story):
        reply = served.api("POST", f"{ONE}{path}", body)
    assert (reply.status, says in reply.json["error"]) == (status, True), reply.body


def test_a_trial_is_stopped_while_the_code_of_others_is_imported(
    served: Served, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports, stopped = threading.Semaphore(0), threading.Event()

    def hang(*given: object, **options: object) -> None:
        imports.release()
        stopped.wait(60)
        raise Invalid("importing it takes too long")

    monkeypatch.setattr(serve_requests, "outside", hang)
    with ThreadPoolExecutor(api.SUBMITTERS) as pool, answering(story):
        body = {"patch": "--- a/x.py"}
        added = [pool.submit(served.api, "POST", f"{ONE}/trials", body) for _ in range(api.SUBMITTERS)]
        for _ in added:
            assert imports.acquire(timeout=60)
        assert served.api("POST", f"{ONE}/trials/3/stop").json == {"trial": 3}
        assert not any(each.done() for each in added)
        stopped.set()
        assert {each.result().status for each in added} == {400}


def test_requests_need_the_token_and_a_submitted_experiment(served: Served, story: Story) -> None:
    for path in ("/trials", "/trials/3/fork", "/trials/3/stop"):
        assert served.send("POST", f"/api/v1{ONE}{path}", {}, headers={}).status == 401
    told(served.results / "mine", config()).directory.path.rename(served.results / "other")
    assert served.api("POST", "/experiments/other/trials").status == 404
    assert not files.RequestFiles(story.directory).waiting()
    assert not (served.results / "other" / files.DIRECTORY).exists()


@pytest.mark.parametrize("state", ["COMPLETED", "ERROR", "STOPPED"])
def test_an_experiment_that_has_ended_goes_on(state: str, served: Served, story: Story) -> None:
    served.control.put("experiment", state)  # type: ignore[arg-type]
    with answering(story, once=lambda: served.control.experiment("experiment").state == "QUEUED"):
        assert served.api("POST", f"{ONE}/trials/3/fork").json == NEW
    assert served.control.calls == [("activate", "experiment")]


def test_an_experiment_that_a_person_has_paused_stays_paused(served: Served, story: Story) -> None:
    served.control.put("experiment", "PAUSED")
    assert served.api("POST", f"{ONE}/trials/3/fork").json == {"trial": None}
    assert not served.control.calls
    assert len(files.RequestFiles(story.directory).waiting()) == 1


def test_an_experiment_that_ends_before_it_sees_a_request_goes_on(served: Served, story: Story) -> None:
    def ends() -> bool:
        if not served.control.calls:
            served.control.put("experiment", "COMPLETED")
            return False
        return True

    with answering(story, once=ends):
        assert served.api("POST", f"{ONE}/trials").json == {"trial": 5, "hparams": {}}
    assert ("activate", "experiment") in served.control.calls


def test_stopping_a_trial_does_not_run_an_experiment(served: Served, story: Story) -> None:
    served.control.put("experiment", "PAUSED")
    assert served.api("POST", f"{ONE}/trials/3/stop").json == {"trial": None}
    assert not served.control.calls
    assert [each.trial for each in files.RequestFiles(story.directory).waiting()] == [3]


@pytest.fixture
def up(served: Served, story: Story) -> Iterator[Served]:
    """A server on this machine that commands find; the experiment has the number 1."""
    address.write(served.results, served.url, TOKEN)
    take_number(story.directory.path)
    yield served
    address.remove(served.results)


TRAIN = "lr = 0.1\nprint(lr)\n"
PATCH = "--- a/train.py\n+++ b/train.py\n@@ -1,2 +1,2 @@\n-lr = 0.1\n+lr = 0.2\n print(lr)\n"


@pytest.fixture
def program(story: Story) -> Story:
    """The experiment's trials run a program, of which it has a copy."""
    story.directory.code.mkdir()
    (story.directory.code / "train.py").write_text(TRAIN)
    file = story.directory.config_file
    file.write_text(f"entrypoint: python3 train.py\n{file.read_text()}")
    return story


def test_a_trial_has_code_of_its_own(
    up: Served, program: Story, dray: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "VIEW_S", 0.0)  # the list is not that of a moment ago
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.py").write_text(TRAIN.replace("0.1", "0.3"))
    client = OnServer(Server(up.url, TOKEN), "experiment")
    with answering(program):
        reply = up.api("POST", f"{ONE}/trials", {"hparams": {"lr": 0.15}, "patch": PATCH})
        code = reply.json["code"]
        assert reply.json == {"trial": 5, "hparams": {"lr": 0.15}, "code": code}
        second = client.add_trial({}, code=other)
        assert second["trial"] == 6
        (tmp_path / "change.diff").write_text(PATCH)
        said = dray("trial", "add", "1", "--patch", tmp_path / "change.diff")
        assert said == Said(code=0, out=f"trial 7, code {code}\n", err="")
        assert dray("trial", "add", "1", "--code", other).out == f"trial 8, code {second['code']}\n"
    assert [program.search.code_of(trial) for trial in (0, 5, 6, 7, 8)] == [None, *(code, second["code"]) * 2]
    assert up.api("GET", f"{ONE}/trials/5").json["code"] == code
    found = up.api("GET", f"{ONE}/trials?search=code={code}&sort=code").json["trials"]
    assert [row["trial"] for row in found] == [5, 7]
    variant = up.api("GET", f"{ONE}/variants/{code}").json
    assert (variant["more"], variant["diff"][-47:]) == (0, "@@ -1,2 +1,2 @@\n-lr = 0.1\n+lr = 0.2\n print(lr)\n")
    for name in ("000000000000", "..%2f..", code.upper()):
        assert up.api("GET", f"{ONE}/variants/{name}").status == 404


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"patch": 3}, "patch must be text, got 3"),
        ({"patch": ""}, "the patch changes no file"),
        ({"patch": PATCH.replace("train", "../train")}, "'../train.py', which is outside of the code's directory"),
        ({"patch": PATCH.replace("0.2", "(")}, "the variant's train.py can't be parsed"),
        ({"patch": PATCH, "hparams": {"rate": 1}}, "rate: is not a hyperparameter of the space"),
        ({"code": "x"}, "code is not expected; give hparams, patch"),
    ],
)
def test_code_that_can_not_be_used_is_refused(
    body: dict[str, object], says: str, served: Served, program: Story
) -> None:
    reply = served.api("POST", f"{ONE}/trials", body)
    assert (reply.status, says in reply.json["error"]) == (400, True), reply.body
    assert not files.RequestFiles(program.directory).waiting()


def test_a_form_has_the_trial_and_its_code(
    served: Served, program: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = OnServer(Server(served.url, TOKEN), "experiment")
    (tmp_path / "empty").mkdir()
    for patch, says in (
        (None, "no script train.py in the variant's code"),
        (PATCH, "give a patch or a directory of code, not both"),
    ):
        with pytest.raises(Invalid, match=says):
            client.add_trial({}, code=tmp_path / "empty", patch=patch)
    monkeypatch.setattr(on_server, "pack", lambda code: b"no archive")
    with pytest.raises(Invalid, match="the code can't be unpacked"):
        client.add_trial({}, code=tmp_path / "empty")
    assert not files.RequestFiles(program.directory).waiting()
