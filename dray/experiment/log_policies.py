"""Whether what a trial has printed forbids to start it again: Determined's log policies."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dray.experiment.logs import trial_lines
from dray.experiment.schema import LogPolicy
from dray.storage import Location, StorageError
from dray.storage.printed import bring_logs

LONGEST = 10_000
"""Characters of a line that are looked at: an expression may take the square of them."""
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")


def forbidden(policies: Sequence[LogPolicy], lines: Iterable[str]) -> str:
    """The first line that a policy is about, with the policy, for people; "" if there is none.

    >>> forbidden([LogPolicy(pattern=".*out of memory", action="cancel_retries")], ["step 1", "CUDA out of memory"])
    "cancel_retries of log_policies, for '.*out of memory' is in its log: CUDA out of memory"
    """
    # A search begins anywhere in a line: what would match all before it only costs time.
    compiled = [(policy, re.compile(policy.pattern.removeprefix(".*"))) for policy in policies]
    for line in lines:
        line = _STAMP.sub("", line, count=1)[:LONGEST]
        for policy, pattern in compiled:
            if pattern.search(line):
                return f"{policy.action} of log_policies, for {policy.pattern!r} is in its log: {line.strip():.200}"
    return ""


def printed(error: str, logs: Path, store: Location) -> Iterator[str]:
    """The lines of a trial's error, and of all that it has printed, so far as they can be had from here.

    Args:
        error: as its worker has told it.
        logs: the directory of its logs on this machine.
        store: the trial's place where checkpoints are.
    """
    yield from error.splitlines()
    yield from trial_lines(logs)(True)
    if not store.is_local:
        with tempfile.TemporaryDirectory(prefix="dray-logs-") as directory:
            with contextlib.suppress(StorageError):  # then what is here has to do
                bring_logs(store, logs, Path(directory))
            yield from trial_lines(Path(directory))(True)
