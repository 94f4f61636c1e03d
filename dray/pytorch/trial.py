"""The class that users extend: a model, its data, and what to do with a batch."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

import torch

from dray.pytorch.batch_functions import data_length
from dray.pytorch.context import PyTorchTrialContext
from dray.training.metrics.reducers import Reducer


class PyTorchTrial(abc.ABC):
    """A model, its data, and how to train on one batch; the trainer does the rest.

    Make models, optimizers and LR schedulers in `__init__` and wrap them with the context's `wrap_model`,
    `wrap_optimizer` and `wrap_lr_scheduler`: what is not wrapped is not saved. Any number of each is fine, and so is
    any order of forward, backward and step.

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
        """Make and wrap models, optimizers and schedulers, and make whatever else the trial needs.

        Raises:
            InvalidHP: raise it for hyperparameters that make no sense; the search then tries others.
        """

    @abc.abstractmethod
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> torch.Tensor | dict[str, Any]:
        """Train on one batch: forward, `context.backward(loss)`, `context.step_optimizer(optimizer)`.

        Args:
            batch: what the training data loader yields, on `context.device`; tensors have shape (batch size of this
                slot, ...). The last batch of an epoch may be smaller.
            epoch_idx: the number of the epoch, from 0.
            batch_idx: the number of the batch on this slot since the trial began, from 0, also after a resume.

        Returns:
            Metrics by name, with the same names for every batch; or one tensor, the loss. A metric is a number, or a
            tensor with one element on any device: return it without `.item()`, so that no batch waits for the device.
            Reports hold the mean over batches and slots.
        """

    @abc.abstractmethod
    def build_training_data_loader(self) -> Iterable[Any]:
        """The training data, which the trainer repeats endlessly.

        Returns:
            A `pytorch.DataLoader`, with `context.get_per_slot_batch_size()` records per batch. Any other loader needs
            `context.experimental.disable_dataset_reproducibility_checks()`.
        """

    @abc.abstractmethod
    def build_validation_data_loader(self) -> Iterable[Any]:
        """The validation data, read once in each validation.

        Returns:
            A `pytorch.DataLoader`; its batch size may differ from that of training.
        """

    def build_callbacks(self) -> dict[str, Any]:
        """Callbacks (`pytorch.PyTorchCallback`) by name. The name is the key of a callback's state in checkpoints."""
        return {}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Validation metrics of one batch; override either this or `evaluate_full_dataset`.

        Runs on every slot, on its share of the data, in eval mode and without gradients. The metrics are reduced by
        `evaluation_reducer`. May be defined without `batch_idx`, and with other names of arguments.

        Args:
            batch: what the validation data loader yields, on `context.device`; tensors have shape (batch size of this
                slot, ...).
            batch_idx: the number of the batch in this validation on this slot, from 0.

        Returns:
            Metrics by name, with the same names for every batch: numbers, tensors or arrays that the reducer can reduce
            to one number.
        """
        raise NotImplementedError("override evaluate_batch() or evaluate_full_dataset()")

    def evaluate_full_dataset(self, data_loader: torch.utils.data.DataLoader[Any]) -> dict[str, Any]:
        """Validation metrics of all data; override either this or `evaluate_batch`.

        Runs on the chief only, in eval mode and without gradients.

        Args:
            data_loader: over the whole validation set; batches are not moved to the device.

        Returns:
            JSON-serialisable metrics by name.
        """
        raise NotImplementedError("override evaluate_batch() or evaluate_full_dataset()")

    def evaluation_reducer(self) -> Reducer | dict[str, Reducer]:
        """How to reduce the metrics of `evaluate_batch` over batches: one reducer for all, or one for each by name.

        The default is `Reducer.AVG`, the mean over batches.
        """
        return Reducer.AVG

    def get_batch_length(self, batch: Any) -> int:
        """The number of records in a batch. Override it if batches are not tensors, arrays, dicts, lists or tuples.

        Raises:
            ValueError: the batch is empty.
            TypeError: it is of another type.
        """
        return data_length(batch)

    def get_batch_tokens(self, batch: Any) -> int:
        """The number of tokens in a batch of training data, for `tokens_per_second` among the figures of the machine.

        For a language model: `return batch["input_ids"].numel()`. Called before the batch is moved to the device.
        """
        return 0
