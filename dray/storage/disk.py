"""The files in a directory, and flushing them to the disk, so that they survive a power failure."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path


def files_in(directory: Path) -> list[str]:
    """The names of all files in a directory and below, relative to it."""
    # Strings, because pathlib takes longer than the disk.
    start = len(os.path.join(directory, ""))
    return [
        os.path.join(root, name)[start:].replace(os.sep, "/") for root, _, names in os.walk(directory) for name in names
    ]


def force_to_disk(directory: Path) -> None:
    """Flush a directory to the disk: its contents, its name, and its parent's name.

    Raises:
        OSError: the disk fails.
        FileNotFoundError: the directory, or something in it, is gone.
    """
    # Strings, because pathlib takes as long as the disk.
    root = os.path.abspath(directory)
    folders, files = [os.path.dirname(root), os.path.dirname(os.path.dirname(root))], []
    for folder, _, names in os.walk(root, onerror=_raise):
        folders.append(folder)
        paths = [os.path.join(folder, name) for name in names]
        files += [path for path in paths if not os.path.islink(path)]
    # All writes are started before the first is waited for, which halves the time.
    for path in files:
        _with(path, begin_writing)
    for path in files:
        _with(path, os.fsync)
    for path in folders:
        _with(path, _fsync_folder)


def begin_writing(file: int) -> None:
    """Ask the system to start writing a file's cached pages to the disk, and to drop the clean ones; does not wait.

    Args:
        file: a file descriptor.
    """
    # This is advice, which not every file system accepts.
    with contextlib.suppress(OSError):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _fsync_folder(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:  # not every file system can flush a directory
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _with(path: str, work: Callable[[int], None]) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        work(descriptor)
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error
