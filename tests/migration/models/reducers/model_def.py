"""Breast cancer (scikit-learn): metrics with reducers of our own, callbacks that keep state."""

from typing import Any, Dict, List

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import TensorDataset

from determined import pytorch
from determined.pytorch import (
    DataLoader,
    MetricReducer,
    PyTorchCallback,
    PyTorchTrial,
    PyTorchTrialContext,
    Reducer,
    TorchData,
)


class Confusion(MetricReducer):
    """Sensitivity and specificity over the whole set, not the mean of those of batches."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.counts = np.zeros((2, 2))

    def update(self, predicted: torch.Tensor, actual: torch.Tensor) -> None:
        for p, a in zip(predicted.tolist(), actual.tolist()):
            self.counts[int(a), int(p)] += 1

    def per_slot_reduce(self) -> Any:
        return self.counts

    def cross_slot_reduce(self, per_slot_metrics: List[Any]) -> Dict[str, float]:
        (tn, fp), (fn, tp) = np.sum(per_slot_metrics, axis=0)
        return {"sensitivity": tp / max(tp + fn, 1), "specificity": tn / max(tn + fp, 1)}


def spread(margins: List[float]) -> float:
    return float(np.percentile(margins, 90) - np.percentile(margins, 10))


class Halve(PyTorchCallback):
    """Halve the learning rate when the validation got worse."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.best = float("inf")
        self.halved = 0

    def on_validation_end(self, metrics: Dict[str, Any]) -> None:
        if metrics["validation_loss"] > self.best:
            self.halved += 1
            for group in self.optimizer.param_groups:
                group["lr"] /= 2
        self.best = min(self.best, float(metrics["validation_loss"]))

    def state_dict(self) -> Dict[str, Any]:
        return {"best": self.best, "halved": self.halved}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.best, self.halved = state_dict["best"], state_dict["halved"]


class Freeze(PyTorchCallback):
    """Train the last layer alone in the first epoch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.body = optimizer.param_groups[0]

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        if epoch_idx == 0:
            self.body["lr"] = 0.0

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        if epoch_idx == 0:
            self.body["lr"] = self.body["initial_lr"]

    def on_training_workload_end(self, avg_metrics: Dict[str, Any], batch_metrics: Dict[str, Any]) -> None:
        assert "sensitivity" in avg_metrics, avg_metrics


class CancerTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        data = load_breast_cancer()
        features = (data.data - data.data.mean(axis=0)) / data.data.std(axis=0)
        self.features, self.labels = torch.tensor(features, dtype=torch.float32), torch.tensor(data.target)
        body, head = nn.Sequential(nn.Linear(30, hparams["width"]), nn.ELU()), nn.Linear(hparams["width"], 1)
        self.model = context.wrap_model(nn.Sequential(body, head))
        groups = [{"params": body.parameters(), "initial_lr": hparams["lr"]}, {"params": head.parameters()}]
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(groups, lr=hparams["lr"]))
        self.train_confusion = context.wrap_reducer(Confusion(), for_validation=False)
        self.validation_confusion = context.wrap_reducer(Confusion(), for_training=False)
        self.margins = context.wrap_reducer(spread, name="margin_spread", for_training=False)

    def build_callbacks(self) -> Dict[str, PyTorchCallback]:
        return {"halve": Halve(self.optimizer), "freeze": Freeze(self.optimizer)}

    def build_training_data_loader(self) -> DataLoader:
        data = TensorDataset(self.features[:448], self.labels[:448])
        return DataLoader(data, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        data = TensorDataset(self.features[448:], self.labels[448:])
        return DataLoader(data, batch_size=self.context.get_per_slot_batch_size())

    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> torch.Tensor:
        features, labels = batch
        logits = self.model(features).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.train_confusion.update(logits > 0, labels)
        return loss

    def evaluation_reducer(self) -> Dict[str, Reducer]:
        return {"validation_loss": Reducer.AVG, "mistakes": pytorch.Reducer.SUM, "surest": Reducer.MAX}

    def evaluate_batch(self, batch: TorchData, batch_idx: int) -> Dict[str, Any]:
        features, labels = batch
        logits = self.model(features).squeeze(1)
        self.validation_confusion.update(logits > 0, labels)
        self.margins.update((logits.abs().mean()).item())
        return {
            "validation_loss": nn.functional.binary_cross_entropy_with_logits(logits, labels.float()),
            "mistakes": ((logits > 0) != labels).sum(),
            "surest": logits.abs().max(),
        }
