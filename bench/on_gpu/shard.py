"""FullyShard with one slot: a GPT made on the meta device, with all of FullyShard's options, then saved in the
background and resumed."""

from __future__ import annotations

import functools
import gc
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from part import ON_GPU, attempt, check, clock, figure, mib, peak
from small_gpt import GPT, TINY, OnTokens, Sizes, clip, loss_of

from dray import pytorch
from dray.pytorch import FullyShard
from dray.training.checkpoint import checkpointer

SIZES = Sizes(tokens=8192, layers=4, width=1024, heads=16, batch=8)
BATCHES, WARM_UP = 12, 4
CLOSE = 0.1
"""The maximum difference between losses, for example between those of bf16 and float32."""
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"mp_policy": BF16},
    "bf16, activation checkpointing": {"mp_policy": BF16, "activation_checkpointing": True},
    "cpu_offload": {"cpu_offload": True},
    # Last, as it takes longest.
    "bf16, activation checkpointing, compile": {"mp_policy": BF16, "activation_checkpointing": True, "compile": True},
    "bf16, compile": {"mp_policy": BF16, "compile": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The results of a run: losses by batch, seconds per batch, peak bytes on the GPU, its directory."""

    losses: list[float]
    batch_s: float
    peak: int
    directory: Path


def main(tiny: bool) -> None:
    """Train each way, with clipping."""
    sizes = TINY if tiny else SIZES
    sizes = replace(sizes, records=2 * sizes.batch)  # seen again and again, so that there is something to learn
    if tiny:
        checkpointer.AT_ONCE_BYTES = 0  # a small state would be written at once
        # Compiling for a CPU takes longer than all the rest.
        torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")  # type: ignore[method-assign]
    usual: Trained | None = None
    resume(sizes)
    for name, way in WAYS.items():
        with attempt(name):
            ran = train(sizes, way)
            usual = usual or ran
            figure(name, f"{ran.batch_s * 1e3:.0f} ms a batch, {mib(ran.peak)} at most, last loss {ran.losses[-1]:.4f}")
            check(f"{name}: losses of float32", close(ran.losses, usual.losses), True)
            check(f"{name}: it learns", ran.losses[-1] < ran.losses[0], True)


def resume(sizes: Sizes) -> None:
    """Save while training continues, and resume from there."""
    with attempt("resuming"):
        third = BATCHES // 3
        whole = train(sizes, {}, checkpoint_period=pytorch.Batch(third))
        checkpoint = whole.directory / f"checkpoint_{2 * third}"
        check("checkpoints of shards", [file.name for file in checkpoint.glob("sharded/*")], ["rank_0.safetensors"])
        resumed = train(sizes, {}, latest_checkpoint=str(checkpoint))
        check("batches after a resume", len(resumed.losses), third)
        check("their losses are those without a stop", close(resumed.losses, whole.losses[-third:]), True)
        differ = max(abs(a - b) for a, b in zip(resumed.losses, whole.losses[-third:], strict=True))
        figure("they differ by at most", f"{differ:.1e}")


def close(losses: list[float], others: list[float]) -> bool:
    return all(math.isclose(a, b, abs_tol=CLOSE) for a, b in zip(losses, others, strict=True))


class Trial(OnTokens):
    """Trains on the same batches in each way."""

    def __init__(self, context: pytorch.PyTorchTrialContext, sizes: Sizes, way: dict[str, Any]) -> None:
        self.context, self.sizes = context, sizes
        with torch.device("meta"):
            model = GPT(
                characters=sizes.tokens, block=sizes.block, layers=sizes.layers, width=sizes.width, heads=sizes.heads
            )
        self.model = context.wrap_model(model, parallel=FullyShard(units="Layer", init=begin, **way))
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-3))
        self.losses: list[torch.Tensor] = []
        self.since = 0.0
        self.offloads = bool(way.get("cpu_offload"))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == WARM_UP:
            self.since = clock()
            peak(begin=True)
        # In bf16 a loss of 8 is rounded to sixteenths.
        loss = loss_of(lambda tokens: self.model(tokens).float(), batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=clip)
        self.losses.append(loss.detach())
        if ON_GPU and batch_idx == 0:
            found = {parameter.device.type for parameter in self.model.parameters()}
            check("shards are on", found, {"cpu" if self.offloads else "cuda"})
        return {"loss": loss}


def begin(module: torch.nn.Module) -> None:
    """A module's initial weights."""
    if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
        torch.nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            torch.nn.init.zeros_(module.bias)
    else:
        module.reset_parameters()  # type: ignore[operator]


def train(sizes: Sizes, way: dict[str, Any], **fit: Any) -> Trained:
    """A run of its own."""
    gc.collect()
    config = {"reproducibility": {"experiment_seed": 7}}
    with pytorch.init(exp_conf=config, enable_tensorboard_logging=False) as context:
        trial = Trial(context, sizes, way)
        callbacks = Ends(trial)
        trial.build_callbacks = lambda: {"ends": callbacks}  # type: ignore[method-assign]
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(BATCHES), checkpoint_policy="none", **fit)
        directory = context.get_tensorboard_path().parent
    return Trained(
        losses=[loss.item() for loss in trial.losses],
        batch_s=callbacks.batch_s,
        peak=callbacks.peak,
        directory=directory,
    )


class Ends(pytorch.PyTorchCallback):
    """Takes the time when training has ended, before the last checkpoint is saved."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.batch_s, self.peak = trial, math.nan, 0

    def on_validation_start(self) -> None:
        self.batch_s, self.peak = (clock() - self.trial.since) / (BATCHES - WARM_UP), peak()
