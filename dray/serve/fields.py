"""Experiments and failures as the API gives them to readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dray.records.overview import Overview
from dray.serve.control import Submitted
from dray.serve.live import Live
from dray.serve.messages import to_json
from dray.serve.trial import plain


def overview_fields(name: str, overview: Overview | None, submitted: Submitted | None) -> dict[str, Any]:
    """An experiment as the list shows it.

    ``state`` is as in `Overview.on_server` if it was submitted, else as in `Overview`; ``submitted`` is null if it was
    not; times are in Unix time, in s.
    """
    it = Overview(name=name, path="", state="STOPPED") if overview is None else overview
    if submitted is not None:
        it = it.on_server(submitted.state, submitted.error)
    return {
        "name": name,
        "number": it.number,
        "title": it.title or name,
        "path": it.path,
        "state": it.state,
        "why": it.why or None,
        "trials": it.trials,
        "ended": it.ended,
        "failed": it.failed,
        "max_trials": it.max_trials,
        "metric": it.metric or None,
        "best_metric": plain(it.best),
        "best_trial": it.best_trial,
        "began": it.began,
        "last": it.last,
        "ran_s": it.ran_s,
        "submitted": None if submitted is None else to_json(submitted),
    }


def about_fields(live: Live) -> dict[str, Any]:
    """What the page of an experiment shows beside `overview_fields`."""
    best, searcher = live.best(), live.config.searcher
    return {
        "version": live.version,
        "smaller_is_better": live.sign == 1,
        "objectives": [] if searcher.objectives is None else [each.name for each in searcher.objectives.objectives],
        "front": live.front(),
        "searcher": searcher.name,
        "max_length": searcher.length,
        "unit": searcher.unit,
        "description": live.config.description,
        "labels": list(live.config.labels),
        "states": +live.states,
        # In the journal are only the validations that the search decided on.
        "best_metric": None if best is None else best.best_value,
        "best_trial": None if best is None else best.view.id,
        "best_hparams": None if best is None else plain(best.hparams),
        "varying": live.varying,
        "failures": len(live.failures),
    }


def failure_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """A failure of a trial: ``again``: it was restarted after it."""
    return {
        "again": record["event"] == "restarted",
        "why": record.get("why"),
        "where": record.get("where") or None,
        "batches": record.get("batches"),
        "error": record.get("error"),
        "time": record.get("time"),
    }
