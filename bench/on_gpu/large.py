"""A trial with a state of 2 GB, most of it AdamW's moments, for the cost of its checkpoints."""

from __future__ import annotations

import time
from typing import Any

import torch
from _measure import stamp
from part import DEVICE, ON_GPU, clock

from dray import pytorch

LAYERS, WIDTH = 10, 4096
"""2 GB: 10 times 17 million weights in float32, and two moments of each. With gradients, 2.7 GB of GPU memory."""
TINY_LAYERS, TINY_WIDTH = 2, 64
BATCH = 64


def made(tiny: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    layers, width = (TINY_LAYERS, TINY_WIDTH) if tiny else (LAYERS, WIDTH)
    with DEVICE:
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=ON_GPU or None)


def batches(tiny: bool) -> torch.utils.data.Dataset[Any]:
    """An epoch of 20 batches."""
    return torch.utils.data.TensorDataset(torch.randn(20 * BATCH, TINY_WIDTH if tiny else WIDTH))


class Large(pytorch.PyTorchTrial):
    """Stamps when each batch begins, with nothing left to do on the GPU."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context, self.tiny = context, bool(context.get_hparam("tiny"))
        if self.tiny:
            from dray.training.checkpoint import checkpointer

            checkpointer.AT_ONCE_BYTES = 0  # a small state would be written at once
        model, optimizer = made(self.tiny)
        self.model, self.optimizer = context.wrap_model(model), context.wrap_optimizer(optimizer)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(batches(self.tiny), batch_size=BATCH)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        stamp("batch", number=batch_idx, at=clock())
        loss = self.model(batch[0]).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        if self.tiny:
            time.sleep(0.02)
        return {"loss": loss}

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        stamp("validation", at=clock())
        return {"validation_loss": 0.0}
