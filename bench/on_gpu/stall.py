"""How long training stops for a checkpoint of 2 GB: dray, which writes in the background, and torch.save by hand.

A stall is the time from one batch to the next with a checkpoint between them, less the median of those with none. The
last checkpoint is written to its end before `fit` returns, so the whole of it counts. While the first batches train, a
thread pins the memory for copies of the state; these batches are compared with all others.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import torch
from _measure import quantile
from large import Large, batches, made
from part import DEVICE, attempt, clock, doing, figure, note, stamps

from dray import pytorch

GOAL, LAST = 0.10, 1.1
SAVES = 2
"""The first copy of the state, and a later one."""
BY_HAND = 3


def main(tiny: bool) -> None:
    """Measure."""
    doing("torch.save, by hand")
    batch_s, usual, size = by_hand(tiny)
    figure("torch.save of the model and its optimizer", f"{usual:.2f} s, {size / 1e9:.1f} GB")
    # So far apart that the one is written before the next begins, which would wait for it.
    period = max(5, math.ceil(1.6 * usual / batch_s))
    with attempt("dray"):
        with pytorch.init(hparams={"tiny": tiny}, enable_tensorboard_logging=False) as context:
            pytorch.Trainer(Large(context), context).fit(
                # So long that the last checkpoint does not wait for the one before.
                max_length=pytorch.Batch(period * (SAVES + 1) - 1),
                checkpoint_period=pytorch.Batch(period),
                checkpoint_policy="none",
            )
            ended = clock()
        begun = [each.fields["at"] for each in stamps("batch")]
        report(begun, period, usual)
        [validation] = [each.fields["at"] for each in stamps("validation")]
        last = ended - validation
        figure(
            "the last checkpoint, at the end",
            f"{last:.2f} s, {last / usual:.2f} of torch.save's",
            goal=f"<= {LAST}",
            reached=last <= LAST * usual,
        )
    note(f"A checkpoint every {period} batches.")


def by_hand(tiny: bool) -> tuple[float, float, int]:
    """Seconds of a batch and of a torch.save, and the file's bytes."""
    model, optimizer = made(tiny)
    loader = itertools.cycle(torch.utils.data.DataLoader(batches(tiny), batch_size=64))

    def train(count: int) -> float:
        began = clock()
        for (batch,) in itertools.islice(loader, count):
            model(batch.to(DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (clock() - began) / count

    train(5)
    batch_s, file, took = train(20), Path("by-hand.pt"), []
    for _ in range(BY_HAND):
        began = clock()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        took.append(clock() - began)
        size = file.stat().st_size
        file.unlink()
    return batch_s, quantile(took, 0.5), size


def report(begun: list[float], period: int, usual: float) -> None:
    """The figures, from when each batch began."""
    gaps = [after - before for before, after in itertools.pairwise(begun)]
    batch_s = quantile([gap for number, gap in enumerate(gaps, 1) if number % period], 0.5)
    first, later = (gaps[number * period - 1] - batch_s for number in range(1, SAVES + 1))
    for what, stall in (("first", first), ("next", later)):
        figure(
            f"stall for the {what}",
            f"{stall:.3f} s, {stall / usual:.0%} of torch.save's",
            goal=f"<= {GOAL:.0%}",
            reached=stall <= GOAL * usual,
        )
    # The first batch also makes the optimizer's state.
    pinning = sum(gaps[1 : period - 1]) - (period - 2) * batch_s
    figure(f"lost until the first, while memory is pinned, of {(period - 2) * batch_s:.1f} s", f"{pinning:.2f} s")
    lost = sum(gaps[period - 1 : 2 * period - 1]) - period * batch_s
    figure(f"lost in all until the next, of {period * batch_s:.1f} s", f"{lost:.2f} s")
    figure("a batch", f"{batch_s * 1e3:.1f} ms")
