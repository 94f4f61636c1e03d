"""The local disk: listing files, flushing them so that they survive a power failure, scratch directories."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "dray-scratch-"
NEW_S = 60.0  # a younger directory may not be locked yet


def files_in(directory: Path) -> list[str]:
    """The paths of all files below a directory, relative to it."""
    # Strings, because pathlib takes longer than the disk.
    start = len(os.path.join(directory, ""))
    return [
        os.path.join(root, name)[start:].replace(os.sep, "/") for root, _, names in os.walk(directory) for name in names
    ]


def force_to_disk(directory: Path) -> None:
    """Flush a directory to the disk, with its contents, its name and its parent's name."""
    # Strings, because pathlib takes as long as the disk.
    root = os.path.abspath(directory)
    folders, files = [os.path.dirname(root), os.path.dirname(os.path.dirname(root))], []
    for folder, _, names in os.walk(root, onerror=_raise):
        folders.append(folder)
        paths = [os.path.join(folder, name) for name in names]
        # Opening a pipe would wait for a writer.
        files += [path for path in paths if os.path.isfile(path) and not os.path.islink(path)]
    # All writes are started before waiting for the first, which halves the time.
    for paths, work in ((files, begin_writing), (files, os.fsync), (folders, _fsync)):
        for path in paths:
            with _opened(path) as descriptor:
                work(descriptor)


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    with _opened(path) as descriptor:
        _fsync(descriptor)


def begin_writing(file: int) -> None:
    """Ask the system to write a file's cached pages to the disk and to drop the clean ones, without waiting."""
    # This is advice, which not every file system accepts.
    with contextlib.suppress(OSError):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _fsync(file: int) -> None:
    try:
        os.fsync(file)
    except OSError as error:  # not every file system can flush a directory
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


@contextlib.contextmanager
def _opened(path: str | Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error


@contextlib.contextmanager
def scratch(purpose: str) -> Iterator[Path]:
    """Yield a new directory whose name contains `purpose`, and remove it at the end of the block.

    The process holds a lock on the directory, which the system releases if it is killed. The next process that makes a
    scratch directory removes all that nobody has locked.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{purpose}-") as directory, locked(directory, fcntl.LOCK_EX):
        yield Path(directory)


@contextlib.contextmanager
def locked(directory: str | Path, lock: int) -> Iterator[None]:
    """Lock a directory by `flock`, also against other descriptors of this process."""
    with _opened(directory) as descriptor:
        fcntl.flock(descriptor, lock)
        yield


def scratch_until_exit(purpose: str) -> Path:
    directory = contextlib.ExitStack()
    atexit.register(directory.close)
    return directory.enter_context(scratch(purpose))


@functools.cache
def _remove_abandoned(root: Path) -> None:
    """Remove scratch directories of this user's killed processes; once per process."""
    for path in root.glob(f"{PREFIX}*"):
        # Errors: a lock is held, another process removes the directory, or its contents are nested too deeply.
        flags = os.O_DIRECTORY | os.O_NOFOLLOW
        with contextlib.suppress(OSError, RecursionError), _opened(path, flags) as descriptor:
            status = os.fstat(descriptor)
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > NEW_S:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
