"""The time that the GPU of a 2 GB trial idles at a rung that the trial passes, in a search on Ray."""

from __future__ import annotations

import itertools
from pathlib import Path

import ray  # noqa: F401 - missing, this part is left out
from _measure import end_on_sigterm, quantile
from part import ON_GPU, check, doing, figure, stamps

import dray

BATCHES, TINY_BATCHES, DIVISOR = 1200, 90, 3
"""The rung is far enough from the end for its checkpoint to be written before it: 13 s on an H100."""


def main(tiny: bool) -> None:
    """One trial of ASHA, which passes its rung after a third of its batches."""
    length = TINY_BATCHES if tiny else BATCHES
    end_on_sigterm()
    doing("the search")
    config = {
        "name": "rung",
        "entrypoint": "large:Large",
        "hyperparameters": {"tiny": tiny, "unused": {"type": "double", "minval": 0, "maxval": 1}},
        "searcher": {
            "name": "asha",
            "metric": "validation_loss",
            "max_length": {"batches": length},
            "max_trials": 1,
            "divisor": DIVISOR,
            "num_rungs": 2,
            "variant": "stopping",
        },
        "resources": {"slots_per_trial": 1, "max_slots": 1, "slot": "gpu" if ON_GPU else "cpu"},
        "checkpoint_policy": "none",
        "max_restarts": 0,
    }
    result = dray.Experiment(config, model_dir=Path(__file__).parent, path=Path.cwd() / "experiment").run()
    check("state", result.trials["state"].tolist(), ["COMPLETED"])
    begun = [each.fields["at"] for each in stamps("batch")]
    check("batches", len(begun), length)
    gaps = [after - before for before, after in itertools.pairwise(begun)]
    batch_s, rung = quantile(gaps, 0.5), length // DIVISOR - 1
    figure("stall at the rung", f"{gaps[rung] - batch_s:.2f} s")
    figure("lost in all from there to the end", f"{sum(gaps[rung:]) - (len(gaps) - rung) * batch_s:.2f} s")
    figure("a batch", f"{batch_s * 1e3:.1f} ms")
