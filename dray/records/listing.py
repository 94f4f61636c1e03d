"""Opens experiments in the results directory, another directory or an object store, and lists their overviews.

Reading an experiment in an object store makes a temporary copy of its small files and changes nothing in the store, as
the experiment may be running on another machine.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dray import private
from dray._version import __version__
from dray.errors import NoExperiment
from dray.records.directory import ExperimentDirectory, results_root
from dray.records.driver_lock import PATIENCE_S, read_driver
from dray.records.local_runs import LocalRun, is_local_run
from dray.records.lookup import Name, experiment_directories, locate, parse_location
from dray.records.mirror import fetch_without_trials
from dray.records.numbering import number_of, numbers_by_path, typed
from dray.records.overview import COMPLETED, Overview, compared_by
from dray.storage import Location, RemoteDirectory
from dray.storage.disk import scratch
from dray.text import one_line

if TYPE_CHECKING:
    from dray.records.reader import ExperimentReader

AT_ONCE = 8
KEPT = ".overview.json"
"""The overview of an experiment that has ended, and the sizes and times of the files from which it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExperiment:
    """An experiment, found by `open_experiment` or a list.

    Attributes:
        directory: its directory, or that of a copy if it is in an object store.
        where: its path, or its URI.
        is_copy: whether ``directory`` is a copy.
        number: its number in the results directory, or None.
    """

    directory: ExperimentDirectory
    where: str
    is_copy: bool
    number: int | None = None

    @classmethod
    def here(cls, directory: ExperimentDirectory, number: int | None = None) -> StoredExperiment:
        return cls(directory=directory, where=str(directory.path), is_copy=False, number=number)

    @property
    def name(self) -> str:
        return Location.of(self.where).name

    @property
    def typed(self) -> str:
        """What is shortest to type for it in a command, see `numbering.typed`."""
        return shlex.quote(self.where) if self.is_copy else typed(self.directory.path)

    def read(self) -> ExperimentReader:
        """A reader that has read the experiment. Raises `DamagedFile` if one of its files can't be
        read."""
        from dray.records.reader import ExperimentReader  # NumPy and pyarrow, which a list need not import

        def seems_to_run() -> bool | None:
            driver = read_driver(RemoteDirectory(self.directory.storage, patience_s=PATIENCE_S))
            return None if driver is None else driver.seems_to_run

        is_running = seems_to_run if self.is_copy else None
        reader = ExperimentReader(self.directory, where=self.where, number=self.number, is_running=is_running)
        reader.refresh()
        return reader

    def overview(self) -> Overview:
        with closing(self.read()) as reader:
            return reader.overview()


@contextmanager
def open_experiment(experiment: Name) -> Iterator[StoredExperiment]:
    """Open an experiment, see `locate`. The copy of a remote one exists only within the block."""
    location = Location.of(locate(experiment))
    if location.is_local:
        yield StoredExperiment.here(ExperimentDirectory.open(location.path), number_of(location.path))
        return
    with scratch("look") as copies:
        directory = ExperimentDirectory(copies / location.name)
        fetch_without_trials(location, directory)
        yield StoredExperiment(directory=directory, where=location.uri, is_copy=True)


def list_experiments(root: str | None = None) -> list[Overview]:
    """All experiments in a directory or below a URI, the newest last. None: the results directory."""
    location = Location.of(results_root()) if root is None else parse_location(root)
    if not location.is_local:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            there = [each for each in pool.map(_overview_of_remote, _children(location)) if each is not None]
    else:
        if root is not None and not location.path.is_dir():
            raise NoExperiment(f"no such directory: {location}")
        known = numbers_by_path()
        there = [_overview_of_local(path, known.get(path.resolve())) for path in experiment_directories(location.path)]
    return sorted(there, key=lambda each: (each.began or 0, each.name))


def _overview_of_local(path: Path, number: int | None) -> Overview:
    where = StoredExperiment.here(ExperimentDirectory(path), number)
    try:
        return local_overview(LocalRun(path)) if is_local_run(path) else _kept_overview(where)
    except Exception as error:  # whatever is wrong with one, the others are listed
        return Overview(name=path.name, path=str(path), number=number, why=why_unread(error))


def _kept_overview(of: StoredExperiment) -> Overview:
    """An overview; that of an ended experiment is kept, because most of a list's time is that of reading metrics."""
    directory, kept = of.directory, of.directory.path / KEPT
    read = [directory.config_file, directory.journal, *sorted(directory.metrics.glob("*"))]
    try:
        files = [__version__, *([path.name, (at := path.stat()).st_size, at.st_mtime_ns] for path in read)]
    except FileNotFoundError:  # it has not begun, or it runs
        return of.overview()
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        found = json.loads(kept.read_bytes())
        if found["files"] == files:
            overview = Overview.from_json(found["overview"])
            return replace(overview, name=of.name, path=of.where, number=of.number)
    overview = of.overview()
    if overview.state in (*COMPLETED, "ERROR"):
        with suppress(OSError), private.replaced(kept) as file:  # it may be another user's experiment
            file.write_text(json.dumps({"files": files, "overview": asdict(overview)}))
    return overview


def why_unread(error: Exception) -> str:
    """Why an experiment can't be read, on one line."""
    return one_line(error if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}")


def local_overview(run: LocalRun) -> Overview:
    times, state = [row["time"] for row in run.rows], run.state
    return Overview(
        name=run.path.name,
        path=str(run.path),
        state=state,
        trials=1,
        ended=int(state in ("COMPLETED", "ERROR")),
        failed=int(state == "ERROR"),
        max_trials=1,
        metric=compared_by(run.searcher).first.name if run.searcher else None,
        best_metric=None if run.best is None else run.best[0],
        best_trial=None if run.best is None else 0,
        best_by=None if run.best is None else "one seed",
        began=min(times, default=None),
        last=max(times, default=None),
        ran_s=max(times, default=0.0) - min(times, default=0.0),
        failure=run.failure or None,
        is_local=True,
    )


def _overview_of_remote(location: Location) -> Overview | None:
    remote, metrics = (RemoteDirectory(each, patience_s=PATIENCE_S) for each in (location, location.child("metrics")))
    with scratch("list") as copies:
        directory = ExperimentDirectory(copies / location.name)
        try:
            remote.download(directory.path, [directory.config_file.name])
        except FileNotFoundError:
            return None
        try:
            metrics.download(directory.metrics, metrics.sizes())
            remote.download(directory.path, [directory.journal.name])
            directory.write_storage(location)
            return StoredExperiment(directory=directory, where=location.uri, is_copy=True).overview()
        except (FileNotFoundError, ValueError) as error:
            return Overview(name=location.name, path=location.uri, why=str(error))


def _children(location: Location) -> list[Location]:
    from pyarrow.fs import FileSelector, FileType

    filesystem, path = location.filesystem()
    try:
        infos = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
    except OSError as error:
        raise NoExperiment(f"can't list {location}: {one_line(error)}") from None
    return [location.child(info.base_name) for info in infos if info.type == FileType.Directory]
