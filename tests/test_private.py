"""Files that others must not change, whatever the umask."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from dray.cli import errors, main
from dray.cli.errors import handle_errors


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_command_makes_nothing_that_others_can_write(umask: int, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "code.py").write_text("x = 1")
    for path, mode in ((tmp_path / "made", 0o777), (tmp_path / "made" / "code.py", 0o666)):
        assert path.stat().st_mode & 0o777 == mode & ~(umask | 0o022)


def test_a_read_only_results_directory_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "users_line", lambda error, trace: [])  # this file is not the user's code
    with pytest.raises(typer.Exit) as ended, handle_errors():
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/results/.server")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == (
        "dray: can't write to /results/.server: Read-only file system; set DRAY_HOME, or the config's "
        "checkpoint_storage, to a directory that you can write to\n"
    )
