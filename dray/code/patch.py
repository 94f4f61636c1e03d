"""Patches of code, unified diffs as ``git diff`` and ``diff -u`` write them: parsed, and applied to texts.

A hunk's old lines must be in the file exactly, at the hunk's own place or at only one other. Neither git nor patch is
needed.
"""

from __future__ import annotations

import io
import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NoReturn

from dray.text import cut

MAX_PATCH_BYTES = 512 << 10
MAX_MOVED = 100  # hunks that are looked for in a whole file: hunks that follow one move with it
_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_NEVER = re.compile(r"1970-01-01|1969-12-31")  # the time that diff gives to a file that does not exist
_PREFIX = re.compile(r"[a-z]/")
_ESCAPE = re.compile(r"\\([0-7]{3}|.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_PLAIN = ("100644", "100755", "100664")  # git's modes of files


class BadPatch(ValueError):
    """A patch that can't be applied; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message, 400))  # a patch may have names and lines of any length


@dataclass(frozen=True, slots=True)
class _Hunk:
    at: int  # its line in the patch
    start: int  # the first of its lines in the file, counted from 0
    old: bytes
    new: bytes


@dataclass(slots=True)
class _Change:
    """The section of a patch about one file."""

    at: int  # its line in the patch
    old: str | None = None  # its names; None: /dev/null
    new: str | None = None
    creates: bool = False
    deletes: bool = False
    renames: bool = False
    hunks: list[_Hunk] = field(default_factory=list)


def read_patch(file: Path) -> str:
    """Read a patch; `BadPatch` if the file can't be one."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_PATCH_BYTES + 1)
    except OSError as error:
        raise BadPatch(f"can't read the patch {file}: {error.strerror}") from None
    return decoded(content)


def decoded(content: bytes) -> str:
    """The text of a patch; `BadPatch` if it is not UTF-8, or too large."""
    _check_size(len(content))
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadPatch(f"the patch is not UTF-8 text: {error}; give a directory with the code instead") from None


def _check_size(count: int) -> None:
    if count > MAX_PATCH_BYTES:
        raise BadPatch(f"the patch has more than {MAX_PATCH_BYTES:,} bytes; give a directory with the code instead")


def apply(patch: str, read: Callable[[str], bytes | None]) -> dict[str, bytes | None]:
    """Apply a patch.

    Args:
        read: returns the content of a file of the code, by its relative path with slashes; None if there is none.

    Returns:
        The new content of each changed file; None if it is deleted.

    Raises:
        BadPatch: it does not apply, or is not a patch of text files within the directory.

    >>> patch = "--- a/model.py\\n+++ b/model.py\\n@@ -1,2 +1,2 @@\\n import torch\\n-lr = 0.1\\n+lr = 0.2\\n"
    >>> apply(patch, {"model.py": b"import torch\\nlr = 0.1\\n"}.get)
    {'model.py': b'import torch\\nlr = 0.2\\n'}
    """
    changed: dict[str, bytes | None] = {}
    moved = itertools.count(1)

    def now(name: str) -> bytes | None:
        return changed[name] if name in changed else read(name)

    for change in _parsed(patch):
        if not (change.hunks or change.creates or change.deletes or change.renames):
            raise BadPatch(f"line {change.at} of the patch: nothing follows the header of the file; it may be cut off")
        old, new = _names(change, lambda name: now(_inside(name)) is not None)
        before = b"" if old is None else now(old)
        if old is not None and before is None:
            raise BadPatch(f"the patch changes {old}, but the code has no such file")
        if new is not None and new != old and now(new) is not None:
            raise BadPatch(f"the patch creates {new}, but the code has it already")
        assert before is not None
        after = _patched(old or new or "", before, change.hunks, moved)
        if old is not None and old != new:
            changed[old] = None
        if new is not None:
            changed[new] = after
        elif after:
            raise BadPatch(f"the patch deletes {old}, but not all of its lines")
    if not changed:
        raise BadPatch("the patch changes no file; make one with git diff or diff -u")
    return changed


# ------------------------------------------------------------------------------------------------------------- parsing
def _parsed(patch: str) -> list[_Change]:
    try:
        content = patch.encode()
    except UnicodeEncodeError as error:
        raise BadPatch(f"the patch is not UTF-8 text: {error}") from None
    _check_size(len(content))
    if 0 < content.count(b"\n") == content.count(b"\r\n"):  # on its way, all its line ends were changed
        content = content.replace(b"\r\n", b"\n")
    lines = io.BytesIO(content).readlines()
    found: list[_Change] = []
    of_git: _Change | None = None  # the section whose header is being read
    at = 0
    while at < len(lines):
        line = lines[at]
        text = line.decode(errors="replace").rstrip("\r\n")
        if text.startswith("diff --git "):
            found.append(of_git := _of_git(text, at + 1))
            at += 1
        elif text.startswith("--- ") and lines[at + 1 : at + 2] and lines[at + 1].startswith(b"+++ "):
            if of_git is None:
                found.append(_Change(at + 1))
            change, of_git = found[-1], None
            old, creates = _name(lines[at], at + 1)
            new, deletes = _name(lines[at + 1], at + 2)
            if not change.renames:
                change.old, change.new, change.creates, change.deletes = old, new, creates, deletes
            at += 2
            while at < len(lines) and lines[at].startswith(b"@@"):
                hunk, at = _hunk(lines, at)
                change.hunks.append(hunk)
            if not change.hunks:
                raise BadPatch(f"line {at} of the patch: no hunk (@@ -1,3 +1,4 @@) follows the names of the files")
        else:
            _refuse(text, at + 1)
            if of_git is not None:
                _take(of_git, text, at + 1)
            at += 1
    return found


def _of_git(line: str, at: int) -> _Change:
    """The section that begins with "diff --git a/model.py b/model.py": names follow, unless its file is empty."""
    rest = line.removeprefix("diff --git ")
    names = re.fullmatch(r'("(?:\\.|[^"\\])*"|.*) ("(?:\\.|[^"\\])*")', rest)
    old, new = names.groups() if names else (rest[: len(rest) // 2], rest[len(rest) // 2 + 1 :])
    return _Change(at, _unquoted(old, at), _unquoted(new, at))


def _take(change: _Change, text: str, at: int) -> None:
    """Take a line of the header of a section of git."""
    if text.startswith(("rename from ", "rename to ")):
        change.renames = True  # these names have no prefix
        setattr(change, "old" if text.startswith("rename from ") else "new", _unquoted(text.split(" ", 2)[2], at))
    elif text.startswith("new file mode "):
        change.creates = True
    elif text.startswith("deleted file mode "):
        change.deletes = True
    mode = re.search(r"mode (\d+)$", text) or re.fullmatch(r"index \S+ (\d+)", text)
    if text.startswith(("old mode", "new mode")):
        raise BadPatch(f"line {at} of the patch changes a file's mode, which a patch of code can't: {text}")
    if mode and mode[1] not in _PLAIN:
        kind = {"120000": "a link", "160000": "a submodule"}.get(mode[1], f"no plain file, by its mode {mode[1]}")
        raise BadPatch(f"line {at} of the patch is about {kind}, and a patch of code can change only files")
    if text.startswith("copy "):
        raise BadPatch(f"line {at} of the patch copies a file; make the patch with git diff --no-renames")


def _refuse(text: str, at: int) -> None:
    """Raise if a line between the sections says something that would otherwise be missing from the code."""
    differs = text.startswith("Files ") and " and " in text and text.endswith(" differ")
    if differs or text.startswith(("GIT binary patch", "Binary files ")):
        raise BadPatch(f"line {at} of the patch is about a binary file; give a directory with the code instead")
    if text.startswith("Only in "):
        raise BadPatch(f"line {at} of the patch: {text}, without its content; make the patch with diff -ruN")
    if text.startswith(("@@", "--- ", "+++ ")):
        raise BadPatch(f"line {at} of the patch: {text[:60]!r} is not where the header of a file or a hunk can be")


def _hunk(lines: list[bytes], at: int) -> tuple[_Hunk, int]:
    """The hunk that begins at a line, and the index of the line after it."""
    first = at
    if (header := _HUNK.match(lines[at])) is None:
        shown = lines[at].decode(errors="replace").rstrip()
        raise BadPatch(f"line {at + 1} of the patch must be like @@ -1,3 +1,4 @@, got {shown[:60]!r}")
    start, num_old, _, num_new = (1 if each is None else int(each) for each in header.groups())
    left = {b"-": num_old, b"+": num_new}
    sides: dict[bytes, list[bytes]] = {b"-": [], b"+": []}

    def wrong(why: str) -> NoReturn:
        raise BadPatch(
            f"the hunk at line {first + 1} of the patch {why} ({lines[first].decode(errors='replace').strip()})"
        )

    last: bytes = b""
    at += 1
    while at < len(lines):
        line = lines[at]
        kind = b" " if line == b"\n" else line[:1]  # editors remove the space of an empty line
        if kind == b"\\":
            for side, mine in sides.items():
                if last in (b" ", side):
                    mine[-1] = mine[-1].removesuffix(b"\n")
        elif kind in (b" ", b"-", b"+") and any(left.values()):
            for side in (b"-", b"+"):
                if kind in (b" ", side):
                    left[side] -= 1
                    sides[side].append(line[1:] if line != b"\n" else line)
            if min(left.values()) < 0:
                wrong("has other numbers of lines than its header says")
            last = kind
        else:
            break
        at += 1
    if any(left.values()):
        wrong("has fewer lines than its header says")
    follow = lines[at : at + 2]
    is_header = len(follow) == 2 and follow[0].startswith(b"--- ") and follow[1].startswith(b"+++ ")
    if follow and follow[0][:1] in b" +-" and not is_header and follow[0].rstrip() not in (b"--", b""):
        wrong("has more lines than its header says")
    # A hunk without old lines comes after the line that its header names.
    return _Hunk(first + 1, start if num_old == 0 else start - 1, *(b"".join(sides[side]) for side in (b"-", b"+"))), at


def _name(line: bytes, at: int) -> tuple[str | None, bool]:
    """The name in a line "--- NAME" or "+++ NAME", which a tab and a time may follow; and whether there is no such file
    on this side."""
    try:
        text = line[4:].decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise BadPatch(f"line {at} of the patch: the file's name is not UTF-8") from None
    name, _, time = text.partition("\t")
    is_nothing = name == "/dev/null"
    return None if is_nothing else _unquoted(name, at), is_nothing or bool(_NEVER.match(time))


def _unquoted(name: str, at: int) -> str:
    """A name that git may have quoted, such as ``"a/caf\\303\\251.py"``."""
    if not name.startswith('"'):
        return name
    body = name.rpartition('"')[0][1:]

    def plain(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code, 8) & 255) if len(code) == 3 else _ESCAPES.get(code, code)

    try:
        # Outside of escapes, the name may have any letters.
        pieces = re.split(r"((?:\\[0-7]{3})+)", body)
        return "".join(
            _ESCAPE.sub(plain, piece).encode("latin-1").decode() if i % 2 else _ESCAPE.sub(plain, piece)
            for i, piece in enumerate(pieces)
        )
    except UnicodeError:
        raise BadPatch(f"line {at} of the patch: the file's name is not UTF-8") from None


def _names(change: _Change, exists: Callable[[str], bool]) -> tuple[str | None, str | None]:
    """The names of a changed file in the code, before and after; None if it does not exist then."""

    def sides(old: str | None, new: str | None) -> tuple[str | None, str | None]:
        return (
            None if old is None or change.creates else _inside(old),
            None if new is None or change.deletes else _inside(new),
        )

    old, new = change.old, change.new
    if old is None and new is None:
        raise BadPatch(f"line {change.at} of the patch names no file")
    if change.renames:
        return sides(old, new)
    # git's own prefixes, which differ, such as a/ and b/
    has_prefixes = all(each is None or _PREFIX.match(each) for each in (old, new))
    if has_prefixes and (old or "")[:2] != (new or "")[:2]:
        return sides(*(None if each is None else each[2:] for each in (old, new)))
    whole = [each for each in (old, new) if each is not None]
    short = [each.partition("/")[2] for each in whole]
    for names in (whole, [each for each in short if each]):  # as with patch -p0 and -p1
        there = sorted({each for each in names if exists(each)})
        if len(there) > 1:
            raise BadPatch(f"line {change.at} of the patch: is it about {there[0]} or {there[1]}? the code has both")
        if there:
            return sides(there[0], there[0])
    if new is None or not (change.creates or all(not hunk.old for hunk in change.hunks)):
        raise BadPatch(f"the patch changes {whole[0]}, but the code has no such file")
    is_below = len(set(whole)) > len(set(short)) and bool(short[0])  # diff -r old new
    return None, _inside(short[0] if is_below else whole[-1])


def _inside(name: str) -> str:
    """The name of a file; `BadPatch` if it is not a relative path within the directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or "\n" in name:
        raise BadPatch(f"the patch is about {name!r:.100}, which is outside of the code's directory")
    return path.as_posix()


# ------------------------------------------------------------------------------------------------------------ applying
def _patched(name: str, content: bytes, hunks: list[_Hunk], moved: Iterator[int]) -> bytes:
    starts = [0, *(match.end() for match in re.finditer(rb"\n", content))]  # of its lines
    pieces, at, shift = [], 0, 0
    for number, hunk in enumerate(hunks, 1):
        line = hunk.start + shift
        expected = starts[line] if 0 <= line < len(starts) else -1
        if not (at <= expected and _is_at(content, hunk, expected)):
            where = f"the patch does not apply: hunk {number} of {name} (line {hunk.at} of the patch)"
            if next(moved) > MAX_MOVED:
                raise BadPatch(
                    f"{where} is one of more than {MAX_MOVED} that are not at their lines; make it from this code"
                )
            found = _elsewhere(content, hunk, at)
            if len(found) != 1:
                many = f"its lines are in several places, but not at line {hunk.start + 1}; give more lines of context"
                raise BadPatch(f"{where}: {many if found else _mismatch(content, hunk, starts)}")
            expected = found[0]
            shift = bisect_left(starts, expected) - hunk.start
        pieces += [content[at:expected], hunk.new]
        at = expected + len(hunk.old)
    return b"".join([*pieces, content[at:]])


def _is_at(content: bytes, hunk: _Hunk, at: int) -> bool:
    """Whether a hunk's old lines are at a place; at the end of the file, if they or the new ones lack the newline."""
    end = at + len(hunk.old)
    ends = all(side.endswith(b"\n") for side in (hunk.old, hunk.new) if side)
    return content.startswith(hunk.old, at) and (ends or end == len(content))


def _elsewhere(content: bytes, hunk: _Hunk, after: int) -> list[int]:
    """At most two places of a hunk's old lines after the earlier hunks."""
    found: list[int] = []
    if not hunk.old:
        return found
    at = content.find(hunk.old, after)
    while at >= 0 and len(found) < 2:
        if (at == 0 or content[at - 1 : at] == b"\n") and _is_at(content, hunk, at):
            found.append(at)
        at = content.find(hunk.old, at + 1)
    return found


def _mismatch(content: bytes, hunk: _Hunk, starts: list[int]) -> str:
    """The reason why a hunk is nowhere in a file: the first line that differs, at the hunk's own place."""
    old = io.BytesIO(hunk.old).readlines()
    here = io.BytesIO(content[starts[hunk.start] :] if hunk.start < len(starts) else b"").readlines()
    here += [b""] * (len(old) - len(here))
    for line, (wanted, has) in enumerate(zip(old, here, strict=False), hunk.start + 1):
        if wanted != has:
            if has and wanted.rstrip(b"\r\n") == has.rstrip(b"\r\n"):
                return (
                    f"line {line} of the code ends in other characters: {_end(wanted)} in the patch, {_end(has)} there"
                )
            has_text = f"has {_shown(has)}" if has else "has ended"
            return f"it expects {_shown(wanted)} at line {line}, where the code {has_text}"
    if old:
        return "the last lines differ in the newline at the end of the file"
    return f"it comes after line {hunk.start}, which the code does not have"


def _end(line: bytes) -> str:
    return {b"\r\n": "CRLF", b"\n": "LF"}.get(line[len(line.rstrip(b"\r\n")) :], "nothing")


def _shown(line: bytes) -> str:
    return repr(line.decode(errors="replace").rstrip("\n"))[:80]
