"""How long training stands still for a checkpoint: dray, which writes behind it, and a plain torch.save by hand.

1.5 GB of state: 124 million weights and AdamW's moments. In both, the host waits for the GPU before each batch, so that
a batch's time is its own. A stall is the time from one batch to the next with a checkpoint between them, less the
median of those with none.
"""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from typing import Any

import torch
from _measure import quantile, spread
from part import DEVICE, clock, doing, figure, note
from small_gpt import TINY, ByHand, Sizes, data, loss_of, made, optimizer_of

from dray import pytorch
from dray.training.checkpoint import saver

GOAL = 0.10
SAVES = 4
BATCH = Sizes(batch=4)


def main(tiny: bool) -> None:
    """Measure."""
    sizes = TINY if tiny else BATCH
    if tiny:
        saver.AT_ONCE_BYTES = 0  # a small state would be written at once
    doing("torch.save, by hand")
    batch_s, saves = by_hand(sizes)
    usual = quantile(saves[1:], 0.5)
    size = Path("by-hand.pt").stat().st_size
    figure("torch.save of the model and its optimizer", f"{spread(saves[1:], 's', 3)}, {size / 1e9:.2f} GB")
    Path("by-hand.pt").unlink()
    # So far apart that the one is written before the next begins, which would wait for it.
    period = max(4, math.ceil(max(4 * usual, 3.0 if not tiny else 0) / batch_s))
    doing("dray")
    with pytorch.init(enable_tensorboard_logging=False) as context:
        trial = Trial(context, sizes)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(period * SAVES + period // 2),
            checkpoint_period=pytorch.Batch(period),
            checkpoint_policy="none",
        )
        directory = context.get_tensorboard_path().parent
    report(trial.begun, period, usual)
    note(f"A checkpoint every {period} batches, written {spread(written_s(directory, trial.begun, period), 's', 1)} "
         "after training went on.")  # fmt: skip


def by_hand(sizes: Sizes) -> tuple[float, list[float]]:
    """Seconds of a batch; and of each torch.save."""
    loop = ByHand(sizes)
    loop.train(5)
    began = clock()
    loop.train(20)
    batch_s, saves = (clock() - began) / 20, []
    for _ in range(SAVES):
        loop.train(5)
        began = clock()
        torch.save({"model": loop.bare.state_dict(), "optimizer": loop.optimizer.state_dict()}, "by-hand.pt")
        saves.append(clock() - began)
    return batch_s, saves


class Trial(pytorch.PyTorchTrial):
    """Notes when each batch begins, with nothing left to do on the GPU."""

    def __init__(self, context: pytorch.PyTorchTrialContext, sizes: Sizes) -> None:
        self.context, self.sizes = context, sizes
        context.experimental.use_amp(torch.bfloat16)
        self.model = context.wrap_model(made(sizes))
        self.optimizer = context.wrap_optimizer(optimizer_of(self.model))
        self.begun: list[float] = []

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(data(self.sizes), batch_size=self.sizes.batch, pin_memory=DEVICE.type == "cuda")

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.begun.append(clock())
        loss = loss_of(self.model, batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": 0.0}


def report(begun: list[float], period: int, usual: float) -> None:
    """The figures, from when each batch began."""
    gaps = [after - before for before, after in itertools.pairwise(begun)]
    batch_s = quantile([gap for number, gap in enumerate(gaps, 1) if number % period], 0.5)
    first, *later = [gaps[number * period - 1] - batch_s for number in range(1, SAVES + 1)]
    share = quantile(later, 0.5) / usual
    figure(
        "stall for a checkpoint of dray's",
        f"{spread(later, 's', 3)}, {share:.0%} of torch.save's",
        goal=f"<= {GOAL:.0%}",
        reached=share <= GOAL,
    )
    figure("stall for the first, which allocates buffers", f"{first:.3f} s, {first / usual:.0%} of torch.save's")
    lost = [sum(gaps[number * period - 1 : (number + 1) * period - 1]) - period * batch_s for number in range(1, SAVES)]
    figure(f"lost in all until the next, of {period * batch_s:.1f} s", spread(lost[1:], "s", 3))
    figure("a batch", f"{batch_s * 1e3:.1f} ms")


def written_s(directory: Path, begun: list[float], period: int) -> list[float]:
    """Seconds from the batch after each checkpoint to its manifest, which is written last."""
    offset = time.time() - time.perf_counter()
    return [
        (directory / f"checkpoint_{number * period}" / "manifest.json").stat().st_mtime
        - offset
        - begun[number * period]
        for number in range(1, SAVES + 1)
    ]
