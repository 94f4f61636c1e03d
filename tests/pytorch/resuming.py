"""Trials whose runs are cut and resumed, each with one thing that has state; and what such a run is compared by."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.training import rng
from tests.pytorch.fakes import FakeHost, state_of

BATCHES = 14
RECORDS = 20  # in global batches of 8: three an epoch, the last one partial


class Numbered(torch.utils.data.Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Every record says which one it is."""

    def __init__(self, records: int = RECORDS) -> None:
        self.records = records

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        x = torch.linspace(index, index + 1, 6) / self.records
        return index, x, (x**2).sum(0, keepdim=True)


class Plain(pytorch.PyTorchTrial):
    """Records in their order, SGD; what else there is, is for the kinds below."""

    shuffle = False
    dropout = 0.0
    momentum = 0.0

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Sequential(*self.layers()))
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=self.momentum)
        )
        self.watch = Watch()
        #: (epoch_idx, batch_idx, records) of each batch that was trained here.
        self.seen: list[tuple[int, int, list[int]]] = []

    def layers(self) -> list[nn.Module]:
        return [nn.Linear(6, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 1)]

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"watch": self.watch}

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(Numbered(), self.context.get_per_slot_batch_size(), shuffle=self.shuffle)

    def build_validation_data_loader(self) -> Any:
        return pytorch.DataLoader(Numbered(), batch_size=5)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.seen.append((epoch_idx, batch_idx, batch[0].tolist()))
        loss = self.loss(batch)
        self.context.backward(loss)
        self.step(batch_idx)
        return {"loss": loss, "draw": random.random()}

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[1]), batch[2])

    def step(self, batch_idx: int) -> None:
        self.context.step_optimizer(self.optimizer)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.loss(batch), "noise": torch.rand(())}


class Shuffled(Plain):
    shuffle = True


class Momentum(Plain):
    momentum = 0.9


class Schedule(Plain):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=context.get_total_batches())
        context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)


class Accumulating(Plain):
    """Gradients that the trial's code adds up and zeroes itself."""

    def step(self, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            self.context.step_optimizer(self.optimizer, auto_zero_grads=False)
            self.optimizer.zero_grad()


class OwnSkip(Plain):
    """An iterable dataset, which repeats, shards and skips by itself."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.experimental.disable_dataset_reproducibility_checks()

    def build_training_data_loader(self) -> Any:
        size, peers = self.context.get_per_slot_batch_size(), self.context.distributed
        first = (self.context.get_initial_batch() * peers.size + peers.rank) * size
        stride = peers.size * size

        class Stream(torch.utils.data.IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                start = first
                while True:
                    yield torch.utils.data.default_collate(
                        [Numbered()[record % RECORDS] for record in range(start, start + size)]
                    )
                    start += stride

        return torch.utils.data.DataLoader(Stream(), batch_size=None)


class Counted(torch.utils.data.IterableDataset[Any]):
    """The records first, first + step, ... below a limit, which continue from their own state."""

    def __init__(self, limit: int = RECORDS, first: int = 0, step: int = 1) -> None:
        self.limit, self.first, self.step = limit, first, step
        self.start = self.done = 0

    def shard(self, num_shards: int, index: int) -> Counted:
        return type(self)(self.limit, self.first + self.step * index, self.step * num_shards)

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        mine = self if worker is None else self.shard(worker.num_workers, worker.id)
        self.done, self.start = self.start, 0
        for record in range(mine.first + mine.step * self.done, mine.limit, mine.step):
            self.done += 1
            yield Numbered()[record]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["done"]


class SizedCounted(Counted):
    def __len__(self) -> int:
        return len(range(self.first, self.limit, self.step))


class Streaming(Plain):
    """An IterableDataset, which dray divides."""

    momentum = 0.9
    data: Callable[[], Any] = Counted

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(type(self).data(), self.context.get_per_slot_batch_size())


class Stateful(Plain):
    """A loader of torchdata's, which shuffles and divides by itself."""

    def build_training_data_loader(self) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        peers, size = self.context.distributed, self.context.get_per_slot_batch_size()
        if peers.size == 1:
            return StatefulDataLoader(Numbered(), size, shuffle=True)
        sampler = StatefulDistributedSampler(Numbered(), peers.size, peers.rank, seed=5)
        return StatefulDataLoader(Numbered(), size, sampler=sampler)


class OwnSampler(Plain):
    """A sampler of the user's, whose order is its own affair."""

    def build_training_data_loader(self) -> Any:
        sampler = pytorch.samplers.ReproducibleShuffleSampler(range(RECORDS), self.context.get_trial_seed())
        return pytorch.DataLoader(Numbered(), self.context.get_per_slot_batch_size(), sampler=sampler)


class Noisy(Numbered):
    """Augments with NumPy's generator, as datasets do."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        index, x, y = super().__getitem__(index)
        return index, x + float(np.random.normal(0, 0.1)), y + random.random() / 10


class Everything(Plain):
    """All that has state: shuffled and augmented data, dropout, momentum, running averages, clipped gradients, two
    models and optimizers, schedules of each kind."""

    shuffle, dropout, momentum = True, 0.4, 0.9

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.head = context.wrap_model(nn.Linear(1, 1))
        self.second = context.wrap_optimizer(torch.optim.Adam(self.head.parameters(), lr=1e-2))
        modes, schedules = pytorch.LRScheduler.StepMode, torch.optim.lr_scheduler
        context.wrap_lr_scheduler(schedules.StepLR(self.optimizer, 2, 0.5), modes.STEP_EVERY_BATCH, frequency=2)
        context.wrap_lr_scheduler(schedules.ExponentialLR(self.second, 0.9), modes.STEP_EVERY_EPOCH)
        steps = schedules.MultiStepLR(self.second, [1, 3])
        context.wrap_lr_scheduler(steps, modes.STEP_EVERY_OPTIMIZER_STEP, frequency=2)

    def layers(self) -> list[nn.Module]:
        return [nn.BatchNorm1d(6), *super().layers()]

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(Noisy(), self.context.get_per_slot_batch_size(), shuffle=True)

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.model(batch[1])), batch[2])

    def step(self, batch_idx: int) -> None:
        self.context.step_optimizer(self.optimizer, clip_grads=lambda p: nn.utils.clip_grad_norm_(p, 1.0))
        self.context.step_optimizer(self.second)


class Amp(Plain):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_amp(torch.bfloat16)
        super().__init__(context)


class TorchsSampler(Plain):
    """A sampler of torch's that was given no generator, so that it draws from the process's own."""

    def build_training_data_loader(self) -> Any:
        weights = torch.linspace(1, 2, RECORDS)
        sampler = torch.utils.data.WeightedRandomSampler(weights.tolist(), RECORDS)
        return pytorch.DataLoader(Numbered(), self.context.get_per_slot_batch_size(), sampler=sampler)


#: The trial's class and aggregation frequency, by kind.
KINDS: dict[str, tuple[type[Plain], int]] = {
    "plain": (Plain, 1),
    "shuffled": (Shuffled, 1),
    "momentum": (Momentum, 1),
    "schedule": (Schedule, 1),
    "aggregation 2": (Shuffled, 2),
    "own aggregation": (Accumulating, 1),
    "everything": (Everything, 1),
    "everything, aggregation 3": (Everything, 3),
    "AMP": (Amp, 1),
    "iterable, own skip": (OwnSkip, 1),
    "stream": (Streaming, 1),
    "stateful loader": (Stateful, 1),
    "own sampler": (OwnSampler, 1),
    "torch's sampler": (TorchsSampler, 1),
}

#: Those that are the same over any number of processes, but for the order of additions.
MOVING = [
    "plain",
    "shuffled",
    "momentum",
    "schedule",
    "aggregation 2",
    "own aggregation",
    "own sampler",
    "torch's sampler",
]


class Watch(pytorch.PyTorchCallback):
    """Writes down every call, and has state of its own."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.epochs = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append(("load_state_dict", dict(state_dict)))
        self.epochs = state_dict["epochs"]

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.epochs += 1
        self.calls.append(("epoch_end", epoch_idx, self.epochs))

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        self.calls.append(("load_start",))

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.calls.append(("upload_end", Path(uuid).name))


def _writes_down(name: str) -> Callable[..., None]:
    return lambda self, *args, **kwargs: self.calls.append((name, *copy.deepcopy((*args, *kwargs.values()))))


_STARTS = ("training_start", "training_epoch_start", "validation_start")
for _name in (*_STARTS, "trial_startup", "training_workload_end", "validation_end", "trial_shutdown"):
    setattr(Watch, f"on_{_name}", _writes_down(_name))


def run(kind: str, host: FakeHost, *, distributed: DistributedContext | None = None, **fit: Any) -> dict[str, Any]:
    """Train to the end, with a checkpoint after each batch; everything that two equal runs have equal."""
    trial_class, aggregation = KINDS[kind]
    with (
        use_host(host),
        pytorch.init(
            hparams={"global_batch_size": 8},
            distributed=distributed,
            aggregation_frequency=aggregation,
            max_length=Batch(BATCHES),
        ) as context,
    ):
        trial = trial_class(context)
        pytorch.Trainer(trial, context).fit(
            validation_period=Batch(3),
            checkpoint_period=Batch(1),
            reporting_period=Batch(2),
            checkpoint_policy="none",
            **fit,
        )
        return {
            "state": state_of(context),
            "rng": rng.capture(context.device),
            "reports": [(r.batches, r.epochs, r.training, r.validation) for r in host.reports],
            "seen": trial.seen,
            "calls": trial.watch.calls,
        }


def cuts(kind: str, count: int = 5) -> list[int]:
    """Where runs of a kind are cut: so many batches at random, the same in every process."""
    return sorted(random.Random(kind).sample(range(1, BATCHES), count))


def assert_goes_on(resumed: dict[str, Any], whole: dict[str, Any], cut: int, checkpoint: str) -> None:
    """A run from `checkpoint`, made at batch `cut`, is what the whole run was from there on, bit for bit."""
    assert_equal(resumed["state"], whole["state"])
    assert_equal(resumed["rng"], whole["rng"])
    assert_equal(resumed["reports"], [report for report in whole["reports"] if report[0] > cut])
    assert resumed["seen"] == whole["seen"][cut:]
    start = resumed["calls"].index(("training_start",)) + 1
    assert [call[0] for call in resumed["calls"][:start]] == [
        "trial_startup",
        "load_start",
        "load_state_dict",
        "training_start",
    ]
    assert resumed["calls"][0] == ("trial_startup", cut, checkpoint)
    assert_equal(
        resumed["calls"][start:], whole["calls"][whole["calls"].index(("upload_end", f"checkpoint_{cut}")) + 1 :]
    )


def assert_equal(mine: Any, other: Any) -> None:
    """Equal to the last bit, also within dicts, lists and tuples."""
    if isinstance(mine, torch.Tensor):
        assert torch.equal(mine, other)
    elif isinstance(mine, dict):
        assert mine.keys() == other.keys()
        for key in mine:
            assert_equal(mine[key], other[key])
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(other)
        for left, right in zip(mine, other, strict=True):
            assert_equal(left, right)
    else:
        assert mine == other
