"""How a `Result` is shown: a line in an interpreter, a table of the best trials in a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from dray.text import counted, shown

if TYPE_CHECKING:
    from dray.records.result import Result

SHOWN = 10


def as_text(result: Result) -> str:
    """Name, state, trials and the best; only the path if its files can't be read. Raises nothing."""
    try:
        return f"<dray.Result {_line(result)}>"
    except Exception:
        return f"<dray.Result {result.path}>"


def as_html(result: Result) -> str:
    """The same, and a table of the best trials with the hyperparameters that differ between them."""
    try:
        line, reader = _line(result), result.reader
    except Exception:
        return f"<p>{escape(as_text(result))}</p>"
    varying = reader.varying
    rows = [
        [each.id, each.state, each.batches, each.best_metric, *(each.hparams.get(name) for name in varying)]
        for each in reader.eligible()[:SHOWN]
    ]
    names = ["trial", "state", "batches", f"best {reader.metric}", *varying]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(shown(cell))}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    return f"<div><p><b>{escape(line)}</b><br>{escape(str(result.path))}</p>{table}</div>"


def _line(result: Result) -> str:
    """``12: digits-asha-20261121-175912-ab9a, COMPLETED, 16 trials, best validation_loss 0.031 by trial 7``."""
    seen = result.overview
    ended = "" if seen.ended == seen.trials else f"{seen.ended} of "
    parts = [seen.label, seen.state, f"{ended}{counted(seen.trials, 'trial')}{' ended' if ended else ''}"]
    if seen.best is not None:
        parts.append(f"best {seen.metric} {shown(seen.best)} by trial {seen.best_trial}")
    return ", ".join(parts)
