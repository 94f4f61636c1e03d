"""A trial whose model is compiled; it stamps the time of its first step, and the compilations so far."""

from __future__ import annotations

import time
from typing import Any

import torch
from _measure import stamp
from torch import nn

from dray import pytorch

WIDTH, DEPTH = 256, 4


@pytorch.cached
def data() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.randn(512, WIDTH), torch.randint(10, (512,)))


class Compiled(pytorch.PyTorchTrial):
    """A small transformer's feed-forward blocks; lr and weight decay are searched."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)]
        net = nn.Sequential(*blocks, nn.Linear(WIDTH, 10))
        self.model = context.wrap_model(torch.compile(net))  # type: ignore[arg-type]
        lr, decay = context.get_hparam("lr"), context.get_hparam("weight_decay")
        adam = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=decay)
        self.optimizer = context.wrap_optimizer(adam)
        self.loss = nn.CrossEntropyLoss()
        self.begun = False

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(data(), batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(data(), batch_size=self.context.get_per_slot_batch_size())

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        began = time.perf_counter()
        loss = self.loss(self.model(batch[0]), batch[1])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        if not self.begun:
            self.begun = True
            stamp("first_step", seconds=time.perf_counter() - began)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        return {"validation_loss": self.loss(self.model(batch[0]), batch[1])}

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"counts": _Counts()}


class _Counts(pytorch.PyTorchCallback):
    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        counters = torch._dynamo.utils.counters
        found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("miss", "hit")}
        stamp("counts", graphs=counters["stats"]["unique_graphs"], **found)
