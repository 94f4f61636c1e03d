"""A model that ranks share: each has a shard of its weights, its gradients and its optimizer's state."""

from __future__ import annotations

import os

import torch
from recorded import Recorded, note, trial_id
from torch import nn

import dray
from dray import pytorch


class Sharded(Recorded):
    """Its result depends on shards of Adam's moments, too, the order of the data and each rank's random numbers.

    Outside an experiment it notes nothing.
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
