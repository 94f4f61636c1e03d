"""Directories in the temporary folder that a process needs for a while, and that outlive no process for long."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "dray-scratch-"
NEW_S = 60.0
"""A directory that is younger may not have been locked yet."""


@contextlib.contextmanager
def scratch(what: str) -> Iterator[Path]:
    """A new directory, removed at the end of the block.

    Its process holds a lock on it, which the system releases if it is killed: the next process that makes a directory
    removes those that nobody holds.

    Args:
        what: it is for; a part of its name.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{what}-") as directory:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(directory)
        finally:
            os.close(descriptor)


def scratch_until_exit(what: str) -> Path:
    """A directory as of `scratch` that is removed when this process ends."""
    directory = contextlib.ExitStack()
    atexit.register(directory.close)
    return directory.enter_context(scratch(what))


@functools.cache
def _remove_abandoned(root: Path) -> None:
    """Remove this user's directories whose process was killed; once in a process."""
    for place in root.glob(f"{PREFIX}*"):
        # A lock is held, another process removes it, or what is in it is nested too deeply to be removed.
        with contextlib.suppress(OSError, RecursionError):
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(descriptor)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > NEW_S:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(descriptor)
