"""``dray ui``: what TensorBoard and optuna-dashboard serve of an experiment, asked as a browser asks."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dray.errors import ExperimentError
from dray.report.ui import free_port
from dray.training.metrics.event_file import EventFile, hparams, scalars
from searchers.events import Started
from tests.records.test_result import Story, config, told

ROOT = Path(__file__).parents[2]
SERVE = "import sys; from pathlib import Path; from dray.report.ui import serve; " + (
    "serve(Path(sys.argv[1]), port=int(sys.argv[2]), say=lambda text: print(text, flush=True))"
)


class Served:
    """A process that serves an experiment, and the lines that it says."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-c", SERVE, str(path), str(free_port(17006))]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def address(self, of: str) -> str:
        """From the line that tells it; others are passed over."""
        while True:
            name, *_, last = self._lines.get(timeout=120).split()
            if name == of and last.startswith("http"):
                return last


@contextmanager
def served(path: Path) -> Iterator[Served]:
    it = Served(path)
    try:
        yield it
    finally:
        it.process.kill()
        it.process.wait()


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
def test_both_show_an_experiment_and_ctrl_c_ends_both(tmp_path: Path) -> None:
    story = told(tmp_path, config())
    story.journal.close()  # no run has it
    scalars_of(story.directory.path, 0, 0.5, 0.25)
    scalars_of(story.directory.path, 3, 0.375)
    with served(story.directory.path) as it:
        board, dashboard = it.address("TensorBoard"), it.address("optuna-dashboard")
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
        shown = study(dashboard)
        assert [trial["state"] for trial in shown["trials"]] == ["Complete", "Fail", "Fail", "Running", "Waiting"]
        assert [each["value"] for each in shown["trials"][0]["intermediate_values"]] == [0.25, 0.5]
        assert shown["trials"][0]["values"] == [0.25]
        it.process.send_signal(signal.SIGINT)
        assert it.process.wait(60) == 0
        with pytest.raises(urllib.error.URLError):
            got(f"{board}data/runs")


@pytest.mark.slow
def test_the_dashboard_follows_a_run_from_before_its_first_trial(tmp_path: Path) -> None:
    story = Story(tmp_path / "experiment", config())  # holds the journal, as a run does
    with served(story.directory.path) as it:
        address = it.address("optuna-dashboard")
        assert {trial["state"] for trial in study(address)["trials"]} == {"Waiting"}
        story.happen(Started(trial=0))
        story.validate(0, 10, 0.25)
        [trial, *_] = study(address)["trials"]
        assert (trial["state"], [each["value"] for each in trial["intermediate_values"]]) == ("Running", [0.25])


def test_a_port_in_use_is_skipped() -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port(port) > port


def test_ports_run_out_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "bind", lambda *_: (_ for _ in ()).throw(OSError("in use")))
    with pytest.raises(ExperimentError, match="no port is free from 6006 to 6105; give another with --port"):
        free_port(6006)
