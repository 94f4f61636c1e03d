"""What an observer receives of an experiment that is over."""

from __future__ import annotations

from dray.observers.observer import Followed, Make
from dray.records.directory import ExperimentDirectory
from dray.records.overview import COMPLETED
from dray.records.reader import ExperimentReader


def replay_to(directory: ExperimentDirectory, make: Make) -> None:
    """Pass an experiment to an observer, as after a resume."""
    observer = make()
    for news in Followed(directory).news():
        observer.update(news)
    reader = ExperimentReader(directory, is_running=lambda: False)
    reader.refresh()
    observer.close(reader.overview().state in COMPLETED)
