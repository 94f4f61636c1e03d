"""The digits trial, noting where its processes run, and its batches. To be put beside the example's model_def.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import model_def
import ray
import torch
import torch.distributed
from recorded import note, trial_id

from dray import pytorch


class RecordedDigits(model_def.DigitsTrial):
    """Notes into the file ``record``; sleeps for ``pause_s`` a batch."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.record, self.pause_s = context.get_hparam("record"), context.get_hparam("pause_s")
        self.trial = trial_id()
        distributed = torch.distributed.is_initialized()
        note(
            self.record,
            trial=self.trial,
            pid=os.getpid(),
            made=context.distributed.get_rank(),
            size=torch.distributed.get_world_size() if distributed else 1,
            backend=torch.distributed.get_backend() if distributed else None,
            device=str(context.device),
            gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
            node=ray.get_runtime_context().get_node_id(),
            file=model_def.__file__,
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        note(self.record, trial=self.trial, pid=os.getpid(), batch=batch_idx)
        time.sleep(self.pause_s)
        return super().train_batch(batch, epoch_idx, batch_idx)


class WithDropout(RecordedDigits):
    """Its result depends on the order of the data and on random numbers of both kinds.

    Waits before a batch as long as there is a file beside ``record`` that says so.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.dropout = torch.nn.Dropout(0.25)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        while Path(f"{self.record}.hold.{self.trial}.{batch_idx}").exists():
            time.sleep(0.02)
        images, labels = batch
        return super().train_batch((self.dropout(images), labels), epoch_idx, batch_idx)
