"""The files of an experiment's code, as text for people: bounded, and never what a link leads to."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MAX_FILES = 2_000
"""Most files in a listing."""
MAX_BYTES = 512 << 10
"""Most bytes of a file that are shown."""


@dataclass(frozen=True, slots=True)
class CodeFile:
    """A file, by its path in the code, with ``/``."""

    path: str
    size: int
    is_link: bool = False


def code_files(code: Path) -> tuple[list[CodeFile], bool]:
    """The files of a directory of code, by path, up to a limit, and whether these are all; directories that are links
    are listed as links."""
    found: list[CodeFile] = []
    for each in _walk(code):
        if len(found) == MAX_FILES:
            return found, False
        status = each.lstat()
        found.append(CodeFile(each.relative_to(code).as_posix(), status.st_size, stat.S_ISLNK(status.st_mode)))
    return found, True


def _walk(directory: Path) -> Iterator[Path]:
    for each in sorted(directory.iterdir()) if directory.is_dir() else ():
        if each.is_symlink() or each.is_file():
            yield each
        elif each.is_dir() and each.name != "__pycache__":
            yield from _walk(each)


def code_text(code: Path, path: str) -> tuple[str | None, int]:
    """The beginning of a file, and its size; the text is None if it is binary.

    Raises:
        FileNotFoundError: there is no such file; or it is a link, is reached through one, or is outside of the code.
    """
    parts = PurePosixPath(path).parts
    place = code
    for part in parts:
        place = place / part
        if part in ("/", "..") or "\0" in part or place.is_symlink():
            raise FileNotFoundError(path)
    if not parts or not place.is_file():
        raise FileNotFoundError(path)
    with os.fdopen(os.open(place, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        content, size = file.read(MAX_BYTES), os.fstat(file.fileno()).st_size
    if b"\0" in content:
        return None, size
    try:
        # The end may be in the middle of a character.
        return content.decode(errors="strict" if size <= MAX_BYTES else "ignore"), size
    except UnicodeDecodeError:
        return None, size
