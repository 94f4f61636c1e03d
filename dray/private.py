"""Files that are written whole or not at all, files and directories that only this user may read, and addresses that
only this machine can reach."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def withhold_writing() -> None:
    """Let nobody else write to the files that this process and its children make, whatever their parent's umask: code
    and configs that others can change would run as this user."""
    os.umask(os.umask(0o077) | 0o022)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Where to write a file that takes the place of the one at `path` after the block, once it is on the disk."""
    unnamed = path.with_name(f".{path.name}.tmp")
    try:
        yield unnamed
        # Otherwise a power failure could leave an empty file in place of the earlier one.
        with unnamed.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(unnamed, path)
    except BaseException:  # for example, the disk is full
        unnamed.unlink(missing_ok=True)
        raise


def create(path: Path) -> TextIO:
    """Open a new file that only this user may read, in place of any file or link at this path."""
    path.unlink(missing_ok=True)  # an existing file would keep its permissions
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w")


def make_directory(path: Path) -> None:
    """Make a directory that only this user may use. Its parent may be world-writable, like the temporary directory.

    Raises:
        PermissionError: another user has made it, or a link in its place.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.lstat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user; remove it, or set TMPDIR to another directory")
    path.chmod(0o700)  # in case it existed


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    import ipaddress  # imported here, as most commands don't need it

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
