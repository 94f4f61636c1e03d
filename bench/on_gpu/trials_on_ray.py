"""From the last batch of a trial to the first of the next, 1 GB of model, in a search on Ray, on one GPU."""

from __future__ import annotations

import os
from pathlib import Path

import ray  # noqa: F401 - missing, this part is left out
from _measure import STAMPS, end_on_sigterm, of_kind, read_stamps, spread
from gigabyte import BATCHES
from part import DEVICE, doing, figure, note

import dray

TRIALS = 4


def main(tiny: bool) -> None:
    """Run a search of a few trials."""
    end_on_sigterm()
    doing("the search")
    config = {
        "name": "gigabyte",
        "entrypoint": "gigabyte:Gigabyte",
        "hyperparameters": {"width": 64 if tiny else 8192, "unused": {"type": "double", "minval": 0, "maxval": 1}},
        "searcher": {
            "name": "random",
            "metric": "validation_loss",
            "max_length": {"batches": BATCHES},
            "max_trials": TRIALS,
            "max_concurrent_trials": 1,
        },
        "resources": {"slots_per_trial": 1, "slot": "gpu" if DEVICE.type == "cuda" else "cpu"},
        "max_restarts": 0,
    }
    result = dray.Experiment(config, model_dir=Path(__file__).parent, path=Path.cwd() / "experiment").run()
    stamps = read_stamps(Path(os.environ[STAMPS]))
    first, last, made = (of_kind(stamps, kind) for kind in ("first_batch", "last_batch", "made"))
    gaps = [begun.time - ended.time for ended, begun in zip(last, first[1:], strict=False)]
    completed = result.trials["state"].tolist().count("COMPLETED")
    figure("trials", f"{completed} completed, in {len({s.pid for s in made})} process(es)", goal=f"{TRIALS} in 1",
           reached=(completed, len({s.pid for s in made})) == (TRIALS, 1))  # fmt: skip
    figure("last batch to the next trial's first", spread(gaps, "s"))
    # The first one leaves the workspace of cuBLAS, which the others use too.
    grown = made[-1].fields["gpu_bytes"] - made[1].fields["gpu_bytes"]
    figure("GPU memory that each further trial leaves", f"{grown / 2**20:.0f} MiB", goal="0", reached=grown == 0)
    note("Between them: the validation, the last checkpoint, and the search's decision.")
