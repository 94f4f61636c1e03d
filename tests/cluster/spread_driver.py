"""Trains the trial of spread.py on two workers, each of which needs a machine. `ray submit` brings this file alone."""

from __future__ import annotations

import os

from spread import Spread

import dray

if __name__ == "__main__":
    config = {
        "name": "spread",
        "hyperparameters": {"global_batch_size": 64, "lr": 0.01, "hidden": 32},
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 20}},
        "resources": {"slots_per_trial": 2, "slot": "cpu", "cpus_per_slot": os.cpu_count()},
    }
    dray.Experiment(config, trial=Spread).run()
