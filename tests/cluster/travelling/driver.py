"""A search over a class of this script: `python driver.py [--resume] <config> <experiment>`."""

from __future__ import annotations

import sys

from beside import Travelled

import dray


class Mine(Travelled):
    """No other process can import it."""


if __name__ == "__main__":
    *resume, config, path = sys.argv[1:]
    if resume:
        dray.Experiment.resume(path, max_trials=2, trial=Mine).run()
    else:
        dray.Experiment(config, trial=Mine, path=path).run()
