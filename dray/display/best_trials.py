"""The table of the best trials, as lines of text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dray.records.metrics import validated_at
from dray.records.reader import ExperimentReader
from dray.records.repeats import table
from dray.text import counted, shown

SHOWN_TRIALS = 10


def best_trials(reader: ExperimentReader, *, width: int, also: Collection[int] = ()) -> list[str]:
    """The best trials, best first, as lines of a table with as many hyperparameters and metrics as fit, after a table
    of those that were trained again. Failed trials are left out; [] if no other trial has validated.

    Args:
        also: trials that are shown whatever their rank.
    """
    top = reader.eligible()[:SHOWN_TRIALS]
    if not top:
        return []
    top += [each for each in reader.trials.values() if each.id in also and each not in top]
    columns: dict[str, list[object]] = {
        "trial": [each.id for each in top],
        "state": [each.state.lower() for each in top],
        "batches": [each.batches for each in top],
        "best at": [each.best_batches for each in top],
    }
    heading = f"best trials by {reader.metric}:"
    if reader.finalists():
        heading = f"best trials, with the {reader.metric} of their own runs, of one seed:"
    if reader.is_pareto:
        heading = f"best trials (front 1 is the Pareto front, {counted(len(reader.front()), 'trial')}):"
        columns["front"] = [reader.fronts().get(each.id) for each in top]
    compared = list(dict.fromkeys(reader.objectives.names))
    columns |= {name: [each.best_metrics.get(name) for each in top] for name in compared}
    if any(each.nan_since is not None for each in top):
        columns["NaN since"] = [each.nan_since for each in top]
    more: dict[str, list[object]] = {name: [each.hparams.get(name) for each in top] for name in reader.varying}
    best = {each.id: each.best_batches for each in top if each.best_batches is not None}
    for name, values in validated_at(reader.directory.metrics, best).items():
        if name not in compared:
            more.setdefault(name, [values.get(each.id) for each in top])
    cells = {name: list(map(shown, column)) for name, column in columns.items()}
    left_out = []
    for name, column in more.items():
        wider = {**cells, name: list(map(shown, column))}
        if sum(_width(each, of_name) + 2 for each, of_name in wider.items()) - 2 <= width:
            cells = wider
        else:
            left_out.append(name)
    lines = [heading, *_aligned([list(cells), *map(list, zip(*cells.values(), strict=True))])]
    if left_out:
        lines.append(f"(not shown: {', '.join(left_out)})")
    if again := reader.repeats_summary():
        finalists = reader.finalists()
        of_finalists = _aligned(table(finalists, reader.metric)) if finalists else []
        lines = [f"trained again: {again}", *of_finalists, "", *lines]
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in rows]


def _width(heading: str, cells: Sequence[str]) -> int:
    return max(map(len, [heading, *cells]))
