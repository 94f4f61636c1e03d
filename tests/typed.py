"""Code as users write it, which mypy checks together with the package (see pyproject.toml); it is not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from typing_extensions import assert_type

import dray
from dray import pytorch


def experiments_by_name_number_and_path() -> None:
    for name in ("latest", 12, Path("results/digits-1"), "s3://bucket/results/digits-1"):
        result = dray.Result(name)
        assert_type(result.trials, pd.DataFrame)
        assert_type(result.best_trial.batches, int)
        assert_type(result.best_trial.best_batches, int)
        assert_type(dray.Experiment.resume(name).run(), dray.Result)


class Counting(pytorch.PyTorchCallback):
    count = 0

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.count += 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class OwnLoader(pytorch.PyTorchTrial):
    """With loaders of torch, as in docs/porting.md."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        total = context.get_total_batches(self.build_training_data_loader)
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=total),
            step_mode=pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH,
        )

    def build_training_data_loader(self) -> torch.utils.data.DataLoader[tuple[torch.Tensor, ...]]:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 1)))

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 1)))

    def build_callbacks(self) -> dict[str, Counting]:
        return {"counting": Counting()}

    def train_batch(self, batch: torch.Tensor, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = self.model(batch).sum()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.model(batch).sum()}


def trained_in_an_experiment_or_not() -> None:
    info = dray.get_cluster_info()
    with pytorch.init(hparams={"lr": 0.1} if info is None else info.trial.hparams) as context:
        pytorch.Trainer(OwnLoader(context), context).fit(max_length=pytorch.Epoch(1), latest_checkpoint="last")


def trained_models() -> None:
    for trial in (dray.Result("latest").load_best_trial(), pytorch.load_trial_from_checkpoint_path("run/checkpoint_8")):
        trial.model.eval()
    assert_type(pytorch.load_trial_from_checkpoint_path("run/checkpoint_8", trial_class=OwnLoader), OwnLoader)
