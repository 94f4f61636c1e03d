"""Code as users write it, which mypy checks together with the package (see pyproject.toml); it is not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from typing_extensions import assert_type

import dray
from dray import pytorch


def experiments_by_name_number_and_path() -> None:
    for name in ("latest", 12, Path("results/digits-1"), "s3://bucket/results/digits-1"):
        result = dray.Result(name)
        assert_type(result.trials, pd.DataFrame)
        assert_type(result.best_trial.batches, int)
        assert_type(dray.Experiment.resume(name).run(), dray.Result)


class OwnLoader(pytorch.PyTorchTrial):
    """As docs/porting.md shows: a loader of torch's, and one of dray's."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.model = context.wrap_model(torch.nn.Linear(1, 1))

    def build_training_data_loader(self) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(1)))

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(torch.ones(1))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return {}


def loaded_trials_have_the_attributes_of_their_class() -> None:
    assert_type(pytorch.load_trial_from_checkpoint_path("checkpoint_1", trial_class=OwnLoader).model, torch.nn.Linear)
    pytorch.load_trial_from_checkpoint_path("checkpoint_1").model.eval()
    dray.Result("latest").load_best_trial().model.eval()
