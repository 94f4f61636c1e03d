"""A regression, on one process or on several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from tests.pytorch.fakes import FakeHost, state_of


class Regression(pytorch.PyTorchTrial):
    """24 records, shuffled, in global batches of 8."""

    dropout = 0.0

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.callbacks: dict[str, pytorch.PyTorchCallback] = {}
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 1))
        self.model = self.wrap(net)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9))

    def wrap(self, model: nn.Module) -> Any:
        return self.context.wrap_model(model)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.callbacks

    def data(self, records: int, **kwargs: Any) -> pytorch.DataLoader:
        x = torch.linspace(-1, 1, records * 4).reshape(records, 4)
        dataset = torch.utils.data.TensorDataset(x, (x**2).sum(1, keepdim=True))
        return pytorch.DataLoader(dataset, batch_size=self.context.get_per_slot_batch_size(), **kwargs)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return self.data(24, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.data(20)

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.loss(batch), "batches_seen": 1.0, "rank": float(self.context.distributed.rank)}

    def evaluation_reducer(self) -> dict[str, pytorch.Reducer]:
        reducers = pytorch.Reducer
        return {"validation_loss": reducers.AVG, "batches_seen": reducers.SUM, "rank": reducers.AVG}


def run(
    trial_class: Callable[[pytorch.PyTorchTrialContext], Any],
    host: FakeHost,
    *,
    distributed: DistributedContext | None = None,
    aggregation_frequency: int = 1,
    global_batch_size: int = 8,
    exp_conf: dict[str, Any] | None = None,
    prepare: Callable[[Any], None] = lambda trial: None,
    **fit: Any,
) -> dict[str, Any]:
    """Train, on one process or on this rank's share, and tell what came of it."""
    error = None
    with (
        use_host(host),
        pytorch.init(
            hparams={"global_batch_size": global_batch_size},
            exp_conf=exp_conf,
            distributed=distributed,
            aggregation_frequency=aggregation_frequency,
        ) as context,
    ):
        trial = trial_class(context)
        prepare(trial)
        try:
            pytorch.Trainer(trial, context).fit(**fit)
        except (Exception, SystemExit) as caught:
            error = f"{type(caught).__name__}: {caught}"
        return {
            "error": error,
            "weights": state_of(context)["models_state_dict"][0],
            "opened": len(host.opened),
            "reports": [(r.batches, r.training, r.validation, r.checkpoint) for r in host.reports],
            "epochs": host.reports[-1].epochs if host.reports else None,
            "trial": getattr(trial, "seen", None),
        }


def two(trial_class: Any, directory: Path, **kwargs: Any) -> dict[str, Any]:
    return run(trial_class, FakeHost(directory), distributed=DistributedContext.from_torch_distributed(), **kwargs)
