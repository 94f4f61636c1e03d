"""What a command says when the disk that it writes to is full."""

from __future__ import annotations

import errno

import pytest
import typer

from dray.cli import errors
from dray.cli.errors import FAILED, handle_errors


def test_it_is_one_line_also_if_more_failed_meanwhile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "users_line", lambda *_: [])  # this file is no model's
    with pytest.raises(typer.Exit) as ended, handle_errors():
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "/results/journal.jsonl")
        finally:
            raise OSError(errno.ENOSPC, "No space left on device")  # as of what is closed
    assert ended.value.exit_code == FAILED
    said = "dray: can't write: No space left on device; free some space: all records are intact\n"
    assert capsys.readouterr().err == said


def test_of_a_copy_what_could_not_be_written_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "users_line", lambda *_: [])
    with pytest.raises(typer.Exit), handle_errors():
        raise OSError(errno.ENOSPC, "No space left on device", "/model/data.bin", None, "/results/code/data.bin")
    assert capsys.readouterr().err.startswith("dray: can't write to /results/code/data.bin: No space left on device")
