"""Errors of storage, by what the user has to do about them."""

from __future__ import annotations

import contextlib
import errno
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CheckpointError(ValueError):
    """A directory is not a checkpoint, or a damaged one."""


class StorageFull(OSError):
    """There is no room for a checkpoint. Earlier ones are untouched."""


class StorageError(OSError):
    """A remote storage refuses, or could not be reached for all of the time that it was tried."""


@contextlib.contextmanager
def writing(staging: Path) -> Iterator[None]:
    """Wraps what writes and commits a checkpoint: if that fails, what was written is removed.

    Raises:
        StorageFull: in place of the error, if its cause was a full disk, a quota, or a limit on file size.
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
    """The error of a full disk that caused this one, if any: `torch.save` raises a RuntimeError instead of it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None
