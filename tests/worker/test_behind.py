"""A trial leaves its group before its last checkpoint is committed; the next one trains in this process meanwhile."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError

from dray import pytorch
from dray.code.load import load_entrypoint
from dray.config.entrypoint import parse_entrypoint
from dray.config.load import load_config
from dray.leases.messages import Departure, DeskReport
from dray.script import Script
from dray.storage.checkpoints import CheckpointStore
from dray.storage.errors import StorageError
from dray.training.parallel.distributed import DistributedContext
from dray.training.units import Batch
from dray.worker import trial
from dray.worker.behind import Behind, Left
from dray.worker.host import RayHost
from dray.worker.log.trial_log import TrialLog, log_writer
from dray.worker.ranks import Place
from dray.worker.trial import run_trial
from tests.bugs import CLASS, model_dir
from tests.model_code import imports_undone
from tests.ray.harness import recorded
from tests.workers import SETTINGS, connected, experiment_spec, lease_in, links


class FarStore(CheckpointStore):
    """Commits once the gate is open, or fails."""

    is_remote = True

    def __init__(self, directory: Path, gate: threading.Event, fault: StorageError | None) -> None:
        super().__init__(directory)
        self._gate, self._fault = gate, fault

    def commit(self, *args: Any, **options: Any) -> str:
        assert self._gate.wait(60)
        if self._fault is not None:
            raise self._fault
        return super().commit(*args, **options)


class Desk:
    """Another trial waits for the group of lease 1. What is told of each lease, in order, is in `told`."""

    def __init__(self, verdict: str) -> None:
        self.verdict = verdict
        self.told: dict[int, list[str]] = {1: [], 2: []}

    def waited_for(self, lease: int) -> bool:
        return lease == 1

    def may_commit(self, lease: int) -> bool:
        return True

    def improves(self, lease: int, score: float) -> bool:
        return True

    def stop_wanted(self, lease: int) -> bool:
        return False

    def saved(self, trial: int, checkpoint: str, batches: int, value: float | None, seconds: float | None) -> None:
        self.told[trial].append(f"saved {batches}")

    def report(self, lease: int, report: DeskReport, decides: bool) -> str:
        if decides:
            self.told[lease].append(f"reported {report.step}{' final' * report.final}")
        return self.verdict if decides else "continue"

    def leave(self, lease: int, rank: int, departure: Departure) -> None:
        self.told[lease].append(departure.outcome)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with imports_undone():
        yield model_dir(tmp_path_factory.mktemp("behind"))


class Process:
    """A worker process, whose desk answers each decided report with this verdict."""

    def __init__(self, model: Path, directory: Path, verdict: str = "continue") -> None:
        self.desk = Desk(verdict)
        self.behind = Behind(connected(self.desk))
        self.behind.write_s = math.inf
        self._model, self._directory = model, directory
        self._gates = {number: threading.Event() for number in (1, 2)}
        self._gates[2].set()

    def run(self, number: int, fault: StorageError | None = None) -> str:
        """Run a lease of the trial with its number; returns the outcome with which it leaves."""
        directory = self._directory / f"trial_{number}"
        record = str(self._directory / "record")
        config = load_config(recorded(record, trials=1, batches=8, entrypoint=CLASS))
        rungs = (Batch(4), Batch(8))
        settings = replace(SETTINGS, config=config.to_dict(), metric="error", max_length=Batch(8), rungs=rungs)
        hparams: dict[str, Any] = {"global_batch_size": 8, "lr": 0.1, "record": record, "pause_s": 0, "bug": "none"}
        lease = replace(
            lease_in(directory, hparams=hparams),
            number=number,
            trial_id=number,
            store=FarStore(directory, self._gates[number], fault),
        )
        program = load_entrypoint(parse_entrypoint(CLASS), self._model)
        given = {"experiment": experiment_spec(settings), "distributed": DistributedContext()}
        self.behind.begin(number, 0)
        links_ = links(self.desk)
        left = run_trial(
            program, self._model, lease, **links_, **given, place=Place("a", "127.0.0.1"), behind=self.behind
        )
        self.desk.leave(number, 0, left)
        self.behind.start(lambda: self.desk.told[number].append("log"))
        return left.outcome

    def write(self) -> None:
        """Let the checkpoint that was left behind be committed, or fail."""
        self._gates[1].set()
        self.behind.wait()

    def log(self, number: int) -> str:
        log_writer.flush()
        return (self._directory / f"trial_{number}" / "logs" / "rank_0.log").read_text()


@pytest.mark.parametrize(("verdict", "outcome"), [("continue", "yielded"), ("stop", "stopped"), ("pause", "paused")])
def test_the_next_trial_trains_to_its_end_before_the_last_ones_checkpoint_is_committed(
    verdict: str, outcome: str, model: Path, tmp_path: Path
) -> None:
    process = Process(model, tmp_path, verdict)
    assert process.run(1) == "writing"
    assert process.behind.nbytes > 0
    assert process.run(2) == ("completed" if verdict == "continue" else outcome)
    assert process.desk.told[1] == ["writing"], "nothing is reported before it is committed"
    process.write()
    assert process.desk.told[1] == ["writing", "saved 4", "reported 4", "log", outcome], "its log is complete"
    assert process.behind.nbytes == 0
    lines = [line.partition(" ")[2] for line in process.log(1).splitlines()[2:]]
    assert [line.split()[0] for line in lines] == ["saved", "trained", "validated", "trial"]
    assert lines[-1] == f"trial 1 {outcome} after 4 batches"
    assert "trial_1" not in process.log(2), "each has its own log"


def test_a_trial_whose_checkpoint_could_not_be_stored_has_failed(model: Path, tmp_path: Path) -> None:
    process = Process(model, tmp_path)
    assert process.run(1, StorageError("the store is gone")) == "writing"
    assert process.run(2) == "completed"
    process.write()
    assert process.desk.told[1] == ["writing", "log", "errored"]
    assert "StorageError: the store is gone" in process.log(1)
    assert "the store is gone" not in process.log(2)


def test_a_rank_that_learns_late_that_all_is_written_leaves_the_files_of_the_trials_next_lease_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, ranks, place = connected(object()), SimpleNamespace(rank=1, size=2), SimpleNamespace()
    downloads = [tmp_path / f".opened-{lease}" for lease in (1, 2)]
    behind = Behind(desk)
    behind.begin(1, 1)

    def leaves(*_: object) -> Departure:
        downloads[0].mkdir()
        behind.take(lambda: None, 0, goes_on=True)
        return Departure(outcome="writing")

    monkeypatch.setattr(trial, "_run", leaves)
    given: Any = pytorch.PyTorchTrial, None, lease_in(tmp_path), desk, desk, experiment_spec(SETTINGS), ranks, place
    trial.run_logged(*given, TrialLog(tmp_path / "rank_1.log", -1), behind=behind)
    downloads[1].mkdir()
    behind.start(lambda: None)
    behind.wait()
    assert [each.exists() for each in downloads] == [False, True]


def test_the_desk_learns_of_an_end_that_its_log_could_not_take() -> None:
    left: list[Departure] = []
    behind = Behind(connected(SimpleNamespace(leave=lambda lease, rank, departure: left.append(departure))))
    behind.begin(7, 0)

    def complete() -> Departure:
        raise BrokenPipeError("the writer was killed")

    behind.left = Left(lambda: None, 0, goes_on=True, complete=complete)
    behind.start(lambda: None)
    behind.wait()
    assert [(each.outcome, each.failure and each.failure.kind) for each in left] == [("errored", "error")]


@pytest.mark.parametrize(
    ("write_s", "returns", "wanted"),
    [(0.0, False, True), (0.0, True, False), (-1.0, True, False), (math.inf, True, True)],
)
def test_a_trial_that_goes_on_later_leaves_only_if_writing_takes_longer_than_starting(
    write_s: float, returns: bool, wanted: bool
) -> None:
    behind = Behind(connected(Desk("continue")))
    behind.begin(1, 0)
    behind.trains()
    behind.write_s = write_s
    assert behind.is_wanted(returns=returns) == wanted


def test_a_program_begins_once_the_copy_of_the_trial_before_is_written(model: Path, tmp_path: Path) -> None:
    process = Process(model, tmp_path)
    assert process.run(1) == "writing"
    threading.Timer(0.05, process.write).start()
    desk, ranks, place = connected(object()), DistributedContext(), SimpleNamespace()
    program = Script(command="true", file="program.py")
    began: list[list[str]] = []

    def run(*_: object) -> Departure:
        began.append([*process.desk.told[1]])
        return Departure(outcome="completed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_run", run)
        lease = lease_in(tmp_path / "trial_3")
        run_trial(program, None, lease, desk, desk, experiment_spec(SETTINGS), ranks, place, behind=process.behind)  # type: ignore[arg-type]
    assert [told[-1] for told in began] == ["yielded"]


def test_a_rank_whose_store_has_ended_with_the_chief_prints_no_error(tmp_path: Path) -> None:
    """It asks for the last time whether all is committed, when the chief knows and has ended."""
    host = RayHost(**links(object()), lease=lease_in(tmp_path), settings=SETTINGS, code_dir=None)

    def finish() -> None:
        raise DistNetworkError("connection closed")

    for is_chief in (False, True):
        host.late = []
        log = TrialLog(tmp_path / f"rank_{is_chief}.log", -1)
        place = Place("a", "127.0.0.1")
        left = trial._complete(Left(finish, 0, goes_on=True), host, None, log, place, is_chief=is_chief)  # noqa: SLF001
        assert left.outcome == ("errored" if is_chief else "writing")
        assert ("connection closed" in log.path.read_text()) == is_chief
