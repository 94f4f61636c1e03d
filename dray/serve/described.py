"""An experiment and a trial in full: what their pages, the report, and ``describe --json`` give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from typing_extensions import TypedDict

from dray.records.checkpoints import CheckpointRow, list_checkpoints
from dray.records.logs import Failure, failure_fields
from dray.records.overview import ExperimentState, Overview
from dray.records.reader import Alert, ExperimentReader
from dray.records.repeats import FinalistRow
from dray.records.standing import Standing, standing
from dray.records.trial_record import Lineage, Number, TrialRecord, TrialRow, lineage
from dray.serve.control import ExperimentState as ServerState
from dray.serve.control import Submitted, verbs_of
from dray.storage import StorageError
from searchers.intervals import Interval
from searchers.rows import said


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(Overview):
    """An experiment in a list.

    Attributes:
        state: see docs/cli.md.
        submitted: its entry on the server; None if it was not submitted to one.
        verbs: those that change something now.
    """

    state: ExperimentState | ServerState = "DAMAGED"  # type: ignore[assignment]
    submitted: Submitted | None = None
    verbs: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standings(Experiment):
    """An experiment that may not have begun.

    Attributes:
        standing: how it stands now.
    """

    standing: Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentInFull(Standings):
    """One experiment.

    Attributes:
        version: increases with each change of its files.
        objectives: the metrics that are optimized, if there are several.
        front: the trials on the Pareto front.
        repeats: the trials that were trained again with other seeds, best first.
        repeats_summary: whether the best of them can be distinguished from the others.
        searcher: the name of the search method.
        max_length: the longest training of a trial, in ``unit``.
        states: the number of trials in each state.
        best_hparams: the hyperparameters of the best trial, by dotted name.
        varying: hyperparameters that differ between trials.
        metrics: the metrics that trials have reported, by KIND.NAME.
        variants: the code of single trials, by name, with the files that it changes.
        failures: the number of failures.
        diverged: the trials whose loss became NaN or infinite, in a sentence; empty if none did.
        stragglers: the trials in which one rank's steps are slow, with the rank and its node; empty if there are none.
        alerts: what people were told, by ``notify`` in the config, the oldest first.
        damaged: damaged lines of its files, which are left out.
    """

    version: int
    objectives: list[str]
    front: list[int]
    repeats: list[FinalistRow]
    repeats_summary: str
    searcher: str
    max_length: float | None
    unit: str | None
    description: str
    states: Mapping[str, int]
    best_hparams: Mapping[str, Any] | None
    varying: list[str]
    metrics: list[str]
    variants: Mapping[str, list[str]]
    failures: int
    diverged: str
    stragglers: str
    alerts: list[Alert]
    damaged: list[str]


def listed(name: str, overview: Overview | None, submitted: Submitted | None) -> Experiment:
    """An experiment as the list shows it. `overview`: None if it has not begun."""
    seen = Overview(name=name, path="", state="STOPPED") if overview is None else overview
    seen = seen if submitted is None else seen.on_server(submitted.state, submitted.error)
    verbs = [] if seen.is_local else verbs_of(seen.state, is_submitted=submitted is not None)
    return Experiment(**taken(seen), submitted=submitted, verbs=verbs)


def with_standing(reader: ExperimentReader | None, seen: Experiment) -> Standings:
    """An experiment, and how it stands. `reader`: None if it has not begun."""
    queued = None if seen.submitted is None else seen.submitted.submitted
    return Standings(**taken(seen), standing=standing(seen, reader, queued=queued))


def described(reader: ExperimentReader, overview: Overview, submitted: Submitted | None) -> ExperimentInFull:
    """An experiment as its page, its report and the command show it."""
    best, config, searcher = reader.best(), reader.config, reader.config.searcher
    seen = with_standing(reader, listed(reader.name, overview, submitted))
    return ExperimentInFull(
        **taken(seen) | {"front": reader.front()},
        version=reader.version,
        objectives=[] if searcher.objectives is None else [each.name for each in searcher.objectives.objectives],
        repeats=[each.to_json() for each in reader.finalists()],
        repeats_summary=reader.repeats_summary(),
        searcher=searcher.name,
        max_length=searcher.length,
        unit=searcher.unit,
        description=config.description,
        states=reader.states,
        best_hparams=None if best is None else best.hparams,
        varying=reader.varying,
        metrics=sorted(f"{kind}.{name}" for kind, name in reader.metrics),
        variants=_variants(reader),
        failures=len(reader.failures),
        diverged=reader.divergence_summary(),
        stragglers=reader.straggler_summary(),
        alerts=reader.alerts,
        damaged=said(reader.directory.path),
    )


def _variants(reader: ExperimentReader) -> Mapping[str, list[str]]:
    known: dict[str, list[str]] = reader.derived.setdefault("variants", {})  # they never change
    for name in {trial.code for trial in reader.trials.values() if trial.code} - known.keys():
        if reader.directory.has_variant(name):
            known[name] = reader.directory.changed_by(name)
    return known


def taken(seen: Overview) -> dict[str, Any]:
    """The fields of an overview, for one with more."""
    kind: Any = type(seen)
    return {name: getattr(seen, name) for name in _names(kind)}


@cache
def _names(kind: Any) -> list[str]:
    return [each.name for each in fields(kind)]


class BestOfAll(TypedDict):
    """The best trial."""

    trial: int
    metric: Number
    best_by: str  # what the metric is: "one seed", or "mean of 3 seeds"
    hparams: Mapping[str, Any]


class TrialInFull(TrialRow):
    """One trial."""

    rank: int | None
    of: int  # trials that have validated
    drawn: Mapping[str, Any] | None  # the hyperparameters as they were sampled
    # the mean of its repeats, which ranks it, with its 95% interval; null if they have not been compared
    repeated: Interval | None
    lineage: Lineage
    best: BestOfAll | None
    varying: list[str]  # the hyperparameters that differ between trials
    trials: int  # the number of trials; they are numbered from 0
    straggler: str  # the rank that the others wait for, with its node; empty if none is slow
    failures: list[Failure]
    checkpoints: list[CheckpointRow]
    checkpoints_error: str | None  # why they can't be listed


def trial_in_full(reader: ExperimentReader, number: int) -> TrialInFull:
    """A trial as its page and the command show it."""
    with reader.lock:
        found = _recorded(reader, reader.trials[number])
    try:
        found["checkpoints"] = [each.to_json() for each in list_checkpoints(reader.directory, number)]
    except (StorageError, OSError) as error:
        found["checkpoints_error"] = str(error)
    return found


def _recorded(reader: ExperimentReader, trial: TrialRecord) -> TrialInFull:
    ranked, best = reader.ranked(), reader.best()
    return {
        **trial.to_json(),
        "rank": ranked.index(trial) + 1 if trial in ranked else None,
        "of": len(ranked),
        "drawn": trial.drawn,
        "repeated": reader.mean_of_repeats(trial.id),
        "lineage": lineage(reader.trials, trial.id),
        "best": None
        if best is None
        else {
            "trial": best.id,
            "metric": reader.value_of(best),
            "best_by": reader.valued_by(best),
            "hparams": best.hparams,
        },
        "varying": reader.varying,
        "trials": len(reader.trials),
        "straggler": trial.straggler,
        "failures": [failure_fields(each) for each in reader.failures if each["trial"] == trial.id],
        "checkpoints": [],
        "checkpoints_error": None,
    }
