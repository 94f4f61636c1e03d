"""A model that ranks share: each has a shard of its weights, its gradients and its optimizer's state."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from recorded import Recorded, note, trial_id
from torch import nn

import dray
from dray import pytorch


class Sharded(Recorded):
    """Its result depends on shards of Adam's moments, too, the order of the data and each rank's random numbers.

    A trial that comes to the batch ``held_at`` waits there for the file ``until``. Outside an experiment it notes
    nothing.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context, self.initial = context, 0.0
        self.record, self.pause_s = context.get_hparam("record"), context.get_hparam("pause_s")
        if dray.get_cluster_info() is not None:
            self.trial = trial_id()
            rank, raylet = context.distributed.get_rank(), os.environ.get("RAY_RAYLET_PID")
            note(self.record, trial=self.trial, pid=os.getpid(), made=rank, raylet=raylet)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.25), nn.Linear(6, 1))
        self.model = context.wrap_model(model, parallel=pytorch.FullyShard(units=[nn.Linear]))
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), lr=context.get_hparam("lr")))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        until = Path(self.context.get_hparam("until"))
        while batch_idx == self.context.get_hparam("held_at") and not until.exists():
            time.sleep(0.02)
        return super().train_batch(batch, epoch_idx, batch_idx)
