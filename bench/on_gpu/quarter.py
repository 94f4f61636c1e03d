"""A small model that leaves most of a GPU idle: a trial of `quarters`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from _measure import stamp
from part import ON_GPU, clock

from dray import pytorch

EVERY = 50
"""Batches between stamps."""
MEETS_S = 40.0
"""The longest time that trials wait for one another; without waiting, they would train one after another."""


class Quarter(pytorch.PyTorchTrial):
    """Waits until as many trials train as there should be, then trains for a while."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context, self.meeting = context, Path(context.get_hparam("meeting"))
        width = 32 if context.get_hparam("tiny") else 1024
        self.data = torch.utils.data.TensorDataset(torch.randn(64 * 128, width))
        layers = [layer for _ in range(8) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        self.model = context.wrap_model(torch.nn.Sequential(*layers))
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.until = 0.0

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.data, batch_size=128)

    build_validation_data_loader = build_training_data_loader

    def meet(self) -> None:
        (self.meeting / str(os.getpid())).touch()
        late = time.monotonic() + MEETS_S
        while len(list(self.meeting.iterdir())) < self.context.get_hparam("trials") and time.monotonic() < late:
            time.sleep(0.02)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == EVERY:  # warm
            clock()
            self.meet()
            self.until = time.time() + self.context.get_hparam("lasts_s")
        if batch_idx % EVERY == 0:
            clock()
            outside = 0
            if ON_GPU:
                free, total = torch.cuda.mem_get_info()
                outside = total - free
            reserved = torch.cuda.memory_reserved() if ON_GPU else 0
            stamp("batch", trial=self.context.get_trial_id(), number=batch_idx, used=outside, reserved=reserved)
            if self.until and time.time() > self.until:
                self.context.set_stop_requested(True)
        loss = self.model(batch[0]).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return {"validation_loss": 0.0}
