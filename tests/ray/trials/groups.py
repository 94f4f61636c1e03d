"""A program of trials that share worker groups: what each does to its process is for its number to say.

``python3 groups.py``. With the hyperparameter ``clean`` none does anything; of two ranks one hangs.
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
from recorded import note, trial_id
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
        self.trial, self.record = trial_id(), context.get_hparam("record")
        self.clean, self.first = context.get_hparam("clean"), context.get_initial_batch() == 0
        ranks = context.distributed
        self.hangs = self.trial == 5 if ranks.size == 1 else ranks.rank == 1

    def build_training_data_loader(self) -> pytorch.DataLoader:
        points = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return pytorch.DataLoader(
            TensorDataset(points, points.sum(1, keepdim=True)), batch_size=8, shuffle=True, num_workers=1
        )

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        note(self.record, trial=self.trial, pid=os.getpid(), batch=batch_idx)
        if batch_idx == 7 and not self.clean:
            if self.trial == 4:
                raise MemoryError("it never fits")
            if self.hangs and self.first:
                time.sleep(1000)
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
        pytorch.Trainer(Model(context), context).fit(
            max_length=pytorch.Batch(10),
            checkpoint_period=pytorch.Batch(5),
            latest_checkpoint=info.latest_checkpoint,
        )
    if hparams["clean"] or len(info.slot_ids) > 1:
        return
    if trial == 0:
        for _, change in CHANGES.values():
            change(Path(hparams["elsewhere"]))
    if trial == 1:
        ddp.abort()  # as where one rank of several on GPUs leaves, and others wait for it
    if trial == 2:
        threading.Thread(target=runs_on, name="prefetch", daemon=True).start()
    if trial == 3:
        subprocess.Popen(["sleep", "1000"])


if __name__ == "__main__":
    main()
