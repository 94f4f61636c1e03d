"""An experiment beside its checkpoints in an object store, brought to another machine."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from dray.config.load import load_config
from dray.config.search import build_search
from dray.errors import ExperimentError, NoExperiment
from dray.experiment.experiment import Experiment
from dray.records import mirror
from dray.records.directory import ExperimentDirectory
from dray.records.mirror import Mirror, fetch_experiment
from dray.storage import RemoteDirectory, StorageError
from searchers.events import Exited, Reported, Started
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
        journal.append({"event": "start", "actions": [{"action": "create", "trial": 0}]})
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


def test_a_fetched_experiment_equals_the_original(experiment: ExperimentDirectory, elsewhere: Path) -> None:
    path = fetch_experiment(copied(experiment).storage.uri)
    assert path == elsewhere / "digits-1"
    here = ExperimentDirectory.open(path)
    for name in ("experiment.yaml", "journal.jsonl", "metrics/_tail.jsonl", "code/lib/m.py"):
        assert (path / name).read_bytes() == (experiment.path / name).read_bytes()
    assert here.config() == experiment.config()
    assert here.store(0).latest() == experiment.store(0).latest() is not None
    assert [p.name for p in elsewhere.iterdir()] == ["digits-1"]


def test_an_experiment_on_this_machine_is_not_fetched_again(experiment: ExperimentDirectory, elsewhere: Path) -> None:
    path = fetch_experiment(copied(experiment).storage.uri)
    (path / "journal.jsonl").write_text("newer\n")
    assert fetch_experiment(experiment.storage.uri) == path
    assert (path / "journal.jsonl").read_text() == "newer\n"


def test_trials_unknown_to_the_copy_start_from_scratch(experiment: ExperimentDirectory, elsewhere: Path) -> None:
    """They may get other hyperparameters than those that their checkpoints are of."""
    copied(experiment)
    save(experiment, 1)
    here = ExperimentDirectory.open(fetch_experiment(experiment.storage.uri))
    assert here.store(1).latest() is None
    assert here.store(0).latest() is not None


@pytest.mark.parametrize("left", [0, 1])
def test_copy_with_a_cut_journal_is_refused(experiment: ExperimentDirectory, elsewhere: Path, left: int) -> None:
    with Journal(experiment.journal) as journal:
        journal.append({"event": "exited", "trial": 0})
    place = RemoteDirectory(copied(experiment).storage)
    place.write("journal.jsonl", b"".join(experiment.journal.read_bytes().splitlines(keepends=True)[:left]))
    with pytest.raises(ExperimentError, match=rf"^{experiment.storage}/journal\.jsonl has {left} record") as error:
        fetch_experiment(experiment.storage.uri)
    assert "with its checkpoints and journal.jsonl.lock; or begin a new experiment" in str(error.value)
    assert experiment.store(0).latest() is not None


class Steps:
    """In place of the thread and its event: what happens between the copies, in virtual time."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.waits: list[float] = []
        self._steps = iter(steps)

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        for step in self._steps:
            step()
            return False
        return True

    def run(self, directory: ExperimentDirectory, monkeypatch: pytest.MonkeyPatch) -> Mirror:
        threads = SimpleNamespace(Event=lambda: self, Thread=lambda target, **_: SimpleNamespace(start=target))
        monkeypatch.setattr(mirror, "threading", threads)
        return Mirror(directory)


class Store:
    """What is written to the store in order, unless it is away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away = False
        self.written: list[str] = []
        self.sent = 0
        real = RemoteDirectory.write

        def write(remote: RemoteDirectory, name: str, content: bytes) -> None:
            if self.away and not name.startswith(".dray-probe"):
                raise StorageError("away")
            self.written.append(name)
            self.sent += len(content)
            real(remote, name, content)

        monkeypatch.setattr(RemoteDirectory, "write", write)

    def leaves(self) -> None:
        self.away = True

    def returns(self) -> None:
        self.away = False


def grow(directory: ExperimentDirectory, size: int = 1) -> None:
    with Journal(directory.journal) as journal:
        journal.append({"event": "reported", "trial": 0, "note": "x" * size})


FAILS = "can't copy the experiment to its checkpoint storage for now, will try again: away"
WORKS = "the experiment is copied to its checkpoint storage again, and nothing is missing there"


def test_only_what_has_changed_is_copied_again(
    experiment: ExperimentDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(monkeypatch)
    Steps(lambda: None, lambda: grow(experiment)).run(experiment, monkeypatch)
    journal = ["journal.jsonl", "journal.jsonl.lock"]
    assert store.written == ["code/lib/m.py", "metrics/_tail.jsonl", *journal, "experiment.yaml", *journal]


def test_each_outage_is_reported_once_and_its_end(
    experiment: ExperimentDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(monkeypatch)

    def news() -> None:
        grow(experiment)

    steps = Steps(news, store.leaves, news, news, store.returns, news, store.leaves, news, store.returns, news)
    assert steps.run(experiment, monkeypatch).missing is None
    assert [record.getMessage() for record in caplog.records] == [FAILS, WORKS, FAILS, WORKS]
    assert RemoteDirectory(experiment.storage).read("journal.jsonl") == experiment.journal.read_bytes()


def test_failed_last_copy_is_reported_with_what_is_missing(
    experiment: ExperimentDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in an outage that was reported before."""
    store = Store(monkeypatch)
    steps = Steps(lambda: None, lambda: grow(experiment), store.leaves, lambda: grow(experiment))
    missing = steps.run(experiment, monkeypatch).missing
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    assert caplog.records[-1].getMessage() == missing
    assert missing is not None
    assert missing.startswith(f"{experiment.storage} lacks a part of the experiment, which is complete only in")
    assert "Not copied were journal.jsonl: away." in missing
    assert missing.endswith(f"dray experiment resume {experiment.path}")


def test_a_file_that_cannot_be_read_is_an_outage_too(
    experiment: ExperimentDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the thread, and nothing more was copied."""
    real, refused = Path.read_bytes, iter([PermissionError("not yours")])

    def read(path: Path) -> bytes:
        if path.suffix == ".py":
            for error in refused:
                raise error
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    assert Steps(lambda: None, lambda: None).run(experiment, monkeypatch).missing is None
    assert [record.getMessage() for record in caplog.records] == [FAILS.replace("away", "not yours"), WORKS]
    assert "code/lib/m.py" in RemoteDirectory(experiment.storage).sizes()


def test_a_directory_deleted_meanwhile_is_no_outage(
    experiment: ExperimentDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is copied any more, so it must not be said that nothing is missing."""
    store = Store(monkeypatch)
    delete = partial(shutil.rmtree, experiment.path)
    steps = Steps(lambda: None, store.leaves, lambda: grow(experiment), delete, store.returns, lambda: None)
    assert steps.run(experiment, monkeypatch).missing is None
    assert [record.getMessage() for record in caplog.records] == [FAILS]


def test_bytes_sent_are_linear_in_time_however_long_the_journal(
    experiment: ExperimentDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal that grows by 40 kB a second of virtual time is copied with 1 kB a second: as a whole, but rarely."""
    store = Store(monkeypatch)
    monkeypatch.setattr(mirror, "BYTES_PER_S", 1000)
    steps = Steps(*[lambda: grow(experiment, 400_000)] * 20)
    steps.run(experiment, monkeypatch)
    final = experiment.journal.stat().st_size
    assert store.sent <= 1000 * sum(steps.waits) + 2 * final
    assert steps.waits[:2] == [mirror.FIRST_S, pytest.approx(400, rel=0.1)]
    assert steps.waits[-1] == pytest.approx(final / 1000, rel=0.1)


def test_copy_of_a_usual_journal_is_at_most_ten_seconds_old(
    experiment: ExperimentDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(*[lambda: grow(experiment, 400_000)] * 20)
    steps.run(experiment, monkeypatch)
    assert experiment.journal.stat().st_size > 7_000_000
    assert set(steps.waits) == {mirror.FIRST_S, mirror.EVERY_S}


def test_resuming_copies_a_completed_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to train, so this needs no Ray."""
    code = tmp_path / "model"
    code.mkdir()
    (code / "m.py").write_text("train()\n")
    config = load_config(
        {**RAW, "entrypoint": "python3 m.py", "checkpoint_storage": f"memory://results/{tmp_path.name}"}
    )
    directory = ExperimentDirectory.create(tmp_path / "digits-1", config, code)
    with Journal(directory.journal) as journal:
        search = build_search(config, journal.append, records=[])
        search.start()
        search.on(Started(trial=0))
        search.on(Reported(trial=0, step=1, value=0.5))
        search.on(Exited(trial=0, reason="completed"))
    store = Store(monkeypatch)
    store.leaves()
    with pytest.raises(ExperimentError, match=r"^the search has completed, but memory://.* lacks a part .* resume /"):
        Experiment.resume(directory.path).run()
    store.returns()
    Experiment.resume(directory.path).run()
    assert RemoteDirectory(directory.storage).read("journal.jsonl") == directory.journal.read_bytes()


def test_a_local_experiment_has_none(tmp_path: Path) -> None:
    directory = ExperimentDirectory.create(tmp_path / "e", load_config(RAW), None)
    Mirror(directory).close()
    assert fetch_experiment(tmp_path / "e") == fetch_experiment(str(tmp_path / "e")) == directory.path


@pytest.mark.parametrize(
    ("where", "says"), [("memory://results/nothing", "no experiment in memory://results/nothing"), ("s3://", "BUCKET")]
)
def test_a_place_without_an_experiment_is_an_error(elsewhere: Path, where: str, says: str) -> None:
    with pytest.raises(NoExperiment, match=says):
        fetch_experiment(where)
    assert list(elsewhere.iterdir()) == []


def test_credentials_are_not_copied(experiment: ExperimentDirectory) -> None:
    assert experiment.storage_file.exists()
    sizes = RemoteDirectory(copied(experiment).storage).sizes()
    assert {"experiment.yaml", "journal.jsonl"} < sizes.keys()
    assert experiment.storage_file.name not in sizes


def test_trial_logs_are_copied_under_their_name_in_the_store(experiment: ExperimentDirectory) -> None:
    logs = experiment.trial(0) / "logs"
    logs.mkdir()
    (logs / "rank_0.log").write_text("2026-11-21T09:02:02.123Z one\n")
    (logs / "another").write_text("not a log\n")
    copied(experiment)
    name = "trial_0/logs/rank_0.20261121T090202.123Z.log"
    assert RemoteDirectory(experiment.storage).read(name) == b"2026-11-21T09:02:02.123Z one\n"
    assert [each for each in RemoteDirectory(experiment.storage).sizes() if "/logs/" in each] == [name]
