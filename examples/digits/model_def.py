"""A classifier of handwritten digits: scikit-learn's 1,797 real 8x8 images, which come with the library."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

from dray import pytorch


@pytorch.cached  # several trials run in one process: read the images once
def datasets() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to train on and 360 held out, stratified by digit, the same in every trial."""
    digits = load_digits()
    parts = train_test_split(digits.data / 16.0, digits.target, test_size=0.2, stratify=digits.target, random_state=0)
    x_train, x_test, y_train, y_test = (torch.as_tensor(part) for part in parts)
    return TensorDataset(x_train.float(), y_train), TensorDataset(x_test.float(), y_test)


class DigitsTrial(pytorch.PyTorchTrial):
    """One hidden layer of ``hidden`` units, trained by Adam at the learning rate ``lr``."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        hidden = context.get_hparam("hidden")
        self.model = context.wrap_model(nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=context.get_hparam("lr")))
        self.loss = nn.CrossEntropyLoss()

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(datasets()[0], batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(datasets()[1], batch_size=60)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        images, labels = batch
        loss = self.loss(self.model(images), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        images, labels = batch
        scores = self.model(images)
        return {
            "validation_loss": self.loss(scores, labels),
            "accuracy": (scores.argmax(dim=1) == labels).float().mean(),
        }
