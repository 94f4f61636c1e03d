"""A perceptron with dropout on scikit-learn's digits. The trial is a class; Determined makes the trainer."""

import os
from typing import Any, Dict, Sequence, Union

import torch
from torch import nn

from determined.pytorch import DataLoader, LRScheduler, PyTorchTrial, PyTorchTrialContext

import data

TorchData = Union[Dict[str, torch.Tensor], Sequence[torch.Tensor], torch.Tensor]


class DigitsTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        model = context.get_hparam("model")
        self.model = context.wrap_model(
            nn.Sequential(
                nn.Linear(64, model["hidden"]),
                nn.ReLU(),
                nn.Dropout(model["dropout"]),
                nn.Linear(model["hidden"], 10),
            )
        )
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), **context.get_hparam("optimizer"))
        )
        self.schedule = context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=context.get_hparam("gamma")),
            step_mode=LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )
        settings = context.get_data_config()
        self.train_set, self.validation_set = data.load(
            settings["validation_fraction"], float(os.environ["PIXEL_RANGE"])
        )

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(self.train_set, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.validation_set, batch_size=self.context.get_per_slot_batch_size())

    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> Dict[str, torch.Tensor]:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.context.backward(loss)
        self.context.step_optimizer(
            self.optimizer,
            clip_grads=lambda params: torch.nn.utils.clip_grad_norm_(params, self.context.get_hparam("clip")),
        )
        return {"loss": loss, "lr": self.schedule.get_last_lr()[0]}

    def evaluate_batch(self, batch: TorchData) -> Dict[str, Any]:
        images, labels = batch
        output = self.model(images)
        wrong = output.argmax(dim=1) != labels
        return {
            "validation_loss": nn.functional.cross_entropy(output, labels).item(),
            "validation_error": wrong.float().mean(),
        }
