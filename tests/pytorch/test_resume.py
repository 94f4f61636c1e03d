"""A run that is interrupted anywhere and resumed is bit for bit the run that never was."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch, Epoch
from dray.training import rng
from tests.pytorch import resuming
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, callback, one_weight, state_of
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
                self.mapped = is_mapped("state-dict.pth")

        self.model = self.context.wrap_model(Assigns(1, 1, bias=False))
        self.optimizer = self.context.wrap_optimizer(torch.optim.Adam(self.model.parameters()))
        self.callbacks["kept"] = Kept()

    def at_batch(self, batch_idx: int) -> None:
        assert not is_mapped("state-dict.pth"), "something is still in the file"


def is_mapped(name: str) -> bool:
    return any(line.rstrip().endswith(name) for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_resume_maps_the_state_and_keeps_nothing_that_is_in_the_file(fit: Fit, host: FakeHost) -> None:
    """So that the ranks of a machine share one copy in the page cache, and the file may go."""
    fit(Keeping, max_length=Batch(2))
    trial = fit(Keeping, max_length=Batch(4), latest_checkpoint=host.checkpoints()[-1])
    assert trial.mapped
    loaded = pytorch.load_trial_from_checkpoint_path(host.checkpoints()[-1], trial_class=Keeping)
    assert torch.equal(loaded.model.weight, trial.model.weight)
    assert not is_mapped("state-dict.pth")
