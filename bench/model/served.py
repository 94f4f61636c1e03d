"""A trial that records when it trains: each batch takes ``pause_s``, and is noted with a time stamp in a file."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dray import pytorch


class ServedTrial(pytorch.PyTorchTrial):
    """A linear model on random points."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.file, self.pause_s = context.get_hparam("file"), context.get_hparam("pause_s")
        self.model = context.wrap_model(nn.Linear(4, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        points = torch.randn(64, 4)
        return pytorch.DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=8)

    build_validation_data_loader = build_training_data_loader

    def error(self, batch: Any) -> torch.Tensor:
        return ((self.model(batch[0]) - batch[1]) ** 2).mean()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        line = {"time": time.time(), "pid": os.getpid(), "batch": batch_idx, "took": self.pause_s}
        file = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, json.dumps(line).encode() + b"\n")
        os.close(file)
        time.sleep(self.pause_s)
        loss = self.error(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"error": self.error(batch)}
