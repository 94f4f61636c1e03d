"""The search of asha.yaml, from Python: ``python examples/digits/driver.py``."""

from __future__ import annotations

from model_def import DigitsTrial

import dray

CONFIG = {
    "name": "digits-asha",
    "hyperparameters": {
        "global_batch_size": 64,
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
        "hidden": {"type": "int", "minval": 16, "maxval": 256},
    },
    "searcher": {
        "name": "asha",
        "metric": "validation_loss",
        "smaller_is_better": True,
        "max_length": {"epochs": 16},
        "max_trials": 64,
        "divisor": 4,
        "num_rungs": 3,
    },
    "resources": {"slots_per_trial": 1},
    "min_validation_period": {"epochs": 1},
    "reproducibility": {"experiment_seed": 7},
}


def main() -> None:
    """Run the search and print the best trial."""
    result = dray.Experiment(CONFIG, trial=DigitsTrial).run()
    best = result.best_trial
    there = result.metrics.query("trial_id == @best.trial_id and batches == @best.best_batches and name == 'accuracy'")
    print(f"best trial: {best.trial_id} {best.hparams}")
    print(f"validation_loss {best.metric:.4f}, accuracy {there['value'].iloc[-1]:.4f} on the held-out digits")
    print(f"results: {result.path}")


# Ray's workers import this file; only the driver may start a search.
if __name__ == "__main__":
    main()
