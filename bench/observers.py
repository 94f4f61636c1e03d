"""What observers cost: the driver per call, and the Optuna study in its thread; all of it simulated.

An ASHA search of many trials in virtual time, with four metrics per epoch, is passed to observers as a driver does it.
The driver's cost is the wall time of its calls: `rows` for a report, `happened` for an event of the search. The study's
is CPU time: to create the file, to write what each second added, and to rewrite all of it, as a resumed run does. For
comparison, some trials of 3 parameters and 4 values through Optuna's own interface.

    python bench/observers.py [--trials 1000] [--plain 100] [--save]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _measure import BENCH, Paper, arguments, machine, perform

sys.path.insert(0, str(BENCH.parent))

WORKERS = 32


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run a search in virtual time, with observers."""
    from dray.config.search import build_method
    from dray.observers.observer import News, Observers
    from dray.observers.optuna_study import OptunaStudy
    from dray.records.directory import ExperimentDirectory
    from searchers.events import Action, Event, Exited, Reported, Started
    from searchers.search import Search
    from searchers.simulate import Curve, simulate
    from tests.report.simulated import BEGAN, config_of, loss, rows

    paper.say(machine())
    config = config_of(options.trials)
    experiment = ExperimentDirectory.create(directory / "experiment", config, None)
    observers = Observers(experiment, {"nothing": lambda: _Nothing()})
    calls_s: dict[str, list[float]] = {"happened": [], "rows": []}
    records: list[dict[str, Any]] = []
    seconds: list[list[News]] = []
    new: dict[int, list[Mapping[str, Any]]] = {}
    started: dict[int, float] = {}
    ended: dict[int, float] = {}
    trained: dict[int, int] = {}

    def happened(now: float, event: Event, actions: list[Action]) -> None:
        trial = event.trial
        if len(seconds) <= now:
            some = [
                News(view=search.trials[each], started=started.get(each), ended=ended.get(each), rows=new[each])
                for each in sorted(new)
            ]
            seconds.append(some)
            new.clear()
        if isinstance(event, Started):
            started.setdefault(trial, BEGAN + now)
        elif isinstance(event, Exited):
            ended[trial] = BEGAN + now
        elif isinstance(event, Reported):
            view = search.trials[trial]
            assert view.hparams is not None
            for epoch in range(trained.get(trial, 0) + 1, int(event.step) + 1):
                report = rows(view.hparams, epoch, BEGAN + now)
                new.setdefault(trial, []).extend(report)
                began = time.perf_counter()
                observers.rows(trial, report)
                calls_s["rows"].append(time.perf_counter() - began)
            trained[trial] = int(event.step)
        for record in records:
            stamped = {**record, "time": BEGAN + now}
            changed = [trial, *(action["trial"] for action in record["actions"] if "trial" in action)]
            for each in changed:
                new.setdefault(each, [])
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
    seconds.append(
        [
            News(view=view, started=started.get(each), ended=ended.get(each), rows=new.get(each, []))
            for each, view in search.trials.items()
        ]
    )

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

    began = time.process_time()
    study = OptunaStudy(experiment.study, config)
    made_s, began = time.process_time() - began, time.process_time()
    for some in seconds:
        study.update(some)
    study.close(True)
    live_s, began = time.process_time() - began, time.process_time()
    again = OptunaStudy(experiment.study, config)
    everything: dict[int, list[Mapping[str, Any]]] = {}
    for some in seconds:
        for one in some:
            everything.setdefault(one.view.id, []).extend(one.rows)
    again.update(
        [News(view=one.view, started=one.started, ended=one.ended, rows=everything[one.view.id]) for one in seconds[-1]]
    )
    again.close(True)
    anew_s = time.process_time() - began
    values = sum(
        row["kind"] == "validation" and row["name"] == config.searcher.metric
        for each in everything.values()
        for row in each
    )
    paper.say("")
    paper.table(
        ["the study of", "CPU time"],
        [
            ["the empty file", f"{made_s:.2f} s"],
            [f"{options.trials:,} trials with {values:,} values, in {len(seconds):,} updates", f"{live_s:.2f} s"],
            ["the same, anew at a resume", f"{anew_s:.2f} s"],
            [
                f"{options.plain:,} trials through Optuna's interface",
                f"{_plain(directory / 'plain.db', options.plain):.2f} s",
            ],
        ],
    )


class _Nothing:
    """An observer that does nothing."""

    def update(self, news: Any) -> None:
        """Nothing."""

    def close(self, done: bool) -> None:
        """Nothing."""


def _plain(path: Path, trials: int) -> float:
    """CPU seconds for these trials, each of 3 parameters and 4 values, through Optuna's own interface."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(storage=f"sqlite:///{path}", sampler=optuna.samplers.RandomSampler(seed=7))
    began = time.process_time()
    for _ in range(trials):
        trial = study.ask()
        trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        trial.suggest_int("hidden", 16, 256)
        trial.suggest_categorical("optimizer", ["adam", "sgd"])
        for step in range(4):
            trial.report(0.5, step)
        study.tell(trial, 0.5)
    return time.process_time() - began


def main() -> None:
    """Read the command line and measure."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--trials", type=int, default=1_000, help="of the search (default 1000)")
    parser.add_argument("--plain", type=int, default=100, help="through Optuna's own interface (default 100)")
    perform(measure, parser.parse_args(), name="observers", title="A run that is followed")


if __name__ == "__main__":
    main()
