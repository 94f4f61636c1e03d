"""The classifier of ``model_def.py``, which also reports its size."""

from __future__ import annotations

from typing import Any

import torch
from model_def import DigitsTrial


class SizedDigitsTrial(DigitsTrial):
    """``parameters``: how many weights and biases the model has."""

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        size = sum(each.numel() for each in self.model.parameters())
        return {**super().evaluate_batch(batch, batch_idx), "parameters": torch.tensor(float(size))}
