"""Finds an experiment by its number, its name or a unique part of that, ``latest``, a path, or a URI.

Names are those of the directories in ``DRAY_HOME`` (else ``~/dray_results``), and of the local runs in its ``local``.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from dray.errors import NoExperiment
from dray.records.directory import ExperimentDirectory, results_root
from dray.records.local_runs import METRICS, LocalRun, is_local_run, local_runs
from dray.records.numbering import numbers_by_path, paths_by_number
from dray.storage import Location
from dray.text import file_name, some

Name: TypeAlias = str | os.PathLike[str] | int
"""A reference to an experiment: see `locate`."""
LATEST = "latest"
_SHOWN = 5
_PART_DIGITS = 4
"""The fewest digits that match as a part of a name: ``delete 7`` must not match every name with a 7 in it."""


def locate(experiment: Name, *, or_local_run: bool = False) -> str:
    """The path of an experiment's or local run's directory, or its URI as given.

    Args:
        experiment: a path or ``s3://...``; or, in the results directory, a number, a name, a unique part of a name, or
            ``latest``.
        or_local_run: whether ``latest`` and parts of names mean local runs too. Otherwise they do so only if they
            match no experiment, for an error that names the run.

    Raises:
        NoExperiment: there is none, or several match.
    """
    experiment = str(experiment) if isinstance(experiment, int) else os.fspath(experiment)
    location = parse_location(experiment)
    if not location.is_local:
        own = results_root() / location.name  # the copy that resuming uses, see `mirror.fetch_experiment`
        has = ExperimentDirectory(own) if ExperimentDirectory(own).config_file.exists() else None
        return str(own) if has is not None and _same(has.storage, location) else experiment
    path, root = location.path, results_root()
    if ExperimentDirectory(path).config_file.exists() or is_local_run(path):
        return str(path.resolve())
    if os.sep in experiment or experiment.startswith((".", "~")):
        raise NoExperiment(_no_experiment(path))
    known = paths_by_number()
    if experiment.isdecimal() and int(experiment) in known:
        place = known[int(experiment)]
        if not ExperimentDirectory(place).config_file.exists():
            raise NoExperiment(f"experiment {experiment}, {place.name}, is no longer in {root}")
        return str(place.resolve())
    there = {each.name: each for each in newest_first(experiment_directories(root))}
    matches = [experiment] if experiment in there else []
    if not matches and not or_local_run:
        matches = names_of(experiment, [name for name, each in there.items() if not is_local_run(each)])
    matches = matches or names_of(experiment, list(there))
    if len(matches) > 1:
        raise NoExperiment(
            f"{experiment!r} matches {len(matches)} experiments in {root}; give a number, or more of the name:"
            + _candidates([there[name] for name in matches])
        )
    if not matches:
        raise NoExperiment(_unknown(experiment, list(there), root, path))
    return str(there[matches[0]])


def names_of(experiment: str, names: Sequence[str]) -> list[str]:
    """The names that match a user's input other than a number: the latest, or an equal name, else names that begin
    with the input, else names that contain it. `names`: all experiments, the newest first."""
    if experiment == LATEST:
        return list(names[:1])
    if experiment in names:
        return [experiment]
    if experiment.isdecimal() and len(experiment) < _PART_DIGITS:
        return []
    part = file_name(experiment)  # the name may be that of the config
    begin = [name for name in names if name.startswith(part)]
    return begin or [name for name in names if part in name]


def _candidates(paths: Sequence[Path]) -> str:
    known = numbers_by_path()
    lines = [f"\n{known.get(path.resolve(), ''):>6}  {path.name}" for path in paths[:_SHOWN]]
    return "".join(lines) + (f"\n        and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")


def local_run(experiment: Name) -> LocalRun | None:
    """The local run of this name; None if it is an experiment's. Raises as `locate`."""
    where = Location.of(locate(experiment, or_local_run=True))
    return LocalRun(where.path) if where.is_local and is_local_run(where.path) else None


def experiment_directories(root: Path) -> list[Path]:
    """The directories of the experiments and local runs below a root, sorted; links are resolved."""
    if not root.is_dir():
        return []
    # Hidden directories are incomplete copies.
    found = [
        path for path in root.iterdir() if not path.name.startswith(".") and os.path.lexists(path / "experiment.yaml")
    ]
    return [path.resolve() if path.is_symlink() else path for path in sorted([*found, *local_runs(root)])]


def newest_first(experiments: Sequence[Path]) -> list[Path]:
    """Sorted by creation time, the newest first; local runs by that of their latest report."""

    def made(path: Path) -> tuple[float, str]:
        return (path / (METRICS if is_local_run(path) else "experiment.yaml")).lstat().st_mtime, path.name

    return sorted(experiments, key=made, reverse=True)


def parse_location(where: str | os.PathLike[str]) -> Location:
    """The location of a path or URI; `NoExperiment` if it is invalid."""
    try:
        return Location.of(where)
    except ValueError as error:
        raise NoExperiment(str(error)) from None


def _same(one: Location, other: Location) -> bool:
    # Without their options, which may come from the environment.
    return one.uri.partition("?")[0] == other.uri.partition("?")[0]


def _no_experiment(path: Path) -> str:
    if not path.exists():
        return f"no such directory: {path}"
    parent = next((each for each in path.resolve().parents if ExperimentDirectory(each).config_file.exists()), None)
    hint = "" if parent is None else f"; it is inside the experiment {parent}"
    return f"no experiment in {path}: it has no experiment.yaml{hint}"


def _unknown(experiment: str, names: Sequence[str], root: Path, path: Path) -> str:
    if path.is_dir():
        return _no_experiment(path)
    if not names:
        return f"no experiment {experiment!r}: there are none in {root}; give a path, or s3://..., or set DRAY_HOME"
    near = difflib.get_close_matches(experiment, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"its experiments are {some(names, _SHOWN)}"
    return f"no experiment {experiment!r} in {root}; {hint}"
