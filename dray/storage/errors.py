"""Storage errors, one class for each remedy."""

from __future__ import annotations

import contextlib
import errno
import logging
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CheckpointError(ValueError):
    """A directory is not a checkpoint, or the checkpoint is damaged."""


class StorageFull(OSError):
    """The disk has no room for a checkpoint. Earlier checkpoints are intact."""


class StorageError(OSError):
    """A store refused a request or could not be reached despite retries, or a directory is not writable."""


@contextlib.contextmanager
def writing(staging: Path) -> Iterator[None]:
    """A block that writes and commits a checkpoint. If it fails, the staged files are removed.

    Raises:
        StorageFull: the disk or the store is full.
    """
    try:
        yield
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if (full := is_full(error)) is None:
            raise
        where = f"in {staging.parent} on {platform.node()}: {full.strerror}"
        raise StorageFull(
            full.errno, f"no room for a checkpoint {where}; free some space (the last checkpoint is intact)"
        ) from error


def is_full(error: BaseException | None) -> OSError | None:
    """The full-disk error that caused this one, if any: `torch.save` wraps it in a RuntimeError."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


class Outage:
    """An intermittent failure: logs `fails` at its first error, and `works` at the first success after it."""

    def __init__(self, log: logging.Logger, *, fails: str, works: str) -> None:
        self._log, self._fails, self._works = log, fails, works
        self._on = False

    def began(self, error: BaseException) -> None:
        if not self._on:
            self._log.warning("%s: %s", self._fails, error)
        self._on = True

    def ended(self) -> None:
        """Call it when an attempt has succeeded and has made up for the failed ones."""
        if self._on:
            self._log.warning("%s", self._works)
        self._on = False
