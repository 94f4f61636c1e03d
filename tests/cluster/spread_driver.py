"""Trains the trial of spread.py on two workers, each of which needs a machine: `spread_driver.py <name> <pause_s>`.

`ray submit` brings this file alone.
"""

from __future__ import annotations

import os
import sys

from spread import Spread

import dray


def main(name: str, pause_s: str) -> None:
    config = {
        "name": name,
        "hyperparameters": {"global_batch_size": 64, "lr": 0.01, "hidden": 32, "pause_s": float(pause_s)},
        # Less than an epoch, whose last batch two workers would not average as one does.
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 20}},
        "resources": {"slots_per_trial": 2, "slot": "cpu", "cpus_per_slot": os.cpu_count()},
        "min_validation_period": {"batches": 5},
        "min_checkpoint_period": {"batches": 5},
        "reproducibility": {"experiment_seed": 7},
    }
    dray.Experiment(config, trial=Spread).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
