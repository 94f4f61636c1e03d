"""The client: where it finds the server, what it sends, and how it follows."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from dray.config.load import load_config
from dray.errors import ConfigError, ExperimentError, NoExperiment
from dray.serve import address
from dray.serve.client import Server
from dray.serve.control import Share
from dray.serve.refusals import Refused
from dray.serve.submission import prepared, reject_objects, run_on_server, submit_file
from dray.serve.verbs.on_server import OnServer
from tests.report.simulated import simulated
from tests.serve.conftest import TOKEN, Served
from tests.serve.test_api import CONFIG, model

__all__ = ["model"]


@pytest.fixture(autouse=True)
def _no_server_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (address.URL, address.TOKEN, "DRAY_STORAGE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(served: Served) -> Server:
    return Server(served.url, TOKEN)


def test_local_runs_are_not_the_latest_experiment(server: Server, served: Served) -> None:
    digits = simulated(served.results / "digits-1", 2).path
    run = served.results / "local" / "digits-mine"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text(
        f'{{"batches": 5, "time": {time.time() + 60}, "final": true, "decides": true}}\n'
    )
    assert [each["name"] for each in server.experiments()] == [digits.name, run.name]
    assert server.named("latest") == server.named("digits") == digits.name


# ------------------------------------------------------------------------------------------------------- finding it
def test_a_server_of_this_user_is_found_by_its_file(served: Served) -> None:
    assert Server.find() is None
    address.write(served.results, served.url, TOKEN)
    assert (served.results / ".server.json").stat().st_mode & 0o777 == 0o600
    found = Server.find()
    assert found is not None
    assert found.is_here
    assert found.status().results == str(served.results)
    address.remove(served.results)
    assert Server.find() is None
    assert address.token_for("127.0.0.1", served.results) == TOKEN  # browsers stay logged in


def test_a_stale_file_means_no_server(served: Served, results: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    here = socket.gethostname()
    for url, pid, machine in (
        (served.url, ended.pid, here),  # killed
        (f"http://127.0.0.1:{free}", os.getpid(), here),  # another process has its number
        (served.url, os.getpid(), "another-machine"),
    ):
        address.write(results, url, TOKEN)
        file = results / ".server.json"
        file.write_text(json.dumps({"url": url, "token": TOKEN, "pid": pid, "machine": machine}))
        assert Server.find() is None, (url, pid, machine)
    file.write_text("{")
    assert Server.find() is None


def test_a_file_that_others_can_write_or_read_is_not_believed(served: Served) -> None:
    address.write(served.results, served.url, TOKEN)
    (served.results / ".server.json").chmod(0o644)
    assert Server.find() is None
    (served.results / ".server.json").rename(served.results / "real")
    (served.results / "real").chmod(0o600)
    (served.results / ".server.json").symlink_to("real")
    assert Server.find() is None


def test_the_environment_names_a_server(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_SERVER", served.url + "/")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    for token in (TOKEN, str(tmp_path / "token")):
        monkeypatch.setenv("DRAY_SERVER_TOKEN", token)
        found = Server.find()
        assert found is not None
        assert found.status().slots == 2
        assert not found.is_here
    monkeypatch.setenv("DRAY_SERVER_TOKEN", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="DRAY_SERVER_TOKEN: can't be read"):
        Server.find()
    monkeypatch.setenv("DRAY_SERVER_TOKEN", "wrong")
    found = Server.find()
    assert found is not None
    with pytest.raises(
        Refused,
        match="refuses this process: the token is not this server's, or it was revoked; export DRAY_SERVER_TOKEN",
    ):
        found.status()
    monkeypatch.setenv("DRAY_SERVER", "trainer:8600")
    with pytest.raises(ConfigError, match="DRAY_SERVER: must be a URL such as"):
        Server.find()


def test_auto_names_the_server_of_the_results_directory(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_SERVER", "auto")
    assert Server.find() is Server.find(url="auto") is None
    address.write(served.results, served.url, TOKEN)
    for found in (Server.find(), Server.find(url="auto")):
        assert found is not None
        assert (found.url, found.is_here) == (served.url, True)


def test_the_token_of_a_server(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = address.token_for("127.0.0.1", results)
    assert len(first) > 32
    address.write(results, "http://127.0.0.1:1", first)
    assert address.token_for("localhost", results) == first  # browsers stay logged in when it restarts
    with pytest.raises(ConfigError, match="other machines can reach the server") as error:
        address.token_for("0.0.0.0", results)
    assert len(error.value.faults) == 1
    monkeypatch.setenv("DRAY_SERVER_TOKEN", "mine")
    assert address.token_for("127.0.0.1", results) == "mine"
    with pytest.raises(ConfigError, match=r"DRAY_SERVER_TOKEN: has 4 characters; at 0\.0\.0\.0"):
        address.token_for("0.0.0.0", results)
    monkeypatch.setenv("DRAY_SERVER_TOKEN", "c3" * 16)
    assert address.token_for("0.0.0.0", results) == "c3" * 16


def test_a_command_that_asks_the_server_imports_nothing_heavy() -> None:
    heavy = ("aiohttp", "pydantic", "torch", "ray", "pandas")
    code = f"import sys, dray.serve.client; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ------------------------------------------------------------------------------------------------------------- verbs
def test_an_experiment_is_submitted_and_annotated(served: Served, server: Server, model: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG + "data: {secrets: {password: correct-horse}}\n")
    submitted = server.submit(*prepared(load_config(tmp_path / "c.yaml"), model))
    assert submitted == served.control.experiment("digits-1")
    assert submitted.share == Share(priority=10, weight=2.0)
    assert "correct-horse" in (served.results / "digits-1" / "secrets.yaml").read_text()
    assert server.change("digits-1", priority=3).share == Share(priority=3, weight=2.0)
    assert server.change("digits-1", tags=["a"], notes="n").tags == ("a",)
    with pytest.raises(NoExperiment, match="digits-9 was not submitted"):
        OnServer(server, "digits-9").stop()
    with pytest.raises(NoExperiment):
        server.events("../results")


def test_places_are_made_absolute(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = load_config({**_mapping(), "checkpoint_storage": "mine"})
    assert f"container_path: {tmp_path / 'mine'}" in prepared(relative, model)[0]
    monkeypatch.setenv("DRAY_STORAGE", "s3://bucket/results")
    assert "storage_path: s3://bucket/results" in prepared(load_config(_mapping()), model)[0]
    keys = {"type": "s3", "bucket": "b", "access_key": "AKIAACCESS", "secret_key": "SECRETKEY"}
    config = prepared(load_config({**_mapping(), "checkpoint_storage": keys}), model)[0]
    assert "secret_key: SECRETKEY" in config


def test_a_file_of_prices_is_read_here(
    served: Served, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prices.yaml").write_text("A100: 2.9\n")
    (tmp_path / "digits.yaml").write_text(yaml.safe_dump({**_mapping(), "prices": "prices.yaml"}))
    sent, _ = submit_file(Server(served.url, TOKEN), tmp_path / "digits.yaml", [], model)
    assert "A100: 2.9" in (served.results / sent.name / "experiment.yaml").read_text()


def test_faults_of_the_code_are_found_before_anything_is_sent(model: Path) -> None:
    config = load_config(_mapping())
    (model / "model_def.py").write_text("class DigitsTrial(:\n")
    with pytest.raises(ConfigError, match="model_def"):
        prepared(config, model)
    (model / "model_def.py").unlink()
    with pytest.raises(ConfigError, match="no module model_def"):
        prepared(config, model)


def test_what_only_this_process_has_is_refused() -> None:
    reject_objects(trial=None, method=None)
    with pytest.raises(ConfigError, match="trial: can't be sent to a server"):
        reject_objects(trial=object, method=None)


def _mapping() -> dict[str, object]:
    return {
        "name": "digits",
        "entrypoint": "model_def:DigitsTrial",
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 4}},
    }


# --------------------------------------------------------------------------------------------------------- following
def test_all_events_are_followed_to_the_end(served: Served, server: Server) -> None:
    directory = simulated(served.results / "digits-1", 4)
    lines = directory.journal.read_text().splitlines(keepends=True)
    directory.journal.write_text("".join(lines[:3]))
    served.control.put("digits-1", "RUNNING")

    def train() -> None:
        for line in lines[3:]:
            with directory.journal.open("a") as file:
                file.write(line)
            time.sleep(0.01)
        served.control.put("digits-1", "COMPLETED")

    driver = threading.Thread(target=train)
    driver.start()
    followed = list(server.follow("digits-1"))
    driver.join()
    served.control.put("digits-1", "COMPLETED")
    assert followed == server.events("digits-1")["lines"]
    assert "search done" in followed[-1]


def test_a_follower_waits_for_a_server_that_restarts(
    served: Served, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated(results / "digits-1", 2)
    served.control.put("digits-1", "COMPLETED")
    monkeypatch.setattr("dray.serve.client.RETRY_S", 0.01)
    gone, said = Server("http://127.0.0.1:9", "old"), list[str]()
    back = threading.Timer(0.2, lambda: address.write(results, served.url, TOKEN))
    back.start()
    assert list(gone.follow("digits-1", say=said.append))
    assert [line.partition(";")[0] for line in said] == ["the server does not answer", "the server is back"]


def test_a_program_gets_the_result(served: Served, model: Path) -> None:
    address.write(served.results, served.url, TOKEN)
    server = Server.find()
    assert server is not None
    begun: list[str] = []

    def done(name: str) -> None:
        begun.append(name)
        simulated(served.results / "other", 2).journal.rename(served.results / name / "journal.jsonl")
        served.control.put(name, "COMPLETED")

    lines: list[str] = []
    result = run_on_server(server, load_config(_mapping()), model, say=lines.append, begun=done)
    assert result.path == served.results / "digits-1"
    assert begun == ["digits-1"]
    assert lines
    for state, error, why in (
        ("ERROR", "the disk is full", "digits-1 failed: the disk is full"),
        ("ERROR", "", "digits-1 failed: every trial did; see: dray experiment logs digits-1"),
        ("PAUSED", "", "digits-1 is PAUSED; continue it with: dray experiment resume digits-1"),
    ):
        served.control.put("digits-1", state, error=error)
        found = OnServer(server, "digits-1")
        assert found.read().why_failed(found.typed) == why

    def completed(name: str) -> None:
        served.control.put(name, "COMPLETED")

    with pytest.raises(ExperimentError, match="its results are with the server, in /"):
        run_on_server(Server(served.url, TOKEN), load_config(_mapping()), model, say=lines.append, begun=completed)
