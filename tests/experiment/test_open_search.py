"""Requests that no driver has answered are carried out when the experiment is opened again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dray.config.custom import Custom
from dray.config.load import load_config
from dray.experiment import requests
from dray.experiment.driver import OpenSearch
from dray.experiment.open_search import open_search
from dray.experiment.request_files import RequestFiles
from dray.records.directory import ExperimentDirectory
from searchers import Exited, Journal, Reported, Requested, Source, Started

CONFIG = load_config(
    {
        "entrypoint": "model_def:Trial",
        "hyperparameters": {"global_batch_size": 2, "lr": {"type": "double", "minval": 0, "maxval": 1}},
        "searcher": {"name": "random", "metric": "loss", "max_length": {"batches": 8}, "max_trials": 2},
    }
)


@pytest.fixture
def directory(tmp_path: Path) -> ExperimentDirectory:
    """The directory of an experiment whose search is done."""
    directory = ExperimentDirectory(tmp_path)
    search = opened(directory).search
    with Journal(directory.journal) as journal:
        search.log = lambda record: journal.append({**record, "time": time.time()})
        for trial in (0, 1):
            search.on(Started(trial=trial))
            search.on(Reported(trial=trial, step=4, value=0.5))
            search.on(Exited(trial=trial, reason="completed"))
    assert search.done
    save(directory, 0, 4)
    return directory


def opened(directory: ExperimentDirectory) -> OpenSearch:
    with Journal(directory.journal) as journal:
        return open_search(
            CONFIG,
            Custom(),
            {},
            journal=journal,
            records=Journal.read(directory.journal),
            requests=RequestFiles(directory),
        )


def save(directory: ExperimentDirectory, trial: int, batches: int) -> None:
    store = directory.store(trial)
    store.commit(store.stage(batches), batches)


def answers(directory: ExperimentDirectory) -> list[Any]:
    return [(record["id"], record["event"]) for record in Journal.read(directory.journal) if "id" in record]


def test_a_request_reopens_a_search_that_is_done(directory: ExperimentDirectory) -> None:
    source = Source(trial=0, step=4, batches=4)
    requests.place(directory.path, Requested(id="a", source=source, hparams={"lr": 2.0}))
    search = opened(directory).search
    assert (search.done, list(search.live), search.source(2)) == (None, [2], source)
    assert not RequestFiles(directory).waiting()
    assert list(opened(directory).search.trials) == [0, 1, 2]


def test_an_answered_request_whose_file_was_not_removed_is_not_carried_out_again(
    directory: ExperimentDirectory,
) -> None:
    for _ in range(2):
        requests.place(directory.path, Requested(id="a", hparams={"lr": 0.5}))
        requests.place(directory.path, Requested(id="b", trial=0))
        assert list(opened(directory).search.trials) == [0, 1, 2]
    assert answers(directory) == [("a", "requested"), ("b", "rejected")]
    assert not RequestFiles(directory).waiting()


def test_a_fork_of_a_checkpoint_that_was_deleted_is_rejected(directory: ExperimentDirectory) -> None:
    requests.place(directory.path, Requested(id="a", source=Source(trial=1, step=4, batches=4)))
    assert opened(directory).search.done
    [record] = [each for each in Journal.read(directory.journal) if "id" in each]
    assert (record["event"], record["error"]) == ("rejected", "trial 1 has no checkpoint at batch 4 any more")


def test_a_trial_is_canceled_if_the_driver_died_before_it_recorded_the_end(directory: ExperimentDirectory) -> None:
    requests.place(directory.path, Requested(id="a", hparams={}))
    search = opened(directory).search
    with Journal(directory.journal) as journal:
        search.log = lambda record: journal.append({**record, "time": time.time()})
        search.request(Requested(id="b", trial=2))
    assert opened(directory).search.trials[2].state == "CANCELED"
