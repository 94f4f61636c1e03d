"""What an observer receives of an experiment that is over."""

from __future__ import annotations

from dray.observers.observer import Make, News
from dray.records.directory import ExperimentDirectory
from dray.records.metrics import read_trials
from dray.records.result import Result
from searchers.journal import Journal
from tests.recorded_search import recorded_search


def replay_to(directory: ExperimentDirectory, make: Make) -> None:
    """Pass an experiment to an observer as one update."""
    search = recorded_search(directory.config(), Journal.read(directory.journal))
    trials, observer = Result(directory.path).reader.trials, make()
    observer.update(
        [
            News(
                view=view,
                started=trials[trial].started,
                ended=trials[trial].ended,
                rows=[
                    {str(name): value for name, value in row.items()}
                    for row in read_trials(directory.metrics, [trial]).to_dict("records")
                ],
            )
            for trial, view in search.trials.items()
        ]
    )
    observer.close(search.done is not None)
