"""The model of small.py as a trial that takes turns with the loop written by hand, in the same process."""

from __future__ import annotations

import time
from typing import Any

import torch
from _measure import stamp
from small import BATCH, VALIDATION_BATCH, ByHand, model, optimizer, training_data, validation_data
from torch import nn

from dray import pytorch


class SmallTrial(pytorch.PyTorchTrial):
    """Trains as `ByHand` does; stamps its first batch."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        torch.set_num_threads(1)
        self.context = context
        self.model = context.wrap_model(model())
        self.optimizer = context.wrap_optimizer(optimizer(self.model))
        self.loss = nn.MSELoss()
        self.begun = False

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(training_data(), batch_size=BATCH, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(validation_data(), batch_size=VALIDATION_BATCH)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        if not self.begun:
            self.begun = True
            stamp("first_batch", cpu_s=time.process_time())
        x, y = batch
        loss = self.loss(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"validation_loss": self.loss(self.model(x), y)}


class InTurns(SmallTrial):
    """Runs an epoch by hand after each of its own, and stamps the CPU time of both."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        # In an experiment a hyperparameter says so, since dray calls pytorch.init() there.
        if not context.get_hparams().get("tensorboard", True):
            context.set_enable_tensorboard_logging(False)
        self.by_hand = ByHand(spread=context.distributed.size > 1)
        self.epoch = len(self.by_hand.training)
        self.by_hand.train()

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"turns": _Turns(self.by_hand, self.context.distributed.rank)}


class _Turns(pytorch.PyTorchCallback):
    # Called once an epoch: the clock adds nothing to a batch.
    def __init__(self, by_hand: ByHand, rank: int) -> None:
        self.by_hand = by_hand
        self.rank = rank
        self.since = 0.0

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        took, began = time.process_time() - self.since, time.process_time()
        self.by_hand.train()
        by_hand = time.process_time() - began
        if epoch_idx > 1:  # the first epoch is for warming up
            stamp("epoch", rank=self.rank, batches=len(self.by_hand.training), dray_s=took, by_hand_s=by_hand)
        self.since = time.process_time()


class ValidationInTurns(SmallTrial):
    """Runs a validation by hand after each of its own, and stamps the CPU time of both."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.by_hand = ByHand()

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"timed": _TimedValidation(self.by_hand)}


class _TimedValidation(pytorch.PyTorchCallback):
    def __init__(self, by_hand: ByHand) -> None:
        self.by_hand = by_hand
        self.began = 0.0
        self.seen = 0

    def on_validation_start(self) -> None:
        self.began = time.process_time()

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        took, began = time.process_time() - self.began, time.process_time()
        self.by_hand.validate()
        by_hand = time.process_time() - began
        self.seen += 1
        if self.seen > 2:  # the first ones are for warming up
            stamp("validation", dray_s=took, by_hand_s=by_hand)
