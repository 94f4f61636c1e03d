"""`EarlyStopping`: a callback that ends a trial whose validation metric no longer improves."""

from __future__ import annotations

import logging
import math
from typing import Any

from dray.pytorch.context import PyTorchTrialContext
from dray.training.callback import PyTorchCallback
from dray.training.errors import ShouldExit

log = logging.getLogger(__name__)


class EarlyStopping(PyTorchCallback):
    """Ends the trial after `patience` validations in a row without an improvement, with a checkpoint.

    NaN is no improvement. A resumed trial continues to count where it was. A trial that had run out of patience does
    not train on. A fork with changed hyperparameters, or a trial that begins from another one's weights, counts afresh.

    Args:
        metric: the name of a validation metric.
        patience: the number of validations, at least 1.
        min_delta: an improvement is a change by more than this.
        smaller_is_better: whether smaller values of the metric are better, as for a loss.

    Raises:
        ValueError: patience is below 1, or min_delta is negative; in training: there is no such metric, or it is not a
            number.
    """

    context: PyTorchTrialContext  # set by the trainer

    def __init__(
        self, metric: str, patience: int = 3, min_delta: float = 0.0, *, smaller_is_better: bool = True
    ) -> None:
        if patience < 1 or not min_delta >= 0:
            raise ValueError(f"patience must be >= 1, and min_delta >= 0, got {patience!r} and {min_delta!r}")
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.sign = 1 if smaller_is_better else -1
        self.best, self.waited = math.inf, 0

    def on_training_start(self) -> None:
        if self.context.get_initial_batch() == 0 or self.context._run.host.is_changed_fork:
            self.best, self.waited = math.inf, 0
        elif self.waited >= self.patience:
            log.info("early stopping: %s had not improved in %d validations", self.metric, self.waited)
            raise ShouldExit

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        value = metrics.get(self.metric)
        if not isinstance(value, (int, float)):
            raise ValueError(
                f"EarlyStopping: {self.metric!r} must be a number in the validation metrics, got {metrics}"
            )
        improves = self.sign * value < self.best - self.min_delta
        self.best, self.waited = (self.sign * value, 0) if improves else (self.best, self.waited + 1)
        if self.waited >= self.patience:
            log.info(
                "early stopping: %s has not improved by more than %g in %d validations, best: %g",
                *(self.metric, self.min_delta, self.waited, self.sign * self.best),
            )
            self.context.set_stop_requested(True)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.waited = state_dict["best"], state_dict["waited"]
