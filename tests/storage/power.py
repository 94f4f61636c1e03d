"""Simulates a power failure, which leaves of a directory only what was flushed to the disk."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import pytest


class Disk:
    """Notes what comes to the disk: the content of files, and the names in directories, as they are when forced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {}
        self._fsync = os.fsync
        # An open file keeps its number, because another file with that number would be taken for it.
        self._open: list[int] = []
        weakref.finalize(self, _close, self._open)
        monkeypatch.setattr(os, "fsync", self._noted)

    def _noted(self, descriptor: int) -> None:
        self._fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        number = os.fstat(descriptor).st_ino
        self._open.append(os.dup(descriptor))
        if path.is_dir():
            with os.scandir(path) as inside:  # numbers without a look at each: another thread may delete some
                self._folders[number] = {each.name: each.inode() for each in inside}
        else:
            self._files[number] = path.read_bytes()

    def holds(self, file: Path) -> bytes:
        """The content of a file that would survive a power failure now."""
        return self._files.get(file.stat().st_ino, b"")

    def leaves(self, directory: Path, there: Path) -> Path:
        """Make `there` what is left of a directory if the power fails now."""
        self._restore(directory.stat().st_ino, there)
        return there

    def _restore(self, number: int, there: Path) -> None:
        there.mkdir(parents=True)
        for name, inside in self._folders.get(number, {}).items():
            if inside in self._folders:
                self._restore(inside, there / name)
            else:
                # A name may be there before the content is.
                (there / name).write_bytes(self._files.get(inside, b""))


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
