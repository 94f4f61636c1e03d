"""Trials in sandboxes: what they can't reach, and how they end; the worker's driver and desk are fakes here."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dray.cluster import bubblewrap
from dray.code.factory import FromDirectory
from dray.config.entrypoint import parse_entrypoint
from dray.config.load import load_config
from dray.leases.messages import Departure, DeskReport
from dray.training.units import Batch
from dray.worker.lease import TrialLease
from dray.worker.ranks import Place
from dray.worker.sandbox import run_in_sandbox
from tests.bugs import CLASS, PROGRAM, RAISES, check_error, model_dir
from tests.ray.harness import printed, recorded
from tests.ray.trials import escaping
from tests.workers import SETTINGS, connected, experiment_spec, lease_in

pytestmark = [pytest.mark.slow]

NO_SANDBOX = bubblewrap.why_impossible()
needs_bubblewrap = pytest.mark.skipif(bool(NO_SANDBOX), reason=f"this machine {NO_SANDBOX}")
NOT_ISOLATED = f"""#!{sys.executable} -IS
# Runs what bubblewrap would run, without any isolation.
import os, sys
os.close(int(sys.argv[2]))
program = sys.argv[sys.argv.index("--") + 1 :]
os.execvp(program[0], program)
"""


class Desk:
    """Lets trials train to their end; keeps what they report."""

    def __init__(self) -> None:
        self.reports: list[DeskReport] = []

    def report(self, lease: int, report: DeskReport, decides: bool) -> str:
        self.reports.append(report)
        return "continue"

    def may_commit(self, lease: int) -> bool:
        return True

    def improves(self, lease: int, score: float) -> bool:
        return True

    def stop_wanted(self, lease: int) -> bool:
        return False

    def saved(self, *_: object) -> None:
        """Nothing."""

    def broken(self, client: str, group: str, why: Any) -> None:
        self.why = why

    def value(self, name: str) -> float:
        """The latest value of a validation metric."""
        rows = [row for report in self.reports for row in report.rows if row["kind"] == "validation"]
        [*_, last] = [row["value"] for row in rows if row["name"] == name]
        return float(last)


@pytest.fixture(autouse=True)
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bubblewrap can't be used, trials run in a process of their own all the same."""
    if NO_SANDBOX:
        tool = tmp_path / "bin" / bubblewrap.TOOL
        tool.parent.mkdir()
        tool.write_text(NOT_ISOLATED)
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")


def left(lease: TrialLease, code: Path, entrypoint: str, desk: Desk, **settings: Any) -> Departure:
    """How a trial leaves its sandbox."""
    load = FromDirectory(entrypoint=parse_entrypoint(entrypoint), directory=str(code))
    experiment = experiment_spec(replace(SETTINGS, is_sandboxed=True, **settings), load_trial=load)
    connection = connected(desk)
    return run_in_sandbox("group-0", code, lease, connection, connection, experiment, Place("node-7", "10.0.0.7"))


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What there is besides a trial, for `escaping`."""
    home, results = tmp_path / "home", tmp_path / "results"
    experiment = results / "experiment"
    for file in ("home/.ssh/id_rsa", "results/.server.json", "results/other/secrets.yaml"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("secret")
    for file in ("secrets.yaml", "trial_7/state", "trial_0/logs/rank_0.log"):
        (experiment / file).parent.mkdir(parents=True, exist_ok=True)
        (experiment / file).write_text("")
    for folder in ("code", "trial_8"):
        (experiment / folder).mkdir()
    (experiment / "trial_8/checkpoint_5").symlink_to(home / ".ssh")
    shutil.copy(escaping.__file__, experiment / "code")
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        number = port.getsockname()[1]
        named.bind(str(home / "socket"))
        abstract.bind(f"\0dray-test-{number}")
        for each in (named, abstract):
            each.listen()
        places = {"home": str(home), "results": str(results), "experiment": str(experiment)}
        yield {**places, "port": number, "pid": os.getpid()}


@needs_bubblewrap
def test_nothing_outside_can_be_reached_and_no_process_stays(
    outside: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_WORKER", "x")
    every = set(escaping.attempts(outside)) - ({"set a setting of the machine"} if os.getuid() else set())
    assert set(escaping.succeeded(outside)) == every, "without a sandbox, all of them succeed"

    experiment, desk = Path(outside["experiment"]), Desk()
    own = experiment / "trial_0"
    source = str(experiment / "trial_8/checkpoint_5")
    lease = lease_in(own, trial_id=0, hparams=outside, source=source)
    departure = left(lease, experiment / "code", "python3 escaping.py", desk, metric="escapes", is_single=True)
    assert departure == Departure(outcome="completed"), printed(experiment, 0)
    assert json.loads(printed(experiment, 0)[-1])["succeeded"] == []
    assert desk.value("escapes") == 0
    with (own / "alive").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not (own / "checkpoint_9").is_symlink()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("bugs"))


def ended(bug: str, entrypoint: str, model: Path, directory: Path, **settings: Any) -> tuple[Departure, Desk]:
    own = directory / "experiment" / "trial_0"
    config = load_config(recorded(own / "record", trials=1, batches=8, entrypoint=entrypoint))
    hparams = {"global_batch_size": 8, "lr": 0.1, "record": str(own / "record"), "pause_s": 0, "bug": bug}
    usual = {"config": config.to_dict(), "metric": "error", "max_length": Batch(8), "rungs": (Batch(8),)}
    desk = Desk()
    return left(lease_in(own, trial_id=0, hparams=hparams), model, entrypoint, desk, **usual, **settings), desk


def test_an_exception_is_reported_with_the_users_line(model: Path, tmp_path: Path) -> None:
    departure, _ = ended("batch: exception", CLASS, model, tmp_path)
    assert departure.outcome == "errored"
    check_error("batch: exception", departure.error, RAISES)


@pytest.mark.long
def test_a_crash_is_reported_with_its_line_and_the_end_of_the_log(model: Path, tmp_path: Path) -> None:
    departure, _ = ended("batch: segfault", PROGRAM, model, tmp_path)
    assert departure.failure is not None
    assert departure.failure.kind == "died"
    check_error("segfault", departure.error, ["the sandbox of trial 0 died: Segmentation fault", "  bugs.py:", ""])
    assert "the last lines of its log" in departure.error


@pytest.mark.long
def test_an_exit_without_an_exception_is_reported_with_its_code(model: Path, tmp_path: Path) -> None:
    departure, _ = ended("batch: end", CLASS, model, tmp_path)
    assert departure.error.splitlines()[0] == "the sandbox of trial 0 died: exited with code 5"
    assert departure.error.endswith("    | just before its end")


@pytest.mark.parametrize(
    ("bug", "entrypoint"), [("batch: sleep", CLASS), pytest.param("none", "endless:Trial", marks=pytest.mark.long)]
)
def test_a_trial_that_hangs_is_ended_also_while_its_code_is_imported(
    bug: str, entrypoint: str, model: Path, tmp_path: Path
) -> None:
    (model / "endless.py").write_text("while True:\n    pass\n")
    departure, _ = ended(bug, entrypoint, model, tmp_path, hang_timeout_s=2)
    assert departure.failure is not None
    assert departure.failure.kind == "hung"
    assert any("the stacks of all threads" in line for line in printed(tmp_path / "experiment", 0))


@pytest.mark.long
def test_code_that_cant_be_imported_ends_the_experiment(model: Path, tmp_path: Path) -> None:
    departure, desk = ended("none", "bugs_import:Buggy", model, tmp_path)
    assert departure == Departure(outcome="interrupted")
    [(field, fault)] = desk.why.faults
    assert field == "entrypoint"
    assert "No module named 'no_such_library'" in fault
