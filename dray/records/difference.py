"""Differences between two experiments, or two trials: config, code, hyperparameters, versions, data, metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from typing_extensions import NotRequired, TypedDict

from dray.code.difference import differences as code_differences
from dray.config.yaml_file import read_mapping
from dray.errors import ExperimentError
from dray.records.comparison import Comparison, compare
from dray.records.directory import ExperimentDirectory
from dray.records.metrics import read_trials
from dray.records.reader import ExperimentReader
from dray.records.trial_record import Number, TrialRecord

MAX_POINTS = 8
"""Most points of training at which the searcher's metric is compared."""
_NOTHING = object()


@dataclass(frozen=True)
class Side:
    """One of the two: an experiment, and the trial that stands for it, None if none has validated."""

    reader: ExperimentReader
    trial: TrialRecord | None

    @classmethod
    def of(cls, reader: ExperimentReader) -> Side:
        """An experiment, for which its best trial stands, or its only one."""
        best = reader.best()
        only = next(iter(reader.trials.values())) if len(reader.trials) == 1 else None
        return cls(reader, only if best is None else best)

    @property
    def directory(self) -> ExperimentDirectory:
        return self.reader.directory

    @property
    def code(self) -> Path:
        """The directory of the code that the trial runs."""
        return self.directory.code_of(None if self.trial is None else self.trial.code)

    @property
    def hparams(self) -> Mapping[str, Any]:
        return {} if self.trial is None else self.trial.hparams

    @property
    def versions(self) -> Mapping[str, str]:
        return {} if self.trial is None else self.trial.versions

    @property
    def data(self) -> Mapping[str, int]:
        """The length of the training data, as far as validations tell it: dray records nothing of its contents."""
        trial = self.trial
        if trial is None or not trial.at or not trial.epochs[-1]:
            return {}
        batches, size = round(trial.at[-1] / trial.epochs[-1]), trial.hparams.get("global_batch_size")
        of_records = {"records_per_epoch": batches * size} if isinstance(size, int) else {}
        return {"batches_per_epoch": batches, **of_records}

    @cached_property
    def curves(self) -> Mapping[tuple[str, str], Mapping[int, float]]:
        """The trial's metrics by kind and name: each value by the batches trained."""
        found: dict[tuple[str, str], dict[int, float]] = {}
        if self.trial is not None:
            rows = read_trials(self.directory.metrics, [self.trial.id])
            for kind, name, at, value in zip(rows["kind"], rows["name"], rows["batches"], rows["value"], strict=True):
                found.setdefault((kind, name), {})[int(at)] = float(value)
        return found


@dataclass(frozen=True, slots=True)
class Compared:
    """A metric of both trials after the same number of batches."""

    kind: str
    name: str
    batches: int
    a: float
    b: float

    @property
    def difference(self) -> float:
        return self.b - self.a


def compared_metrics(a: Side, b: Side) -> list[Compared]:
    """The metrics that both trials have, validations first: each at the last point that they have in common, and the
    searcher's also at points before."""
    found = []
    for kind, name in sorted(a.curves.keys() & b.curves.keys(), key=lambda each: (each[0] != "validation", each[1])):
        one, other = a.curves[kind, name], b.curves[kind, name]
        common = sorted(one.keys() & other.keys())
        is_searched = (kind, name) == ("validation", a.reader.metric)
        found += [
            Compared(kind, name, at, one[at], other[at]) for at in _spread(common, MAX_POINTS if is_searched else 1)
        ]
    return found


def compared_trials(a: Side, b: Side) -> Comparison | None:
    """The difference of the searcher's metric, by the trials' repeats if they have any; None if it is not known."""
    if a.trial is None or b.trial is None:
        return None
    with suppress(ExperimentError):  # it is the same trial, or one has not validated, or the metrics are different
        return compare(a.reader, a.trial.id, b.reader, b.trial.id)
    return None


def _spread(points: Sequence[int], most: int) -> list[int]:
    """At most this many of the points, evenly spread, with the last one."""
    kept = min(most, len(points))
    return [points[len(points) * each // kept - 1] for each in range(1, kept + 1)]


def code_difference(a: Side, b: Side) -> list[str]:
    """The lines of a patch that makes the code of one into the other's."""
    return [line.rstrip("\n") for line in code_differences(a.code, b.code)]


class DifferentSide(TypedDict):
    experiment: str
    trial: int | None
    versions: Mapping[str, Any]
    data: Mapping[str, Any]
    metric: str
    smaller_is_better: bool
    best_metric: NotRequired[Number]
    best_batches: NotRequired[int | None]


class _Field(TypedDict):
    path: str


class DifferentField(_Field, total=False):
    """A field, with its value in each that has it."""

    a: Any
    b: Any


class Differences(TypedDict):
    """What two experiments or trials differ in, but for their code."""

    a: DifferentSide
    b: DifferentSide
    config: list[DifferentField]
    hyperparameters: list[DifferentField]
    versions: list[DifferentField]
    data: list[DifferentField]
    metrics: list[Compared]  # of both after the same number of batches
    comparison: Comparison | None


def differences(a: Side, b: Side) -> Differences:
    """All of it. What only one of them has recorded is a difference too, except for versions and data, which may be
    unknown."""
    return {
        "a": _side(a),
        "b": _side(b),
        "config": config_difference(a.directory, b.directory),
        "hyperparameters": list(_fields(a.hparams, b.hparams, "")),
        "versions": list(_fields(a.versions, b.versions, "")) if a.versions and b.versions else [],
        "data": list(_fields(a.data, b.data, "")) if a.data and b.data else [],
        "metrics": compared_metrics(a, b),
        "comparison": compared_trials(a, b),
    }


def _side(side: Side) -> DifferentSide:
    trial, reader = side.trial, side.reader
    found: DifferentSide = {
        "experiment": reader.name,
        "trial": None if trial is None else trial.id,
        "versions": side.versions,
        "data": side.data,
        "metric": reader.metric,
        "smaller_is_better": reader.sign == 1,
    }
    return (
        found if trial is None else {**found, "best_metric": reader.value_of(trial), "best_batches": trial.best_batches}
    )


def config_difference(a: ExperimentDirectory, b: ExperimentDirectory) -> list[DifferentField]:
    """The fields in which the configs differ; a mapping that only one of them has is one field."""
    return list(_fields(read_mapping(a.config_file), read_mapping(b.config_file), ""))


def _fields(a: Any, b: Any, path: str) -> Iterator[DifferentField]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in {**a, **b}:
            yield from _fields(a.get(name, _NOTHING), b.get(name, _NOTHING), f"{path}.{name}".removeprefix("."))
    elif a != b:
        found: DifferentField = {"path": path}
        if a is not _NOTHING:
            found["a"] = a
        if b is not _NOTHING:
            found["b"] = b
        yield found
