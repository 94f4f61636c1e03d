"""docs/steering.md: its Python leaves requests for the search's driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.experiment.request_files import RequestFiles
from dray.serve.verbs.in_directory import InDirectory
from searchers import Source
from tests.docs.pages import blocks
from tests.records.test_result import config, told


def test_its_python_leaves_three_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = told(tmp_path, config())
    story.journal.close()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "digits").symlink_to(story.directory.path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(InDirectory, "_run", lambda experiment: "STOPPED")
    [block] = blocks("python", page="steering.md")
    exec(block.text, {})
    fork, add, stop = RequestFiles(story.directory).waiting()
    assert (fork.source, fork.hparams) == (Source(trial=3, step=10, batches=10), {"lr": 0.005})
    assert (add.source, add.hparams, stop.trial) == (None, {"lr": 0.02}, 4)
