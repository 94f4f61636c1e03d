"""An experiment whose directory is deleted while it runs ends with that one error, whatever fails by it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.errors import DirectoryGone
from tests.experiment.test_desk_lost import experiment


def _deleted(self: dray.Experiment, config: Any, directory: Any, *_: Any) -> None:
    shutil.rmtree(self.path)
    (self.path / "trial_0").mkdir(parents=True)  # as a trial does that still runs
    directory.config_file.read_text()


def test_errors_caused_by_it_are_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = experiment(tmp_path / "experiment", per_run=1)
    monkeypatch.setattr(type(lost), "_run", _deleted)
    with pytest.raises(DirectoryGone, match="was deleted or moved while it ran") as raised:
        lost.run()
    assert raised.value.__suppress_context__
    assert str(tmp_path / "experiment") in str(raised.value)


def test_an_error_with_the_directory_there_is_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = experiment(tmp_path / "experiment", per_run=1)
    monkeypatch.setattr(type(lost), "_run", lambda *_: (_ for _ in ()).throw(FileNotFoundError("another file")))
    with pytest.raises(FileNotFoundError, match="another file"):
        lost.run()
