"""A trial with OneCycleLR, as long as the training; or else (`length: fixed`) as long as it was at first. With
`length: refused` it has invalid hyperparameters for a longer training."""

from __future__ import annotations

from typing import Any

import torch

from dray import pytorch


class Extended(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        total = context.get_total_batches(self.build_training_data_loader)
        length = context.get_hparam("length")
        if length == "refused" and total > 8:
            raise pytorch.InvalidHP("it trains for 8 batches")
        steps = 8 if length == "fixed" else total
        schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=steps)
        context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        self.total = float(total)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(torch.ones(16, 1), batch_size=self.context.get_per_slot_batch_size())

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = (self.model(batch) - 1).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": (self.model(batch) - 1).square().mean(), "total": self.total}
