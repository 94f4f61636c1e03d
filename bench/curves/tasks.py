"""The recorded tasks: for each its space, data and network, and the trial that dray trains.

Two spaces: five tasks share `LAYERS`, with a choice of the optimizer (and a momentum that only SGD has); five tasks
share `SEQUENCES`, with a warm-up and a schedule. An epoch is a fixed number of records (`Task.epoch`): all training
data of `digits_mlp`, `diabetes_mlp` and `cancer_mlp`, a part of the larger sets of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import data
import networks
import torch
from torch import Tensor, nn
from torch.nn import functional

from dray import pytorch

EPOCHS = 27

LAYERS: dict[str, Any] = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": 0},
    "weight_decay": {"type": "log", "base": 10, "minval": -6, "maxval": -1},
    "dropout": {"type": "double", "minval": 0, "maxval": 0.6},
    "global_batch_size": {"type": "int", "minval": 16, "maxval": 128, "log": True},
    "width": {"type": "int", "minval": 8, "maxval": 128, "log": True},
    "layers": {"type": "int", "minval": 1, "maxval": 3},
    "optimizer": {
        "type": "categorical",
        "vals": [{"name": "sgd", "momentum": {"type": "double", "minval": 0, "maxval": 0.98}}, {"name": "adam"}],
    },
}
SEQUENCES: dict[str, Any] = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -0.5},
    "weight_decay": {"type": "log", "base": 10, "minval": -4, "maxval": 0},
    "dropout": {"type": "double", "minval": 0, "maxval": 0.5},
    "global_batch_size": {"type": "int", "minval": 8, "maxval": 32, "log": True},
    "width": {"type": "int", "minval": 8, "maxval": 40, "step": 4},
    "warmup": {"type": "double", "minval": 0, "maxval": 0.3},
    "schedule": {"type": "categorical", "vals": ["constant", "cosine"]},
}


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Args:
        space: like an experiment's `hyperparameters`.
        load: loads the data.
        network: makes the network from the hyperparameters.
        epoch: records per epoch.
        loss: of the network's output and the targets, a scalar.
    """

    space: Mapping[str, Any]
    load: data.Load
    network: Callable[[Mapping[str, Any]], nn.Module]
    epoch: int
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy


def _of_each(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of all elements of all sequences."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


TASKS = {
    "digits_mlp": Task(LAYERS, data.digits, networks.digits_mlp, 800),
    "diabetes_mlp": Task(LAYERS, data.diabetes, networks.diabetes_mlp, 300, functional.mse_loss),
    "code_origin": Task(LAYERS, data.code_origin, networks.code_origin, 400),
    "docs_gru": Task(SEQUENCES, data.docs, networks.DocsGRU, 64, _of_each),
    "digits_vit": Task(SEQUENCES, data.digits, networks.DigitsViT, 96),
    "digits_cnn": Task(LAYERS, data.digits, networks.digits_cnn, 200),
    "cancer_mlp": Task(LAYERS, data.cancer, networks.cancer_mlp, 380),
    "code_tags": Task(SEQUENCES, data.code_tags, networks.code_tags, 64, _of_each),
    "code_transformer": Task(SEQUENCES, data.code, networks.CodeTransformer, 64, _of_each),
    "pixels": Task(SEQUENCES, data.pixels, networks.pixels, 48, _of_each),
}
"""The first five are `recorded_problems.TUNE_ON`, the others `KEPT`."""


class RecordedTrial(pytorch.PyTorchTrial):
    """A trial of any task: its experiment's config names the task, in `data`."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.task = TASKS[context.get_data_config()["task"]]
        self.split = self.task.load()
        hparams = context.get_hparams()
        self.model = context.wrap_model(self.task.network(hparams))
        self.optimizer = context.wrap_optimizer(_optimizer(self.model, hparams))
        if "schedule" in hparams:
            self.scheduler = context.wrap_lr_scheduler(
                torch.optim.lr_scheduler.LambdaLR(self.optimizer, _schedule(hparams, EPOCHS * self.batches_per_epoch)),
                pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH,
            )

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches that comes closest to an epoch."""
        return max(round(self.task.epoch / self.context.get_global_batch_size()), 1)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(self.split.training, batch_size=size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.split.validation, batch_size=len(self.split.validation))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Tensor]:
        inputs, targets = batch
        loss = self.task.loss(self.model(inputs), targets)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        inputs, targets = batch
        return {"validation_loss": self.task.loss(self.model(inputs), targets)}


def _optimizer(model: nn.Module, hparams: Mapping[str, Any]) -> torch.optim.Optimizer:
    lr, decay = hparams["lr"], hparams["weight_decay"]
    if hparams.get("optimizer", {}).get("name") == "sgd":
        momentum = hparams["optimizer"]["momentum"]
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay, fused=True)


def _schedule(hparams: Mapping[str, Any], batches: int) -> Callable[[int], float]:
    """The factor of the learning rate: a linear warm-up, then constant or a cosine to 0."""
    warmup = max(hparams["warmup"] * batches, 1.0)

    def factor(batch: int) -> float:
        if batch + 1 < warmup:
            return (batch + 1) / warmup
        if hparams["schedule"] == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (batch + 1 - warmup) / max(batches - warmup, 1.0)))

    return factor
