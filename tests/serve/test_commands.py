"""The commands with a server, and what they say when none is up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from dray.records.numbering import take_number
from dray.serve import address
from dray.serve.client import Server
from dray.serve.control import Share
from tests.cli.conftest import dray
from tests.cli.said import Said
from tests.report.simulated import simulated
from tests.serve.conftest import TOKEN, Served
from tests.serve.test_api import CONFIG, model

__all__ = ["dray", "model"]

Dray = Callable[..., Said]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (address.URL, address.TOKEN, "DRAY_STORAGE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def digits(up: Served) -> Served:
    """One with an experiment, number 1, ``digits-1``, which has all its events."""
    take_number(simulated(up.results / "digits-1", 4).path)
    up.control.put("digits-1", "RUNNING")
    return up


@pytest.fixture
def config(model: Path) -> Path:
    file = model / "digits.yaml"
    file.write_text(CONFIG)
    return file


def soon(act: Callable[[], object], once: Callable[[], bool] = lambda: True) -> None:
    """Do it in half a second, or as soon after that as a command has come so far."""

    def wait() -> None:
        while not once():
            time.sleep(0.02)
        act()

    timer = threading.Timer(0.5, wait)
    timer.daemon = True
    timer.start()


def is_queued(up: Served) -> bool:
    return [each.state for each in up.control.experiments() if each.name == "digits-1"] == ["QUEUED"]


# ------------------------------------------------------------------------------------------------------------- create
def test_detached_prints_only_the_name(up: Served, config: Path, dray: Dray) -> None:
    said = dray("e", "create", config, "--detach", "--config", "resources.priority=3")
    assert (said.code, said.out, said.err) == (0, "digits-1\n", "")
    assert up.control.experiment("digits-1").share == Share(priority=3, weight=2.0)
    take_number(up.results / "digits-1")
    assert (up.results / "digits-1" / "code" / "parts" / "layer.py").exists()
    for command in (("create", config), ("fork", "digits-1")):
        said = dray("e", *command, "--detach", "--json")
        answer = up.control.experiment(said.value["name"])
        assert said.value == {"number": None, **json.loads(json.dumps(asdict(answer)))}
        assert said.out.count("\n") == 1


def test_a_submission_shows_the_space_and_warns_once(
    up: Served, config: Path, dray: Dray, caplog: pytest.LogCaptureFixture
) -> None:
    rates = "{type: log, base: 10, minval: 0.0001, maxval: 0.1}"
    said = dray("e", "create", config, "--detach", "--config", f"hyperparameters.lr={rates}")
    assert (said.code, said.out) == (0, "digits-1\n")
    assert "searching lr: 1.00023 to 1.25893, log\n" in said.err
    [message] = [each for each in caplog.messages if "may not mean" in each and str(config) in each]
    assert "for 0.0001 to 0.1 write {type: log, base: 10, minval: -4, maxval: -1}" in message


@pytest.mark.parametrize("as_json", [False, True])
def test_an_experiment_is_followed_to_its_end(up: Served, config: Path, dray: Dray, as_json: bool) -> None:
    def train() -> None:
        simulated(up.results / "digits-1", 2)
        time.sleep(0.5)
        up.control.put("digits-1", "COMPLETED")

    soon(train, once=lambda: is_queued(up))
    said = dray("e", "create", config, "-f", *["--json"] * as_json)
    assert said.code == 0, said.err
    followed = said.err if as_json else said.out
    assert "trial 0 started: " in followed
    assert "Results: " in followed.splitlines()[-1]
    if as_json:
        assert said.value["name"] == "digits-1"
    else:
        assert said.out.startswith(f"digits-1, submitted to {up.url}\n")


def test_faults_are_reported_as_without_a_server(up: Served, config: Path, dray: Dray) -> None:
    for old, new in (("batches: 4", "batchs: 4"), ("priority: 10", "priority: 0"), ("name: digits", "name: 'dig")):
        config.write_text(CONFIG.replace(old, new))
        said = dray("e", "create", config)
        assert (said.code, said.out) == (2, "")
        assert said == dray("e", "create", config, "--no-server")
    config.write_text(CONFIG.replace("model_def:", "model_deff:"))
    assert dray("e", "create", config).err == (
        f"dray: {config} has 1 error:\n"
        "  entrypoint: no module model_deff in the model directory; did you mean model_def?\n"
    )
    assert "no such directory: nowhere" in dray("e", "create", config, "nowhere").err
    assert "no such file" in dray("e", "create", "none.yaml", ".").err
    assert up.control.experiments() == []


@pytest.mark.parametrize("way", [["--no-server"], ["--path", "here"], ["--storage-path", "here"]])
def test_ways_around_the_server(
    up: Served, config: Path, dray: Dray, way: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dray as package

    made: list[object] = []

    def experiment(*_: object, **given: object) -> object:
        made.append(given)
        assert "DRAY_SERVER" not in os.environ  # `Experiment` would submit it
        raise KeyboardInterrupt("SIGINT")

    monkeypatch.setitem(vars(package), "Experiment", SimpleNamespace(of_command=experiment))
    monkeypatch.setenv("DRAY_SERVER", up.url)
    assert dray("e", "create", config, *way).code == 130
    assert len(made) == 1
    assert up.control.experiments() == []


def test_detach_needs_a_server(results: Path, config: Path, dray: Dray) -> None:
    said = dray("e", "create", config, "--detach").is_one_line()
    assert said == "dray: --detach needs a server, and none is up; start one with: dray serve\n"
    for option, *value in (["--storage-path", "s3://bucket/results"], ["--path", "here"], ["--no-server"], ["--local"]):
        said = dray("e", "create", config, "--detach", option, *value).is_one_line()
        assert said.startswith(f"dray: --detach submits to a server, but {option} runs the experiment in this process")
    assert "only one of --detach and --follow" in dray("e", "create", config, "-d", "-f").is_one_line()


def test_what_was_not_submitted_to_the_server_can_not_be_detached(up: Served, results: Path, dray: Dray) -> None:
    simulated(results / "mine-1", 2)
    for command in (("resume",), ("extend", "--max-trials", 9)):
        said = dray("e", command[0], "mine", *command[1:], "--detach").is_one_line()
        assert said == f"dray: mine was not submitted to the server at {up.url}, so it runs here: leave out --detach\n"
    said = dray("e", "fork", "mine", "--no-server", "--detach").is_one_line()
    assert said.startswith("dray: --detach submits to a server, but --no-server runs the experiment in this process")


def test_ctrl_c_during_a_submission_says_that_the_server_may_have_it(
    up: Served, config: Path, dray: Dray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "submit", interrupted)
    ended = dray("e", "create", config)
    assert (ended.code, ended.err.splitlines()) == (
        130,
        ["dray: the server may have the experiment already; see: dray experiment list", "dray: stopped by Ctrl-C"],
    )


@pytest.mark.slow
def test_ctrl_c_leaves_the_experiment_running(digits: Served) -> None:
    command = [sys.executable, "-m", "dray.cli", "experiment", "logs", "1", "-f"]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    with follower:
        assert follower.stdout is not None
        assert "started" in follower.stdout.readline()
        follower.send_signal(signal.SIGINT)
        err = follower.communicate(timeout=60)[1]
    assert follower.returncode == 130
    assert "digits-1 continues on the server; follow it again with: dray experiment logs 1 -f" in err
    assert "stop it with: dray experiment stop 1" in err
    assert digits.control.calls == []


# -------------------------------------------------------------------------------------------------------------- verbs
def test_its_share_is_set(digits: Served, dray: Dray) -> None:
    assert dray("e", "set", "priority", "1", "7").err == "digits-1: priority 7, weight 1, no limit of slots\n"
    assert dray("e", "set", "weight", "1", "0.5").code == 0
    assert dray("e", "set", "max-slots", "1", "3").err == "digits-1: priority 7, weight 0.5, at most 3 slots\n"
    assert dray("e", "set", "max-slots", "1", "none").err.endswith("no limit of slots\n")
    for arguments in (("priority", "1", "0"), ("weight", "1", "nan"), ("weight", "1", "0"), ("max-slots", "1", "0")):
        assert dray("e", "set", *arguments).code == 2
    assert digits.control.experiment("digits-1").share == Share(priority=7, weight=0.5)


# --------------------------------------------------------------------------------------------------------- who is up
def test_the_list_has_the_servers_states_and_slots(digits: Served, dray: Dray) -> None:
    simulated(digits.results / "mine-1", 4)
    digits.control.put("digits-1", "QUEUED", slots=1.5)
    head, *rows = dray("ls").out.splitlines()
    assert head.split() == ["#", "name", "state", "slots", "trials", "method", "best", "metric", "started"]
    by_name = {row.split()[1]: row.split() for row in rows}
    assert by_name["digits-1"][2:4] == ["QUEUED", "1.5"]
    assert by_name["mine-1"][2:4] == ["COMPLETED", "-"]
    listed = {each["name"]: each for each in dray("ls", "--json").value}
    assert listed["digits-1"]["submitted"]["share"]["priority"] == 42
    assert (listed["digits-1"]["state"], listed["mine-1"]["submitted"]) == ("QUEUED", None)


def test_a_server_elsewhere_is_named_in_the_environment(
    digits: Served, dray: Dray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("DRAY_SERVER", digits.url)
    monkeypatch.setenv("DRAY_SERVER_TOKEN", TOKEN)
    assert "digits-1" in dray("ls").out
    # The server, in this process, sees no numbers here: digits must not be taken for a part of a name.
    assert "'1' is no experiment" in dray("e", "pause", "1").is_one_line()
    assert dray("e", "pause", "digits").code == 0
    assert dray("e", "activate", "digits").code == 0
    assert "is no experiment on the server" in dray("e", "pause", "nothing").is_one_line()
    soon(lambda: digits.control.put("digits-1", "COMPLETED"))
    assert dray("e", "wait", "latest").code == 0
    monkeypatch.setenv("DRAY_SERVER", "http://127.0.0.1:9")
    said = dray("e", "pause", "1")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "no dray server answers at http://127.0.0.1:9" in said.err


# -------------------------------------------------------------------------------------------------------- dray serve
def test_the_status_is_printed(digits: Served, dray: Dray) -> None:
    out = dray("serve", "--status").out
    assert f"{digits.url}/login?token={TOKEN}" in out
    assert "1 of 2 busy" in out
    assert "digits-1  RUNNING" in out
    value = dray("serve", "--status", "--json").value
    assert [each["name"] for each in value["queue"]] == ["digits-1"]
    assert value["slots"] == 2
    address.remove(digits.results)
    assert dray("serve", "--status").is_one_line() == "dray: no server is up; start one with: dray serve\n"


def test_a_server_for_other_machines_needs_a_token(results: Path, dray: Dray) -> None:
    said = dray("serve", "--host", "0.0.0.0")
    assert said.code == 2
    assert said.err.startswith(
        "dray: The environment has 1 error:\n  DRAY_SERVER_TOKEN: missing: at 0.0.0.0, other mac"
    )
    assert list(results.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "says"),
    [("", "starting Ray on this machine"), ("head:6379", "connecting to the Ray cluster at head:6379")],
)
def test_a_server_says_what_it_waits_for_before_it_is_up(
    results: Path, dray: Dray, monkeypatch: pytest.MonkeyPatch, address: str, says: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("dray.serve.server.serve", lambda *, say, **given: say("up"))
    assert dray("serve").out == f"{says} ...\nup\n"


def test_a_second_server_does_not_start(digits: Served, dray: Dray) -> None:
    assert f"a server is up already, at {digits.url}" in dray("serve").is_one_line()


def test_the_list_and_the_description_agree_and_old_failures_are_not_repeated(digits: Served, dray: Dray) -> None:
    digits.control.put("digits-1", "ERROR", error="no such metric")
    said = dray("e", "list")
    assert (said.err, "ERROR" in said.out) == ("", True)
    described = dray("e", "describe", "1").out
    assert "ERROR" in described
    assert "no such metric" in described
    digits.control.put("digits-1", "RESTARTING", error="killed by signal 9")
    assert dray("e", "list").err == "digits-1: killed by signal 9\n"
    assert dray("e", "describe", "1", "--json").value["state"] == "RESTARTING"
    digits.control.put("digits-1", "COMPLETED", error="")
    assert dray("e", "list", "--json").value[0]["state"] == dray("e", "describe", "1", "--json").value["state"]


def test_tags_and_notes_are_set(digits: Served, dray: Dray) -> None:
    assert dray("e", "set", "tags", "1", "baseline", "paper").err == "digits-1: 2 tags: baseline, paper\n"
    assert dray("e", "set", "notes", "1", "the first").err == "digits-1: notes set\n"
    kept = digits.control.experiment("digits-1")
    assert (kept.tags, kept.notes) == (("baseline", "paper"), "the first")
    assert dray("e", "set", "tags", "1").err == "digits-1: 0 tags\n"
    assert digits.control.experiment("digits-1").tags == ()
