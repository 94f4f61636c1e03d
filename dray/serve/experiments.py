"""The experiments of a results directory, read as they grow and kept in memory while they are viewed."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dray.errors import NoExperiment
from dray.records.directory import ExperimentDirectory
from dray.records.listing import local_overview, why_unread
from dray.records.local_runs import METRICS, LocalRun, local_runs
from dray.records.numbering import LINKS, numbers_by_path
from dray.records.overview import Overview
from dray.records.reader import ExperimentReader
from dray.serve.answers import encoded
from dray.serve.curves import curves
from dray.serve.figures import CPU_SHARE, CURVES_SHARE, CachedFigures, cached, figures_of
from dray.serve.given import Wanted

SCAN_S = 5.0  # how often the directory is searched for new experiments, and experiments that do not run are checked
FRESH_S = 1.0  # how often a running experiment is checked for the list
FORGET_S = 120.0  # how long an experiment that neither runs nor is viewed stays in memory
VIEW_S = 0.5  # how often a viewed experiment is read at most
VIEWED_S = 30.0  # how long after a request an experiment counts as viewed
FOLLOW_S = 2.5
"""How often the metrics of viewed experiments are read at least: after more than five seconds their writer may have
moved them twice, and then all would be read again."""
MOST_MADE = 40  # most figures and curves of an experiment that are kept
PATIENCE_S = 0.3  # how long the list waits for experiments that are read for the first time; a thread reads the rest
TICK_S = 2.0  # how far apart two changes of a directory may be that have the same time, in some file systems


@contextmanager
def locked(one: ExperimentReader, other: ExperimentReader) -> Iterator[None]:
    """Both locks, in the same order for every request."""
    first, second = sorted((one, other), key=lambda each: each.name)
    with first.lock, second.lock:
        yield


@dataclass(slots=True)
class _Entry:
    """An experiment, or a local run."""

    path: Path
    reader: ExperimentReader | None = None  # while it runs or is viewed
    overview: Overview | None = None  # as last read; None: never read
    is_local: bool = False
    size: int = -1  # bytes of its journal, or of a local run's metrics, when last read
    read_at: float = 0.0  # time of the last check for changes
    viewed_at: float = -math.inf  # time of the last request for this experiment
    grows: str = ""  # the file that grows while it runs

    def __post_init__(self) -> None:
        self.grows = str(self.path / (METRICS if self.is_local else "journal.jsonl"))

    @property
    def is_running(self) -> bool:
        return self.overview is not None and self.overview.state == "RUNNING"

    @property
    def is_stale(self) -> bool:
        """Whether it should be checked for changes."""
        fresh_s = FRESH_S if self.is_running or self.overview is None else SCAN_S
        return time.monotonic() - self.read_at > fresh_s


class Experiments:
    """Thread-safe."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self._entries: dict[str, _Entry] = {}
        self._local: list[_Entry] = []
        self._numbers: dict[Path, int] = {}
        self._numbered = -1.0  # when there was a new number
        self._scanned = 0.0
        self._changed = 0  # time of the last change of the results directory
        self._list_lock = threading.Lock()
        self._lock = threading.Lock()  # of entries, and their readers
        self._follower: threading.Thread | None = None
        self._rest: threading.Thread | None = None
        self._made: dict[tuple[str, str | Wanted], CachedFigures] = {}

    # ------------------------------------------------------------------ the list
    def overviews(self, also: Iterable[str] = ()) -> tuple[dict[str, Overview], int]:
        """The overviews by name, in the order of creation; and the number of experiments still to be read. `also`:
        names of existing experiments that the scan may not have found yet."""
        with self._list_lock:
            now = time.monotonic()
            before = self._changed
            with suppress(FileNotFoundError):
                self._changed = os.stat(self.results).st_mtime_ns
            # At once if one was created or deleted.
            if now - self._scanned > SCAN_S or before != self._changed:
                self._scan()
                self._scanned = now
            for name in set(also) - set(self._entries):
                with suppress(NoExperiment):
                    self._entry(name)
            for entry in (every := [*self._local, *self._entries.values()]):
                if entry.is_stale:
                    if time.monotonic() - now > PATIENCE_S:
                        self._read_the_rest()
                        break
                    self._look(entry)
            found = {entry.path.name: entry.overview for entry in every if entry.overview is not None}
            left = len(every) - len(found)
        return dict(sorted(found.items(), key=lambda item: (item[1].began or 0, item[0]))), left

    def _read_the_rest(self) -> None:
        """Read the experiments that have never been read, in a thread; requests go on between two of them."""

        def read() -> None:
            for entry in list(self._entries.values()):
                with self._list_lock:
                    if entry.overview is None:
                        self._look(entry)

        if self._rest is None or not self._rest.is_alive():
            self._rest = threading.Thread(target=read, name="dray-list", daemon=True)
            self._rest.start()

    def _scan(self) -> None:
        there = dict[str, float]()
        with suppress(FileNotFoundError):
            for each in os.scandir(self.results):
                with suppress(FileNotFoundError):  # it has just been deleted
                    there[each.name] = each.stat(follow_symlinks=False).st_mtime
        new, gone = there.keys() - self._entries, self._entries.keys() - there
        # The newest are read first, since the page shows them first.
        for name in (*sorted(new, key=there.__getitem__, reverse=True), *gone):
            with suppress(NoExperiment):
                self._entry(name)
        self._read_numbers()
        known = {entry.path: entry for entry in self._local}
        runs = local_runs(self.results, without=self._entries)
        self._local = [known.get(path) or _Entry(path, is_local=True) for path in runs]

    def _read_numbers(self) -> None:
        """Read the numbers, unless there are no new ones since the last time."""
        try:
            changed = (self.results / LINKS).stat().st_mtime
        except OSError:
            changed = 0.0
        if changed != self._numbered or time.time() - changed < TICK_S:
            self._numbers, self._numbered = numbers_by_path(), changed

    def _entry(self, name: str) -> _Entry:
        """An experiment's entry, perhaps a new one. If the experiment does not exist any more: `NoExperiment`."""
        with self._lock:
            try:
                path = experiment_path(self.results, name)
            except NoExperiment:
                if (entry := self._entries.pop(name, None)) is not None:
                    self._release(entry)
                raise
            return self._entries.setdefault(name, _Entry(path))

    def _look(self, entry: _Entry, max_age_s: float = VIEW_S) -> None:
        entry.read_at = time.monotonic()
        try:
            size = os.stat(entry.grows).st_size
        except OSError:
            size = 0
        if entry.overview is not None and not entry.is_running and size == entry.size:
            return
        entry.size = size
        try:
            if entry.is_local:
                seen = local_overview(LocalRun(entry.path))
            else:
                seen = self._refreshed(entry, max_age_s=max_age_s).overview()
        except Exception as error:  # whatever is wrong with one, the others are listed
            seen = Overview(name=entry.path.name, path=str(entry.path), why=why_unread(error))
        if entry.overview is None and entry.path not in self._numbers:  # newer than the last scan
            self._read_numbers()
        entry.overview = replace(seen, number=self._numbers.get(entry.path))
        self._forget(entry)

    def _refreshed(self, entry: _Entry, *, max_age_s: float) -> ExperimentReader:
        with self._lock:
            if entry.reader is None:
                entry.reader = ExperimentReader(ExperimentDirectory(entry.path))
            reader = entry.reader
        reader.refresh(max_age_s=max_age_s)
        return reader

    def overview(self, name: str, *, max_age_s: float = VIEW_S) -> Overview:
        """The overview of one experiment, at most this old. If there is none of this name: `NoExperiment`."""
        entry = self._entry(name)
        entry.viewed_at = time.monotonic()  # its reader is kept for what is asked next
        # Without the list's lock: whoever reads one experiment does not wait until all are read.
        if entry.overview is None or time.monotonic() - entry.read_at >= max_age_s:
            self._look(entry, max_age_s)
        assert entry.overview is not None
        return entry.overview

    # ------------------------------------------------------------------ one of them
    def open(self, name: str) -> ExperimentReader:
        """An experiment as it is now.

        Raises:
            NoExperiment: there is none of this name.
            DamagedFile: one of its files can't be read.
        """
        entry = self._entry(name)
        entry.viewed_at = time.monotonic()
        with self._lock:
            if self._follower is None:
                self._follower = threading.Thread(target=self._follow, name="dray-follow", daemon=True)
                self._follower.start()
        return self._refreshed(entry, max_age_s=VIEW_S)

    def with_trial(self, name: str, trial: int) -> ExperimentReader:
        """As `open`; also `NoExperiment` if it has no such trial."""
        reader = self.open(name)
        if trial not in reader.trials:
            reader.refresh()  # it may have just been added
        reader.trial(trial)
        return reader

    def _follow(self) -> None:
        """Read new records of viewed experiments, until none is viewed."""
        while True:
            time.sleep(FOLLOW_S)
            with self._lock:
                viewed = [each for each in self._entries.values() if time.monotonic() - each.viewed_at < FORGET_S]
                if not viewed:
                    self._follower = None
                    return
            for entry in viewed:
                with suppress(Exception):  # the next request reports it
                    self._refreshed(entry, max_age_s=VIEW_S)

    def _forget(self, entry: _Entry) -> None:
        """Drop the reader of an experiment that neither runs nor is viewed."""
        with self._lock:
            if not entry.is_running and time.monotonic() - entry.viewed_at > FORGET_S:
                self._release(entry)

    def _release(self, entry: _Entry) -> None:
        if entry.reader is not None:
            entry.reader.close()
            entry.reader = None
        for key in [key for key in list(self._made) if key[0] == entry.path.name]:
            self._made.pop(key, None)

    def figures(self, name: str, kind: str, include: Sequence[int] = (), *, now: bool = False) -> tuple[bytes, float]:
        """Figures of one of `figures.KINDS`, remade if their cost allows it or `now` demands it; and the seconds until
        they may be remade. They have the trials `include` even if they leave out others of their rank."""
        what = f"{kind} {','.join(map(str, include))}"
        return self._paced(name, what, lambda reader: figures_of(reader, kind, include), now=now)

    def curves(self, name: str, wanted: Wanted) -> tuple[bytes, float]:
        """Learning curves; paced like `figures`, but remade more often."""
        return self._paced(name, wanted, lambda reader: encoded(curves(reader, wanted)), share=CURVES_SHARE)

    def _paced(
        self,
        name: str,
        what: str | Wanted,
        make: Callable[[ExperimentReader], bytes],
        *,
        now: bool = False,
        share: float = CPU_SHARE,
    ) -> tuple[bytes, float]:
        reader, key = self.open(name), (name, what)
        made = self._made.get(key)
        if made is None or now or (made.version != reader.version and not made.wait_s):
            made = cached(reader, lambda: make(reader), share)
        self._made.pop(key, None)
        self._made[key] = made  # as the last that was looked at
        for old in [each for each in list(self._made) if each[0] == name][:-MOST_MADE]:
            self._made.pop(old, None)  # of selections that nobody looks at any more
        return made.body, made.wait_s

    def viewed(self) -> int:
        """The number of viewed experiments, at least 1."""
        now = time.monotonic()
        with self._lock:
            return max(1, sum(now - entry.viewed_at < VIEWED_S for entry in self._entries.values()))


def experiment_path(results: Path, name: str) -> Path:
    """The directory of an experiment, by the decoded name from a URL. Unknown and hidden names, and names with a
    slash, are `NoExperiment`."""
    path = results / name
    if name and not name.startswith(".") and "/" not in name and "\0" not in name:
        # `link_into_results` makes links to directories of the same name.
        is_ours = not path.is_symlink() or Path(os.readlink(path)).name == name
        if is_ours and os.path.lexists(path / "experiment.yaml"):
            return path.resolve()
    raise NoExperiment(f"no experiment {name[:100]!r} in the results directory")
