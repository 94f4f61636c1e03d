"""Requests: how a driver answers them, and those that no driver has answered, when the experiment is opened again."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.config.custom import Custom
from dray.config.load import load_config
from dray.errors import NoExperiment
from dray.experiment import requests
from dray.experiment.driver import OpenSearch
from dray.experiment.open_search import open_search
from dray.experiment.request_files import RequestFiles
from dray.records.directory import ExperimentDirectory
from searchers import Exited, Reported, Requested, Started
from searchers.errors import IllegalEvent
from searchers.events import Create, Source
from searchers.journal import Journal
from searchers.space import parse as parse_space
from tests.recorded_search import action_from_json
from tests.records.test_result import Story, config, told


@pytest.fixture
def story(tmp_path: Path) -> Story:
    """Trial 3 runs, with a checkpoint at batch 10, where it was validated."""
    return told(tmp_path, config())


@pytest.fixture
def trials(story: Story) -> requests.Trials:
    return requests.Trials(story.directory.path)


@contextmanager
def answering(story: Story, once: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """A driver that has the journal open, and carries out requests while a condition holds."""
    over = threading.Event()

    def drive() -> None:
        while not over.wait(0.01):
            for request in RequestFiles(story.directory).waiting() if once() else ():
                try:
                    story.search.request(request)
                except IllegalEvent as error:
                    story.write({"event": "rejected", "id": request.id, "error": str(error)})
                RequestFiles(story.directory).remove(request.id)

    driver = threading.Thread(target=drive)
    driver.start()
    try:
        yield
    finally:
        over.set()
        driver.join()


def created(story: Story) -> list[Create]:
    """The trials that were created on request."""
    records = [each for each in Journal.read(story.directory.journal) if each["event"] == "requested"]
    actions = [action_from_json(each) for record in records for each in record["actions"]]
    return [each for each in actions if isinstance(each, Create)]


def test_a_driver_answers_with_the_number_of_the_new_trial(story: Story, trials: requests.Trials) -> None:
    story.validate(3, 15, 0.5)
    with answering(story):
        for at, number in (("best", 5), ("latest", 6), ("15", 7)):
            assert trials.fork_trial(3, at=at, hparams={})["trial"] == number
        trials.stop_trial(3)
    sources = [each.source for each in created(story)]
    best, latest = (Source(trial=3, step=batches, batches=batches) for batches in (10, 15))
    assert sources == [best, latest, latest]
    assert story.search.trials[3].stop_requested


def test_a_fork_of_a_best_checkpoint_that_is_missing_is_an_error(story: Story, trials: requests.Trials) -> None:
    story.validate(3, 12, 0.001, save=False)
    with pytest.raises(ValueError, match=r"the best checkpoint of trial 3 .* after 12 batches .* after 10 b"):
        trials.fork_trial(3, hparams={})
    with answering(story):
        assert trials.fork_trial(3, at="last", hparams={})["trial"] == 5
    assert [each.source for each in created(story)] == [Source(trial=3, step=10, batches=10)]


def test_a_value_that_no_config_may_have_is_an_error(story: Story, trials: requests.Trials) -> None:
    with pytest.raises(ValueError, match=r"hyperparameters\.lr: a hyperparameter is <object") as raised:
        trials.add_trial({"lr": object()})
    assert "\n" not in str(raised.value)
    assert not RequestFiles(story.directory).waiting()


@pytest.mark.parametrize("size", [0, -1, 128.5])
def test_a_batch_size_that_no_config_may_have_is_an_error(size: float) -> None:
    reader: Any = SimpleNamespace(config=SimpleNamespace(space=parse_space({"global_batch_size": 64})))
    with pytest.raises(ValueError, match=f"global_batch_size: must be an integer >= 1, got {size}"):
        requests.add(reader, {"global_batch_size": size})


def test_a_rejected_request_is_an_error(story: Story) -> None:
    request = requests.stop(story.result.reader, 3)
    story.search.request(request)  # by someone else
    with answering(story), pytest.raises(ValueError, match="trial 3 can't be stopped"):
        requests.place(story.directory.path, again := replace(request, id=requests.new_id()))
        requests.decision(requests.wait(story.directory.journal, again, is_running=lambda: True, timeout_s=30))


def test_an_answer_that_a_driver_gives_as_it_ends_is_found(story: Story) -> None:
    request = requests.add(story.result.reader, {})

    def is_running() -> bool:
        story.search.request(request)  # its last event
        return False

    found = requests.wait(story.directory.journal, request, is_running=is_running, timeout_s=30)
    assert requests.decision(found)["trial"] == 5


def test_a_request_for_which_the_disk_has_no_room_leaves_nothing(story: Story) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            requests.place(story.directory.path, requests.add(story.result.reader, {}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((story.directory.path / "requests").iterdir())


def test_a_file_that_is_no_request_is_ignored(story: Story) -> None:
    folder = story.directory.path / "requests"
    folder.mkdir()
    for name, text in {
        "empty": "",
        "list": "[]",
        "number": "3",
        "trial": '{"trial": "0"}',
        "deep": "[" * 100_000,
    }.items():
        (folder / f"{name}.json").write_text(text)
    assert RequestFiles(story.directory).waiting() == []


def test_an_experiment_that_has_not_begun_has_nothing_to_fork(tmp_path: Path) -> None:
    with pytest.raises(NoExperiment):
        requests.Trials(tmp_path / "none").fork_trial(0, hparams={})


SEARCH = load_config(
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
            SEARCH,
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
