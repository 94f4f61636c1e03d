"""Trials that write down what they do, so that a test sees which process trained which batch of which trial."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dray
from dray import pytorch


def note(path: str, **what: object) -> None:
    """Append one line; whole, whoever else appends, and whatever kills this process next."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, json.dumps({"time": time.time(), **what}).encode() + b"\n")
    os.close(file)


def first(file: str) -> bool:
    """Whether nobody has called this with the file before."""
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def trial_id() -> int:
    info = dray.get_cluster_info()
    assert info is not None, "a trial of an experiment can ask about itself"
    return info.trial.trial_id


class Recorded(pytorch.PyTorchTrial):
    """A linear model. Each batch sleeps for ``pause_s``, and is noted in the file ``record`` before that."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.trial = trial_id()
        self.record, self.pause_s = context.get_hparam("record"), context.get_hparam("pause_s")
        model = nn.Linear(4, 1)
        self.initial = model.weight.sum().item()
        rank, raylet = context.distributed.get_rank(), os.environ.get("RAY_RAYLET_PID")
        note(self.record, trial=self.trial, pid=os.getpid(), made=rank, initial=self.initial, raylet=raylet)
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr")))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        points = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return pytorch.DataLoader(
            TensorDataset(points, points.sum(1, keepdim=True)),
            batch_size=self.context.get_per_slot_batch_size(),
            shuffle=True,
        )

    build_validation_data_loader = build_training_data_loader

    def error(self, batch: Any) -> torch.Tensor:
        return ((self.model(batch[0]) - batch[1]) ** 2).mean()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = self.error(batch)
        note(self.record, trial=self.trial, pid=os.getpid(), batch=batch_idx, loss=loss.item())
        time.sleep(self.pause_s)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"error": self.error(batch), "initial": self.initial}


class Held(Recorded):
    """At its sixth batch a trial waits for the file ``until``; trial 0 then also waits for the file ``longer``."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        if batch_idx == 5:
            names = ("until", "longer") if self.trial == 0 else ("until",)
            for file in (Path(self.context.get_hparam(name)) for name in names):
                while not file.exists():
                    time.sleep(0.05)
        return super().train_batch(batch, epoch_idx, batch_idx)


class FirstAhead(Recorded):
    """The first trial to come to batch ``held_at`` goes on; all others wait there for the file ``until``."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        until = Path(self.context.get_hparam("until"))
        if batch_idx == self.context.get_hparam("held_at") and not first(f"{until}.first"):
            while not until.exists():
                time.sleep(0.02)
        return super().train_batch(batch, epoch_idx, batch_idx)


class Faulty(Recorded):
    """Trial 1 raises at its sixth batch, whenever it gets there; the hyperparameters of trial 2 are invalid."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        if self.trial == 2:
            raise pytorch.InvalidHP("too large for this machine")

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        if self.trial == 1 and batch_idx == 5:
            raise ArithmeticError("it always ends so")
        return super().train_batch(batch, epoch_idx, batch_idx)
