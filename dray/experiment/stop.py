"""Stops a running experiment from another process, like Ctrl-C in its terminal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from dray.errors import NoExperiment
from dray.records.listing import StoredExperiment
from searchers.journal import Journal

POLL_S = 0.2


class NotRunning(NoExperiment):
    """No process that can be stopped from here runs the experiment; the message is one line."""


def stop(found: StoredExperiment, say: Callable[[str], None]) -> None:
    """Interrupt the experiment's driver, and wait until it has ended.

    Args:
        found: the experiment.
        say: prints a line for the user.

    Raises:
        NotRunning: it is not running, or not as this user on this machine.
    """
    if found.is_copy:
        raise NotRunning(f"{found.where} is in an object store; if it is running, stop it on the machine of its driver")
    journal = found.directory.journal
    driver = Journal.writer(journal)
    if driver is None:
        raise NotRunning(f"{found.where} is not running")
    try:
        # 0: the lock names no process, which may be one of another machine.
        if not driver or not _has_open(driver, journal.with_name(f"{journal.name}.lock")):
            raise ProcessLookupError
        os.kill(driver, signal.SIGINT)
    except ProcessLookupError:
        number = f", as process {driver} there" if driver else ""
        raise NotRunning(
            f"{found.where} is running on another machine or in another container{number}; stop it there"
        ) from None
    except PermissionError:
        raise NotRunning(f"{found.where} is running in process {driver} of another user, who can stop it") from None
    say(f"stopping {found.name}, process {driver}: waiting until its running trials have saved a checkpoint")
    while Journal.writer(journal) == driver:
        time.sleep(POLL_S)


def _has_open(process: int, file: Path) -> bool:
    """Whether this process has the file open: the journal's lock may name a process of another machine.

    Raises:
        ProcessLookupError, PermissionError: the process does not exist here, or is another user's.
    """
    try:
        descriptors = list(Path(f"/proc/{process}/fd").iterdir())
    except FileNotFoundError:
        raise ProcessLookupError from None
    mine = file.stat()
    for descriptor in descriptors:
        try:
            if os.path.samestat(descriptor.stat(), mine):
                return True
        except FileNotFoundError:  # closed meanwhile, or not a file
            continue
    return False
