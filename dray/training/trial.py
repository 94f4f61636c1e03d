"""Protocols of what the executor calls. `dray.pytorch` has the classes that users extend."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

log = logging.getLogger(__name__)


class Trial(Protocol):
    """See `dray.pytorch.PyTorchTrial`."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> torch.Tensor | dict[str, Any]: ...

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]: ...

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]: ...

    def evaluation_reducer(self) -> Any: ...

    def get_batch_length(self, batch: Any) -> int: ...


class Callback(Protocol):
    """See `dray.pytorch.PyTorchCallback`."""

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None: ...

    def on_trial_shutdown(self) -> None: ...

    def on_training_start(self) -> None: ...

    def on_training_epoch_start(self, epoch_idx: int) -> None: ...

    def on_training_epoch_end(self, epoch_idx: int) -> None: ...

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None: ...

    def on_validation_start(self) -> None: ...

    def on_validation_epoch_start(self) -> None: ...

    def on_validation_epoch_end(self, outputs: list[Any]) -> None: ...

    def on_validation_end(self, metrics: dict[str, Any]) -> None: ...

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None: ...

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None: ...

    def on_checkpoint_end(self, checkpoint_dir: str) -> None: ...

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None: ...

    def on_checkpoint_upload_end(self, uuid: str) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Whether callbacks of any rank have hooks that cost something on all ranks.

    Args:
        batch_metrics: `on_training_workload_end`, which gets the metrics of each batch.
        checkpoints: a hook for written checkpoints: training waits for the write.
    """

    batch_metrics: bool
    checkpoints: bool


class Scheduler(Protocol):
    """See `dray.pytorch.LRScheduler`."""

    def after_batch(self, batch_idx: int, *, epoch_length: int | None, aggregation_frequency: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def evaluate_batch_of(trial: Trial) -> Callable[..., Any]:
    """A trial's `evaluate_batch`, which may lack `batch_idx`, as in Determined's user guide."""
    evaluate_batch: Callable[..., Any] = trial.evaluate_batch
    try:
        parameters = inspect.signature(evaluate_batch).parameters
    except (TypeError, ValueError):
        return evaluate_batch
    kinds = {parameter.kind for parameter in parameters.values()}
    if parameters and "batch_idx" not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        return lambda batch, batch_idx: evaluate_batch(batch=batch)
    return evaluate_batch


def epoch_start_of(callback: Callback) -> Callable[[int], None]:
    """A callback's `on_training_epoch_start`, which may lack its argument, as in old versions of Determined."""
    hook: Any = callback.on_training_epoch_start
    if inspect.signature(hook).parameters:
        return lambda epoch_idx: hook(epoch_idx)
    log.warning(
        "%s.on_training_epoch_start() without epoch_idx is deprecated; add the parameter", type(callback).__name__
    )
    return lambda epoch_idx: hook()
