"""Differences of code, as patches that `dray.code.patch` applies."""

from __future__ import annotations

import difflib
import io
import os
from collections.abc import Iterator
from pathlib import Path

MAX_TEXT_BYTES = 1 << 20
"""Larger files are compared as a whole."""
MAX_COMPARED_LINES = 5_000
"""Between its first and its last change, a longer file is replaced as a whole: comparing its lines may take minutes."""
CONTEXT = 3  # lines around a change
_FILE, _LINK = "100644", "120000"  # git's modes
_NO_NEWLINE = "\\ No newline at end of file\n"


def differences(before: Path, after: Path) -> Iterator[str]:
    """The lines of a patch, with their ends, that makes one directory into the other.

    There is only a line "Binary files ... differ" about a file that is no UTF-8 text, or too large. Links are not
    followed: they may lead to data.
    """
    for name in sorted(_files(before) | _files(after)):
        for mode, content in ((_FILE, _content), (_LINK, _target)):
            was, now = content(before / name), content(after / name)
            if was != now:
                yield from difference(name, was, now, mode)


def difference(name: str, was: bytes | None, now: bytes | None, mode: str = _FILE) -> Iterator[str]:
    """The lines of a patch about one file, or one link, which is None where it does not exist."""
    yield f"diff --git a/{name} b/{name}\n"
    if was is None or now is None:
        yield f"{'new' if was is None else 'deleted'} file mode {mode}\n"
    elif mode != _FILE:
        yield f"index 0000000..0000000 {mode}\n"
    sides = "/dev/null" if was is None else f"a/{name}", "/dev/null" if now is None else f"b/{name}"
    try:
        old, new = _text(was or b""), _text(now or b"")
    except ValueError:
        yield f"Binary files {sides[0]} and {sides[1]} differ\n"
        return
    begin, end = 0, 0
    while begin < min(len(old), len(new)) and old[begin] == new[begin]:
        begin += 1
    while end < min(len(old), len(new)) - begin and old[-1 - end] == new[-1 - end]:
        end += 1
    if max(len(old), len(new)) - begin - end <= MAX_COMPARED_LINES:
        lines = difflib.unified_diff(old, new, *sides, n=CONTEXT)
    else:
        lines = _replaced(old, new, sides, begin, end)
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}"


def _replaced(old: list[str], new: list[str], sides: tuple[str, str], begin: int, end: int) -> Iterator[str]:
    first, after = max(begin - CONTEXT, 0), max(end - CONTEXT, 0)
    counts = [len(each) - first - after for each in (old, new)]
    yield f"--- {sides[0]}\n"
    yield f"+++ {sides[1]}\n"
    yield f"@@ -{first + (counts[0] > 0)},{counts[0]} +{first + (counts[1] > 0)},{counts[1]} @@\n"
    yield from (f" {line}" for line in old[first:begin])
    yield from (f"-{line}" for line in old[begin : len(old) - end])
    yield from (f"+{line}" for line in new[begin : len(new) - end])
    yield from (f" {line}" for line in old[len(old) - end : len(old) - after])


def _files(code: Path) -> set[str]:
    found = (path.relative_to(code) for path in code.rglob("*") if path.is_symlink() or path.is_file())
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() and not file.is_symlink() else None


def _target(link: Path) -> bytes | None:
    return os.fsencode(os.readlink(link)) if link.is_symlink() else None


def _text(content: bytes) -> list[str]:
    """The lines of a file, with their ends; a ValueError if it is binary or too large."""
    if len(content) > MAX_TEXT_BYTES or b"\0" in content:
        raise ValueError
    return [line.decode() for line in io.BytesIO(content).readlines()]
