"""An experiment whose directory is deleted while it runs ends with that one error, whatever fails by it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.errors import DirectoryGone

TRIALS = Path(__file__).parents[1] / "ray" / "trials"


def experiment(path: Path) -> dray.Experiment:
    config = {
        "name": "lost",
        "entrypoint": "recorded:Recorded",
        "hyperparameters": {"global_batch_size": 8, "record": "-", "pause_s": 0.0, "lr": 0.1},
        "searcher": {"name": "random", "metric": "error", "max_length": {"batches": 10}, "max_trials": 5},
    }
    return dray.Experiment(config, model_dir=TRIALS, path=path)


def _deleted(self: dray.Experiment, config: Any, directory: Any, *_: Any) -> None:
    shutil.rmtree(self.path)
    (self.path / "trial_0").mkdir(parents=True)  # as a trial does that still runs
    directory.config_file.read_text()


def test_errors_caused_by_a_deleted_directory_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = experiment(tmp_path / "experiment")
    monkeypatch.setattr(dray.Experiment, "_run", _deleted)
    with pytest.raises(DirectoryGone, match="was deleted or moved while it ran") as raised:
        lost.run()
    assert raised.value.__suppress_context__
    assert str(tmp_path / "experiment") in str(raised.value)


def test_an_error_is_unchanged_if_the_directory_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = experiment(tmp_path / "experiment")
    monkeypatch.setattr(dray.Experiment, "_run", lambda *_: (_ for _ in ()).throw(FileNotFoundError("another file")))
    with pytest.raises(FileNotFoundError, match="another file"):
        lost.run()
