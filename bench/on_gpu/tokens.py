"""Tokens per second of a GPT in bf16, in batches of 16 and of 1: dray, with TensorBoard too, and a loop by hand.

They take turns in one process on one GPU. With batches of 1 the GPU waits for the host, so dray's cost shows most.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import torch
from _measure import quantile, spread
from part import DEVICE, ON_GPU, attempt, clock, doing, figure, mib, note
from small_gpt import (
    TINY,
    ByHand,
    OnTokens,
    Sizes,
    clip,
    data,
    held,
    loss_of,
    made,
    millions,
    optimizer_of,
    schedule_of,
)

from dray import pytorch
from dray.training.usage import count_flops, peak_flops

GOAL = 0.99
TURN = 20
"""Batches in a turn."""
WARM_UP, TURNS = 2, 8
"""Turns of each: to warm up, and measured."""
LARGE_GPU = 40 << 30
"""A GPU with less memory trains on batches of 4, not 16."""
ENOUGH_S = 20.0
"""No further turn of a size after this time, but at least four."""


def main(tiny: bool) -> None:
    """Measure each size of a batch."""
    small = ON_GPU and torch.cuda.get_device_properties(DEVICE).total_memory < LARGE_GPU
    for batch in (4 if small or tiny else 16, 1):
        with attempt(f"batches of {batch}"):
            measure(replace(TINY if tiny else Sizes(), batch=batch), *((3, 4) if tiny else (TURN, TURNS)))
            gc.collect()


def measure(sizes: Sizes, turn: int, turns: int) -> None:
    sizes = replace(sizes, records=turn * sizes.batch)
    with pytorch.init() as context:
        trial = Trial(context, sizes, turn=turn, turns=turns)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Epoch(1000),
            reporting_period=pytorch.Batch(trial.turn),
            checkpoint_policy="none",
        )


def flops_of(sizes: Sizes) -> float:
    """FLOPs of a token, forward and backward."""
    model, one = made(sizes), [part.to(DEVICE) for part in data(replace(sizes, records=1))[:1]]
    return count_flops(lambda: loss_of(model, one).backward())[1] / sizes.block


class Trial(OnTokens):
    """An epoch is a turn. When one ends, the loop by hand has a turn as long."""

    def __init__(self, context: pytorch.PyTorchTrialContext, sizes: Sizes, *, turn: int, turns: int) -> None:
        self.context, self.sizes, self.turn, self.turns = context, sizes, turn, turns
        self.flops = flops_of(sizes)
        self.by_hand = ByHand(sizes)
        context.experimental.use_amp(torch.bfloat16)
        self.bare = self.model = context.wrap_model(made(sizes))
        self.optimizer = context.wrap_optimizer(optimizer_of(self.bare))
        context.wrap_lr_scheduler(schedule_of(self.optimizer), pytorch.LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"turns": Turns(self)}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = loss_of(self.model, batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=clip)
        return {"loss": loss}


class Turns(pytorch.PyTorchCallback):
    """Called where an epoch begins: takes the time of the last one, then of the loop by hand."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.since = self.began = 0.0
        self.rates: list[tuple[float, float]] = []
        self.peaks: list[tuple[int, int]] = []

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        took, peak = clock() - self.since, self._peak(self.trial.by_hand.bare, self.trial.by_hand.optimizer)
        trial, hand = self.trial, self.trial.by_hand
        if epoch_idx > 0:
            began = clock()
            hand.train(trial.turn)
            by_hand, hands_peak = clock() - began, self._peak(trial.bare, trial.optimizer)
        if epoch_idx == WARM_UP:
            self.began = time.perf_counter()
        if epoch_idx > WARM_UP:
            doing(f"turn {len(self.rates) + 2}")
            tokens = trial.turn * trial.sizes.batch * trial.sizes.block
            self.rates.append((tokens / took, tokens / by_hand))
            self.peaks.append((peak, hands_peak))
            self._say()
            late = time.perf_counter() - self.began > ENOUGH_S and len(self.rates) >= 4
            if late or len(self.rates) == trial.turns:
                trial.context.set_stop_requested(True)
                self._compare()
        self.since = clock()

    def _peak(self, *other: Any) -> int:
        """Peak bytes since the last call, without the bytes that the other loop holds."""
        if not ON_GPU:
            return 0
        peak = torch.cuda.max_memory_allocated() - held(*other)
        torch.cuda.reset_peak_memory_stats()
        return peak

    def _say(self) -> None:
        ratios = [dray / hand for dray, hand in self.rates]
        middle, size = quantile(ratios, 0.5), f"batch {self.trial.sizes.batch}: "
        figure(
            f"{size}dray's tokens a second by those by hand",
            f"{spread(ratios, digits=3)}, {len(ratios)} turns",
            goal=f">= {GOAL:g}",
            reached=middle >= GOAL,
        )
        most = peak_flops(torch.cuda.get_device_name(DEVICE)) if ON_GPU else None
        for what, place in (("dray", 0), ("by hand", 1)):
            rate, peak = [rates[place] for rates in self.rates], max(peaks[place] for peaks in self.peaks)
            mfu = f", MFU {quantile(rate, 0.5) * self.trial.flops / most:.1%}" if most else ""
            figure(f"{size}{what}", f"{spread([value / 1e3 for value in rate], 'thousand tokens/s', 1)}{mfu}")
            figure(f"{size}most GPU memory, {what}", mib(peak))

    def _compare(self) -> None:
        """Both have trained the same model on the same number of batches; the rounding of a GPU may differ."""
        trial = self.trial
        with torch.no_grad():
            ours, theirs = (
                torch.cat([p.flatten() for p in model.parameters()]) for model in (trial.bare, trial.by_hand.bare)
            )
            differ = ((ours - theirs).norm() / theirs.norm()).item()
        note(
            f"{millions(trial.bare):.0f} million parameters, {trial.flops / 1e6:,.1f} MFLOP a token, "
            f"batches of {trial.sizes.batch} x {trial.sizes.block} tokens, {trial.turn} batches a turn; "
            f"the weights of both differ by {differ:.1e} of their norm at the end."
        )
