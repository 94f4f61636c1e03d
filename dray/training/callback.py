"""Callbacks: hooks into a trial's training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class PyTorchCallback:
    """Base class of the callbacks that `PyTorchTrial.build_callbacks` returns. Override the hooks you need.

    Unless stated otherwise, hooks run on every rank, in the order of the dict that `build_callbacks` returned. An
    exception in a hook ends training. A callback with state overrides `state_dict` and `load_state_dict`.

    Order: on_trial_startup, (loaders are built), on_checkpoint_load_start, load_state_dict, on_training_start; then
    on_training_epoch_start, batches, on_training_epoch_end, on_training_workload_end, on_validation_start,
    on_validation_epoch_start, on_validation_epoch_end, on_validation_end, on_checkpoint_save_start,
    on_checkpoint_write_end, on_checkpoint_upload_end, repeatedly; on_trial_shutdown.
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Called before the data loaders are built.

        Args:
            first_batch_idx: the batch at which this run starts, 0 for a fresh trial.
            checkpoint_uuid: the checkpoint from which it resumes, None for a fresh trial.
        """

    def on_trial_shutdown(self) -> None:
        """Called once at the end, even after an error; callbacks in reverse order."""

    def on_training_start(self) -> None:
        """Called after state is loaded, before the first batch, and before worker processes copy the data set."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Called before the first batch of an epoch is loaded, but not when training resumes within one.

        With `num_workers=0`, an attribute of the data set that is set here is seen by all records of the epoch. Worker
        processes don't see it: they have copies of the data set, made after `on_training_start`, and load ahead, across
        epochs. Give the data set a method `set_epoch(epoch)` instead, which is called in all processes just before
        this hook; in worker processes before their first record of the epoch, and in a resumed run before its first.

        Args:
            epoch_idx: the number of the epoch, from 0.
        """

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Called after the last batch of an epoch."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """Called after each workload, that is, before each report, validation and checkpoint.

        Args:
            avg_metrics: averages over ranks and the workload's batches, the custom reducers' metrics, and the "batches"
                and "epochs" trained.
            batch_metrics: each batch's metrics averaged over ranks, without those of custom reducers.
        """

    def on_validation_start(self) -> None:
        """Called before a validation."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first batch of a validation, but not with `evaluate_full_dataset`."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """Called after the last batch of a validation, but not with `evaluate_full_dataset`.

        Args:
            outputs: the results of `evaluate_batch` on this rank, one per batch, with tensors as NumPy arrays.
        """

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Called after a validation.

        Args:
            metrics: metrics reduced over batches and ranks, the same on each rank. Copy the dict to keep it: on the
                chief, "batches" and "epochs" are added later.
        """

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is loaded.

        Args:
            checkpoint: its state, with keys such as "models_state_dict"; the hook may change it.
        """

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Called on the chief before a checkpoint is written.

        Args:
            checkpoint: its state, with keys such as "models_state_dict"; the hook may change it.
        """

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        """Deprecated: use `on_checkpoint_write_end`, which is called just after it."""

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """Called on the chief after the files of a checkpoint are written.

        Args:
            checkpoint_dir: a temporary directory, which is renamed or uploaded when the hook returns. Files added here,
                and fields added to its `metadata.json`, become part of the checkpoint. To read the checkpoint later,
                keep the id that `on_checkpoint_upload_end` gets.
        """

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """Called when a checkpoint is complete.

        Args:
            uuid: the checkpoint's id, for `Trainer.fit(latest_checkpoint=...)`.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return this callback's state: tensors, NumPy arrays, numbers, strings; dicts, lists, tuples, sets of them."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The hooks with a cost on all ranks that a callback of any rank has."""

    batch_metrics: bool  # on_training_workload_end, which gets the metrics of each batch
    checkpoints: bool  # a hook for written checkpoints: training waits for the write


def checked_callbacks(callbacks: Any) -> dict[str, PyTorchCallback]:
    """Check the result of `build_callbacks()`, and copy it."""
    if not isinstance(callbacks, dict) or not all(isinstance(each, PyTorchCallback) for each in callbacks.values()):
        raise TypeError(
            f"build_callbacks() must return a dict of pytorch.PyTorchCallback instances by name, got {callbacks!r}"
        )
    for name, callback in callbacks.items():
        if overrides(callback, "on_checkpoint_end"):
            warnings.warn(
                f"callback {name!r}: on_checkpoint_end is deprecated; use on_checkpoint_write_end",
                FutureWarning,
                stacklevel=3,
            )
    return dict(callbacks)


def overrides(callback: PyTorchCallback, hook: str) -> bool:
    """Whether a callback overrides a hook of `PyTorchCallback`."""
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(PyTorchCallback, hook)


def hooks_of(callbacks: Mapping[str, PyTorchCallback]) -> Hooks:

    def has(*hooks: str) -> bool:
        return any(overrides(callback, hook) for callback in callbacks.values() for hook in hooks)

    return Hooks(
        batch_metrics=has("on_training_workload_end"),
        checkpoints=has("on_checkpoint_end", "on_checkpoint_write_end", "on_checkpoint_upload_end"),
    )
