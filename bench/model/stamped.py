"""The trial of an example, with time stamps: to be put beside its `model_def.py`."""

from __future__ import annotations

import itertools
import time
from typing import Any

import model_def
import torch
from _measure import stamp

from dray import pytorch

_NUMBERS = itertools.count()
Example: Any = getattr(model_def, "GPTTrial", None) or model_def.FinetuneTrial


class Stamped(Example):  # type: ignore[misc]
    """Stamps the beginning of each trial's first batch, how long its batches take, and every validation."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        # The n-th trial of a process is the n-th of all ranks of its group.
        self.who = {"trial": context.get_trial_id(), "rank": context.distributed.rank, "nth": next(_NUMBERS)}
        self.begun = False

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"stamped": _Stamped(self.who)}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        if not self.begun:
            stamp("first_batch", **self.who)
        began = time.perf_counter()
        metrics: dict[str, torch.Tensor] = super().train_batch(batch, epoch_idx, batch_idx)
        stamp("batch", first=not self.begun, took=time.perf_counter() - began, **self.who)
        self.begun = True
        return metrics


class _Stamped(pytorch.PyTorchCallback):
    def __init__(self, who: dict[str, int]) -> None:
        self.who = who

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        stamp("validated", **self.who)
