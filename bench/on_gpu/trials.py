"""From the last batch of a trial to the first of the next, 1 GB of model, in one process without Ray."""

from __future__ import annotations

import gc
import itertools
import os
import time
from pathlib import Path

from _measure import STAMPS, of_kind, read_stamps, spread
from gigabyte import by_hand, locally
from part import allocated, doing, figure

TRIALS = 4


def main(tiny: bool) -> None:
    """Run trials one after another, then the same by hand."""
    width = 64 if tiny else 8192
    returned, kept, left = [], [], []
    for number in range(1, TRIALS + 1):
        doing(f"trial {number}")
        locally(width, lambda: returned.append(time.time()))
        kept.append(allocated())
        gc.collect()
        left.append(allocated())
    stamps = read_stamps(Path(os.environ[STAMPS]))
    first, last = ([s.time for s in of_kind(stamps, kind)] for kind in ("first_batch", "last_batch"))
    gaps = [begun - ended for ended, begun in zip(last, first[1:], strict=False)]
    saving = [done - ended for ended, done in zip(last, returned, strict=True)]
    figure("last batch to the next trial's first", spread(gaps, "s"))
    figure("of that: validating, and saving the last checkpoint", spread(saving[:-1], "s"))
    # The first one leaves the workspace of cuBLAS, which the others use too.
    grown = left[-1] - left[0]
    figure("GPU memory that each further trial leaves", f"{grown / 2**20:.0f} MiB", goal="0", reached=grown == 0)
    figure("the same, before the garbage is collected", f"{(max(kept) - left[0]) / 2**20:.0f} MiB")
    doing("by hand")
    turns = [by_hand(width, "by-hand.pt") for _ in range(TRIALS)]
    gaps = [begun - ended for (_, ended), (begun, _) in itertools.pairwise(turns)]
    figure("the same by hand, with torch.save", spread(gaps, "s"))
