"""`PyTorchTrial`, the class that users extend."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

import torch

from dray.pytorch.batch_functions import data_length
from dray.pytorch.context import PyTorchTrialContext
from dray.training.metrics.reducers import Reducer


class PyTorchTrial(abc.ABC):
    """A model, its data, and the code that trains on one batch; the trainer does the rest.

    Make models, optimizers and LR schedulers in `__init__`, and wrap them with the context's `wrap_model`,
    `wrap_optimizer` and `wrap_lr_scheduler`; anything that is not wrapped is not saved. A trial can have any number of
    each, and call forward, backward and step in any order.

    >>> from dray import pytorch
    >>> class Line(pytorch.PyTorchTrial):
    ...     def __init__(self, context):
    ...         self.context = context
    ...         self.model = context.wrap_model(torch.nn.Linear(1, 1))
    ...         self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
    ...         x = torch.linspace(0, 1, 64).reshape(64, 1)
    ...         self.data = torch.utils.data.TensorDataset(x, 3 * x)
    ...
    ...     def build_training_data_loader(self):
    ...         return pytorch.DataLoader(self.data, batch_size=8, shuffle=True)
    ...
    ...     def build_validation_data_loader(self):
    ...         return pytorch.DataLoader(self.data, batch_size=8)
    ...
    ...     def train_batch(self, batch, epoch_idx, batch_idx):
    ...         x, y = batch
    ...         loss = torch.nn.functional.mse_loss(self.model(x), y)
    ...         self.context.backward(loss)
    ...         self.context.step_optimizer(self.optimizer)
    ...         return {"loss": loss}
    ...
    ...     def evaluate_batch(self, batch, batch_idx):
    ...         x, y = batch
    ...         return {"validation_loss": torch.nn.functional.mse_loss(self.model(x), y)}
    >>> with pytorch.init() as context:
    ...     trial = Line(context)
    ...     pytorch.Trainer(trial, context).fit(max_length=pytorch.Epoch(40))
    >>> round(trial.model.weight.item(), 1)
    3.0
    """

    @abc.abstractmethod
    def __init__(self, context: PyTorchTrialContext) -> None:
        """Make and wrap models, optimizers and schedulers, and make everything else that the trial needs.

        Args:
            context: the trial's access to its run.

        Raises:
            InvalidHP: raise this for hyperparameters that make no sense; the search then tries others.
        """

    @abc.abstractmethod
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> torch.Tensor | dict[str, Any]:
        """Train on one batch: forward, `context.backward(loss)`, `context.step_optimizer(optimizer)`.

        Args:
            batch: a batch of the training data loader, on `context.device`; tensors have shape (batch size of this
                slot, ...). The last batch of an epoch may be smaller.
            epoch_idx: the number of the epoch, from 0.
            batch_idx: the number of the batch on this slot since the trial began, from 0; a resume does not reset it.

        Returns:
            Metrics by name, with the same names for every batch; or one tensor, the loss. A metric is a number or a
            tensor with one element, on any device. Return tensors without `.item()`, so that no batch waits for the
            device. Reports contain the mean over batches and slots; a smaller last batch counts as much as any other.
        """

    @abc.abstractmethod
    def build_training_data_loader(self) -> Iterable[Any]:
        """Make the loader of the training data, which the trainer repeats endlessly.

        Returns:
            A `pytorch.DataLoader`, with `context.get_per_slot_batch_size()` records per batch; or a loader with
            `state_dict()` and `load_state_dict()`, see docs/streaming.md. Any other loader needs
            `context.experimental.disable_dataset_reproducibility_checks()`.
        """

    @abc.abstractmethod
    def build_validation_data_loader(self) -> Iterable[Any]:
        """Make the loader of the validation data, which each validation reads once.

        Returns:
            A `pytorch.DataLoader`. Its batch size may differ from the training loader's.
        """

    def build_callbacks(self) -> dict[str, Any]:
        """Return callbacks (`pytorch.PyTorchCallback`) by name, which is the key of their state in checkpoints."""
        return {}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Compute the validation metrics of one batch. Override either this or `evaluate_full_dataset`.

        Each slot evaluates its share of the data, in eval mode and without gradients; `evaluation_reducer` says how the
        metrics are reduced. The method may be defined without `batch_idx`, and with other argument names.

        Args:
            batch: a batch of the validation data loader, on `context.device`; tensors have shape (batch size of this
                slot, ...).
            batch_idx: the number of the batch on this slot in this validation, from 0.

        Returns:
            Metrics by name, with the same names for every batch: numbers, tensors or arrays that the reducer can reduce
            to one number.
        """
        raise NotImplementedError("override evaluate_batch() or evaluate_full_dataset()")

    def evaluate_full_dataset(self, data_loader: torch.utils.data.DataLoader[Any]) -> dict[str, Any]:
        """Compute the validation metrics of the whole dataset. Override either this or `evaluate_batch`.

        Called only on the chief (with a sharded model, on all slots), in eval mode and without gradients.

        Args:
            data_loader: a loader of the whole validation set; its batches are not moved to the device.

        Returns:
            JSON-serialisable metrics by name.
        """
        raise NotImplementedError("override evaluate_batch() or evaluate_full_dataset()")

    def evaluation_reducer(self) -> Reducer | dict[str, Reducer]:
        """Return the reducer of `evaluate_batch`'s metrics over batches, or a dict with a reducer for each metric.

        The default is `Reducer.AVG`, the mean over batches, in which a last, smaller batch counts as much as any other;
        `Reducer.AVG_OVER_RECORDS` weights each batch by its number of records, from `get_batch_length`.
        """
        return Reducer.AVG

    def get_batch_length(self, batch: Any) -> int:
        """Return the number of records in a batch. Override it if batches are not tensors, arrays, dicts, lists or
        tuples.

        Raises:
            ValueError: the batch is empty.
            TypeError: the batch is of another type.
        """
        return data_length(batch)

    def get_batch_tokens(self, batch: Any) -> int:
        """Return the number of tokens in a batch of training data, for the machine's figure `tokens_per_second`.

        For a language model: `return batch["input_ids"].numel()`. Called before the batch is moved to the device.
        """
        return 0


def overrides(trial: PyTorchTrial, name: str) -> bool:
    """Whether the trial has its own method of this name."""
    return getattr(type(trial), name) is not getattr(PyTorchTrial, name) or name in vars(trial)
