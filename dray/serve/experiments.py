"""The experiments of a results directory, read as they grow and kept while somebody looks at them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dray.errors import NoExperiment
from dray.records.logs import GrowingFile
from dray.records.numbering import numbers_by_path
from dray.records.overview import Glance, Overview
from dray.serve.curves import other_curves
from dray.serve.live import Live
from dray.serve.live_report import Made, made_of, make
from dray.serve.names import experiment_path
from dray.text import one_line
from searchers.errors import JournalError
from searchers.journal import Journal

SCAN_S = 5.0
"""How often the directory is searched for new experiments, and those that nobody runs are looked at."""
FRESH_S = 1.0
"""What was looked at this lately is not looked at again."""
FORGET_S = 120.0
"""For so long an experiment stays in memory that nobody looks at."""
LOOKED_AT_S = 30.0
FOLLOW_S = 2.5
"""How often metrics of experiments that are looked at are read at least: after more than five seconds their writer may
have moved them twice, and then all would be read again."""
PATIENCE_S = 1.0
"""How long the list waits for experiments that are read for the first time."""


@dataclass(slots=True)
class _Entry:
    """An experiment in the list."""

    path: Path
    journal: GrowingFile
    glance: Glance | None = None
    overview: Overview | None = None
    running: bool = False
    looked_at: float = 0.0


class Experiments:
    """Thread-safe.

    Args:
        results: the results directory.
    """

    def __init__(self, results: Path) -> None:
        self.results = results
        self._entries: dict[str, _Entry] = {}
        self._numbers: dict[Path, int] = {}
        self._scanned = 0.0
        self._list_lock = threading.Lock()
        self._lock = threading.Lock()
        self._live: dict[str, Live] = {}
        self._follower: threading.Thread | None = None
        self._made: dict[tuple[str, str], Made] = {}
        self._expected: dict[tuple[str, str], float] = {}

    # ------------------------------------------------------------------ the list
    def overviews(self, also: Iterable[str] = ()) -> tuple[dict[str, Overview], int]:
        """By name, in the order of creation; and how many are still to be read.

        Args:
            also: names that exist, though they may not have been found yet.
        """
        with self._list_lock:
            now = time.monotonic()
            if now - self._scanned > SCAN_S:
                self._scan()
                self._scanned = now
            for name in also:
                if name not in self._entries:
                    self._find(name)
            for entry in self._entries.values():
                age = time.monotonic() - entry.looked_at
                if age > (FRESH_S if entry.running or entry.overview is None else SCAN_S):
                    if time.monotonic() - now > PATIENCE_S:
                        break
                    self._look(entry)
            found = {name: entry.overview for name, entry in self._entries.items() if entry.overview is not None}
            left = len(self._entries) - len(found)
        return dict(sorted(found.items(), key=lambda item: (item[1].began or 0, item[0]))), left

    def _scan(self) -> None:
        names = {path.name for path in self.results.iterdir()} if self.results.is_dir() else set()
        for name in names - set(self._entries):
            self._find(name)
        for name in list(self._entries):
            if name not in names or not (self._entries[name].path / "experiment.yaml").is_file():
                del self._entries[name]
        self._numbers = numbers_by_path()

    def _find(self, name: str) -> None:
        try:
            path = experiment_path(self.results, name)
        except NoExperiment:
            return
        self._entries[name] = _Entry(path, GrowingFile(path / "journal.jsonl"))

    def _look(self, entry: _Entry) -> None:
        entry.looked_at = time.monotonic()
        try:
            # Checked before the journal is read: if a driver ends in between, its last record is read too.
            entry.running = Journal.writer(entry.path / "journal.jsonl") is not None
            lines = entry.journal.new_lines()
            if entry.glance is None:
                entry.glance = Glance(str(entry.path), (entry.path / "experiment.yaml").read_bytes())
            for line in lines:
                entry.glance.add(json.loads(line))
            seen = entry.glance.overview(entry.running)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            # Perhaps a torn line that resuming has removed: all is read again the next time.
            entry.glance, entry.journal = None, GrowingFile(entry.path / "journal.jsonl")
            seen = Overview(name=entry.path.name, path=str(entry.path), why=one_line(error))
        entry.overview = replace(seen, number=self._numbers.get(entry.path))

    def overview(self, name: str) -> Overview:
        """One of them.

        Raises:
            NoExperiment: there is none.
        """
        experiment_path(self.results, name)
        with self._list_lock:
            if name not in self._entries:
                self._find(name)
            entry = self._entries[name]
            if entry.overview is None or time.monotonic() - entry.looked_at > FRESH_S:
                self._look(entry)
            assert entry.overview is not None
            return entry.overview

    # ------------------------------------------------------------------ one of them
    def open(self, name: str) -> Live:
        """One of them, as it is now.

        Raises:
            NoExperiment: there is none.
            JournalError: its journal is damaged.
        """
        path = experiment_path(self.results, name)
        with self._lock:
            self._forget()
            live = self._live.get(name)
            if live is None:
                live = self._live[name] = Live(path)
            if self._follower is None:
                self._follower = threading.Thread(target=self._follow, name="dray-follow", daemon=True)
                self._follower.start()
        live.refresh()
        return live

    def _follow(self) -> None:
        """Read what is new as long as somebody looks."""
        while True:
            time.sleep(FOLLOW_S)
            with self._lock:
                self._forget()
                if not self._live:
                    self._follower = None
                    return
                followed = list(self._live.values())
            for live in followed:
                with suppress(JournalError, OSError):  # who asks for it is told
                    live.refresh(asked=False)

    def figures(self, name: str, kind: str, *, now: bool = False) -> tuple[Made, float]:
        """Figures of an experiment; made again if they are old enough for what they cost. And for how many seconds they
        will not be.

        Args:
            name: of the experiment.
            kind: one of `live_report.KINDS`.
            now: make them again in any case.
        """
        live = self.open(name)
        return self._paced((name, kind), live, lambda: make(live, kind), now=now)

    def curves(self, name: str, metric: tuple[str, str]) -> tuple[Made, float]:
        """The curves of another metric than the searcher's, by its kind and name; paced as `figures`."""
        live = self.open(name)
        return self._paced((name, " ".join(metric)), live, lambda: made_of(live, lambda: other_curves(live, *metric)))

    def _paced(
        self, key: tuple[str, str], live: Live, make_it: Callable[[], Made], *, now: bool = False
    ) -> tuple[Made, float]:
        made, figures = self._made.get(key), self._looked_at_figures()
        if made is None or now or (made.version != live.version and made.wait_s(figures) <= 0):
            made = self._made[key] = make_it()
        wait_s = max(0.0, made.wait_s(figures))
        self._expected[key] = time.monotonic() + wait_s + LOOKED_AT_S
        return made, wait_s

    def _looked_at_figures(self) -> int:
        now = time.monotonic()
        return max(1, sum(now < expected for expected in list(self._expected.values())))

    def looked_at(self) -> int:
        """How many experiments are looked at now."""
        now = time.monotonic()
        with self._lock:
            return max(1, sum(now - live.asked < LOOKED_AT_S for live in self._live.values()))

    def _forget(self) -> None:
        for name, live in list(self._live.items()):
            if time.monotonic() - live.asked > FORGET_S or not live.directory.config_file.exists():
                live.close()
                del self._live[name]
                for key in [key for key in self._made if key[0] == name]:
                    del self._made[key]
                    self._expected.pop(key, None)
