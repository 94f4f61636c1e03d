"""A trial of two ranks: one fails while the other, which does not hear of it, works alone for ten minutes."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from recorded import Recorded, note


class Deaf(Recorded):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        if batch_idx == 3:
            rank = self.context.distributed.rank
            note(self.record, trial=self.trial, pid=os.getpid(), stuck=rank)
            if rank == 1:
                raise KeyError("gone")
            time.sleep(600)
        return super().train_batch(batch, epoch_idx, batch_idx)
