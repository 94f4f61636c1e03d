"""What trials reported: with dray, read from an experiment's directory; with Determined, as `reference.py` wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import dray

Numbers = dict[str, float]
KINDS = ("batches", "training", "validation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The reports of one trial.

    Attributes:
        batches: numbers of each batch, counted from 1.
        training: means over the batches since the last report, and what reducers make of them, by the batches trained.
        validation: numbers of each validation, by the batches trained.
    """

    batches: dict[int, Numbers]
    training: dict[int, Numbers]
    validation: dict[int, Numbers]

    @classmethod
    def of_json(cls, raw: Mapping[str, Any]) -> Told:
        return cls(**{kind: {int(n): row for n, row in raw[kind].items()} for kind in KINDS})


def with_dray(path: Path, trial: int) -> Told:
    """What a trial of an experiment reported."""
    table = dray.Result(path).metrics
    table = table[table["trial_id"] == trial]
    rows: dict[str, dict[int, Numbers]] = {"training": {}, "validation": {}}
    for row in table.itertuples():
        if row.kind in rows:
            rows[row.kind].setdefault(int(row.batches), {})[row.name] = row.value
    return Told(batches=_each_batch(rows["training"], path / f"trial_{trial}"), **rows)


def _each_batch(reported: dict[int, Numbers], trial_dir: Path) -> dict[int, Numbers]:
    """A program's own reports, one a batch. A Trainer's are means; each batch's are where TensorBoard shows them."""
    if reported.keys() == set(range(1, len(reported) + 1)):
        return reported
    return _scalars(trial_dir / "tensorboard", {name for numbers in reported.values() for name in numbers})


def _scalars(directory: Path, names: Iterable[str]) -> dict[int, Numbers]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # here: it takes a second

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[int, Numbers] = {}
    for name in names:
        scalars = events.Scalars(f"Determined/{name}")
        if scalars[0].step == 0:  # a reducer's are later, at the ends of periods
            for event in scalars:
                found.setdefault(event.step + 1, {})[name] = event.value
    return found


def difference(mine: Mapping[int, Numbers], theirs: Mapping[int, Numbers]) -> float:
    """The largest relative difference, in single precision, of any number that both have, up to where mine end.

    Raises:
        AssertionError: mine lack a step, or have no number of one.
    """
    steps = [step for step in sorted(theirs) if step <= max(mine)]
    assert set(steps) <= mine.keys()
    return max((_difference(mine[step], theirs[step]) for step in steps), default=0.0)


def _difference(mine: Numbers, theirs: Numbers) -> float:
    shared = mine.keys() & theirs.keys()
    assert shared, f"{sorted(mine)} and {sorted(theirs)} have no name in common"
    pairs = [(np.float32(mine[name]), np.float32(theirs[name])) for name in shared]
    return float(max(abs(a - b) / max(abs(b), np.float32(1e-3)) for a, b in pairs))
