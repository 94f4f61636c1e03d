"""The digits trial of examples/, with time stamps, otherwise unchanged."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from _measure import stamp
from model_def import DigitsTrial

from dray import pytorch

_NUMBERS = itertools.count()


class TimedDigits(DigitsTrial):
    """Stamps each trial's first batch and every validation.

    It has optional hyperparameters of its own: the first batch sleeps ``sleep_s`` seconds, or ``slow_s`` for the trials
    in the list ``slow_trials``.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        # The n-th trial of a process is the n-th of all ranks of its group.
        self.who = {"trial": context.get_trial_id(), "rank": context.distributed.rank, "nth": next(_NUMBERS)}
        hparams = context.get_hparams()
        slow = self.who["trial"] in hparams.get("slow_trials", ())
        self.sleep_s = hparams["slow_s"] if slow else hparams.get("sleep_s", 0.0)
        self.begun = False

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"timed": _Timed(self.who)}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        if not self.begun:
            self.begun = True
            stamp("first_batch", **self.who)
            if self.sleep_s:
                time.sleep(self.sleep_s)
        return super().train_batch(batch, epoch_idx, batch_idx)


class _Timed(pytorch.PyTorchCallback):
    def __init__(self, who: dict[str, int]) -> None:
        self.who = who

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        found = {"loss": float(metrics["validation_loss"]), "accuracy": float(metrics["accuracy"])}
        stamp("validated", **found, **self.who)


stamp("trial_class_loaded")
