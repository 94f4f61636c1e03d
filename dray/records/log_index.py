"""Long logs by the numbers of their lines, which count from 1: windows of lines, and searches, without all of the text.

A log grows, and is asked about every second while somebody looks. What is kept of a file is only how many lines end
before each block of it, so that each byte is counted once.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from dray.text import cut
from searchers.rows import regular

BLOCK = 256 << 10
MOST_LINES = 2_000
"""Most lines in a window."""
MOST_BYTES = 1 << 20
"""Most bytes that a window is cut from."""
MOST_LETTERS = 20_000
"""Most letters of a line in a window."""
MOST_MATCHES = 1_000
"""Most matches that a search returns."""
MATCH_LETTERS = 300


@dataclass(frozen=True, slots=True)
class Matches:
    """The lines with a text, up to a limit: their numbers and beginnings; and whether there are more."""

    lines: list[tuple[int, str]]
    more: bool


class Lines(Protocol):
    """A log as lines."""

    def __len__(self) -> int: ...

    def read(self, first: int, count: int) -> list[str]:
        """The lines from one on; perhaps fewer than there are, but at least one."""

    def search(self, text: str, first: int = 1) -> Matches:
        """The lines with a text, in any case, from one on."""


class ListedLines:
    """Lines in memory."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, first: int, count: int) -> list[str]:
        return list(self._lines[first - 1 : first - 1 + count])

    def search(self, text: str, first: int = 1) -> Matches:
        found = (at for at in range(first - 1, len(self._lines)) if text.lower() in self._lines[at].lower())
        return _some((at + 1, self._lines[at]) for at in found)


class FileLines:
    """A growing file. A last line without its end counts once the file is known to be complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._inode = -1
        self._size = self._ends = 0  # bytes counted, and the lines that end in them
        self._before: list[int] = []  # lines that end before each block
        self._is_cut = False  # whether the last byte is within a line

    def refresh(self) -> None:
        """Count the lines that were added."""
        with self._lock, open(self.path, "rb", opener=regular) as file:
            status = self.path.stat()
            if status.st_ino != self._inode or status.st_size < self._size:
                self._forget()
            self._inode = status.st_ino
            file.seek(self._size)
            while data := file.read(BLOCK - self._size % BLOCK):
                if self._size % BLOCK == 0:
                    self._before.append(self._ends)
                self._ends += data.count(b"\n")
                self._size += len(data)
                self._is_cut = not data.endswith(b"\n")

    def count(self, *, final: bool) -> int:
        return self._ends + (final and self._is_cut)

    def number_at(self, offset: int) -> int:
        """The number of the line at an offset."""
        block = min(offset // BLOCK, len(self._before) - 1)
        if block < 0:
            return 1
        with self.path.open("rb") as file:
            file.seek(block * BLOCK)
            return self._before[block] + file.read(offset - block * BLOCK).count(b"\n") + 1

    def offset_of(self, number: int) -> int:
        """The offset at which a line begins."""
        ends = number - 1  # lines before it
        if ends <= 0:
            return 0
        block = bisect_left(self._before, ends) - 1
        with self.path.open("rb") as file:
            file.seek(block * BLOCK)
            parts = file.read(BLOCK).split(b"\n", ends - self._before[block])
        return block * BLOCK + sum(len(each) + 1 for each in parts[:-1])

    def read(self, first: int, count: int) -> list[str]:
        """Some of the lines from one on, at least one if there is one."""
        with self.path.open("rb") as file:
            file.seek(self.offset_of(first))
            data = file.read(MOST_BYTES)
            is_all = len(data) < MOST_BYTES
        lines = data.split(b"\n", count)
        if not is_all and 1 < len(lines) <= count:
            lines.pop()  # its end was not read
        return [cut(line.decode(errors="replace"), MOST_LETTERS) for line in lines[:count]]

    def find(self, text: str, first: int) -> Iterator[tuple[int, str]]:
        """The lines with a text, from one on."""
        wanted, number = text.encode().lower(), first
        with self.path.open("rb") as file:
            file.seek(self.offset_of(first))
            while data := file.read(BLOCK):
                data += file.readline(MOST_BYTES)
                lower, done = data.lower(), 0
                while (at := lower.find(wanted, done)) >= 0:
                    number += lower.count(b"\n", done, at)
                    start = lower.rfind(b"\n", 0, at) + 1
                    end = lower.find(b"\n", at)
                    end = len(data) if end < 0 else end
                    yield number, data[start:end].decode(errors="replace")
                    done = end
                number += lower.count(b"\n", done)


class JoinedLines:
    """The files of one rank, one after the other."""

    def __init__(self, files: Sequence[FileLines], *, final: bool) -> None:
        self._files = files
        for each in files:
            each.refresh()
        # A file that another one follows is complete.
        counts = [each.count(final=final or each is not files[-1]) for each in files]
        self._before = list(accumulate(counts, initial=0))

    def __len__(self) -> int:
        return self._before[-1]

    def number_at(self, file: str, offset: int) -> int:
        """The number of the line at an offset in one of the files, given by its name."""
        pairs = zip(self._files, self._before, strict=False)
        return next(before + each.number_at(offset) for each, before in pairs if each.path.name == file)

    def read(self, first: int, count: int) -> list[str]:
        lines: list[str] = []
        while len(lines) < count and first + len(lines) <= len(self):
            place = bisect_left(self._before, first + len(lines)) - 1
            room = min(count - len(lines), self._before[place + 1] - (first + len(lines)) + 1)
            lines += (found := self._files[place].read(first + len(lines) - self._before[place], room))
            if len(found) < room:
                break
        return lines

    def search(self, text: str, first: int = 1) -> Matches:
        def found() -> Iterator[tuple[int, str]]:
            for file, before, end in zip(self._files, self._before, self._before[1:], strict=False):
                if first <= end:
                    for number, line in file.find(text, max(first - before, 1)):
                        if number + before <= end:
                            yield number + before, line

        return _some(found())


def _some(matches: Iterable[tuple[int, str]]) -> Matches:
    found: list[tuple[int, str]] = []
    for number, line in matches:
        if len(found) == MOST_MATCHES:
            return Matches(found, more=True)
        found.append((number, cut(line, MATCH_LETTERS)))
    return Matches(found, more=False)
