"""The one reader of files with a JSON value on each line, which processes append to, and of files with one JSON value.

What is cut at the end of a file was being written when its process or machine died, and is dropped in silence. Anything
else that is damaged is one line that names the file and its line: as an error where it must not be lost, else in the
log.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple, TypeAlias

from searchers.errors import DamagedFile

log = logging.getLogger(__name__)

Row: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[[Any], str]
"""Returns what is wrong with a value that was read; "" if it is as it was written."""
Fields: TypeAlias = Mapping[str, tuple[type, ...]]
"""The types of a row's fields. With `NoneType`, a field may be null or missing; rows may have further fields."""

NUMBER = (int, float)
OPTIONAL_NUMBER = (int, float, NoneType)
_MOST = 1e300
"""Numbers are smaller than this: they are converted to floats, and written as strict JSON."""
_RESTORE = "restore the file from a backup"
_SHOWN = 60
SAID: dict[str, None] = {}
"""The latest sentences that this process has logged, in order."""
_KEPT = 1024


class _Damage(NamedTuple):
    line: int
    what: str


def has_fields(fields: Fields, *, unbounded: str = "") -> Check:
    """A check that a value is an object with these fields. Only the number `unbounded` may be NaN or infinite."""
    required = tuple((name, frozenset(kinds), float in kinds and name != unbounded) for name, kinds in fields.items())

    def check(row: Any) -> str:
        if type(row) is not dict:
            return f"expected a JSON object, got {_cut(row)}"
        for name, kinds, is_bounded in required:
            value: Any = row.get(name)
            if type(value) not in kinds or (is_bounded and type(value) in NUMBER and not -_MOST < value < _MOST):
                return f"{name} is {_cut(value)}" if name in row else f"it has no {name}"
        return ""

    return check


def is_too_large(value: object) -> bool:
    """Whether a value is an integer that no float can be; infinity and NaN are no integers."""
    return type(value) is int and not -_MOST < value < _MOST


def is_text(value: str) -> bool:
    """Whether a text has no half of a character, which JSON allows and nothing can show or write."""
    return value == value.encode(errors="ignore").decode()


def by_kind(name: str, kinds: Mapping[str, Fields], common: Fields = MappingProxyType({})) -> Check:
    """A check that a value is an object with the fields of its kind, which is in the field `name`. All kinds have the
    `common` fields, and unknown ones only these."""
    checks = {kind: has_fields({**common, **fields}) for kind, fields in kinds.items()}
    other = has_fields({name: (str,), **common})

    def check(row: Any) -> str:
        kind = row.get(name) if type(row) is dict else None
        return (checks.get(kind, other) if type(kind) is str else other)(row)

    return check


is_object = has_fields({})


def strict(data: bytes, where: object, check: Check = is_object, *, first: int = 1) -> list[Any]:
    """Parse the content of a file, or a part of it that begins with the line `first`.

    Raises:
        DamagedFile: A line other than the last is not JSON, or any line does not fit.
    """
    rows, damages = _parse(data, check, first)
    for damage in damages:
        raise DamagedFile(damaged_line(where, damage.line, damage.what))
    return rows


def lenient(
    data: bytes, where: object, check: Check = is_object, *, first: int = 1, containing: bytes = b""
) -> list[Any]:
    """Parse like `strict`, but leave out damaged lines, and say so once in the log. Lines without `containing` are left
    out too."""
    rows, damages = _parse(data, check, first, containing)
    if damages:
        more = f"; so {'is' if len(damages) == 2 else 'are'} {len(damages) - 1} more" if damages[1:] else ""
        say(damaged_line(where, damages[0].line, damages[0].what, remedy=f"this line is left out{more}"))
    return rows


def document(path: Path, check: Check = is_object) -> Any:
    """Return the JSON value in a file. Raises `FileNotFoundError`, and `DamagedFile` if it can't be read."""
    return parse_document(read(path), path, check)


def parse_document(data: bytes, where: object, check: Check = is_object) -> Any:
    """Parse the content of a file with one JSON value, like `document`."""
    if (value := _value(data)) is _NOT_JSON:
        raise unreadable(where, f"expected a JSON object, got {_cut(data)}")
    if what := check(value):
        raise unreadable(where, what)
    return value


def read(path: Path, start: int = 0, *, missing: bytes | None = None) -> bytes:
    """Return the content of a file from an offset on; `missing` if there is no such file, else `FileNotFoundError`.
    Raises `DamagedFile` if it can't be read."""
    try:
        with readable(path), open(path, "rb", opener=regular) as file:
            file.seek(start)
            return file.read()
    except FileNotFoundError:
        if missing is None:
            raise
        return missing


def regular(path: str, flags: int) -> int:
    """An `opener` for `open` that refuses pipes, which would wait for a writer, and devices, which may have no end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode) and not stat.S_ISDIR(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a pipe or a device")
    return descriptor


@contextlib.contextmanager
def readable(path: object, *errors: type[Exception], remedy: str = _RESTORE) -> Iterator[None]:
    """Raise `DamagedFile` in place of errors of the operating system, except `FileNotFoundError`, and of these."""
    try:
        yield
    except (FileNotFoundError, DamagedFile):
        raise
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    except errors as error:
        raise unreadable(path, " ".join(str(error).split()), remedy) from None


def complete_size(data: bytes) -> int:
    """Return the size of the data without an incomplete last line; only the last two lines are looked at."""
    end = data.rfind(b"\n") + 1
    begin = data.rfind(b"\n", 0, max(end - 1, 0)) + 1
    return end if end == begin or _value(data[begin:end]) is not _NOT_JSON else begin


def cut_incomplete(path: Path) -> None:
    """Remove an incomplete last line from a file that is about to be appended to, if there is such a file."""
    data = read(path, missing=b"")
    if (size := complete_size(data)) < len(data):
        os.truncate(path, size)


def damaged_line(where: object, line: int, what: str, *, remedy: str = _RESTORE) -> str:
    """Return the sentence about a damaged line."""
    return f"{where}: line {line} is damaged: {what}; {remedy}"


def unreadable(where: object, what: str, remedy: str = _RESTORE) -> DamagedFile:
    """Return the error of a file that is damaged as a whole."""
    return DamagedFile(f"{where} can't be read: {what}; {remedy}")


def say(sentence: str) -> None:
    """Log a sentence about a damaged file, once."""
    if sentence not in SAID:
        SAID[sentence] = None
        if len(SAID) > _KEPT:
            SAID.pop(next(iter(SAID)), None)
        log.warning("%s", sentence)


def said(directory: Path) -> list[str]:
    """What was logged about the files in a directory."""
    return [each for each in SAID if each.startswith(f"{directory}/")]


_NOT_JSON = object()


def _parse(data: bytes, check: Check, first: int, containing: bytes = b"") -> tuple[list[Any], list[_Damage]]:
    lines = data.split(b"\n")[:-1]
    chosen = [line for line in lines if containing in line] if containing else lines
    try:
        # This takes half the time of parsing each line, which is only needed to find a damaged one.
        rows: list[Any] = json.loads(b"[%b]" % b",".join(chosen))
    except (ValueError, RecursionError):
        rows = []
    if len(rows) == len(chosen) and not any(map(check, rows)):
        return rows, []
    rows, damages = [], []
    for number, value, what in _one_by_one(lines, check, containing):
        if not what:
            rows.append(value)
        elif value is not _NOT_JSON or number < len(lines):  # else the end of the file is incomplete
            damages.append(_Damage(first + number - 1, what))
    return rows, damages


def _one_by_one(lines: list[bytes], check: Check, containing: bytes) -> Iterator[tuple[int, Any, str]]:
    for number, line in enumerate(lines, start=1):
        if containing in line:
            value = _value(line)
            yield number, value, f"expected a JSON object, got {_cut(line)}" if value is _NOT_JSON else check(value)


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # also UnicodeDecodeError
        return _NOT_JSON


def _cut(value: object) -> str:
    text = repr(value[: _SHOWN + 1] if isinstance(value, bytes) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
