"""``dray ui``: what TensorBoard and optuna-dashboard serve of an experiment, asked as a browser asks."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dray.errors import ExperimentError
from dray.serve.boards import free_port, serve, start_dashboard
from dray.training.metrics.event_file import EventFile, hparams, scalars
from searchers.events import Started
from tests.records.test_result import Story, config, told

pytestmark = pytest.mark.filterwarnings("ignore")


def served(path: Path) -> dict[str, str]:
    """The addresses that are printed, by name; Ctrl-C comes when all are."""
    lines: dict[str, str] = {}

    def say(line: str) -> None:
        name, *_, last = line.split()
        lines[name] = last
        if name == "press":
            raise KeyboardInterrupt

    serve(path, port=free_port(17006), say=say)
    return lines


def got(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.loads(answer.read())


def study(address: str) -> dict[str, Any]:
    """What optuna-dashboard's page asks for."""
    base, _, number = address.partition("/dashboard/studies/")
    found: dict[str, Any] = got(f"{base}/api/studies/{number}?after=0")
    return found


def trials_of(board: str) -> dict[int, dict[str, float]]:
    """By trial, what TensorBoard's page of hyperparameters asks for."""
    asked = {"allowedStatuses": ["STATUS_UNKNOWN"], "colParams": [], "startIndex": 0, "sliceSize": 100}
    url, head = f"{board}data/plugin/hparams/session_groups", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode(), head), timeout=60) as answer:
        groups = json.loads(answer.read())["sessionGroups"]
    return {int(group["name"].partition("/")[0].removeprefix("trial_")): group["hparams"] for group in groups}


def scalars_of(path: Path, trial: int, *values: float) -> None:
    file = EventFile(path / f"trial_{trial}" / "tensorboard")
    file.write([hparams(time.time(), {"lr": trial / 10, "net.depth": 2})])
    file.write([scalars(time.time(), step, {"Determined/validation_loss": value}) for step, value in enumerate(values)])
    file.close()


@pytest.mark.slow
def test_both_show_an_experiment(tmp_path: Path) -> None:
    story = told(tmp_path, config())
    story.journal.close()  # no run has it
    scalars_of(story.directory.path, 0, 0.5, 0.25)
    scalars_of(story.directory.path, 3, 0.375)
    addresses = served(story.directory.path)
    board = addresses["TensorBoard"]
    assert board.startswith("http://localhost:")
    runs: list[str] = []
    while len(runs) < 2:  # it reads the files in a thread
        runs = got(f"{board}data/runs")
    assert sorted(runs) == ["trial_0/tensorboard", "trial_3/tensorboard"]
    trials: dict[int, dict[str, float]] = {}
    while len(trials) < 2:  # a run may be listed before its hyperparameters are read
        with suppress(urllib.error.HTTPError):
            trials = trials_of(board)
    assert trials == {0: {"lr": 0.0, "net.depth": 2}, 3: {"lr": 0.3, "net.depth": 2}}
    shown = study(addresses["optuna-dashboard"])
    assert [trial["state"] for trial in shown["trials"]] == ["Complete", "Fail", "Fail", "Running", "Waiting"]
    assert [each["value"] for each in shown["trials"][0]["intermediate_values"]] == [0.25, 0.5]
    assert shown["trials"][0]["values"] == [0.25]


@pytest.mark.slow
def test_the_dashboard_follows_a_run_from_before_its_first_trial(tmp_path: Path) -> None:
    story = Story(tmp_path / "experiment", config())  # holds the journal, as a run does
    address = start_dashboard(story.directory.path, free_port(17106))
    assert {trial["state"] for trial in study(address)["trials"]} == {"Waiting"}
    story.happen(Started(trial=0))
    story.validate(0, 10, 0.25)
    deadline = time.monotonic() + 60
    while (trial := study(address)["trials"][0])["state"] != "Running" and time.monotonic() < deadline:
        pass  # it reads twice a second
    assert [each["value"] for each in trial["intermediate_values"]] == [0.25]


def test_a_port_in_use_is_skipped() -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port(port) > port


def test_ports_run_out_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "bind", lambda *_: (_ for _ in ()).throw(OSError("in use")))
    with pytest.raises(ExperimentError, match="no port is free from 6006 to 6105; give another with --port"):
        free_port(6006)
