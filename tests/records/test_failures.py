"""Failures by their cause."""

from __future__ import annotations

from typing import Any

from dray.records.failures import MOST_TRACEBACK, failure_groups


def record(trial: int, event: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"trial": trial, "event": event, "time": time, **fields}


KEY = """KeyError: 'lrr'
  net/model_def.py:12, in __init__
    lr = hparams["lrr"]

Traceback (most recent call last):
  File "/code/net/model_def.py", line 12, in __init__
KeyError: 'lrr'"""
WHERE = "KeyError at model_def.py:12 in __init__"


def test_failures_are_grouped_by_the_users_line() -> None:
    found = failure_groups(
        [
            record(3, "restarted", 5.0, error="worker died: exit code 1"),
            record(1, "restarted", 10.0, error=KEY, where=WHERE, batches=4),
            record(1, "gave_up", 20.0, error=KEY, where=WHERE, batches=4, why="it failed at the same place again"),
            record(2, "gave_up", 15.0, error=KEY, where=WHERE, batches=-1, kept="COMPLETED"),
        ]
    )
    keys, died = found
    assert (keys.error, keys.file, keys.line, keys.function) == ("KeyError: 'lrr'", "net/model_def.py", 12, "__init__")
    assert keys.code == 'lr = hparams["lrr"]'
    assert (keys.count, keys.restarted, keys.given_up, keys.trials) == (3, 1, 2, [(1, 2), (2, 1)])
    assert (keys.first, keys.last, keys.batches, keys.kept) == (10.0, 20.0, None, ["COMPLETED"])
    assert keys.traceback == KEY
    assert (died.error, died.file, died.code, died.why) == ("worker died: exit code 1", None, None, None)
    assert failure_groups([]) == []


def test_failures_without_an_error_are_a_group() -> None:
    old, long = {"trial": 0, "event": "gave_up"}, record(1, "restarted", 1.0, error="x" * 2 * MOST_TRACEBACK)
    one, other = failure_groups([old, long])
    assert (one.error, one.first, one.traceback, one.trials) == ("no reason given", None, "", [(0, 1)])
    assert len(other.traceback) < MOST_TRACEBACK + 100
