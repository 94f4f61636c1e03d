"""What can go wrong with storage, in kinds that call for different cures."""

from __future__ import annotations

import contextlib
import errno
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CheckpointError(ValueError):
    """A directory that was to be a checkpoint is none, or is damaged."""


class StorageFull(OSError):
    """There is no room for a checkpoint. Those that were there before stand."""


class StorageError(OSError):
    """A remote storage can't be used: it refuses, or could not be reached for as long as it was tried."""


@contextlib.contextmanager
def writing(staging: Path) -> Iterator[None]:
    """Around what writes a checkpoint and commits it: if that fails, what was written of it is removed.

    Raises:
        StorageFull: in the place of whatever was raised because the disk, a quota or a limit of files was full.
    """
    try:
        yield
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if (full := is_full(error)) is None:
            raise
        where = f"in {staging.parent}: {full.strerror}, on {platform.node()}"
        raise StorageFull(full.errno, f"no room for a checkpoint {where}; free some, the last one stands") from error


def is_full(error: BaseException | None) -> OSError | None:
    """The error of a full disk that led to this one: `torch.save` raises a RuntimeError after it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None
