"""Tables of the command."""

from __future__ import annotations

import itertools

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
