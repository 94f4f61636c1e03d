"""A trial that fails as trials on GPUs do: `errors` runs it without Ray, `failing_search` on Ray."""

from __future__ import annotations

from typing import Any

import torch
from _measure import stamp
from part import DEVICE, ON_GPU, allocated, used

from dray import pytorch

BATCHES = 5


class Failing(pytorch.PyTorchTrial):
    """Fails in its third batch, according to its hyperparameter: assert, memory, or not at all."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context, self.fault = context, str(context.get_hparam("fault"))
        stamp("made", fault=self.fault, allocated=allocated(), used=used())
        self.model = context.wrap_model(torch.nn.Linear(1024, 1024))
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(self.model.parameters()))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(torch.utils.data.TensorDataset(torch.randn(8 * BATCHES, 1024)), batch_size=8)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self.model(batch[0]).square().mean()
        if batch_idx == 2 and self.fault == "assert":
            loss = loss + self.model.weight[torch.tensor([5000], device=loss.device)].sum()
            loss.item()
        elif batch_idx == 2 and self.fault == "memory":
            size = torch.cuda.get_device_properties(DEVICE).total_memory if ON_GPU else 1 << 55
            loss = loss + torch.empty(size, dtype=torch.uint8, device=loss.device).sum()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.model(batch[0]).square().mean()}
