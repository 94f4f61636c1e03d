"""A compiled model, partly pretrained, on cached data; each trial writes down what it found warm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dray import pytorch

makes: list[int] = []


@pytorch.cached
def data(records: int) -> torch.utils.data.TensorDataset:
    makes.append(records)
    return torch.utils.data.TensorDataset(torch.randn(records, 4))


@pytorch.pretrained
def embedding(width: int) -> nn.Module:
    makes.append(width)
    return nn.Linear(4, width)


class Warm(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        net = nn.Sequential(embedding(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        self.model = context.wrap_model(torch.compile(net))  # type: ignore[arg-type]
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=context.get_hparam("lr")))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(data(32), batch_size=8, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(data(32), batch_size=8)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = self.model(batch[0]).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        return {"error": self.model(batch[0]).square().mean()}

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"record": _Record(Path(self.context.get_hparam("record")))}


class _Record(pytorch.PyTorchCallback):
    def __init__(self, file: Path) -> None:
        self.file = file

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        found = {
            "pid": os.getpid(),
            "compiled": torch._dynamo.utils.counters["stats"]["unique_graphs"],
            "makes": len(makes),
            "cache": cache_dir(),
        }
        with self.file.open("a") as file:
            file.write(json.dumps(found) + "\n")
