"""A search over a class of this script: `python driver.py <config> <experiment> [<trials in all, to resume it>]`."""

from __future__ import annotations

import sys

from beside import Travelled

import dray


class Mine(Travelled):
    """No other process can import it."""


if __name__ == "__main__":
    config, path, *trials = sys.argv[1:]
    if trials:
        dray.Experiment.resume(path, max_trials=int(trials[0]), trial=Mine).run()
    else:
        dray.Experiment(config, trial=Mine, path=path).run()
