"""The cost of observers to the driver, per call; simulated.

An ASHA search of many trials in virtual time, with four metrics per epoch, is passed to observers as by a driver.
The cost is the wall time of the driver's calls: `rows` for a report, `happened` for an event of the search.

    python bench/observers.py [--trials 1000] [--save]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from _measure import BENCH, Paper, arguments, machine, perform

sys.path.insert(0, str(BENCH.parent))

WORKERS = 32


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run a search in virtual time, with observers."""
    from dray.config.search import build_method
    from dray.observers.observer import Observers
    from dray.records.directory import ExperimentDirectory
    from searchers.events import Action, Event, Reported
    from searchers.search import Search
    from searchers.simulate import Curve, simulate
    from tests.report.simulated import BEGAN, config_of, loss, rows

    paper.say(machine())
    config = config_of(options.trials)
    experiment = ExperimentDirectory.create(directory / "experiment", config, None)
    observers = Observers(experiment, {"nothing": lambda: _Nothing()})
    calls_s: dict[str, list[float]] = {"happened": [], "rows": []}
    records: list[dict[str, Any]] = []
    trained: dict[int, int] = {}

    def happened(now: float, event: Event, actions: list[Action]) -> None:
        trial = event.trial
        if isinstance(event, Reported):
            view = search.trials[trial]
            assert view.hparams is not None
            for epoch in range(trained.get(trial, 0) + 1, int(event.step) + 1):
                report = rows(view.hparams, epoch, BEGAN + now)
                began = time.perf_counter()
                observers.rows(trial, report)
                calls_s["rows"].append(time.perf_counter() - began)
            trained[trial] = int(event.step)
        for record in records:
            stamped = {**record, "time": BEGAN + now}
            began = time.perf_counter()
            observers.happened(stamped, search.trials)
            calls_s["happened"].append(time.perf_counter() - began)
        records.clear()

    search = Search(build_method(config), config.space, seed=7, smaller_is_better=True, log=records.append)
    observers.begin([], {}, paper.say)
    simulate(
        search, WORKERS, lambda hparams: Curve(lambda epochs: loss(hparams, epochs)), start_cost=0.5, watch=happened
    )
    observers.close(done=True)
    paper.say("")
    calls = [
        [
            f"`{name}`",
            f"{len(took):,}",
            f"{1e6 * sum(took) / len(took):.1f} us",
            f"{1e6 * sorted(took)[-len(took) // 100]:.1f} us",
        ]
        for name, took in calls_s.items()
    ]
    paper.table(["the driver's call", "calls", "mean", "99 of 100 below"], calls)


class _Nothing:
    """An observer that does nothing."""

    def update(self, news: Any) -> None:
        """Nothing."""

    def close(self, done: bool) -> None:
        """Nothing."""


def main() -> None:
    """Read the command line and measure."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--trials", type=int, default=1_000, help="trials of the search (default 1000)")
    perform(measure, parser.parse_args(), name="observers", title="A run that is followed")


if __name__ == "__main__":
    main()
