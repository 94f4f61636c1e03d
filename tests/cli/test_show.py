"""Tables of the command."""

from __future__ import annotations

import itertools
import os
import shutil
import sys

import pytest

from dray.cli import show


@pytest.mark.parametrize("cells", list(itertools.product(["", "a"], repeat=4)))
def test_a_table_with_empty_columns_and_headings_is_printed(
    cells: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, *row = cells
    for left in ([], [one, two]):
        show.table([one, two], [row], left=left)
        assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
            [cell for cell in line if cell] for line in ((one, two), row)
        ]


def test_a_long_name_is_cut_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(7, "n" * 60, 0.25, "Nov 29 16:44")]
    show.table(["#", "name", "best", "started"], rows, left=["name"])
    assert "n" * 60 in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((60, 20)))
    show.table(["#", "name", "best", "started"], rows, left=["name"])
    heading, row = capsys.readouterr().out.splitlines()
    assert [len(heading), len(row)] == [60, 60]
    assert row.split() == ["7", "n" * 36 + "…", "0.25", "Nov", "29", "16:44"]
