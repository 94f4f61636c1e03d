"""A GPT of the size of the smallest GPT-2, 124 million parameters: the model of examples/gpt, and random tokens."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from _measure import BENCH
from part import DEVICE, ON_GPU
from torch.nn import functional as F

from dray import pytorch

sys.path.append(str(BENCH.parent / "examples" / "gpt"))

from gpt import GPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the model and of a batch."""

    tokens: int = 50_304
    block: int = 1024
    layers: int = 12
    width: int = 768
    heads: int = 12
    batch: int = 16
    records: int = 512


TINY = Sizes(tokens=128, block=16, layers=2, width=32, heads=2, batch=4, records=64)


def made(sizes: Sizes) -> torch.nn.Module:
    """A model with the same weights each time."""
    torch.manual_seed(0)
    with DEVICE:
        return GPT(
            characters=sizes.tokens, block=sizes.block, layers=sizes.layers, width=sizes.width, heads=sizes.heads
        )


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=DEVICE.type == "cuda" or None
    )


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))


def clip(parameters: Any) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def data(sizes: Sizes) -> torch.utils.data.Dataset[Any]:
    """Blocks of random tokens, each one token longer, for the targets."""
    tokens = torch.randint(sizes.tokens, (sizes.records, sizes.block + 1), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(tokens)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> torch.Tensor:
    """Mean cross entropy of each next token."""
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class ByHand:
    """A hand-written loop: bf16, AdamW, warm-up, clipping; the mean loss is read once at the end of a turn."""

    def __init__(self, sizes: Sizes) -> None:
        self.bare = made(sizes)
        self.optimizer = optimizer_of(self.bare)
        self.schedule = schedule_of(self.optimizer)
        self.loader = torch.utils.data.DataLoader(data(sizes), batch_size=sizes.batch, pin_memory=DEVICE.type == "cuda")
        self.batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def train(self, batches: int) -> float:
        total = torch.zeros((), device=DEVICE)
        for _ in range(batches):
            batch = [part.to(DEVICE, non_blocking=True) for part in next(self.batches)]
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                loss = loss_of(self.bare, batch)
            loss.backward()
            clip(self.bare.parameters())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            total += loss.detach()
        return total.item() / batches


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights and of the optimizer's state on the GPU."""
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.is_cuda)


def millions(model: torch.nn.Module) -> float:
    return math.fsum(parameter.numel() for parameter in model.parameters()) / 1e6


class OnTokens(pytorch.PyTorchTrial):
    """A trial that trains on these tokens, and whose validation computes nothing."""

    sizes: Sizes

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(data(self.sizes), batch_size=self.sizes.batch, pin_memory=ON_GPU)

    build_validation_data_loader = build_training_data_loader

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": 0.0}
