"""A run that is interrupted anywhere and resumed is bit for bit the run that never was."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch, Epoch
from dray.storage import verify
from dray.storage.manifest import Listed
from dray.training import rng
from dray.training.checkpoint import checkpointer
from dray.training.checkpoint import files as checkpoint
from dray.training.checkpoint.files import Contents
from dray.training.host import Report
from tests.pytorch import resuming
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, RungHost, callback, one_weight, state_of, trial
from tests.pytorch.resuming import assert_equal

BATCHES = 14


@pytest.mark.gpu
@pytest.mark.api("9.7")
def test_the_random_numbers_of_a_gpu_continue_too(tmp_path: Path) -> None:
    whole = resuming.run("everything", FakeHost(tmp_path / "whole"))
    assert "cuda" in whole["rng"]
    for cut in resuming.cuts("everything"):
        torch.cuda.manual_seed(999)
        checkpoint = str(tmp_path / "whole" / f"checkpoint_{cut}")
        resumed = resuming.run("everything", FakeHost(tmp_path / f"cut_{cut}"), latest_checkpoint=checkpoint)
        resuming.assert_goes_on(resumed, whole, cut, checkpoint)


@pytest.mark.api("2.12", "9.8")
def test_a_run_stopped_anywhere_resumes_as_if_uninterrupted(tmp_path: Path) -> None:
    """It stops at the next boundary, where nothing would have been saved otherwise."""

    class Stopping(resuming.Shuffled):
        dropout, momentum = 0.4, 0.9
        stop_at: int | None = None

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == self.stop_at:
                self.context.set_stop_requested(True)
            return super().train_batch(batch, epoch_idx, batch_idx)

    def run(name: str, stop_at: int | None, **fit: Any) -> tuple[Stopping, FakeHost]:
        host = FakeHost(tmp_path / name)
        with use_host(host), pytorch.init(hparams={"global_batch_size": 8}) as context:
            trial = Stopping(context)
            trial.stop_at = stop_at
            pytorch.Trainer(trial, context).fit(
                max_length=Batch(BATCHES), reporting_period=Batch(2), validation_period=Batch(5), **fit
            )
        return trial, host

    def history(*hosts: FakeHost) -> list[Any]:
        reports = [report for host in hosts for report in host.reports if report.training or report.validation]
        return [(report.batches, report.training, report.validation) for report in reports]

    whole, told = run("whole", None, checkpoint_policy="none")
    for stop_at in random.Random(3).sample(range(BATCHES - 3), 5):
        first, heard = run(f"{stop_at}_first", stop_at, checkpoint_policy="none")
        second, heard_later = run(
            f"{stop_at}_second", None, checkpoint_policy="none", latest_checkpoint=heard.checkpoints()[-1]
        )
        assert first.seen[-1][1] in (stop_at, stop_at + 1)
        assert first.seen + second.seen == whole.seen
        assert_equal(state_of(second.context), state_of(whole.context))
        assert history(heard, heard_later) == history(told)


@pytest.mark.parametrize("kind", resuming.KINDS)
def test_resuming_is_bit_identical_wherever_the_run_was_cut(tmp_path: Path, kind: str) -> None:
    whole = resuming.run(kind, FakeHost(tmp_path / "whole"))
    for cut in resuming.cuts(kind, 1):
        rng.seed_all(999)  # what the resumed process has drawn by itself must not matter
        checkpoint = str(tmp_path / "whole" / f"checkpoint_{cut}")
        resumed = resuming.run(kind, FakeHost(tmp_path / f"cut_{cut}"), latest_checkpoint=checkpoint)
        resuming.assert_goes_on(resumed, whole, cut, checkpoint)


@pytest.mark.api("8.11")
def test_gradients_of_a_batch_that_a_trial_has_left_are_not_saved(fit: Fit, host: FakeHost, tmp_path: Path) -> None:
    """It is trained again, and its gradients would count twice."""

    class Leaving(OneWeight):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 3 and self.context.get_initial_batch() == 0:
                self.context.backward(self.loss(batch))
                raise pytorch.ShouldExit
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(Leaving, max_length=Batch(5))
    again = FakeHost(tmp_path / "again")
    resumed = fit(Leaving, again, max_length=Batch(5), latest_checkpoint=host.checkpoints()[-1])
    assert [batch for _, batch in resumed.seen] == [3, 4]
    assert resumed.weight == one_weight(5)


def test_the_seed_alone_decides_a_run(tmp_path: Path) -> None:
    def run(name: str, seed: int) -> dict[str, Any]:
        state: dict[str, Any] = resuming.run("everything", FakeHost(tmp_path / name, trial_seed=seed))["state"]
        return state

    first = run("a", 3)
    torch.manual_seed(0)
    np.random.seed(1)
    assert_equal(run("b", 3), first)
    with pytest.raises(AssertionError):
        assert_equal(run("c", 4), first)


@pytest.mark.api("4.7")
def test_the_order_of_shuffled_data_is_no_matter_of_other_random_numbers(fit: Fit, tmp_path: Path) -> None:
    def order(name: str, draws: int) -> list[list[int]]:
        seen: list[list[int]] = []

        class Watching(OneWeight):
            def build_training_data_loader(self) -> pytorch.DataLoader:
                torch.rand(draws)
                return pytorch.DataLoader(range(12), batch_size=4, shuffle=True)

            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                seen.append(batch.tolist())
                torch.rand(draws)
                return super().train_batch(torch.ones(1), epoch_idx, batch_idx)

        fit(Watching, FakeHost(tmp_path / name), max_length=Epoch(2))
        return seen

    one, two = order("a", 0), order("b", 7)
    assert one == two
    assert sorted(record for batch in one[:3] for record in batch) == list(range(12))
    assert one[:3] != one[3:], "each epoch has an order of its own"


class Tuned(OneWeight):
    """Its optimizer and its schedule follow hyperparameters."""

    def at_init(self) -> None:
        hparams = self.context.get_hparams()
        arguments = {name: hparams[name] for name in ("lr", "weight_decay")}
        self.optimizer = self.context.optimizers[0] = torch.optim.Adam(self.model.parameters(), **arguments)
        schedules = torch.optim.lr_scheduler
        if made := {
            "StepLR": lambda: schedules.StepLR(self.optimizer, 1, gamma=0.5),
            "ReduceLROnPlateau": lambda: schedules.ReduceLROnPlateau(self.optimizer, patience=0),
            "OneCycleLR": lambda: schedules.OneCycleLR(self.optimizer, max_lr=hparams["lr"], total_steps=9),
        }.get(hparams["schedule"]):
            self.schedule = self.context.wrap_lr_scheduler(made(), pytorch.LRScheduler.StepMode.MANUAL_STEP)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        if self.context.lr_schedulers:
            self.schedule.step(*([1.0] if self.context.get_hparam("schedule") == "ReduceLROnPlateau" else []))
        return metrics


@pytest.mark.parametrize("source", [False, True], ids=["resumed", "started from a source"])
@pytest.mark.parametrize("schedule", [None, "StepLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_hyperparameters_of_an_optimizer_that_a_checkpoint_overrides_are_warned_of(
    fit: Fit, host: FakeHost, tmp_path: Path, caplog: pytest.LogCaptureFixture, schedule: str | None, source: bool
) -> None:
    hparams = {"lr": 0.1, "weight_decay": 0.0, "schedule": schedule}
    fit(Tuned, init={"hparams": hparams}, max_length=Batch(4))
    [checkpoint] = host.checkpoints()

    def warnings(**changed: float) -> list[str]:
        caplog.clear()
        again = FakeHost(tmp_path / "again")
        again.source_checkpoint = checkpoint if source else None
        resumed = None if source else checkpoint
        fit(Tuned, again, init={"hparams": hparams | changed}, max_length=Batch(5), latest_checkpoint=resumed)
        return [text for text in caplog.messages if "checkpoint's values" in text]

    assert warnings() == []
    [decay] = warnings(weight_decay=0.3)
    assert "weight_decay 0.0 instead of 0.3" in decay
    assert " lr " not in decay
    if schedule != "ReduceLROnPlateau":  # it does not say from where it has reduced
        [both] = warnings(lr=0.2, weight_decay=0.3)
        assert ("initial_lr" in both) == (schedule is not None)
        assert "lr 0.1 instead of 0.2" in both or schedule == "OneCycleLR"
        assert "weight_decay 0.0 instead of 0.3" in both


@pytest.mark.parametrize("schedule", [None, "StepLR", "OneCycleLR"])
def test_a_fork_trains_with_its_own_hyperparameters_at_its_place_in_the_schedule(
    fit: Fit, host: FakeHost, tmp_path: Path, schedule: str | None
) -> None:
    hparams = {"lr": 0.1, "weight_decay": 0.0, "schedule": schedule}
    fit(Tuned, init={"hparams": hparams}, max_length=Batch(4))
    [checkpoint] = host.checkpoints()

    def used(hparams: dict[str, Any], *, is_fork: bool = False, **given: Any) -> dict[str, Any]:
        """The optimizer's values after the fifth batch."""
        here = FakeHost(tmp_path / "again")
        here.is_changed_fork = is_fork
        trial = fit(Tuned, here, init={"hparams": hparams}, max_length=Batch(5), **given)
        return {name: value for name, value in trial.optimizer.param_groups[0].items() if name != "params"}

    changed = hparams | {"lr": 0.025, "weight_decay": 0.5}
    forked = used(changed, is_fork=True, latest_checkpoint=checkpoint)
    assert forked == used(changed)
    assert forked != used(changed, latest_checkpoint=checkpoint)
    unchanged = used(hparams, is_fork=True, latest_checkpoint=checkpoint)
    assert unchanged == used(hparams, latest_checkpoint=checkpoint)


class Unfreezing(OneWeight):
    """Trains a second model from batch 2 on."""

    def at_init(self) -> None:
        self.more = self.context.wrap_model(nn.Linear(1, 1, bias=False))

    def unfreeze(self) -> None:
        self.optimizer.add_param_group({"params": self.more.parameters()})

    def at_batch(self, batch_idx: int) -> None:
        if batch_idx == 2:
            self.unfreeze()


def test_a_parameter_group_that_training_added_is_added_again_as_the_error_says(fit: Fit, host: FakeHost) -> None:
    def prepare(trial: Unfreezing) -> None:
        trial.callbacks.update(callback(on_checkpoint_load_start=lambda checkpoint: trial.unfreeze()))

    fit(Unfreezing, max_length=Batch(3))
    (checkpoint,) = host.checkpoints()
    with pytest.raises(
        ValueError, match=r"has 2 parameter groups in the checkpoint, but 1 here\. .* on_checkpoint_load_start"
    ):
        fit(Unfreezing, max_length=Batch(4), latest_checkpoint=checkpoint)
    trial = fit(Unfreezing, prepare=prepare, max_length=Batch(4), latest_checkpoint=checkpoint)
    assert (trial.weight, len(trial.optimizer.param_groups)) == (one_weight(4), 2)


def test_a_finished_run_resumed_does_nothing(fit: Fit, host: FakeHost, tmp_path: Path) -> None:
    fit(OneWeight, max_length=Batch(3))
    again = FakeHost(tmp_path / "again")
    trial = fit(OneWeight, again, max_length=Batch(3), latest_checkpoint=host.checkpoints()[-1])
    assert again.reports == []
    assert trial.seen == []


class Keeping(OneWeight):
    """All of its parts keep the tensors that they load, instead of copying them."""

    mapped: bool
    directory: Path

    def at_init(self) -> None:
        class Assigns(nn.Linear):
            def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
                return super().load_state_dict(state, strict, assign=True)

            def get_extra_state(self) -> Any:
                return {"seen": torch.ones(3)}

            def set_extra_state(self, state: Any) -> None:
                self.extra = state

        class Kept(pytorch.PyTorchCallback):
            def state_dict(self) -> dict[str, Any]:
                return {"mean": torch.ones(3)}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.state = state

            def on_checkpoint_load_start(kept, checkpoint: dict[str, Any]) -> None:
                self.mapped = is_mapped(self.directory)

        self.model = self.context.wrap_model(Assigns(1, 1, bias=False))
        self.optimizer = self.context.wrap_optimizer(torch.optim.Adam(self.model.parameters()))
        self.callbacks["kept"] = Kept()

    def at_batch(self, batch_idx: int) -> None:
        assert not is_mapped(self.directory), "something is still in the file"


def is_mapped(directory: Path) -> bool:
    """Whether the state of a checkpoint in this directory is mapped. Other tests may have left those of others."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(f" {directory}/" in line and line.endswith("state-dict.pth") for line in lines)


def test_a_resume_maps_the_state_and_keeps_nothing_that_is_in_the_file(fit: Fit, host: FakeHost) -> None:
    """So that the ranks of a machine share one copy in the page cache, and the file may go."""
    Keeping.directory = host.store.trial_dir
    fit(Keeping, max_length=Batch(2))
    trial = fit(Keeping, max_length=Batch(4), latest_checkpoint=host.checkpoints()[-1])
    assert trial.mapped
    loaded = pytorch.load_trial_from_checkpoint_path(host.checkpoints()[-1], trial_class=Keeping)
    assert torch.equal(loaded.model.weight, trial.model.weight)
    assert not is_mapped(host.store.trial_dir)


SAVED_BATCHES = 7  # of 5 an epoch


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
            max_length=Batch(SAVED_BATCHES),
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
    assert held.writers == ["other"] * (SAVED_BATCHES - 1) + ["main"]
    held.writers.clear()
    checkpointer.AT_ONCE_BYTES = 1 << 30  # put back by the fixture
    waiting = trained(FakeHost(tmp_path / "waiting"), None)
    assert held.writers == ["main"] * SAVED_BATCHES
    assert_equal(behind, waiting)
    for batches in range(1, SAVED_BATCHES + 1):
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
        max_length=Batch(8),
        checkpoint_period=Batch(1),
        validation_period=Batch(1),
        checkpoint_policy="none",
    )
    assert len(pids) > 8, "they are forked for each validation"
    for batches, path in host.store.listed():
        state = torch.load(verify(Path(path)) / "state-dict.pth", weights_only=True)
        assert state["models_state_dict"][0]["weight"].item() == pytest.approx(one_weight(batches))
    assert len(host.store.listed()) == 8
