"""An experiment at a glance agrees with its replay; names and places."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dray.config.load import load_config
from dray.config.search import recorded_search
from dray.errors import NoExperiment
from dray.experiment.experiment import Experiment
from dray.records.copies import delete
from dray.records.directory import ExperimentDirectory, link_into_results
from dray.records.improvements import Improvements
from dray.records.listing import StoredExperiment, list_experiments
from dray.records.lookup import locate
from dray.records.metrics import MetricsLog
from dray.records.result import Result
from searchers.journal import Journal
from tests.report.simulated import simulated

TRIAL = """
from dray import pytorch


class Trial(pytorch.PyTorchTrial):
    pass
"""


def open_experiment(directory: ExperimentDirectory) -> StoredExperiment:
    return StoredExperiment(directory=directory, where=str(directory.path), is_copy=False)


def ends(directory: ExperimentDirectory) -> Iterator[int]:
    """Cuts the journal after each record, from the last on, and says how many are left."""
    lines = directory.journal.read_bytes().splitlines(keepends=True)
    for end in range(len(lines), 1, -1):
        directory.journal.write_bytes(b"".join(lines[:end]))
        yield end


def test_an_overview_agrees_with_a_replay_of_the_journal_at_any_time(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "one", 12, failures=0.05)
    config = load_config(directory.config_file)
    states = set()
    for _ in ends(directory):
        overview = open_experiment(directory).overview()
        search = recorded_search(config, Journal.read(directory.journal))
        views = search.trials.values()
        assert (overview.trials, overview.ended) == (len(views), sum(view.ended for view in views))
        values = {view.best: view.id for view in views if view.best is not None}
        best = min(values, default=None)
        assert (overview.best, overview.best_trial) == (best, values.get(best))
        assert overview.state == ("COMPLETED" if search.done else "STOPPED")
        states.add(overview.state)
    assert states == {"COMPLETED", "STOPPED"}


def test_time_without_a_driver_does_not_count(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "one", 4)
    directory.journal.unlink()
    with Journal(directory.journal) as journal:
        for event, time in (("opened", 100), ("saved", 130), ("opened", 1000), ("opened", 2000), ("saved", 2007)):
            journal.append({"event": event, "time": time})
    overview = open_experiment(directory).overview()
    assert (overview.began, overview.last, overview.ran_s) == (100, 2007, 37)


def test_an_extended_search_continues_and_invalid_trials_are_not_the_best(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "one", 4)
    directory.journal.unlink()
    done = [{"action": "done", "reason": "completed"}]
    records = [
        {"event": "start", "actions": [{"action": "create", "trial": 0}, {"action": "create", "trial": 1}]},
        {"event": "reported", "trial": 0, "step": 1, "value": 0.5, "actions": []},
        {"event": "saved", "trial": 0, "batches": 10, "value": 0.25},
        {"event": "reported", "trial": 1, "step": 1, "value": 0.125, "actions": []},
        {"event": "reported", "trial": 1, "step": 2, "value": "nan", "actions": []},
        {"event": "exited", "trial": 1, "reason": "invalid_hp", "actions": []},
        {"event": "exited", "trial": 0, "reason": "completed", "actions": done},
    ]
    more = {"event": "extended", "max_trials": 9, "max_length": None, "actions": [{"action": "resume", "trial": 0}]}
    with Journal(directory.journal) as journal:
        for record in records:
            journal.append(record)
    overview = open_experiment(directory).overview()
    assert (overview.state, overview.ended, overview.best, overview.best_trial) == ("COMPLETED", 2, 0.25, 0)
    with Journal(directory.journal) as journal:
        journal.append(more)
    overview = open_experiment(directory).overview()
    assert (overview.state, overview.ended, overview.max_trials) == ("STOPPED", 1, 9)


def test_a_search_in_which_every_trial_failed_is_an_error(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "one", 4)
    with Journal(directory.journal) as journal:
        journal.append({"event": "exited", "trial": 0, "actions": [{"action": "done", "reason": "errored"}]})
    assert open_experiment(directory).overview().state == "ERROR"


def test_an_experiment_that_can_not_run_is_an_error_until_it_is_resumed(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "one", 4)
    directory.journal.unlink()
    with Journal(directory.journal) as journal:
        journal.append({"event": "opened", "time": 1})
        journal.append({"event": "failed", "error": "slots_per_trial: 4 slots", "time": 2})
        assert open_experiment(directory).overview().state == "RUNNING"
    overview = open_experiment(directory).overview()
    assert (overview.state, overview.why) == ("ERROR", "slots_per_trial: 4 slots")
    with Journal(directory.journal) as journal:
        journal.append({"event": "opened", "time": 3})
    overview = open_experiment(directory).overview()
    assert (overview.state, overview.why) == ("STOPPED", "")


def test_a_path_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for root in ("results", "here"):
        (tmp_path / root / "one").mkdir(parents=True)
        (tmp_path / root / "one" / "experiment.yaml").touch()
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    monkeypatch.chdir(tmp_path / "here")
    assert locate("one") == str(tmp_path / "here" / "one")
    monkeypatch.chdir(tmp_path)
    assert locate("one") == str(tmp_path / "results" / "one")
    (tmp_path / "results" / ".one-partial").mkdir()  # a copy that is not complete
    (tmp_path / "results" / ".one-partial" / "experiment.yaml").touch()
    assert [each.name for each in list_experiments()] == ["one"]
    with pytest.raises(NoExperiment, match="there are none in"):
        monkeypatch.setenv("DRAY_HOME", str(tmp_path / "empty"))
        locate("one")


def test_an_experiment_in_another_storage_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    (tmp_path / "model_def.py").write_text(TRIAL)
    config = {
        "name": "one",
        "entrypoint": "model_def:Trial",
        "hyperparameters": {"global_batch_size": 1},
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 1}},
        "checkpoint_storage": {"type": "shared_fs", "host_path": str(tmp_path / "shared")},
    }

    def stopped(**arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dray.experiment.experiment.Display", stopped)
    experiment = Experiment(config, model_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    assert experiment.path.parent == tmp_path / "shared"
    assert locate("latest") == locate("one") == locate(experiment.path.name) == str(experiment.path)
    assert [(each.name, each.path) for each in list_experiments()] == [(experiment.path.name, str(experiment.path))]
    delete(
        StoredExperiment(directory=ExperimentDirectory.open(experiment.path), where=str(experiment.path), is_copy=False)
    )
    assert list((tmp_path / "results").iterdir()) == []


def test_a_link_to_an_experiment_that_is_missing_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    link_into_results(tmp_path / "not-mounted" / "one")
    assert list_experiments() == []
    with pytest.raises(NoExperiment, match="there are none in"):
        locate("one")


def test_a_link_that_cannot_be_made_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "file" / "results"))
    link_into_results(tmp_path / "shared" / "one")
    assert list_experiments() == []


@pytest.mark.parametrize("several", [False, True])
def test_the_list_and_the_result_agree_on_the_best_where_curves_turn_up(tmp_path: Path, several: bool) -> None:
    directory = simulated(tmp_path / "one", 4, several=several)
    improvements = Improvements(load_config(directory.config_file).searcher)
    metrics = MetricsLog(directory.metrics)
    with Journal(directory.journal) as journal:
        for batches, value in enumerate((0.5, 0.01, 0.3), start=1000):  # better between two rungs than at either
            row = {"batches": batches, "epochs": 100.0, "kind": "validation", "time": 1_700_000_999.0}
            rows = [{**row, "name": "validation_loss", "value": value}, {**row, "name": "size", "value": 20.0}]
            metrics.append(0, rows)
            for record in improvements.among(0, rows):
                journal.append(record, wait=False)
    metrics.close()
    overview, result = open_experiment(directory).overview(), Result(directory.path)
    assert (overview.best, overview.best_trial) == (0.01, 0)
    assert result.trials["best_metric"].min() == 0.01
