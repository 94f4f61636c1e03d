"""A trial that tells on which machine each of its ranks is, and whence they have their code and data."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
from model_def import DigitsTrial

from dray import pytorch


class Spread(DigitsTrial):
    """The digits, slowly: each batch takes ``pause_s`` more than it needs."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        here = Path(__file__).parent
        print("machine", socket.gethostname())
        print("process", os.getpid())
        print("code", here)
        print("data", (here / "words.txt").read_text())

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        print("batch", batch_idx)
        time.sleep(self.context.get_hparam("pause_s"))
        return super().train_batch(batch, epoch_idx, batch_idx)
