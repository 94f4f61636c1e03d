"""An experiment whose desk dies starts over from its journal, and gives up when that brings nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dray
from dray.errors import DeskLost
from dray.experiment.experiment import MAX_DESK_LOSSES
from dray.experiment.open_search import OpenSearch
from searchers.events import Exited, Reported, Started
from searchers.journal import Journal

TRIALS = Path(__file__).parents[1] / "ray" / "trials"


class Experiment(dray.Experiment):
    """Each run takes the trials one by one, ``per_run`` of them to their end, and then loses its desk."""

    per_run: int
    runs = 0

    def _run(self, opened: OpenSearch, *_: Any) -> None:
        search = opened.search
        self.runs += 1
        for trial in [view.id for view in search.trials.values() if not view.ended][: self.per_run]:
            search.on(Started(trial=trial))
            search.on(Reported(trial=trial, step=10, value=0.5))
            search.on(Exited(trial=trial, reason="completed"))
        if search.done is None:
            raise DeskLost(f"lost the desk; resume with: dray experiment resume {self.path}")


def experiment(path: Path, per_run: int) -> Experiment:
    made = Experiment(
        {
            "name": "lost",
            "entrypoint": "recorded:Recorded",
            "hyperparameters": {"global_batch_size": 8, "record": "-", "pause_s": 0.0, "lr": 0.1},
            "searcher": {"name": "random", "metric": "error", "max_length": {"batches": 10}, "max_trials": 5},
        },
        model_dir=TRIALS,
        path=path,
    )
    made.per_run = per_run
    return made


def test_one_call_ends_the_search_however_often_the_desk_dies_while_trials_report(tmp_path: Path) -> None:
    lost = experiment(tmp_path / "experiment", per_run=1)
    result = lost.run()
    assert lost.runs == 5
    assert result.trials["state"].tolist() == ["COMPLETED"] * 5
    assert sum(record["event"] == "opened" for record in Journal.read(result.path / "journal.jsonl")) == 5


def test_a_desk_that_keeps_dying_without_a_report_ends_the_run_with_the_command_to_resume(tmp_path: Path) -> None:
    lost = experiment(tmp_path / "experiment", per_run=0)
    with pytest.raises(dray.ExperimentError, match=f"dray experiment resume {tmp_path / 'experiment'}"):
        lost.run()
    assert lost.runs == MAX_DESK_LOSSES
