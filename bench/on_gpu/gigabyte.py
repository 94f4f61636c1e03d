"""A trial with a model of 1 GB, and the same by hand: what happens from its last batch to the next one's first."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from _measure import stamp
from part import DEVICE, allocated, clock

from dray import pytorch

BATCHES = 5


def made(width: int) -> torch.nn.Module:
    """Four square layers, made on the device: at a width of 8192, 1.07 GB."""
    with DEVICE:
        return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(4)])


def data(width: int) -> torch.utils.data.Dataset[Any]:
    return torch.utils.data.TensorDataset(torch.randn(8 * BATCHES, width))


def edge(what: str) -> None:
    """Stamp the start of the first batch, or the end of the last one, with nothing left to do on the GPU."""
    clock()
    stamp(what, gpu_bytes=allocated())


class Gigabyte(pytorch.PyTorchTrial):
    """One of the trials; plain SGD, so that its checkpoint is the model."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        stamp("made", gpu_bytes=allocated())
        self.context, self.width = context, context.get_hparam("width")
        self.model = context.wrap_model(made(self.width))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=1e-3))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(data(self.width), batch_size=8)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 0:
            edge("first_batch")
        loss = self.model(batch[0]).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        if batch_idx == BATCHES - 1:
            edge("last_batch")
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.model(batch[0]).square().mean()}


def by_hand(width: int, file: str) -> tuple[float, float]:
    """The same loop: when its first batch began, and when its last one ended. The model is saved at the end."""
    model = made(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(data(width), batch_size=8)
    began = 0.0
    for (batch,) in loader:
        x = batch.to(DEVICE, non_blocking=True)
        began = began or clock()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ended = clock()
    with torch.no_grad():
        losses = [model(batch.to(DEVICE)).square().mean() for (batch,) in loader]
        torch.stack(losses).mean().item()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    os.unlink(file)
    return began, ended


def locally(width: int, returned: Callable[[], None]) -> None:
    """One local run of the trial; only its files remain."""
    with pytorch.init(hparams={"width": width}, enable_tensorboard_logging=False) as context:
        pytorch.Trainer(Gigabyte(context), context).fit(max_length=pytorch.Batch(BATCHES), checkpoint_policy="none")
        returned()
