"""Does computation hide the loading and copying of uint8 images from worker processes through pinned memory, and how
much GPU memory do they take? Compares dray, the same loop by hand, and a loop whose batch stays on the GPU."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from part import DEVICE, ON_GPU, attempt, clock, figure, mib, peak
from torch import nn
from torch.nn import functional as F

from dray import pytorch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of an image, a batch, the model, and a run; the batches before `warm_up` do not count."""

    pixels: int = 224
    batch: int = 256
    width: int = 64
    warm_up: int = 10
    batches: int = 200
    workers: int = max(1, min(12, len(os.sched_getaffinity(0)) - 2))

    @property
    def batch_bytes(self) -> int:
        return self.batch * 3 * self.pixels**2


TINY = Sizes(pixels=16, batch=8, width=4, warm_up=2, batches=6, workers=2)


class Images(torch.utils.data.Dataset[Any]):
    """Crops of a few images in memory, since reading files is not measured."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.pool = torch.randint(256, (32, 3, sizes.pixels + 32, sizes.pixels + 32), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.sizes.batch * (self.sizes.batches + 1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x, y = index % 31, index % 29
        crop = self.pool[index % 32, :, x : x + self.sizes.pixels, y : y + self.sizes.pixels]
        return crop.contiguous(), index % 10


def model_of(sizes: Sizes) -> nn.Module:
    """Some 3.5 GFLOP an image forward, as much as a ResNet-34."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, sizes.width, 7, stride=4, padding=3)]
    for n in range(3):
        width = sizes.width * 2**n
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(width, 2 * width, 3, stride=2 if n else 1, padding=1), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * sizes.width, 10)]
    return nn.Sequential(*layers).to(DEVICE, memory_format=torch.channels_last)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    images = images.to(memory_format=torch.channels_last).float() / 255
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        return F.cross_entropy(model(images).float(), labels)


def main(tiny: bool) -> None:
    """One after another, each with the GPU to itself."""
    sizes = TINY if tiny else Sizes()
    rates: dict[str, float] = {}
    peaks: dict[str, int] = {}
    ways: dict[str, Callable[[], tuple[float, int]]] = {
        "batch stays on the GPU": lambda: by_hand(sizes, itertools.repeat(next(iter(loader(sizes, 0))))),
        "by hand": lambda: by_hand(sizes, iter(loader(sizes, sizes.workers))),
        "dray": lambda: by_dray(sizes, sizes.workers),
        "dray, no workers": lambda: by_dray(sizes, 0),
    }
    for name, run in ways.items():
        with attempt(name):
            gc.collect()
            rates[name], peaks[name] = run()
            figure(name, f"{rates[name]:,.0f} images/s, {mib(peaks[name])} at most")
    if rates.keys() != ways.keys():
        return
    share = rates["dray"] / rates["by hand"]
    figure("dray's images a second by those by hand", f"{share:.3f}", goal=">= 0.97", reached=share >= 0.97)
    figure(
        "the same by those of a batch that stays on the GPU", f"{rates['dray'] / rates['batch stays on the GPU']:.3f}"
    )
    more = (peaks["dray"] - peaks["by hand"]) / sizes.batch_bytes
    # One that is copied ahead, and some room for what has been used and is not free yet.
    figure("batches more in the GPU's memory than by hand", f"{more:.1f}", goal="<= 4", reached=more <= 4)


def loader(sizes: Sizes, workers: int) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(Images(sizes), sizes.batch, num_workers=workers, pin_memory=ON_GPU)


def by_hand(sizes: Sizes, batches: Iterator[Any]) -> tuple[float, int]:
    """Images per second, and peak bytes on the GPU."""
    model = model_of(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    since = 0.0
    kept: Any = None
    for batch_idx in range(sizes.batches):
        if batch_idx == sizes.warm_up:
            since = clock()
            peak(begin=True)
        batch = next(batches)
        if batch[0] is not kept or batch_idx == 0:
            kept, moved = batch[0], [part.to(DEVICE, non_blocking=True) for part in batch]
        loss_of(model, moved).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sizes.batch * (sizes.batches - sizes.warm_up) / (clock() - since), peak()


class Trial(pytorch.PyTorchTrial):
    """The same for dray."""

    def __init__(self, context: pytorch.PyTorchTrialContext, sizes: Sizes, workers: int) -> None:
        self.context, self.sizes, self.workers = context, sizes, workers
        self.model = context.wrap_model(model_of(sizes))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=1e-3))
        self.since = 0.0
        self.measured = (0.0, 0)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(
            Images(self.sizes), batch_size=self.sizes.batch, num_workers=self.workers, pin_memory=ON_GPU
        )

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == self.sizes.warm_up:
            self.since = clock()
            peak(begin=True)
        loss = loss_of(self.model, batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        if batch_idx == self.sizes.batches - 1:
            images = self.sizes.batch * (self.sizes.batches - self.sizes.warm_up)
            self.measured = images / (clock() - self.since), peak()
            self.context.set_stop_requested(True)
        return {"loss": loss}

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return {"validation_loss": 0.0}


def by_dray(sizes: Sizes, workers: int) -> tuple[float, int]:
    with pytorch.init(enable_tensorboard_logging=False) as context:
        trial = Trial(context, sizes, workers)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(sizes.batches), reporting_period=pytorch.Batch(1000), checkpoint_policy="none"
        )
        return trial.measured
