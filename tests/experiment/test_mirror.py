"""An experiment beside its checkpoints in an object store, brought to another machine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from dray.experiment import mirror
from dray.experiment.config import load_config
from dray.experiment.directory import ExperimentDirectory
from dray.experiment.errors import NoExperiment
from dray.experiment.mirror import Mirror, brought
from dray.storage import RemoteDirectory, StorageError
from searchers.journal import Journal

RAW = {"entrypoint": "m:T", "searcher": {"name": "single", "metric": "m", "max_length": {"batches": 1}}}


@pytest.fixture
def experiment(tmp_path: Path) -> ExperimentDirectory:
    """With code, metrics, and a trial that started."""
    code = tmp_path / "model"
    (code / "lib").mkdir(parents=True)
    (code / "lib" / "m.py").write_text("x = 1\n")
    config = load_config({**RAW, "checkpoint_storage": f"memory://results/{tmp_path.name}"})
    directory = ExperimentDirectory.create(tmp_path / "first" / "digits-1", config, code)
    directory.metrics.mkdir()
    (directory.metrics / "_tail.jsonl").write_text("{}\n")
    with Journal(directory.journal) as journal:
        journal.append({"event": "started", "trial": 0})
    save(directory, 0)
    return directory


def save(directory: ExperimentDirectory, trial: int) -> str:
    store = directory.store(trial)
    staging = store.stage(5)
    (staging / "state-dict.pth").write_bytes(b"state")
    return store.commit(staging, 5)


def copied(directory: ExperimentDirectory) -> ExperimentDirectory:
    Mirror(directory).close()
    return directory


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another machine's place for results."""
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "second"))
    (tmp_path / "second").mkdir()
    return tmp_path / "second"


def test_it_is_brought_as_it_was(experiment: ExperimentDirectory, elsewhere: Path) -> None:
    path = brought(copied(experiment).storage.uri)
    assert path == elsewhere / "digits-1"
    here = ExperimentDirectory.open(path)
    for name in ("experiment.yaml", "journal.jsonl", "metrics/_tail.jsonl", "code/lib/m.py"):
        assert (path / name).read_bytes() == (experiment.path / name).read_bytes()
    assert here.config() == experiment.config()
    assert here.store(0).latest() == experiment.store(0).latest() is not None
    assert [p.name for p in elsewhere.iterdir()] == ["digits-1"]


def test_what_this_machine_has_is_not_brought_again(experiment: ExperimentDirectory, elsewhere: Path) -> None:
    path = brought(copied(experiment).storage.uri)
    (path / "journal.jsonl").write_text("newer\n")
    assert brought(experiment.storage.uri) == path
    assert (path / "journal.jsonl").read_text() == "newer\n"


def test_trials_that_the_copy_does_not_know_begin_again(experiment: ExperimentDirectory, elsewhere: Path) -> None:
    """They may get other hyperparameters than those that their checkpoints are of."""
    copied(experiment)
    save(experiment, 1)
    here = ExperimentDirectory.open(brought(experiment.storage.uri))
    assert here.store(1).latest() is None
    assert here.store(0).latest() is not None


def test_only_what_has_changed_is_copied_again(
    experiment: ExperimentDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    real = RemoteDirectory.write

    def write(remote: RemoteDirectory, name: str, content: bytes) -> None:
        written.append(name)
        real(remote, name, content)

    monkeypatch.setattr(RemoteDirectory, "write", write)
    monkeypatch.setattr(mirror, "FIRST_S", 100)
    of_it = Mirror(experiment)
    of_it._copy()
    assert written == ["code/lib/m.py", "metrics/_tail.jsonl", "journal.jsonl", "experiment.yaml"]
    with Journal(experiment.journal) as journal:
        journal.append({"event": "reported", "trial": 0})
    of_it.close()
    assert written[4:] == ["journal.jsonl"]


def test_a_store_that_is_away_ends_nothing(
    experiment: ExperimentDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(*_: Any) -> None:
        raise StorageError("away")

    monkeypatch.setattr(RemoteDirectory, "write", write)
    Mirror(experiment).close()
    assert [(record.levelno, record.getMessage().endswith("for now: away")) for record in caplog.records] == [
        (logging.WARNING, True)
    ]


def test_a_local_experiment_has_none(tmp_path: Path) -> None:
    directory = ExperimentDirectory.create(tmp_path / "e", load_config(RAW), None)
    Mirror(directory).close()
    assert brought(tmp_path / "e") == brought(str(tmp_path / "e")) == directory.path


@pytest.mark.parametrize(
    ("where", "says"), [("memory://results/nothing", "no experiment in memory://results/nothing"), ("s3://", "BUCKET")]
)
def test_what_is_no_experiment_is_told(elsewhere: Path, where: str, says: str) -> None:
    with pytest.raises(NoExperiment, match=says):
        brought(where)
    assert list(elsewhere.iterdir()) == []


def test_credentials_are_not_copied(experiment: ExperimentDirectory) -> None:
    assert experiment.storage_file.exists()
    sizes = RemoteDirectory(copied(experiment).storage).sizes()
    assert {"experiment.yaml", "journal.jsonl"} < sizes.keys()
    assert experiment.storage_file.name not in sizes


def test_what_trials_print_is_copied_under_the_name_that_it_has_in_a_store(experiment: ExperimentDirectory) -> None:
    logs = experiment.trial(0) / "logs"
    logs.mkdir()
    (logs / "rank_0.log").write_text("2026-11-21T09:02:02.123Z one\n")
    (logs / "another").write_text("not a log\n")
    copied(experiment)
    name = "trial_0/logs/rank_0.20261121T090202.123Z.log"
    assert RemoteDirectory(experiment.storage).read(name) == b"2026-11-21T09:02:02.123Z one\n"
    assert [each for each in RemoteDirectory(experiment.storage).sizes() if "/logs/" in each] == [name]
