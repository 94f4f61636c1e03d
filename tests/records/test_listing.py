"""An experiment at a glance agrees with its replay; names and places."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dray.config.load import load_config
from dray.errors import NoExperiment
from dray.experiment.experiment import Experiment
from dray.records.copies import delete
from dray.records.directory import ExperimentDirectory, link_into_results
from dray.records.listing import KEPT, StoredExperiment, list_experiments
from dray.records.lookup import locate
from searchers.journal import Journal
from tests.recorded_search import recorded_search
from tests.report.simulated import simulated

TRIAL = """
from dray import pytorch
from tests.recorded_search import recorded_search


class Trial(pytorch.PyTorchTrial):
    pass
"""


def ends(directory: ExperimentDirectory) -> Iterator[int]:
    """Cuts the journal after each record, from the last on, and says how many are left."""
    lines = directory.journal.read_bytes().splitlines(keepends=True)
    for end in range(len(lines), 1, -1):
        directory.journal.write_bytes(b"".join(lines[:end]))
        yield end


def test_overview_agrees_with_a_replay_of_the_journal(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "one", 12, failures=0.05)
    config = load_config(directory.config_file)
    states = set()
    for _ in ends(directory):
        reader = StoredExperiment.here(directory).read()
        overview = reader.overview()
        search = recorded_search(config, Journal.read(directory.journal))
        views = search.trials.values()
        assert (overview.trials, overview.ended) == (len(views), sum(view.ended for view in views))
        assert {trial.id: trial.state for trial in reader.trials.values()} == {view.id: view.state for view in views}
        assert [trial.last_step or None for trial in reader.trials.values()] == [view.last_step for view in views]
        assert overview.state == ("COMPLETED" if search.done else "STOPPED")
        states.add(overview.state)
    assert states == {"COMPLETED", "STOPPED"}


def test_time_without_a_driver_does_not_count(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "one", 4)
    directory.journal.unlink()
    with Journal(directory.journal) as journal:
        for event, time in (("opened", 100), ("saved", 130), ("opened", 1000), ("opened", 2000), ("saved", 2007)):
            journal.append({"event": event, "time": time})
    overview = StoredExperiment.here(directory).overview()
    assert (overview.began, overview.last, overview.ran_s) == (100, 2007, 37)


def test_an_extended_search_continues(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "one", 4)
    overview = StoredExperiment.here(directory).overview()
    assert (overview.state, overview.ended) == ("COMPLETED", 4)
    with Journal(directory.journal) as journal:
        actions = [{"action": "resume", "trial": 0}]
        journal.append({"event": "extended", "max_trials": 9, "max_length": None, "actions": actions})
    overview = StoredExperiment.here(directory).overview()
    assert (overview.state, overview.ended, overview.max_trials) == ("STOPPED", 3, 9)


def test_a_search_in_which_every_trial_failed_is_an_error(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "one", 4)
    with Journal(directory.journal) as journal:
        actions = [{"action": "done", "reason": "errored"}]
        journal.append({"event": "exited", "trial": 0, "reason": "errored", "actions": actions})
    assert StoredExperiment.here(directory).overview().state == "ERROR"


def test_experiment_that_cannot_run_is_an_error_until_resumed(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "one", 4)
    directory.journal.unlink()
    with Journal(directory.journal) as journal:
        journal.append({"event": "opened", "time": 1})
        journal.append({"event": "failed", "error": "slots_per_trial: 4 slots", "time": 2})
        assert StoredExperiment.here(directory).overview().state == "RUNNING"
    overview = StoredExperiment.here(directory).overview()
    assert (overview.state, overview.why) == ("ERROR", "slots_per_trial: 4 slots")
    with Journal(directory.journal) as journal:
        journal.append({"event": "opened", "time": 3})
    overview = StoredExperiment.here(directory).overview()
    assert (overview.state, overview.why) == ("STOPPED", None)


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
    delete(StoredExperiment.here(ExperimentDirectory.open(experiment.path)))
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


LIST = """
import json, sys
from dataclasses import asdict
from dray.records.listing import list_experiments
found = [asdict(each) for each in list_experiments(sys.argv[1])]
print(json.dumps([found, [*{"numpy", "pyarrow", "pandas"} & {*sys.modules}]]))
"""


def test_the_overview_of_an_ended_experiment_is_kept_until_its_files_change(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "results" / "one", 4)

    def listed() -> tuple[dict[str, Any], list[str]]:
        command = [sys.executable, "-c", LIST, str(tmp_path / "results")]
        [found], imported = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return found, imported

    first, imported = listed()
    overview = asdict(StoredExperiment.here(directory).overview())
    assert (first, "pyarrow" in imported) == (json.loads(json.dumps(overview)), True)
    assert listed() == (first, [])
    directory.path.rename(tmp_path / "results" / "two")
    directory = ExperimentDirectory(tmp_path / "results" / "two")
    assert listed() == ({**first, "name": "two", "path": str(directory.path)}, [])
    with Journal(directory.journal) as journal:
        journal.append({"event": "extended", "max_trials": 9, "actions": [{"action": "resume", "trial": 0}]})
    for _ in range(2):  # and that of one that has not ended is read each time
        found, imported = listed()
        assert (found["state"], "pyarrow" in imported) == ("STOPPED", True)


def test_a_kept_overview_that_is_damaged_is_read_anew(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "one", 4)
    before = list_experiments(str(tmp_path))
    kept = directory.path / KEPT
    for text in ("", "[]", "[" * 100_000, json.dumps({**json.loads(kept.read_text()), "overview": {"trials": 3}})):
        kept.write_text(text)
        assert list_experiments(str(tmp_path)) == before
