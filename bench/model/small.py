"""A model so small that the loop around it matters, and a loop written by hand. Torch only, no dray."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 16
VALIDATION_BATCH = 32


class Points(TensorDataset):
    """Not torch's TensorDataset, from which dray takes batches faster than torch: the loops would differ."""


def training_data() -> TensorDataset:
    """16,000 records: 1,000 batches."""
    return _data(16_000, seed=1)


def validation_data() -> TensorDataset:
    """6,400 records: 200 batches."""
    return _data(6_400, seed=2)


def _data(records: int, seed: int) -> TensorDataset:
    x = torch.randn(records, 16, generator=torch.Generator().manual_seed(seed))
    return Points(x, x.square().sum(1, keepdim=True))


def model() -> nn.Module:
    """A model with about a thousand parameters."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


class ByHand:
    """The minimum that trains and validates: no metrics while training, no schedule, no aggregation.

    Args:
        spread: train on all processes of torch.distributed, by DistributedDataParallel.
    """

    def __init__(self, spread: bool = False) -> None:
        data = training_data()
        self.model = model()
        if spread:
            self.model = DistributedDataParallel(self.model)
        self.optimizer = optimizer(self.model)
        self.loss = nn.MSELoss()
        sampler = DistributedSampler(data) if spread else None
        self.training = DataLoader(data, batch_size=BATCH, sampler=sampler, shuffle=not spread)
        self.validation = DataLoader(validation_data(), batch_size=VALIDATION_BATCH)

    def train(self) -> None:
        """One epoch."""
        self.model.train()
        for x, y in self.training:
            self.optimizer.zero_grad()
            loss = self.loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()

    def validate(self) -> float:
        """The mean loss."""
        self.model.eval()
        total = torch.zeros(())
        with torch.no_grad():
            for x, y in self.validation:
                total += self.loss(self.model(x), y)
        return (total / len(self.validation)).item()
