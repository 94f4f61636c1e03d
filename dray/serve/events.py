"""An experiment's events since a place in its journal, as lines of text."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from dray.config.load import stored_config
from dray.config.schema import ExperimentConfig
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.records.logs import event_lines
from dray.serve.control import ACTIVE, Control, NotSubmitted
from searchers.journal import Journal

MAX_READ = 1 << 20
"""Most bytes of a journal that are read at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What has happened.

    Attributes:
        lines: as ``dray experiment logs`` prints them.
        next: where in the journal they end, in bytes: the next ``after``.
        state: of the experiment.
        failed: how many of its trials have failed; None while it is active, or before all lines have been read.
        error: as of `dray.serve.control.Submitted`; "" if it was not submitted.
    """

    lines: list[str]
    next: int
    state: str
    failed: int | None
    error: str


def after(control: Control, path: Path, after: int) -> News:
    """The events after a place in the journal; some of them, if there are many.

    Raises:
        JournalError: the journal is damaged.
    """
    directory = ExperimentDirectory(path)
    # Before the journal is read: the records that were written before the state changed are then read too.
    state, error = _state(control, directory)
    lines: list[str] = []
    after = min(after, _size(directory.journal))
    while not lines and (whole := _read(directory.journal, after)):
        after += len(whole)
        records = Journal.parse(whole, where=str(directory.journal))
        lines = list(event_lines(_config(directory.config_file, directory.config_file.stat().st_mtime_ns), records))
    failed = None if lines or state in ACTIVE else StoredExperiment.here(directory).overview().failed
    return News(lines=lines, next=after, state=state, failed=failed, error=error)


def _size(journal: Path) -> int:
    try:
        return journal.stat().st_size
    except FileNotFoundError:
        return 0


def _read(journal: Path, start: int) -> bytes:
    """Its whole lines from there on, up to a limit."""
    try:
        with journal.open("rb") as file:
            file.seek(start)
            data = file.read(MAX_READ)
            if len(data) == MAX_READ and b"\n" not in data:
                data += file.readline()
    except FileNotFoundError:
        return b""
    return data[: data.rfind(b"\n") + 1]


def _state(control: Control, directory: ExperimentDirectory) -> tuple[str, str]:
    try:
        submitted = control.experiment(directory.path.name)
    except NotSubmitted:
        is_running = Journal.writer(directory.journal) is not None
        return "RUNNING" if is_running else StoredExperiment.here(directory).overview().state, ""
    return submitted.state, submitted.error


@functools.lru_cache(maxsize=64)
def _config(path: Path, modified_ns: int) -> ExperimentConfig:
    return stored_config(path)
