"""A trial that needs a secret, and says in `record` which one it got, as a digest."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch
from recorded import Faulty, FirstAhead, note

from dray import pytorch


class Secretive(FirstAhead, Faulty):
    """Prints it, waits as `FirstAhead` does, and fails as `Faulty` does, but with the secret in its error."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.token = context.get_data_config()["secrets"]["token"]
        print(f"printed: {self.token}")
        digest = hashlib.sha256(self.token.encode()).hexdigest()
        note(f"{self.record}-secrets", trial=self.trial, pid=os.getpid(), digest=digest)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        try:
            return super().train_batch(batch, epoch_idx, batch_idx)
        except ArithmeticError:
            raise PermissionError(f"no access with {self.token}") from None
