"""The time that the GPU of a 2 GB trial idles, in a search on Ray: at a rung that the trial passes, and while the next
trial gets the GPU before the last checkpoint of the one before is written."""

from __future__ import annotations

import itertools
from pathlib import Path

import ray  # noqa: F401 - missing, this part is left out
from _measure import end_on_sigterm, quantile
from part import ON_GPU, check, doing, figure, stamps

import dray

BATCHES, TINY_BATCHES, DIVISOR = 1200, 90, 3
"""The rung is far enough from the end for its checkpoint to be written before it: 13 s on an H100."""


def search(name: str, tiny: bool, trials: int, length: int) -> list[float]:
    """Run this many trials of ASHA, which decides after a third of their batches; returns when their batches began."""
    doing(f"the search {name}")
    before = len(stamps("batch"))
    config = {
        "name": name,
        "entrypoint": "large:Large",
        "hyperparameters": {"tiny": tiny, "unused": {"type": "double", "minval": 0, "maxval": 1}},
        "searcher": {
            "name": "asha",
            "metric": "validation_loss",
            "max_length": {"batches": length},
            "max_trials": trials,
            "divisor": DIVISOR,
            "num_rungs": 2,
            "variant": "stopping",
        },
        "resources": {"slots_per_trial": 1, "max_slots": 1, "slot": "gpu" if ON_GPU else "cpu"},
        "checkpoint_policy": "none",
        "max_restarts": 0,
    }
    result = dray.Experiment(config, model_dir=Path(__file__).parent, path=Path.cwd() / name).run()
    ended = {"COMPLETED", "PRUNED"}
    check(f"trials of {name} that have not ended well", len(result.trials[~result.trials["state"].isin(ended)]), 0)
    return [each.fields["at"] for each in stamps("batch")[before:]]


def main(tiny: bool) -> None:
    """A search of one trial, which passes its rung, and one of two, which wait for each other."""
    length = TINY_BATCHES if tiny else BATCHES
    end_on_sigterm()
    begun = search("rung", tiny, 1, length)
    check("batches", len(begun), length)
    gaps = [after - before for before, after in itertools.pairwise(begun)]
    batch_s, rung = quantile(gaps, 0.5), length // DIVISOR - 1
    figure("stall at the rung", f"{gaps[rung] - batch_s:.2f} s")
    figure("lost in all from there to the end", f"{sum(gaps[rung:]) - (len(gaps) - rung) * batch_s:.2f} s")
    figure("a batch", f"{batch_s * 1e3:.1f} ms")
    begun = search("next", tiny, 2, length // 4)
    between = sorted(after - before for before, after in itertools.pairwise(begun))[-3:]
    figure("longest pauses between two batches of two trials", ", ".join(f"{each:.2f} s" for each in between))
