"""What lies beside a driver: a trial that notes what of its code, and of dray, is where it runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dray import pytorch

EDITION = "first"


class Travelled(pytorch.PyTorchTrial):
    """A linear model. Its points lie in a file beside this one, and what it found in the file ``record``."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        beside = Path(__file__).parent
        found = {
            "edition": EDITION,
            "files": {name: sys.modules[name].__file__ for name in ("dray", "searchers", __name__)},
            "left_out": [name for name in ("secret.txt", ".env") if (beside / name).exists()],
            "link": os.readlink(beside / "shared") if (beside / "shared").is_symlink() else None,
        }
        with open(context.get_hparam("record"), "a") as file:
            file.write(json.dumps(found) + "\n")
        self.points = torch.tensor([float(x) for x in (beside / "points.csv").read_text().split(",")])
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        points = self.points.unsqueeze(1)
        return pytorch.DataLoader(TensorDataset(points, points), batch_size=self.context.get_per_slot_batch_size())

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = self.evaluate_batch(batch, batch_idx)["error"]
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"error": ((self.model(batch[0]) - batch[1]) ** 2).mean()}
