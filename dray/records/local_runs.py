"""Local runs, which `Trainer.fit()` and `core.init()` write to `DRAY_HOME/local` outside of an experiment.

A run's directory has `metrics.jsonl`, with a line per report, and its checkpoints; see `dray.hosts.local`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from dray.config.yaml_file import read_mapping
from dray.errors import ConfigError, NoExperiment
from dray.records.overview import compared_by
from dray.records.trial_record import SLOWEST_RANK, TrialRecord, straggler
from dray.storage import CheckpointStore
from dray.storage.manifest import MANIFEST
from searchers import rows
from searchers.rows import NUMBER, OPTIONAL_NUMBER, has_fields

if TYPE_CHECKING:
    import pandas as pd

LocalState: TypeAlias = Literal["RUNNING", "COMPLETED", "STOPPED", "ERROR", "UNKNOWN"]
METRICS = "metrics.jsonl"
LOCAL = "local"
_METRICS, _TEXT = (dict, NoneType), (str, NoneType)
_has_fields = has_fields(
    {"batches": (int,), "epochs": OPTIONAL_NUMBER, "time": NUMBER, "training": _METRICS, "validation": _METRICS}
    | {"system": _METRICS, "ended": _TEXT, "error": _TEXT}
)


def _check(row: Any) -> str:
    """What is wrong with a report; "" if it may have been written."""
    if what := _has_fields(row):
        return what
    for kind in ("training", "validation", "system"):
        for name, value in (row.get(kind) or {}).items():
            if rows.is_too_large(value):
                return f"{name} is {value!r:.60}"
    return ""


def is_local_run(path: Path) -> bool:
    """Whether this is the directory of a local run. Its checkpoints have metrics too, but are not runs."""
    return (
        os.path.lexists(path / METRICS) and not (path / MANIFEST).exists() and not (path / "experiment.yaml").exists()
    )


def local_runs(root: Path, *, without: Container[str] = ()) -> list[Path]:
    """The directories of local runs in a results directory, `without` names there that are known to be others."""
    places = [(root, without), (root / LOCAL, ())] if root.is_dir() else []
    below = [
        place / name for place, others in places if place.is_dir() for name in os.listdir(place) if name not in others
    ]
    return [path for path in below if not path.name.startswith(".") and is_local_run(path)]


def reject_local_run(path: Path) -> None:
    """Raise `NoExperiment` for a local run, in commands that need an experiment."""
    if is_local_run(path):
        raise NoExperiment(
            f"{path.name} is a local run, not an experiment: look at it with dray experiment describe, dray trial "
            f"metrics, or dray ui; give one of its checkpoints by its path, "
            f"{path}/checkpoint_N; or give an experiment's number or name, see dray experiment list"
        )


@dataclass(frozen=True)
class LocalRun:
    path: Path

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The reports, except for an incomplete last one."""
        return rows.lenient(rows.read(self.path / METRICS), self.path / METRICS, _check)

    @property
    def state(self) -> LocalState:
        """UNKNOWN: the run was killed."""
        with open(self.path / METRICS, opener=rows.regular) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return "RUNNING"
            except OSError:  # the file system has no locks
                return "UNKNOWN"
        ended: LocalState | None = next(
            (each for each in get_args(LocalState) if each == self._last.get("ended")), None
        )
        if ended is None and self._last.get("final"):
            return "COMPLETED" if self._last.get("decides") else "STOPPED"
        return ended or "UNKNOWN"

    @property
    def failure(self) -> str:
        """The error that ended the run, in one line, or ""."""
        return self._last.get("error") or ""

    @property
    def _last(self) -> dict[str, Any]:
        return self.rows[-1] if self.rows else {}

    @cached_property
    def searcher(self) -> dict[str, Any]:
        """The config's ``searcher`` section, from the latest checkpoint; {} for a script without a config."""
        for _, checkpoint in self.checkpoints:
            try:
                return dict(read_mapping(Path(checkpoint) / "experiment.yaml").get("searcher") or {})
            except ConfigError:
                return {}
        return {}

    @cached_property
    def best(self) -> tuple[float, int] | None:
        """The best value of the searcher's metric, and its number of batches; None if unknown."""
        if not self.searcher:
            return None
        trial = TrialRecord(0, compared_by(self.searcher))
        for row in self.rows:
            for name, value in (row.get("validation") or {}).items():
                if name in trial.objectives.names and isinstance(value, int | float):
                    trial.validated(name, row["batches"], row.get("epochs"), value, row["time"])
        best, batches = trial.best_metric, trial.best_batches
        return None if best is None or batches is None else (best, batches)

    @property
    def straggler(self) -> str:
        """The rank that the others wait for, with its node; "" if none is slow, as of the last figures."""
        figures = (each for row in reversed(self.rows) for each in (row.get("system") or {}).items())
        return next((straggler(*each) for each in figures if each[0].startswith(SLOWEST_RANK)), "")

    @property
    def checkpoints(self) -> list[tuple[int, str]]:
        """Batches and path of each checkpoint, the latest first."""
        return [each for each in CheckpointStore(self.path).listed() if (Path(each[1]) / MANIFEST).exists()]

    def metrics(self, *, system: bool = False) -> pd.DataFrame:
        """The metrics, or the machine's figures, as a table like that of an experiment with one trial, 0."""
        import pandas as pd

        kinds = ["system"] if system else ["training", "validation"]
        columns = ["trial_id", "batches", "epochs", "kind", "name", "value", "time"]
        table = pd.DataFrame([(0, *values) for row in self.rows for values in _values(row, kinds)], columns=columns)
        # A run that was killed and resumed has measured some batches twice.
        once = table.drop_duplicates(["batches", "kind", "name"], keep="last")
        return once.sort_values(["batches", "kind", "name"], kind="stable")


def _values(row: dict[str, Any], kinds: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for kind in kinds:
        for name, value in (row.get(kind) or {}).items():
            if isinstance(value, int | float):
                yield row["batches"], row.get("epochs"), kind, name, float(value), row.get("time")
