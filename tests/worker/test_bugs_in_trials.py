"""How a worker reports bugs in a trial's code; its desk, and Ray, are fakes here."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dray.code.load import load_entrypoint
from dray.config.entrypoint import parse_entrypoint
from dray.config.load import load_config
from dray.leases.messages import Departure, DeskReport
from dray.training.parallel.distributed import DistributedContext
from dray.training.units import Batch
from dray.worker.process_group import outliving_programs
from dray.worker.ranks import Place
from dray.worker.trial import run_trial
from tests.bugs import CLASS, OF_A_CLASS, OF_A_PROGRAM, PROGRAM, check_error, model_dir
from tests.model_code import imports_undone
from tests.ray.harness import recorded
from tests.workers import SETTINGS, experiment_spec, lease_in, links

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
ALONE |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


class Desk:
    """Answers every decided report with this verdict; keeps final reports.

    Args:
        verdict: the answer.
        stops: whether it wants the workers back.
    """

    def __init__(self, verdict: str = "continue", *, stops: bool = False) -> None:
        self.verdict = verdict
        self.final: list[DeskReport] = []
        self.left: list[Departure] = []
        answers = {"may_commit": True, "improves": True, "stop_wanted": stops, "saved": None, "best": None}
        for name, answer in answers.items():
            setattr(self, name, lambda *_, answer=answer: answer)

    def leave(self, lease: int, rank: int, departure: Departure) -> None:
        self.left.append(departure)

    def report(self, lease: int, report: DeskReport, decides: bool) -> str:
        if report.final:
            self.final.append(report)
        return self.verdict if decides else "continue"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with imports_undone():
        yield model_dir(tmp_path_factory.mktemp("bugs"))


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The process group of a worker, which all its trials share."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1
    )
    with outliving_programs():
        yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def alone(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)


def left(
    entrypoint: str,
    bug: str,
    model: Path,
    directory: Path,
    verdict: str = "continue",
    *,
    stops: bool = False,
    peers: DistributedContext | None = None,
) -> tuple[Departure, Desk]:
    """How a worker leaves a trial with this bug."""
    config = load_config(recorded(directory / "record", trials=1, batches=8, entrypoint=entrypoint))
    settings = replace(SETTINGS, config=config.to_dict(), metric="error", max_length=Batch(8), rungs=(Batch(8),))
    hparams = {"global_batch_size": 8, "lr": 0.1, "record": str(directory / "record"), "pause_s": 0, "bug": bug}
    lease = lease_in(directory, hparams=hparams)
    desk = Desk(verdict, stops=stops)
    program = load_entrypoint(parse_entrypoint(entrypoint), model)
    ranks = peers or DistributedContext()
    given = {"experiment": experiment_spec(settings), "distributed": ranks, "place": Place("node-7", "127.0.0.1")}
    return run_trial(program, model, lease, **links(desk), **given), desk


@pytest.mark.parametrize("bug", OF_A_CLASS)
def test_a_bug_of_a_class_is_reported_with_the_users_line(bug: str, model: Path, tmp_path: Path) -> None:
    ending, desk = left(CLASS, bug, model, tmp_path)
    assert (ending.outcome, ending.fatal) == ("completed" if OF_A_CLASS[bug] is None else "errored", False)
    check_error(bug, ending.error, OF_A_CLASS[bug])
    assert len(desk.final) == (OF_A_CLASS[bug] is None)


@pytest.mark.parametrize("bug", OF_A_PROGRAM)
def test_a_bug_of_a_program_is_reported_with_the_users_line(bug: str, model: Path, tmp_path: Path) -> None:
    ending, desk = left(PROGRAM, bug, model, tmp_path)
    assert (ending.outcome, ending.fatal) == ("completed" if OF_A_PROGRAM[bug] is None else "errored", False)
    check_error(bug, ending.error, OF_A_PROGRAM[bug])
    assert len(desk.final) == (OF_A_PROGRAM[bug] is None)


class Dies:
    """Reaches another rank, whose process dies in the sixth batch."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.was_printed = False

    def allgather(self, stuff: Any, timeout_s: float | None = None) -> list[Any]:
        if timeout_s is None:
            return [stuff, stuff]
        self.was_printed = "went wrong" in self.log.read_text()
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    def gather(self, stuff: Any) -> None:
        raise AssertionError("not used here")

    def close(self) -> None:
        pass


def test_a_rank_reports_its_error_before_it_waits_for_another_which_may_have_died(model: Path, tmp_path: Path) -> None:
    dies = Dies(tmp_path / "logs" / "rank_0.log")
    two = DistributedContext(
        rank=0, size=2, local_rank=0, local_size=2, cross_rank=0, cross_size=1, chief_ip="127.0.0.1", transport=dies
    )
    ending, desk = left(CLASS, "first batch: exception", model, tmp_path, peers=two)
    assert ending.failure is not None
    assert (ending.outcome, ending.failure.kind, desk.left) == ("errored", "error", [ending])
    check_error("batch: exception", ending.error, OF_A_CLASS["batch: exception"])
    assert dies.was_printed
    assert dies.log.read_text().count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize(("error", "node"), [("uncorrectable ECC error encountered", "node-7"), ("out of memory", "")])
def test_an_error_of_a_gpu_names_its_node(error: str, node: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(f"raise RuntimeError('CUDA error: {error}')")
    ending, _ = left("python3 broken.py", "none", tmp_path, tmp_path / "trial")
    assert ending.failure is not None
    assert ending.failure.node == node


OUT_OF_MEMORY = "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')"


def test_when_a_gpus_memory_runs_out_the_error_says_where_a_snapshot_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of torch's private functions, so their absence makes this test fail."""
    (tmp_path / "large.py").write_text(OUT_OF_MEMORY)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("a snapshot"))
    ending, _ = left("python3 large.py", "none", tmp_path, tmp_path / "trial")
    snapshot = tmp_path / "trial" / "logs" / "rank_0.memory.pickle"
    told = f"the GPU's memory then: {snapshot} on {socket.gethostname()}; https://pytorch.org/memory_viz shows it"
    assert ending.failure is not None
    assert (ending.failure.kind, snapshot.read_text()) == ("oom", "a snapshot")
    assert ending.error.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n  large.py:1")
    assert ending.error.endswith(f"\n{told}")
    assert told in snapshot.with_name("rank_0.log").read_text()


def test_without_a_snapshot_the_error_of_a_gpus_memory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large.py").write_text(OUT_OF_MEMORY)
    ending, _ = left("python3 large.py", "none", tmp_path, tmp_path / "cpu")
    assert "memory_viz" not in ending.error
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delattr(torch.cuda.memory, "_dump_snapshot")
    ending, _ = left("python3 large.py", "none", tmp_path, tmp_path / "gpu")
    assert ending.error.startswith("OutOfMemoryError: CUDA out of memory.")
    assert "\nno snapshot of the GPU's memory: AttributeError: " in ending.error


@pytest.mark.gpu
def test_a_snapshot_of_a_gpus_memory_shows_what_fills_it(tmp_path: Path) -> None:
    program = "import torch; kept = torch.ones(1 << 20, device='cuda'); torch.empty(1 << 50, device='cuda')"
    (tmp_path / "large.py").write_text(program)
    for _ in range(2):  # the second takes the place of the first
        ending, _ = left("python3 large.py", "none", tmp_path, tmp_path / "trial")
        assert ending.failure is not None
        assert (ending.failure.kind, "memory_viz" in ending.error) == ("oom", True)
    [path] = (tmp_path / "trial" / "logs").glob("*.pickle")
    with path.open("rb") as file:
        segments = pickle.load(file)["segments"]
    assert any(4 << 20 in (block["size"], block["requested_size"]) for each in segments for block in each["blocks"])


@pytest.mark.parametrize("bug", ["before: exit 0", "core: nothing"])
def test_a_program_that_reports_nothing_ends_the_search(bug: str, model: Path, tmp_path: Path) -> None:
    ending, desk = left(PROGRAM, bug, model, tmp_path)
    assert (ending.outcome, ending.fatal, desk.final) == ("errored", True, [])
    assert ending.error.startswith(f"entrypoint: {PROGRAM} ended without calling Trainer.fit()")
    assert ending.error.endswith("or report validation metrics with core.init()")


ASKED = """
import sys
from dray import core

with core.init() as context:
    context.train.report_validation_metrics(steps_completed=8, metrics={"error": 1.0})
    if %s:
        %s
"""


@pytest.mark.parametrize("end", ["raise Exception('preempted')", "sys.exit(1)"])
@pytest.mark.parametrize(
    ("verdict", "outcome"), [("stop", "stopped"), ("pause", "paused"), ("interrupt", "interrupted")]
)
def test_a_program_that_has_acknowledged_a_stop_may_end_with_an_error(
    verdict: str, outcome: str, end: str, tmp_path: Path
) -> None:
    (tmp_path / "asked.py").write_text(ASKED % ("context.preempt.should_preempt()", end))
    ending, desk = left("python3 asked.py", "none", tmp_path, tmp_path / "trial", verdict)
    assert (ending.outcome, ending.error, desk.final) == (outcome, "", [])
    assert end in (tmp_path / "trial" / "logs" / "rank_0.log").read_text(), "the log has the error"


def test_a_program_that_has_not_acknowledged_a_stop_has_failed(tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text(ASKED % ("True", "raise Exception('mine')"))
    ending, _ = left("python3 asked.py", "none", tmp_path, tmp_path / "trial", "stop")
    assert (ending.outcome, ending.error.splitlines()[-1]) == ("errored", "Exception: mine")


BEFORE_A_REPORT = """
from dray import core

with core.init() as context:
    assert context.preempt.should_preempt()
"""


def test_a_program_that_is_asked_to_stop_before_its_first_report_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(BEFORE_A_REPORT)
    ending, desk = left("python3 early.py", "none", tmp_path, tmp_path / "trial", stops=True)
    assert (ending.outcome, ending.error, desk.final) == ("interrupted", "", [])
