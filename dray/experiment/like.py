"""Learns a new experiment's first points from the earlier ones that ``searcher.like`` names (see `searchers.like`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, cast

import yaml

from dray.config.custom import Custom
from dray.config.schema import ExperimentConfig
from dray.config.search import rungs_of
from dray.config.searcher import PointedSearcher
from dray.errors import ConfigError, NoExperiment
from dray.records.directory import ExperimentDirectory, results_root
from dray.records.journal import read_journal
from dray.records.listing import open_experiment
from dray.records.local_runs import is_local_run
from dray.records.lookup import experiment_directories, locate, newest_first
from dray.records.numbering import typed
from dray.records.overview import Heading, compared_by
from dray.text import counted, some
from searchers.errors import DamagedFile
from searchers.events import Exited, Reported
from searchers.objectives import normalised

if TYPE_CHECKING:
    from searchers.like import Earlier
from searchers.records import event_from_json, hparams_from_json, repeats_in

_MOST_NAMED = 5
_NEWEST = 50
"""How many of the newest experiments are looked at, for those that a new one could learn from."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What a new experiment begins with.

    Attributes:
        config: Its config, with the points.
        lines: What was learned from which experiments, for people.
    """

    config: ExperimentConfig
    lines: Sequence[str] = ()


def learn(config: ExperimentConfig, custom: Custom) -> Learned:
    """Fill up ``searcher.points`` from the experiments in ``searcher.like``, which are resolved now, once.

    Raises:
        ConfigError: An experiment does not exist, or can't be read.
    """
    searcher = config.searcher
    if not isinstance(searcher, PointedSearcher):
        return Learned(config)
    if not searcher.like:
        return Learned(config, _offer(config))
    # It imports scipy, which takes a while.
    from searchers.like import LEAST, MOST_POINTS, Earlier, first_points, num_results

    found, lines = dict[str, tuple[str, Earlier]](), list[str]()  # by path: one may have several names
    for place, name in enumerate(searcher.like):
        matches, faults = list[tuple[str, str]](), list[tuple[str, Exception]]()
        try:
            matches = _matching(name)
        except (NoExperiment, OSError) as error:
            faults.append((name, error))
        for named, path in matches:
            try:
                found[path] = found.get(path) or (named, read_earlier(path))
            except (NoExperiment, OSError, ValueError) as error:
                faults.append((named, error))
        # A fork has the points that were learned once, and of a pattern some may be damaged.
        if faults and not searcher.points and not any(path in found for _, path in matches):
            raise ConfigError([(f"searcher.like[{place}]", str(faults[0][1]))])
        lines += [f"nothing learned from {named}: {error}" for named, error in faults]
    used = {name: each for name, each in found.values() if num_results(each) >= LEAST}
    space = replace(config.space, constraint=custom.constraint)
    own, seed = searcher.points, config.reproducibility.experiment_seed
    points = first_points(space, list(used.values()), seed=seed, points=own)
    sizes = [getattr(searcher, field, None) for field in ("max_trials", "population")]
    room = max(min([MOST_POINTS, *(size for size in sizes if size is not None)]) - len(own), 0)
    points = points[:room]
    few = [name for name, _ in found.values() if name not in used]
    if points:
        lines.append(f"first {counted(len(points), 'trial')} learned from {some(list(used), _MOST_NAMED)}")
    elif used and not room:
        lines.append(f"nothing learned from {some(list(used), _MOST_NAMED)}: searcher.points has {len(own)} already")
    elif used and not own:
        what = "hyperparameter" if space.constraint is None else "hyperparameter or allowed point"
        lines.append(f"nothing learned from {some(list(used), _MOST_NAMED)}: no {what} in common")
    if few:
        lines.append(f"nothing learned from {some(few, _MOST_NAMED)}: fewer than {LEAST} results")
    pointed = searcher.model_copy(update={"points": [*own, *points]})
    return Learned(config.model_copy(update={"searcher": pointed}), lines)


def _offer(config: ExperimentConfig) -> list[str]:
    """A line that names the newest experiments that the new one could learn from, if there are any."""
    if config.entrypoint is None:  # a class from a script, which has no name elsewhere
        return []
    raw = config.to_dict()
    entrypoint, metrics = yaml.safe_dump({"entrypoint": raw["entrypoint"]}), compared_by(raw["searcher"])
    found: list[str] = []
    for path in newest_first(experiment_directories(results_root()))[:_NEWEST]:
        file = ExperimentDirectory(path).config_file
        with suppress(OSError, ValueError, DamagedFile):
            if entrypoint not in file.read_text():  # parsing takes longer
                continue
            heading = Heading.of(file)
            if heading.objectives == metrics and heading.searcher["name"] != "single":
                found.append(typed(path))
    if not found:
        return []
    known = some(found, _MOST_NAMED)
    return [f"same entrypoint and metric: {known}; to learn from one, add --config searcher.like={found[0]}"]


def _matching(name: str) -> list[tuple[str, str]]:
    """The experiments of a name or a pattern: what people call each, and its path or URI."""
    is_name = not re.search(r"[*?[]", name) or "://" in name or (results_root() / name).exists()
    if is_name:
        return [(name, locate(name))]
    paths = [path for path in experiment_directories(results_root()) if fnmatch(path.name, name)]
    if not (found := [(typed(path), str(path.resolve())) for path in paths if not is_local_run(path)]):
        raise NoExperiment(f"no experiment in {results_root()} matches {name!r}")
    return found


def read_earlier(name: str) -> Earlier:
    """What an experiment found, by its journal. Trials that began from others, and repeats, are left out."""
    with open_experiment(name) as found:
        config, records = found.directory.config(), list[dict[str, Any]]()
        with suppress(FileNotFoundError):  # it was created, and has yet to begin
            records = read_journal(found.directory.journal)
    searcher = config.searcher
    hparams: dict[int, dict[str, object]] = {}
    events: list[Reported | Exited] = []
    others: set[int] = set()
    for record in records:
        others.update(repeats_in(record))
        others.update(each["trial"] for each in record.get("actions") or () if each.get("source"))
        if record.get("event") not in ("started", "reported", "exited") or record["trial"] in others:
            continue
        event = normalised(event_from_json(record), searcher.sign > 0, searcher.objectives)
        if isinstance(event, Reported | Exited):
            events.append(event)
        elif record.get("hparams"):
            hparams.setdefault(record["trial"], cast("dict[str, object]", hparams_from_json(record["hparams"])))
    known = [record["rungs"] for record in records if record.get("rungs")]  # those of the last extension
    rungs = tuple(map(float, known[-1])) if known else rungs_of(config)
    from searchers.like import Earlier

    return Earlier(rungs=rungs, hparams=hparams, events=events)
