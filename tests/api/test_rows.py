"""Every row of API.md has a test."""

from __future__ import annotations

import pytest

from tests.api import rows
from tests.api.rows import ELSEWHERE, ROWS

SHOWN = list(rows.tests())


@pytest.mark.parametrize("row", [row for row in ROWS if row not in ELSEWHERE])
def test_row_has_a_test(row: str) -> None:
    assert any(row in test.rows for test in SHOWN), f"no test is marked with @pytest.mark.api({row!r}): {ROWS[row]}"


def test_tests_name_rows_that_there_are() -> None:
    assert {(test.file, row) for test in SHOWN for row in test.rows if row not in ROWS} == set()


def test_rows_of_other_issues_are_rows() -> None:
    assert set(ELSEWHERE) <= set(ROWS)
