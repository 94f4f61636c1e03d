"""Code that a worker can't load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dray.desk.messages import Departure
from dray.errors import EntrypointError, ImportRaisedError
from dray.worker.unfit import unloaded

DESK: Any = None  # it is told of what concerns other trials, too
LEASE: Any = SimpleNamespace(client="run", code="0123456789ab")
RAISED = ImportRaisedError([("trial", "model_def.py:3 raised ValueError: no")])


@pytest.mark.parametrize(
    ("error", "is_reused", "is_tried_again"),
    [(RAISED, True, True), (RAISED, False, False), (EntrypointError([("trial", "there is no class")]), True, False)],
)
def test_only_an_import_that_fails_in_a_process_with_other_code_is_tried_in_a_new_one(
    error: EntrypointError, is_reused: bool, is_tried_again: bool
) -> None:
    departure = unloaded(DESK, "g", LEASE, error, is_reused=is_reused)
    if is_tried_again:
        assert departure == Departure(outcome="unloaded", alone=True)
    else:
        why = f"its code can't be loaded: trial: {error.faults[0].what}"
        assert departure == Departure(outcome="errored", error=why, fatal=True), "it would fail again"
