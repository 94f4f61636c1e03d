"""A host that keeps everything it is told, and trials whose every number is known."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dray import pytorch
from dray.storage import CheckpointStore, verify
from dray.storage.checkpoints import RemoteStore
from dray.storage.manifest import Listed
from dray.training.host import Reached, Report
from dray.training.optimisation import bare
from dray.training.parallel.distributed import DistributedContext
from dray.training.plan import Plan
from dray.training.units import Batch, TrainUnit


class FakeHost:
    """Implements `dray.training.host.Host`; stops after the report at `stop_at` batches."""

    experiment_id = 4
    trial_id = 9
    latest_checkpoint: str | None = None
    source_checkpoint: str | None = None
    is_changed_fork: bool = False
    code_dir: Path | None = None
    secrets: Sequence[str] = ()
    metrics: Sequence[str] = ()
    validation_period: TrainUnit | None = None
    checkpoint_period: TrainUnit | None = None
    is_remote = False

    def __init__(
        self,
        directory: Path,
        *,
        trial_seed: int = 1,
        max_length: TrainUnit | None = None,
        rungs: Sequence[TrainUnit] = (),
        best_supported: bool = True,
        stop_at: int | None = None,
    ) -> None:
        self.trial_seed = trial_seed
        self.max_length = max_length
        self.rungs = rungs
        self.best_supported = best_supported
        self.stop_at = stop_at
        self.asked = False
        self.tensorboard_path = directory / "tensorboard"
        self.reports: list[Report] = []
        self.committed: list[Report] = []
        self.opened: list[str] = []
        self.store = CheckpointStore(directory)
        self._best = float("inf")

    def is_best(self, validation: Mapping[str, object]) -> bool:
        value = validation.get(next(iter(self.metrics), "validation_loss"), 0.0)
        assert isinstance(value, (int, float))
        better, self._best = value < self._best, min(value, self._best)
        return better

    def reached(self, validation: Mapping[str, object]) -> Reached:
        return "nothing"

    def training(self, plan: Plan, begin: int, peers: DistributedContext) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def watch(self, progress: Callable[[], tuple[int, int]]) -> None:
        self.progress = progress

    def new_checkpoint(self, batches: int) -> Path:
        return self.store.stage(batches)

    def commit(self, staging: Path, report: Report, known: Mapping[str, Listed]) -> str:
        self.committed.append(report)
        return self.store.commit(staging, report.batches, known)

    def add_to_checkpoint(self, staging: Path, batches: int, known: Mapping[str, Listed]) -> dict[str, Listed]:
        return self.store.add(staging, batches, known)

    def open_checkpoint(self, checkpoint: str) -> Path:
        self.opened.append(checkpoint)
        return verify(Path(checkpoint))

    def last_checkpoint(self) -> str | None:
        return self.latest_checkpoint

    def stop_requested(self) -> bool:
        return self.asked

    def publish(self, report: Report) -> bool:
        self.reports.append(report)
        return self.stop_at is not None and report.batches >= self.stop_at

    def checkpoints(self) -> list[str]:
        return [report.checkpoint for report in self.reports if report.checkpoint is not None]


class RungHost(FakeHost):
    """The search decides at batch 4. Its checkpoint goes to a store far away, which commits it, or kills this process,
    only when another batch is trained."""

    is_remote = True

    def __init__(self, directory: Path, *, kills: bool = False, **kwargs: Any) -> None:
        super().__init__(directory, rungs=[Batch(4)], **kwargs)
        self._kills = kills

    def commit(self, staging: Path, report: Report, known: Mapping[str, Listed]) -> str:
        deadline = time.monotonic() + 30
        while report.batches == 4 and self.progress()[0] < 5:
            assert time.monotonic() < deadline, "training waits for the commit"
            time.sleep(0.001)
        if report.batches == 4 and self._kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().commit(staging, report, known)


class RemoteHost(FakeHost):
    """Keeps checkpoints in S3."""

    is_remote = True

    def __init__(self, store: RemoteStore, directory: Path) -> None:
        super().__init__(directory)
        self.store = store

    def open_checkpoint(self, checkpoint: str) -> Path:
        return self.store.open(checkpoint)


def state_of(context: pytorch.PyTorchTrialContext) -> dict[str, Any]:
    """The state of what a trial has wrapped, by the names of a checkpoint."""
    return {
        "models_state_dict": [bare(model).state_dict() for model in context.models],
        "optimizers_state_dict": [optimizer.state_dict() for optimizer in context.optimizers],
        "lr_schedulers_state_dict": [scheduler.state_dict() for scheduler in context.lr_schedulers],
    }


class Ones(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, records: int) -> None:
        self.records = records

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1)


class OneWeight(pytorch.PyTorchTrial):
    """w' = w + 2 lr (1 - w), from w = 0; the loss of a batch is (1 - w)^2. Ten records: five batches of two."""

    lr = 0.25
    records = 10

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=self.lr))
        self.callbacks: dict[str, pytorch.PyTorchCallback] = {}
        self.seen: list[tuple[int, int]] = []
        self.at_init()

    def at_init(self) -> None:
        """At the end of the constructor."""

    def at_batch(self, batch_idx: int) -> None:
        """Before a batch is trained."""

    def at_validation(self, batch_idx: int) -> None:
        """Before a batch is validated."""

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.callbacks

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(Ones(self.records), batch_size=2)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(Ones(6), batch_size=2)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = ((self.model(batch) - 1) ** 2).mean()
        return loss

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.at_batch(batch_idx)
        self.seen.append((epoch_idx, batch_idx))
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.at_validation(batch_idx)
        return {"validation_loss": self.loss(batch)}

    @property
    def weight(self) -> float:
        return float(self.model.weight.detach())


def one_weight(steps: int, lr: float = OneWeight.lr) -> float:
    """The oracle: the weight after so many steps."""
    weight = 0.0
    for _ in range(steps):
        weight += 2 * lr * (1 - weight)
    return weight


def trial(base: type[OneWeight] = OneWeight, **methods: Any) -> type[Any]:
    """A trial with these methods."""
    return type("Trial", (base,), methods)


def fails(error: BaseException, at: int = 0) -> type[Any]:
    """A trial that raises an error before it trains a batch."""

    def raises(self: OneWeight, batch_idx: int) -> None:
        if batch_idx == at:
            raise error

    return trial(at_batch=raises)


def callback(**hooks: Callable[..., Any]) -> dict[str, pytorch.PyTorchCallback]:
    """A callback with these hooks, by its name in a trial."""
    found = {name: staticmethod(hook) for name, hook in hooks.items()}
    return {"callback": type("Callback", (pytorch.PyTorchCallback,), found)()}


FULL = {"evaluate_batch": pytorch.PyTorchTrial.evaluate_batch}
"""Additional attributes of a trial with `evaluate_full_dataset`."""
