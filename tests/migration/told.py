"""What trials reported: with dray, read from an experiment's directory; with Determined, as `reference.py` wrote it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dray

Numbers = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Of one trial.

    Attributes:
        training: numbers of each batch, counted from 1.
        validation: numbers of each validation, by the batches trained.
    """

    training: dict[int, Numbers]
    validation: dict[int, Numbers]

    @classmethod
    def of_json(cls, raw: Mapping[str, Any]) -> Told:
        return cls(**{kind: {int(n): row for n, row in raw[kind].items()} for kind in ("training", "validation")})


def with_dray(path: Path, trial: int) -> Told:
    """What a trial of an experiment reported."""
    table = dray.Result(path).metrics
    table = table[table["trial_id"] == trial]
    rows: dict[str, dict[int, Numbers]] = {"training": {}, "validation": {}}
    for row in table.itertuples():
        if row.kind in rows:
            rows[row.kind].setdefault(int(row.batches), {})[row.name] = row.value
    # Of a Trainer these are means over periods; each batch's numbers are where TensorBoard shows them.
    names = {name for numbers in rows["training"].values() for name in numbers}
    batches = _scalars(path / f"trial_{trial}" / "tensorboard", names)
    return Told(training=batches or rows["training"], validation=rows["validation"])


def _scalars(directory: Path, names: Container[str]) -> dict[int, Numbers]:
    if not directory.is_dir():
        return {}
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[int, Numbers] = {}
    for tag in events.Tags()["scalars"]:
        name = tag.removeprefix("Determined/")
        if name != tag and name in names:
            for event in events.Scalars(tag):
                found.setdefault(event.step + 1, {})[name] = event.value
    return found


def difference(mine: Mapping[int, Numbers], theirs: Mapping[int, Numbers]) -> float:
    """The largest relative difference, in single precision, of any number that both have, over the shorter's length.

    Raises:
        AssertionError: one has a name or a step that the other has not.
    """
    worst = 0.0
    last = min(max(mine), max(theirs))
    assert [n for n in mine if n <= last] == [n for n in sorted(theirs) if n <= last]
    for step in (n for n in mine if n <= last):
        for name, expected in theirs[step].items():
            if name in mine[step]:
                a, b = np.float32(mine[step][name]), np.float32(expected)
                worst = max(worst, float(abs(a - b) / max(abs(b), np.float32(1e-3))))
    return worst
