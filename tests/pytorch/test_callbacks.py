"""Callbacks: which are called, in which order, with what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dray import pytorch
from dray.pytorch import Batch, Epoch
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FULL, FakeHost, OneWeight, callback, fails, one_weight, trial
from tests.pytorch.sharding import Epochs

# A Recording answers for every hook, also for the deprecated one.
pytestmark = pytest.mark.filterwarnings("ignore:callback .* on_checkpoint_end is deprecated:FutureWarning")

HOOKS = [name for name in vars(pytorch.PyTorchCallback) if name.startswith("on_")]


class Recording(pytorch.PyTorchCallback):
    """Writes down the name of every hook that is called, and of the trial's own methods."""

    def __init__(self, log: list[str], name: str = "") -> None:
        self.log = log
        self.arguments: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.name = name

    def __getattribute__(self, attribute: str) -> Any:
        if not attribute.startswith(("on_", "load_state")):
            return super().__getattribute__(attribute)

        # `on_training_epoch_start` is looked at for its parameters.
        def hook(*args: Any, **kwargs: Any) -> None:
            self.log.append(self.name + attribute)
            self.arguments.append((attribute, args, kwargs))

        return hook

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.log)}


class Recorded(OneWeight):
    """Logs its own methods beside the callbacks'."""

    log: list[str]

    def build_training_data_loader(self) -> pytorch.DataLoader:
        self.log.append("build_training_data_loader")
        return super().build_training_data_loader()

    def at_batch(self, batch_idx: int) -> None:
        self.log.append(f"train_batch {batch_idx}")

    def at_validation(self, batch_idx: int) -> None:
        self.log.append(f"evaluate_batch {batch_idx}")


def recorded(fit: Fit, host: FakeHost | None = None, trial_class: Any = Recorded, **arguments: Any) -> list[str]:
    log: list[str] = []
    fit(trial(trial_class, log=log), host, callbacks={"recording": Recording(log)}, **arguments)
    return log


VALIDATION = [
    "on_validation_start",
    "on_validation_epoch_start",
    *(f"evaluate_batch {i}" for i in range(3)),
    "on_validation_epoch_end",
    "on_validation_end",
]
CHECKPOINT = [
    "on_checkpoint_save_start",
    "on_checkpoint_end",
    "on_checkpoint_write_end",
    "on_checkpoint_upload_end",
]


@pytest.mark.api("7.2", "7.9", "8.8")
def test_the_order_of_events(fit: Fit) -> None:
    log = recorded(fit, max_length=Batch(7), step_zero_validation=True, checkpoint_policy="none")
    assert log == [
        "on_trial_startup",
        "build_training_data_loader",
        "on_training_start",
        *VALIDATION,
        "on_training_epoch_start",
        *(f"train_batch {i}" for i in range(5)),
        "on_training_epoch_end",
        "on_training_epoch_start",
        *(f"train_batch {i}" for i in range(5, 7)),
        "on_training_workload_end",
        *VALIDATION,
        *CHECKPOINT,
        "on_trial_shutdown",
    ]


@pytest.mark.api("7.2", "7.4")
def test_the_order_of_events_when_resuming_within_an_epoch(fit: Fit, host: FakeHost, tmp_path: Path) -> None:
    recorded(fit, max_length=Batch(7))
    again = FakeHost(tmp_path / "again")
    log = recorded(fit, again, max_length=Batch(11), latest_checkpoint=host.checkpoints()[-1])
    assert log == [
        "on_trial_startup",
        "build_training_data_loader",
        "on_checkpoint_load_start",
        "load_state_dict",
        "on_training_start",
        *(f"train_batch {i}" for i in range(7, 10)),
        "on_training_epoch_end",
        "on_training_epoch_start",
        "train_batch 10",
        "on_training_workload_end",
        *VALIDATION,
        *CHECKPOINT,
        "on_trial_shutdown",
    ]


@pytest.mark.api("2.6", "7.3")
def test_startup_knows_where_training_begins(fit: Fit, host: FakeHost) -> None:
    began: list[Any] = []
    callbacks = callback(on_trial_startup=lambda first_batch_idx, uuid: began.append((first_batch_idx, uuid)))
    fit(OneWeight, callbacks=callbacks, max_length=Batch(3))
    uuid = host.checkpoints()[0]
    made = fit(OneWeight, callbacks=callbacks, max_length=Batch(4), latest_checkpoint=uuid)
    assert began == [(0, None), (3, uuid)]
    assert made.context.get_initial_batch() == 3


@pytest.mark.api("7.9", "9.7")
def test_the_id_of_a_checkpoint_reaches_the_callbacks_and_is_what_fit_takes(fit: Fit, host: FakeHost) -> None:
    ids: list[str] = []

    fit(OneWeight, callbacks=callback(on_checkpoint_upload_end=lambda uuid: ids.append(uuid)), max_length=Batch(3))
    assert ids == host.checkpoints()
    assert fit(OneWeight, max_length=Batch(5), latest_checkpoint=ids[0]).weight == one_weight(5)


@pytest.mark.api("7.10", "7.11")
def test_shutdown_comes_once_in_reverse_order_also_after_an_error(fit: Fit) -> None:
    log: list[str] = []

    callbacks = {name: Recording(log, f"{name} ") for name in ("a", "b")}
    with pytest.raises(RuntimeError, match="broken"):
        fit(fails(RuntimeError("broken")), callbacks=callbacks, max_length=Batch(3))
    assert [entry for entry in log if "startup" in entry] == ["a on_trial_startup", "b on_trial_startup"]
    assert [entry for entry in log if "shutdown" in entry] == ["b on_trial_shutdown", "a on_trial_shutdown"]


@pytest.mark.api("7.10")
def test_callbacks_that_did_not_start_are_not_shut_down(fit: Fit) -> None:
    log: list[str] = []

    class Failing(pytorch.PyTorchCallback):
        def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
            raise RuntimeError("no")

        def on_trial_shutdown(self) -> None:
            log.append("failing on_trial_shutdown")

    with pytest.raises(RuntimeError, match="no"):
        fit(OneWeight, callbacks={"a": Recording(log), "b": Failing()}, max_length=Batch(3))
    assert log == ["on_trial_startup", "on_trial_shutdown"]


@pytest.mark.api("1.15", "6.5", "6.7")
def test_workload_end_gets_averages_and_every_batch(fit: Fit) -> None:
    calls: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []

    fit(
        trial(at_init=lambda self: self.context.wrap_reducer(len, name="count")),
        callbacks=callback(on_training_workload_end=lambda *given: calls.append(given)),
        max_length=Batch(5),
        reporting_period=Batch(3),
    )
    (first, rows), (second, _) = calls
    expected = [np.float32((1 - one_weight(i)) ** 2) for i in range(5)]
    assert [row["loss"] for row in rows] == expected[:3]
    assert isinstance(rows[0]["loss"], np.ndarray)
    assert [list(row) for row in rows] == [["loss"]] * 3, "custom reducers have no batches"
    assert first == {"batches": 3, "epochs": 0.6, "loss": pytest.approx(np.mean(expected[:3])), "count": 0}
    assert second["batches"] == 5


@pytest.mark.api("6.7")
def test_a_metric_of_the_users_named_batches_wins(fit: Fit) -> None:
    seen: list[dict[str, Any]] = []

    fit(
        trial(train_batch=lambda self, batch, epoch_idx, batch_idx: {"batches": 77.0}),
        callbacks=callback(on_training_workload_end=lambda avg_metrics, batch_metrics: seen.append(avg_metrics)),
        max_length=Batch(1),
    )
    assert seen == [{"batches": 77.0, "epochs": 0.2}]


@pytest.mark.api("1.15", "7.6", "7.7")
def test_validation_hooks_get_outputs_and_reduced_metrics(fit: Fit, host: FakeHost) -> None:
    seen: dict[str, Any] = {}

    def validated(metrics: dict[str, Any]) -> None:
        seen.update(copy=dict(metrics), metrics=metrics)
        metrics["added"] = 5

    hooks = {"on_validation_epoch_end": lambda outputs: seen.update(outputs=outputs), "on_validation_end": validated}
    fit(OneWeight, callbacks=callback(**hooks), max_length=Batch(1))
    loss = (1 - one_weight(1)) ** 2
    assert seen["outputs"] == [{"validation_loss": np.float32(loss)}] * 3
    assert seen["copy"] == {"validation_loss": loss}
    assert seen["metrics"] == {"validation_loss": loss, "added": 5, "batches": 1, "epochs": 0.2}, (
        "the chief's gains these"
    )
    assert host.reports[-1].validation == {"validation_loss": loss, "added": 5}


@pytest.mark.api("7.6")
def test_evaluate_full_dataset_has_no_validation_epoch(fit: Fit) -> None:
    full = trial(Recorded, **FULL, evaluate_full_dataset=lambda self, data_loader: {"validation_loss": 1.0})
    log = recorded(fit, trial_class=full, max_length=Batch(1))
    assert [entry for entry in log if "validation" in entry] == ["on_validation_start", "on_validation_end"]


@pytest.mark.api("7.8")
def test_hooks_may_change_what_is_saved_and_what_is_loaded(fit: Fit, host: FakeHost) -> None:
    class Editing(pytorch.PyTorchCallback):
        def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["extra"] = torch.ones(2)

        def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
            assert (Path(checkpoint_dir) / "state-dict.pth").exists()
            (Path(checkpoint_dir) / "mine.txt").write_text("mine")

        def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
            assert torch.equal(checkpoint["extra"], torch.ones(2))
            checkpoint["models_state_dict"][0]["weight"].fill_(1.0)

    callbacks = {"editing": Editing()}
    fit(OneWeight, callbacks=callbacks, max_length=Batch(1))
    path = host.open_checkpoint(host.checkpoints()[0])
    assert (path / "mine.txt").read_text() == "mine"
    assert fit(OneWeight, callbacks=callbacks, max_length=Batch(2), latest_checkpoint=str(path)).weight == 1.0


@pytest.mark.api("1.4", "9.7")
def test_state_of_callbacks_is_kept_by_name(fit: Fit, host: FakeHost, caplog: pytest.LogCaptureFixture) -> None:
    fit(OneWeight, callbacks={"counting": Epochs()}, max_length=Epoch(2))
    callbacks = {"counting": Epochs(), "fresh": Epochs()}
    fit(OneWeight, callbacks=callbacks, max_length=Epoch(3), latest_checkpoint=host.checkpoints()[0])
    assert [each.ended for each in callbacks.values()] == [3, 1]
    assert "callback 'fresh' has no state in the checkpoint" in caplog.text


@pytest.mark.api("7.4")
def test_epoch_start_without_its_argument_still_works(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    starts: list[int] = []

    fit(OneWeight, callbacks=callback(on_training_epoch_start=lambda: starts.append(1)), max_length=Epoch(2))
    assert len(starts) == 2
    assert "deprecated" in caplog.text


@pytest.mark.api("7.9")
def test_on_checkpoint_end_is_deprecated(fit: Fit) -> None:
    with pytest.warns(FutureWarning, match="use on_checkpoint_write_end"):
        fit(OneWeight, callbacks=callback(on_checkpoint_end=lambda checkpoint_dir: None), max_length=Batch(1))


@pytest.mark.api("7.1")
def test_every_hook_does_nothing_by_default() -> None:
    callback = pytorch.PyTorchCallback()
    assert callback.state_dict() == {}
    assert len(HOOKS) == 15
    callback.on_trial_startup(0, None)
    callback.on_training_epoch_start(0)
    callback.on_training_epoch_end(0)
    callback.on_training_workload_end({}, [])
    callback.on_validation_epoch_end([])
    callback.on_validation_end({})
    callback.load_state_dict({})
