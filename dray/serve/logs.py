"""Growing text, read in pieces from an offset: an experiment's events and its trials' output."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from typing_extensions import TypedDict

from dray.config.load import stored_config
from dray.config.schema import ExperimentConfig
from dray.errors import Invalid
from dray.records.directory import ExperimentDirectory
from dray.records.journal import check, read_journal
from dray.records.listing import StoredExperiment
from dray.records.log_index import MOST_LINES, MOST_MATCHES, FileLines, JoinedLines, Lines, ListedLines
from dray.records.logs import OutputLine, event_lines, log_files, read_output, with_ranks
from dray.serve.control import ACTIVE, Control
from dray.serve.refusals import NotSubmitted
from dray.storage.disk import scratch_until_exit
from dray.storage.logs import EVERY_S, NAME, fetch_logs
from searchers import rows
from searchers.errors import DamagedFile
from searchers.journal import Journal

MAX_READ = 1 << 20  # most bytes of a journal read at once
TAIL_BYTES = 64 << 10  # bytes of a rank's output in the first piece
MOST_BYTES = 256 << 10  # most bytes of a rank's output in a piece
MOST_FILES, MOST_EVENTS = 500, 16  # how many files and experiments are kept counted


# ---------------------------------------------------------------------------------------------------------- events
class Events(TypedDict):
    lines: list[str]  # as dray experiment logs prints them
    exited: list[int]  # trials that ended in these lines
    next: int  # the offset after these lines
    state: str
    failed: int | None  # the number of failed trials; null while more lines may follow
    error: str  # the reason for the state ERROR


def events_after(control: Control, path: Path, after: int) -> Events:
    """The events after an offset in the journal, in bytes, or the first of them if there are many."""
    directory = ExperimentDirectory(path)
    # Before the journal is read, so that all records from before the change of state are read too.
    state, error = _state(control, directory)
    lines: list[str] = []
    exited: list[int] = []
    after = min(after, _end(directory.journal))
    if not _begins_line(directory.journal, after):
        raise Invalid(f"after={after} is not where a line begins; give next of an earlier answer, or 0")
    while not lines and (whole := _lines_from(directory.journal, after)):
        after += len(whole)
        records = _records(directory.journal, whole)
        exited += [cast(int, record["trial"]) for record in records if record.get("event") == "exited"]
        lines = list(event_lines(_config(directory.config_file, _modified(directory.config_file)), records))
    failed = None if lines or state in ACTIVE else StoredExperiment.here(directory).overview().failed
    return {"lines": lines, "exited": exited, "next": after, "state": state, "failed": failed, "error": error}


def _end(journal: Path) -> int:
    """The end of a journal's last complete line: one may be being written."""
    try:
        with rows.readable(journal), journal.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - MAX_READ)
            file.seek(start)
            return start + file.read().rfind(b"\n") + 1
    except FileNotFoundError:
        return 0


def _begins_line(journal: Path, at: int) -> bool:
    if not at:
        return True
    with journal.open("rb") as file:
        file.seek(at - 1)
        return file.read(1) == b"\n"


def _lines_from(journal: Path, start: int) -> bytes:
    """The complete lines of a journal from an offset on, up to a limit."""
    try:
        with rows.readable(journal), journal.open("rb") as file:
            file.seek(start)
            data = file.read(MAX_READ)
            if len(data) == MAX_READ and b"\n" not in data:
                data += file.readline()
    except FileNotFoundError:
        return b""
    return data[: data.rfind(b"\n") + 1]


def _records(journal: Path, lines: bytes) -> list[dict[str, Any]]:
    """The records of some lines of a journal."""
    try:
        return rows.strict(lines, journal, check)
    except DamagedFile:
        read_journal(journal)  # whose error has the line's number
        raise


def _state(control: Control, directory: ExperimentDirectory) -> tuple[str, str]:
    try:
        submitted = control.experiment(directory.path.name)
    except NotSubmitted:
        is_running = Journal.writer(directory.journal) is not None
        return "RUNNING" if is_running else StoredExperiment.here(directory).overview().state, ""
    return submitted.state, submitted.error


def _modified(config: Path) -> int:
    with rows.readable(config):
        return config.stat().st_mtime_ns


@functools.lru_cache(maxsize=64)
def _config(path: Path, modified_ns: int) -> ExperimentConfig:
    return stored_config(path)


class _Events:
    """The events of one experiment as lines, which grow."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._inode = self._read = 0
        self._lock = threading.Lock()

    def of(self, directory: ExperimentDirectory) -> Lines:
        """The lines now."""
        with self._lock:
            with rows.readable(directory.journal):
                status = directory.journal.stat() if os.path.lexists(directory.journal) else None
            if status is None or status.st_ino != self._inode or status.st_size < self._read:
                self._lines, self._inode, self._read = [], 0 if status is None else status.st_ino, 0
            config = _config(directory.config_file, _modified(directory.config_file))
            while whole := _lines_from(directory.journal, self._read):
                self._read += len(whole)
                self._lines += event_lines(config, _records(directory.journal, whole))
            return ListedLines(self._lines.copy())


# ---------------------------------------------------------------------------------------------------------- output
class Match(TypedDict):
    rank: int | None  # null for an experiment's own log
    line: int
    text: str  # the beginning of the line


class Found(TypedDict, total=False):
    """Lines of a log, or of its ranks."""

    lines: list[str]
    line: int  # the number of the first line
    total: int  # the number of lines
    matches: list[Match]
    more: bool  # whether there are more matches
    next: str
    skipped: int  # bytes left out before the first line
    places: list[tuple[int, int]]  # of each line its rank, and its number among the lines of this rank
    ranks: list[int]  # the ranks that have printed something
    running: bool  # whether more lines may follow


class Logs:
    """The logs of experiments and their trials; what is counted of those that were asked for last is kept."""

    def __init__(self) -> None:
        self._fetched = FetchedLogs()
        self._files: dict[Path, FileLines] = {}
        self._events: dict[Path, _Events] = {}
        self._lock = threading.Lock()

    def events(self, directory: ExperimentDirectory) -> Lines:
        """An experiment's own log, as ``dray experiment logs`` prints it."""
        with self._lock:
            found = self._events[directory.path] = self._events.pop(directory.path, _Events())
            for path in list(self._events)[:-MOST_EVENTS]:
                del self._events[path]
        return found.of(directory)

    def ranks(self, directory: ExperimentDirectory, trial: int, *, final: bool) -> dict[int, JoinedLines]:
        """A trial's output by rank. `final`: whether incomplete last lines count."""
        files: dict[int, list[FileLines]] = {}
        there = log_files(self._fetched.places(directory, trial))
        with self._lock:
            for rank, path in there.values():
                found = self._files[path] = self._files.pop(path, FileLines(path))
                files.setdefault(rank, []).append(found)
            for path in list(self._files)[:-MOST_FILES]:
                del self._files[path]
        return {rank: JoinedLines(files[rank], final=final) for rank in sorted(files)}

    def piece(self, directory: ExperimentDirectory, trial: int, after: str) -> Found:
        """As `piece`, with the rank and the number of each line."""
        places = self._fetched.places(directory, trial)
        found, lines, starts = _piece(places, after)
        ranks, first = self.ranks(directory, trial, final=False), dict[str, int]()
        for each in lines:
            if each.file not in first:
                first[each.file] = ranks[each.rank].number_at(each.file, starts.get(each.file, 0))
        return {**found, "ranks": list(ranks), "places": [(each.rank, first[each.file] + each.place) for each in lines]}

    def whole(self, directory: ExperimentDirectory, trial: int) -> list[str]:
        """All output of a trial."""
        places = self._fetched.places(directory, trial)
        return with_ranks(read_output(places, {}, final=True)[0], {rank for rank, _ in log_files(places).values()})


def window(lines: Lines, line: int, limit: int) -> Found:
    """Lines from one on, or the last ones if `line` is 0."""
    total, limit = len(lines), min(limit, MOST_LINES)
    line = line or max(total - limit + 1, 1)
    return {"lines": lines.read(line, limit) if line <= total else [], "line": line, "total": total}


def search(ranks: Mapping[int | None, Lines], text: str, line: int) -> Found:
    """The lines with a text, see `Lines.search`."""
    found, more = list[Match](), False
    for rank, lines in ranks.items():
        matches = lines.search(text, max(line, 1))
        more |= matches.more
        found += [{"rank": rank, "line": number, "text": text} for number, text in matches.lines]
    return {
        "matches": found[:MOST_MATCHES],
        "more": more or len(found) > MOST_MATCHES,
        "total": sum(map(len, ranks.values())),
    }


def piece(places: list[Path], after: str) -> Found:
    """New output of a trial's ranks, sorted by time; with several ranks, each line begins with its rank.
    `after`: ``next`` of the previous piece; "" for the end of the output."""
    return _piece(places, after)[0]


def _piece(places: list[Path], after: str) -> tuple[Found, list[OutputLine], dict[str, int]]:
    starts, skipped, files = _parsed(after), 0, log_files(places)
    for name, (_, path) in files.items():
        size = path.stat().st_size
        if starts.get(name, 0) > size:  # the file was replaced
            starts[name] = 0
        elif not after and size > TAIL_BYTES:
            with path.open("rb") as file:  # not from the middle of a line
                file.seek(size - TAIL_BYTES)
                file.readline()
                starts[name] = file.tell()
            skipped += starts[name]
    lines, ends = read_output(places, starts, most=MOST_BYTES)
    texts = with_ranks(lines, {rank for rank, _ in files.values()})
    return {"lines": texts, "next": _encoded(ends), "skipped": skipped}, lines, starts


class FetchedLogs:
    """Logs of trials that ran on other machines, copied from the object store every ten seconds at most."""

    def __init__(self) -> None:
        self._directory = scratch_until_exit("logs")
        self._at: dict[tuple[Path, int], float] = {}
        self._lock = threading.Lock()

    def places(self, directory: ExperimentDirectory, trial: int) -> list[Path]:
        """The directories with logs of a trial, for `piece`."""
        here = directory.trial(trial) / "logs"
        if directory.storage.is_local:
            return [here]
        copy = self._directory / directory.path.name / str(trial)
        with self._lock:
            if time.monotonic() - self._at.get((directory.path, trial), -EVERY_S) >= EVERY_S:
                copy.mkdir(parents=True, exist_ok=True)
                fetch_logs(directory.storage.child(f"trial_{trial}"), here, copy)
                self._at[directory.path, trial] = time.monotonic()
        return [copy, here]


def _encoded(ends: Mapping[str, int]) -> str:
    return ",".join(f"{name}:{end}" for name, end in ends.items()) or "-"


def _parsed(after: str) -> dict[str, int]:
    starts = {}
    for part in after.split(",") if after not in ("", "-") else []:
        name, _, number = part.rpartition(":")
        if not NAME.fullmatch(name) or not number.isdecimal() or len(number) > 18:
            raise Invalid(f"after={after[:80]}: must be `next` of the previous piece")
        starts[name] = int(number)
    return starts
