"""Training goes on while its checkpoint is written: what follows does not get into it, nor anything out of it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.storage import verify
from dray.storage.manifest import Listed
from dray.training.checkpoint import checkpointer
from dray.training.checkpoint import files as checkpoint
from dray.training.checkpoint.files import Contents
from dray.training.host import Report
from tests.pytorch import resuming
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, RungHost, one_weight, state_of, trial
from tests.pytorch.resuming import assert_equal

BATCHES = 7  # of 5 an epoch


class Held:
    """Writing, which begins when training has done something more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._next = threading.Event()
        self.writers: list[str] = []
        write, contents = checkpoint.write, checkpoint.contents

        def made(**kwargs: Any) -> Contents:
            self._next.clear()
            return contents(**kwargs)

        def held(directory: Path, contents: Contents, **how: bool) -> dict[str, Listed]:
            thread = threading.current_thread()
            self.writers.append("main" if thread is threading.main_thread() else "other")
            if thread is not threading.main_thread():
                assert self._next.wait(30)
            return write(directory, contents, **how)

        monkeypatch.setattr(checkpoint, "contents", made)
        monkeypatch.setattr(checkpoint, "write", held)
        monkeypatch.setattr(checkpointer, "AT_ONCE_BYTES", 0)

    def go_on(self) -> None:
        """Training has."""
        self._next.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


class Everything(resuming.Everything):
    held: Held | None = None

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"remembering": Remembering()}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        found = super().train_batch(batch, epoch_idx, batch_idx)
        if self.held is not None:
            self.held.go_on()
        return found


class Remembering(pytorch.PyTorchCallback):
    """Hands out what it goes on to change."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"draws": [], "mean": torch.zeros(2)}

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.state["draws"].append(metrics["noise"])
        self.state["mean"] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def trained(host: FakeHost, held: Held | None, **fit: Any) -> dict[str, Any]:
    with use_host(host), pytorch.init(hparams={"global_batch_size": 8}, aggregation_frequency=2) as context:
        trial = Everything(context)
        trial.held = held
        pytorch.Trainer(trial, context).fit(
            max_length=Batch(BATCHES),
            validation_period=Batch(1),
            checkpoint_period=Batch(1),
            checkpoint_policy="none",
            **fit,
        )
    return {
        "state": state_of(context),
        "reports": [(r.batches, r.training, r.validation) for r in host.reports],
        "seen": trial.seen,
    }


def files(directory: Path) -> dict[str, bytes]:
    names = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in names}


def test_files_weights_and_metrics_are_those_of_a_run_that_waits(tmp_path: Path, held: Held) -> None:
    """Each file to the last byte, though it was written when the next batch had been trained."""
    behind = trained(FakeHost(tmp_path / "behind"), held)
    assert held.writers == ["other"] * (BATCHES - 1) + ["main"]
    held.writers.clear()
    checkpointer.AT_ONCE_BYTES = 1 << 30  # put back by the fixture
    waiting = trained(FakeHost(tmp_path / "waiting"), None)
    assert held.writers == ["main"] * BATCHES
    assert_equal(behind, waiting)
    for batches in range(1, BATCHES + 1):
        mine, other = (verify(tmp_path / kind / f"checkpoint_{batches}") for kind in ("behind", "waiting"))
        assert files(mine) == files(other)
    # And from there it goes on as it was.
    again = trained(FakeHost(tmp_path / "again"), None, latest_checkpoint=str(tmp_path / "behind" / "checkpoint_5"))
    assert_equal(again["state"], waiting["state"])
    assert again["seen"] == waiting["seen"][5:]


class Watching(FakeHost):
    """Writes down the order of things."""

    def __init__(self, directory: Path, **kwargs: Any) -> None:
        super().__init__(directory, **kwargs)
        self.events: list[str] = []

    def commit(self, staging: Path, report: Report, known: Mapping[str, Listed]) -> str:
        saved = super().commit(staging, report, known)
        self.events.append(f"committed {report.batches}")
        return saved

    def publish(self, report: Report) -> bool:
        self.events.append(f"{'ended' if report.final else 'published'} {report.batches}")
        return super().publish(report)


class Going(OneWeight):
    """Lets what is being written begin after each batch."""

    held: Held

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        found = super().train_batch(batch, epoch_idx, batch_idx)
        self.held.go_on()
        return found


def test_reports_go_out_before_the_commit_unless_a_search_decides_on_them(fit: Fit, held: Held, tmp_path: Path) -> None:
    host = Watching(tmp_path / "w", rungs=[Batch(4)])
    fit(Going, host, prepare=lambda t: setattr(t, "held", held), max_length=Batch(6), checkpoint_period=Batch(2))
    assert host.events == [
        *("published 2", "committed 2"),
        *("committed 4", "published 4"),
        *("committed 6", "ended 6"),
    ]
    assert [report.checkpoint is None for report in host.reports] == [True, False, False]
    assert [batches for batches, _ in host.store.listed()] == [6, 4, 2]


class Rung(Watching, RungHost):
    """Writes down the order of things at a rung."""


ENDLESS = 10**9
PastRung = Callable[[RungHost, int], None]


@pytest.fixture
def past_rung(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> PastRung:
    """Trains so many batches, with no report between the rung and the end."""
    monkeypatch.setattr(checkpointer, "AT_ONCE_BYTES", 0)
    return lambda host, batches: fit(OneWeight, host, max_length=Batch(batches), reporting_period=Batch(batches))


def test_training_continues_at_a_rung_which_the_search_hears_of_after_the_commit(
    past_rung: PastRung, tmp_path: Path
) -> None:
    host = Rung(tmp_path / "w")
    past_rung(host, 8)
    assert host.events == ["committed 4", "published 4", "committed 8", "ended 8"]
    assert host.checkpoints() == [host.store.id_of(4), host.store.id_of(8)]


def test_a_trial_that_the_search_stops_after_the_commit_has_ended_at_the_rung(
    past_rung: PastRung, tmp_path: Path
) -> None:
    host = Rung(tmp_path / "w", stop_at=4)
    past_rung(host, ENDLESS)
    assert host.events == ["committed 4", "published 4"]
    assert host.progress()[0] == 4
    assert host.store.latest() == host.store.id_of(4)


def test_a_rungs_checkpoint_that_fails_ends_the_run_unreported(
    past_rung: PastRung, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Rung(tmp_path / "w")

    def broken(*arguments: Any) -> str:
        raise LookupError("the store is gone")

    monkeypatch.setattr(host.store, "commit", broken)
    with pytest.raises(LookupError, match="the store is gone"):
        past_rung(host, ENDLESS)
    assert host.events == []


@pytest.mark.parametrize(
    "fault", [KeyError("broken"), pytorch.ShouldExit(True), SystemExit(3)], ids=["error", "exit unsaved", "system exit"]
)
def test_what_is_being_written_is_completed_however_the_run_ends(
    fit: Fit, held: Held, tmp_path: Path, fault: BaseException
) -> None:
    host = Watching(tmp_path / "w")

    def ends(self: OneWeight, batch_idx: int) -> None:
        if batch_idx == 3:
            held.go_on()
            raise fault

    with contextlib.nullcontext() if isinstance(fault, pytorch.ShouldExit) else pytest.raises(type(fault)):
        fit(trial(at_batch=ends), host, max_length=Batch(9), checkpoint_period=Batch(3), checkpoint_policy="none")
    verify(tmp_path / "w" / "checkpoint_3")
    assert host.events[:2] == ["published 3", "committed 3"]


class Pids(torch.utils.data.Dataset[int]):
    """Each record is the process that reads it; it computes and hashes as the writer does."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        hashlib.sha256(torch.ones(1000).numpy().tobytes()).hexdigest()
        logging.getLogger(__name__).info("read")
        return os.getpid()


@pytest.mark.slow
def test_workers_that_are_forked_while_a_checkpoint_is_written_do_not_hang(
    fit: Fit, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is written at the time of the fork is written once."""
    monkeypatch.setattr(checkpointer, "AT_ONCE_BYTES", 0)
    pids: set[int] = set()

    class Forking(OneWeight):
        def at_init(self) -> None:
            self.model.register_buffer("ballast", torch.randn(1 << 20))

        def build_validation_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(Pids(), batch_size=1, num_workers=2, multiprocessing_context="fork")

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            pids.add(int(batch))
            return {"validation_loss": 0.0}

    fit(
        Forking,
        max_length=Batch(20),
        checkpoint_period=Batch(1),
        validation_period=Batch(1),
        checkpoint_policy="none",
    )
    assert len(pids) > 20, "they are forked for each validation"
    for batches, path in host.store.listed():
        state = torch.load(verify(Path(path)) / "state-dict.pth", weights_only=True)
        assert state["models_state_dict"][0]["weight"].item() == pytest.approx(one_weight(batches))
    assert len(host.store.listed()) == 20
