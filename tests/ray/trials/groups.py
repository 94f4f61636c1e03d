"""A program of trials that share worker groups: what each does to its process is for its number to say.

``python3 groups.py``. With the hyperparameter ``clean`` none does anything.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch
from changes import CHANGES
from recorded import note
from torch import nn
from torch.utils.data import TensorDataset

import dray
from dray import pytorch
from dray.training.parallel import ddp


class Model(pytorch.PyTorchTrial):
    """A small net with dropout, on shuffled data that a worker process loads."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=context.get_hparam("lr")))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        points = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return pytorch.DataLoader(
            TensorDataset(points, points.sum(1, keepdim=True)), batch_size=8, shuffle=True, num_workers=1
        )

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = ((self.model(batch[0]) - batch[1]) ** 2).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"error": ((self.model(batch[0]) - batch[1]) ** 2).mean()}


def runs_on() -> None:
    time.sleep(1000)


def main() -> None:
    info = dray.get_cluster_info()
    assert info is not None
    trial, hparams = info.trial.trial_id, dict(info.trial.hparams)
    record = hparams["record"]
    signal.signal(signal.SIGTERM, print)
    atexit.register(note, record, trial=trial, pid=os.getpid(), left=True)
    seen = {what: look() for what, (look, _) in CHANGES.items()}
    note(record, trial=trial, pid=os.getpid(), made=0, seen=seen, draw=torch.rand(1).item())
    with pytorch.init(hparams=hparams) as context:
        pytorch.Trainer(Model(context), context).fit(max_length=pytorch.Batch(10))
    if hparams["clean"]:
        return
    if trial == 0:
        for _, change in CHANGES.values():
            change(Path(hparams["elsewhere"]))
    if trial == 1:
        threading.Thread(target=runs_on, name="prefetch", daemon=True).start()
    if trial == 2:
        subprocess.Popen(["sleep", "1000"])
    if trial == 3:
        ddp.abort()  # as where one rank of several on GPUs leaves, and others wait for it


if __name__ == "__main__":
    main()
