"""A trial without randomness of its own, that writes down which records each of its processes trains on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from recorded import note, trial_id
from torch import nn
from torch.utils.data import TensorDataset

from dray import pytorch

RECORDS = 64


class Elastic(pytorch.PyTorchTrial):
    """A linear model. Each batch is noted in the file ``record``, and sleeps for ``pause_s`` until ``enough`` is there.

    ``enough`` is a file that a test makes when it has seen what it waits for.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.record, self.pause_s = context.get_hparam("record"), context.get_hparam("pause_s")
        self.enough = Path(context.get_hparam("enough"))
        self.who = {"trial": trial_id(), "pid": os.getpid(), "size": context.distributed.get_size()}
        self.model = context.wrap_model(nn.Linear(4, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        points = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(points, points.sum(1, keepdim=True), torch.arange(RECORDS))
        return pytorch.DataLoader(data, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    build_validation_data_loader = build_training_data_loader

    def error(self, batch: Any) -> torch.Tensor:
        return ((self.model(batch[0]) - batch[1]) ** 2).mean()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        note(self.record, **self.who, batch=batch_idx, records=batch[2].tolist())
        if not self.enough.exists():
            time.sleep(self.pause_s)
        loss = self.error(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"error": self.error(batch)}
