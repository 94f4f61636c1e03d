"""The table of the best trials, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from dray.records.outcomes import ranked, sound, varying_hparams
from dray.text import counted

if TYPE_CHECKING:
    from dray.records.result import Result

SHOWN_TRIALS = 10


def best_trials(result: Result, metric: str, sign: int, *, width: int) -> list[str]:
    """The best trials, best first, as lines of a table, with as many hyperparameters and other metrics as fit. Trials
    that failed are left out. No lines if no other has validated."""
    there = ranked(result.trials, sign)  # trials that have not started have no hyperparameters yet
    validated = sound(there)
    if validated.empty:
        return []
    compared = [str(name).removeprefix("metrics.") for name in there.columns if str(name).startswith("metrics.")]
    others = _other_metrics(result, metric)
    top, at_best = validated.head(SHOWN_TRIALS), result.best_batches()
    columns = {
        "trial": [str(trial) for trial in top["trial_id"]],
        "state": [str(s).lower() for s in top["state"]],
        "batches": [str(at_best[trial]) for trial in top["trial_id"]],
        metric: list(map(_shown, top["best_metric"])),
    }
    heading = f"best trials by {metric}:"
    if compared:
        heading = f"best trials (front 1 is the Pareto front, {counted((validated['front'] == 1).sum(), 'trial')}):"
        columns = {name: columns[name] for name in ("trial", "state", "batches")}
        columns["front"] = list(map(str, top["front"]))
        columns |= {name: list(map(_shown, top[f"metrics.{name}"])) for name in compared}
        others = others.drop(columns=[name for name in compared if name in others])
    if top["nan_since"].notna().any():
        columns["NaN since"] = top["nan_since"].astype("string").fillna("").tolist()
    more = {
        # A dash where a trial has no such hyperparameter: those of another branch of the space.
        name.removeprefix("hparams."): [
            "–" if value is None or value != value else _shown(value) for value in top[name]
        ]
        for name in varying_hparams(there)
    }
    for name in others.columns:
        more.setdefault(name, [_shown(others[name].get(trial)) for trial in top["trial_id"]])
    left_out = []
    for name, cells in more.items():
        if sum(_width(each, heads) + 2 for each, heads in {**columns, name: cells}.items()) - 2 <= width:
            columns[name] = cells
        else:
            left_out.append(name)
    lines = [heading]
    widths = [_width(name, cells) for name, cells in columns.items()]
    for row in [tuple(columns), *zip(*columns.values(), strict=True)]:
        lines.append("  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)))
    if left_out:
        lines.append(f"(not shown: {', '.join(left_out)})")
    return lines


def _width(heading: str, cells: Sequence[str]) -> int:
    return max(map(len, [heading, *cells]))


def _other_metrics(result: Result, metric: str) -> pd.DataFrame:
    """The other validation metrics at each trial's best validation: a column for each metric, by trial."""
    rows = result.metrics
    rows = rows[rows["kind"] == "validation"]
    best = result.best_batches()
    at_best = rows[rows["batches"] == rows["trial_id"].map(best)]
    return at_best[at_best["name"] != metric].pivot(index="trial_id", columns="name", values="value")


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
