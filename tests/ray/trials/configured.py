"""A trial that fails as its hyperparameter says, after a line that a log policy may be about; or diverges."""

from __future__ import annotations

import os
from typing import Any

import torch
from recorded import Recorded, note

from dray import pytorch

FLAVOUR = os.environ.get("FLAVOUR", "none")
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", "all")


class Configured(Recorded):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        note(self.record, trial=self.trial, flavour=FLAVOUR, token=len(os.environ["SOME_TOKEN"]), gpus=GPUS)
        note(self.record, trial=self.trial, deterministic=torch.are_deterministic_algorithms_enabled(),
             workspace=os.environ.get("CUBLAS_WORKSPACE_CONFIG"))  # fmt: skip
        torch.use_deterministic_algorithms(False)  # the next trial in this process has them again
        self.fails = context.get_hparam("fails")

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 4:
            match self.fails:
                case "raises":
                    raise RuntimeError("the disk is full")
                case "dies":
                    print("fatal: the disk is full", flush=True)
                    os._exit(7)
                case "otherwise":
                    raise RuntimeError("the disk is slow")
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        return {"loss": metrics["loss"] * float("nan")} if self.fails == "diverges" and batch_idx >= 4 else metrics

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """One that fails would be the best."""
        error = super().evaluate_batch(batch, batch_idx)["error"]
        return {"error": error * (self.fails in ("no", "diverges"))}
