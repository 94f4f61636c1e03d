"""An experiment whose journal has lost records does not go on as another search. Nothing here starts Ray."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.config.search import build_search
from dray.errors import ExperimentError
from dray.experiment import requests
from dray.records.directory import ExperimentDirectory
from dray.records.listing import open_experiment
from dray.records.metrics import MetricsLog
from dray.records.reader import ExperimentReader
from searchers import Exited, Reported, Started
from searchers.journal import Journal

CONFIG: dict[str, Any] = {
    "entrypoint": "python3 train.py",
    "hyperparameters": {"global_batch_size": 2, "lr": {"type": "double", "minval": 0, "maxval": 1}},
    "searcher": {"name": "asha", "metric": "loss", "max_length": {"batches": 16}, "num_rungs": 3, "max_trials": 4}
    | {"max_concurrent_trials": 2},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An experiment whose driver was killed when three trials had started, of which one was stopped."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("train()\n")
    directory = dray.Experiment(CONFIG, model_dir=code, path=tmp_path / "cut-1").prepare()
    with Journal(directory.journal) as journal, closing(MetricsLog(directory.metrics)) as metrics:
        journal.append({"event": "opened", "version": "0", "time": 0.0})
        search = build_search(directory.config(), lambda record: journal.append({**record, "time": 0.0}))
        search.start()
        for trial, value in ((0, 0.1), (1, 0.2), (2, 0.05)):
            search.on(Started(trial=trial))
            row = {"batches": 1, "epochs": None, "kind": "validation", "name": "loss", "value": value, "time": 0.0}
            metrics.append(trial, [row])
            search.on(Reported(trial=trial, step=1, value=value))
            store = directory.store(trial)
            store.commit(store.stage(1), 1)
        search.on(Exited(trial=1, reason="stopped"))
    return directory.path


def empty(journal: Path) -> None:
    journal.write_bytes(b"")


def replace(journal: Path) -> None:
    """By an older copy."""
    shutil.copy(journal, older := journal.with_name("older"))
    older.write_bytes(b"".join(older.read_bytes().splitlines(keepends=True)[:5]))
    older.rename(journal)


def cut(journal: Path) -> None:
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-2]))


LOSSES: list[Callable[[Path], None]] = [empty, Path.unlink, replace, cut]


def tear(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:-5])


def resume(path: Path, **extension: Any) -> None:
    dray.Experiment.resume(path, **extension).run()


def reader_of(path: Path) -> ExperimentReader:
    reader = ExperimentReader(ExperimentDirectory.open(path))
    with closing(reader):
        reader.refresh()
    return reader


@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize("extension", [{}, {"max_trials": 9}])
def test_an_experiment_is_not_resumed_or_extended(
    path: Path, lose: Callable[[Path], None], extension: dict[str, int]
) -> None:
    had = len(Journal.read(path / "journal.jsonl"))
    lose(path / "journal.jsonl")
    before = {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}
    for _ in range(2):
        with pytest.raises(ExperimentError, match=rf"journal\.jsonl has \d+ records?, but had {had}") as error:
            resume(path, **extension)
    assert "with its checkpoints and journal.jsonl.lock; or begin a new experiment from a checkpoint" in str(
        error.value
    )
    assert {each: each.read_bytes() for each in path.rglob("*") if each.is_file()} == before


@pytest.mark.parametrize("lose", LOSSES)
def test_requests_and_views_say_so(path: Path, lose: Callable[[Path], None]) -> None:
    lose(path / "journal.jsonl")
    reader = reader_of(path)
    for request in (
        lambda: requests.add(reader, {}),
        lambda: requests.fork(reader, 0, "best", {}),
        lambda: requests.stop(reader, 0),
    ):
        with pytest.raises(ValueError, match="was cut, deleted, or replaced by an older copy"):
            request()
    with open_experiment(path) as found:
        assert "was cut, deleted, or replaced by an older copy" in found.overview().why
    assert "Stopped: " in dray.Result(path).standing.sentence


@pytest.mark.parametrize("tears", [0, 1, 2])
def test_an_experiment_whose_last_line_is_incomplete_is_resumed(
    path: Path, tears: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dray.cluster.connection", None)  # the run would begin
    for _ in range(tears):
        tear(path / "journal.jsonl")
        with pytest.raises(ImportError):
            resume(path)
    with pytest.raises(ImportError):
        resume(path)
