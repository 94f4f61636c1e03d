"""Determined's log policies, which can forbid restarting a trial because of its output."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dray.config.log_policies import LogPolicy
from dray.records.logs import STAMP, trial_lines
from dray.storage import Location, StorageError
from dray.storage.disk import scratch
from dray.storage.logs import fetch_logs

LONGEST = 10_000  # characters of a line that are searched, because regular expressions can take quadratic time


def forbidden(policies: Sequence[LogPolicy], lines: Iterable[str]) -> str:
    """The first line that a policy matches, with the policy, as text; "" if there is none.

    >>> forbidden([LogPolicy(pattern=".*out of memory", action="cancel_retries")], ["step 1", "CUDA out of memory"])
    "log_policies: cancel_retries, as its log has '.*out of memory': CUDA out of memory"
    """
    # `search` matches anywhere in a line, so a leading ".*" would only cost time.
    compiled = [(policy, re.compile(policy.pattern.removeprefix(".*"))) for policy in policies]
    for line in lines:
        line = STAMP.sub("", line, count=1)[:LONGEST]
        for policy, pattern in compiled:
            if pattern.search(line):
                return f"log_policies: {policy.action}, as its log has {policy.pattern!r}: {line.strip():.200}"
    return ""


def printed(error: str, logs: Path, store: Location) -> Iterator[str]:
    """The lines of a trial's error and of its output, in the directory `logs` and in its directory in the store."""
    yield from error.splitlines()
    yield from trial_lines(logs)(True)
    if not store.is_local:
        with scratch("logs") as copies:
            with contextlib.suppress(StorageError):  # then only the local logs are searched
                fetch_logs(store, logs, copies)
            yield from trial_lines(copies)(True)
