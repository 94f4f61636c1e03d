"""How a `Result` is shown: a line in an interpreter, a table of the best trials in a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import pandas as pd

from dray.records.outcomes import ranked, sound, varying_hparams
from dray.text import counted

if TYPE_CHECKING:
    from dray.records.result import Result

SHOWN = 10


def as_text(result: Result) -> str:
    """Name, state, trials and the best; only the path if its files can't be read. Raises nothing."""
    try:
        return f"<dray.Result {_line(result)}>"
    except Exception:  # also those of the user's own search method, which is imported
        return f"<dray.Result {result.path}>"


def as_html(result: Result) -> str:
    """The same, and a table of the best trials with the hyperparameters that differ between them."""
    try:
        line, best, metric = _line(result), _ranked(result).head(SHOWN).copy(), result.config.searcher.first_metric
    except Exception:
        return f"<p>{escape(as_text(result))}</p>"
    varying = varying_hparams(best)
    best[varying] = (
        best[varying].astype(object).where(best[varying].notna(), "–")
    )  # a dash: of other branches of the space
    shown = best[["trial_id", "state", "batches", "best_metric", *varying]].rename(
        columns={"trial_id": "trial", "best_metric": f"best {metric}"}
        | {column: column.removeprefix("hparams.") for column in varying}
    )
    table = "" if best.empty else shown.to_html(index=False, border=0, float_format="{:.5g}".format)
    return f"<div><p><b>{escape(line)}</b><br>{escape(str(result.path))}</p>{table}</div>"


def _line(result: Result) -> str:
    """``12: digits-asha-20261121-175912-ab9a, COMPLETED, 16 trials, best validation_loss 0.031 by trial 7``."""
    overview, best = result.overview, _ranked(result)
    running = "" if overview.ended == overview.trials else f"{overview.ended} of "
    parts = [
        overview.label,
        overview.state,
        f"{running}{counted(overview.trials, 'trial')}{' ended' if running else ''}",
    ]
    if not best.empty:
        row = best.iloc[0]
        parts.append(f"best {overview.metric} {row['best_metric']:.5g} by trial {row['trial_id']}")
    return ", ".join(parts)


def _ranked(result: Result) -> pd.DataFrame:
    """The trials that have validated and did not fail, best first."""
    return sound(ranked(result.trials, result.config.searcher.sign))
