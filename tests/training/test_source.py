"""Which files a checkpoint carries as the trial's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.training.checkpoint import source


def make(directory: Path, *names: str, content: str = "x = 1\n") -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_source_is_taken_and_the_rest_is_left(tmp_path: Path) -> None:
    make(tmp_path, "model_def.py", "conf/asha.yaml", "lib/a/b.py", "data.npz", ".git/config.py", "__pycache__/a.py")
    make(tmp_path, "venv/pyvenv.cfg", "venv/lib/x.py", ".hidden.py")
    make(tmp_path, "big.json", content="1" * (source.MAX_FILE_BYTES + 1))
    make(tmp_path, "results/local/run/checkpoint_1/code/a.py")  # a checkpoint
    found = source.collect(tmp_path, leave_out=tmp_path / "results" / "local")
    assert sorted(found) == ["conf/asha.yaml", "lib/a/b.py", "model_def.py"]


def test_a_directory_too_large_is_cut_off_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(source, "MAX_ENTRIES", 3)
    make(tmp_path, *(f"{i}.py" for i in range(5)), "deep/x.py")
    assert "deep/x.py" not in source.collect(tmp_path)
    assert "more than a program's source" in caplog.text
