"""Storage errors, one class for each thing that the user can do about them."""

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
    """A store refused a request, or could not be reached despite retries; or a directory can't be written to."""


@contextlib.contextmanager
def writing(staging: Path) -> Iterator[None]:
    """Write and commit a checkpoint in the block. If that fails, the staged files are removed."""
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
    """The full-disk error that caused this one, or None: `torch.save` raises a RuntimeError because of it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


class Outage:
    """A failure that comes and goes: warns that it `fails` at the first error, that it `works` at the first success."""

    def __init__(self, log: logging.Logger, *, fails: str, works: str) -> None:
        self._log, self._fails, self._works = log, fails, works
        self._on = False

    def began(self, error: BaseException) -> None:
        if not self._on:
            self._log.warning("%s: %s", self._fails, error)
        self._on = True

    def ended(self) -> None:
        """An attempt has succeeded, and nothing that failed before is missing."""
        if self._on:
            self._log.warning("%s", self._works)
        self._on = False
