"""What ``dray experiment describe`` prints of an experiment, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from dray.cli import server, show
from dray.cli.reader import ExperimentReader
from dray.records.hparams import flatten
from dray.serve.messages import to_json
from dray.text import counted, duration

if TYPE_CHECKING:
    from dray.records.overview import Overview

_FRONT_SHOWN = 20


def overview(each: Overview) -> dict[str, Any]:
    """An experiment's overview, as JSON."""
    return {
        "name": each.name,
        "number": each.number,
        "path": each.path,
        "title": each.title,
        "state": each.state,
        "why": each.why or None,
        "trials": each.trials,
        "ended": each.ended,
        "failed": each.failed,
        "max_trials": each.max_trials,
        "metric": each.metric or None,
        "best_metric": each.best,
        "best_trial": each.best_trial,
        "front": list(each.front) or None,
        "began": show.iso(each.began),
        "last": show.iso(each.last),
        "ran_s": each.ran_s,
    }


def as_json(read: ExperimentReader) -> dict[str, Any]:
    """An experiment's description, as JSON."""
    from dray.records.outcomes import nan_since_by_trial
    from dray.records.rungs import rung_estimates

    failures = _failures(read.records)
    seen, submitted = server.seen(read.stored.overview())
    return {
        **overview(seen),
        "submitted": None if submitted is None else to_json(submitted),
        "smaller_is_better": read.config.searcher.sign == 1,
        "states": Counter(row["state"] for row in read.trials.values()),
        "best": _best(read),
        "front": _front(read),
        "diverged": nan_since_by_trial(read.result.trials),
        "restarts": sum(failure["again"] for failure in failures),
        "failures": failures,
        "rungs": [asdict(each) for each in rung_estimates(read.config, read.records)],
        "config": read.config.to_dict(),
    }


def describe(read: ExperimentReader) -> None:
    """Print an experiment's description."""
    from dray.display.best_trials import best_trials
    from dray.records.outcomes import divergence_summary, failure_summary, no_best_reason
    from dray.records.rungs import rung_estimates

    seen, submitted = server.seen(read.stored.overview())
    counts, best = Counter(row["state"] for row in read.trials.values()), _best(read)
    searcher = read.config.searcher
    order = "smaller is better" if searcher.sign == 1 else "larger is better"
    compared = [f"{searcher.first_metric}, {order}"]
    if searcher.objectives is not None:
        compared = list(map(str, searcher.objectives.metrics))
    of_all = f"{seen.ended} of {seen.max_trials or seen.trials} ended"
    words = {"INVALID_HP": "with invalid hyperparameters"}
    if seen.state in ("STOPPED", "ERROR"):
        words |= {"RUNNING": "interrupted"}
    states = ", ".join(f"{count} {words.get(state, state.lower())}" for state, count in counts.items())
    failed = failure_summary(row["state"] for row in read.trials.values())
    show.fields(
        [
            ("experiment", f"{seen.label}  {seen.state}"),
            ("error", show.red(seen.why)),
            ("failed", show.red(failed)),
            ("diverged", show.red(divergence_summary(read.result.trials))),
            ("description", read.config.description),
            ("labels", ", ".join(read.config.labels)),
            ("tags", "" if submitted is None else ", ".join(submitted.tags)),
            ("notes", "" if submitted is None else submitted.notes),
            ("stored in", seen.path),
            ("checkpoints in", "" if read.stored.directory.storage.is_local else str(read.stored.directory.storage)),
            ("search", f"{searcher.name} on {'; '.join(compared)}"),
            ("rungs", "\n".join(each.sentence(searcher.unit) for each in rung_estimates(read.config, read.records))),
            ("each trial on", read.config.resources.share),
            ("started", f"{show.clock(seen.began, exact=True)}, ran for {duration(seen.ran_s)}"),
            ("trials", f"{of_all}: {states}" if counts else of_all),
            (
                "best",
                no_best_reason(read.ranked, searcher.first_metric)
                if best is None
                else _best_line(best, searcher.first_metric),
            ),
            ("Pareto front", _front_line(_front(read))),
            ("checkpoint", "" if best is None else best["checkpoint"] or "none"),
            ("failures", "\n".join(_failure_lines(_failures(read.records)))),
            ("resume with", f"dray experiment resume {read.stored.where}" if seen.state == "STOPPED" else ""),
        ]
    )
    if not read.ranked.empty:
        typer.echo()
        width = show.console().width
        show.lines(best_trials(read.result, searcher.first_metric, searcher.sign, width=width))


def _best(read: ExperimentReader) -> dict[str, Any] | None:
    if (trial := read.best) is None:
        return None
    batches = read.best_batches[trial]
    return {
        "trial": trial,
        "metric": read.trials[trial]["best_metric"],
        "batches": batches,
        "hparams": read.hparams[trial],
        "checkpoint": read.checkpoint(trial),
    }


def _front(read: ExperimentReader) -> list[dict[str, Any]] | None:
    """The Pareto front, the best in the first objective first; None if the search has one metric."""
    if (objectives := read.config.searcher.objectives) is None:
        return None
    there = read.ranked[read.ranked["front"].eq(1)] if not read.ranked.empty else read.ranked
    names = list(dict.fromkeys(objectives.names))
    return [
        {"trial": int(row["trial_id"])} | {name: row[f"metrics.{name}"] for name in names}
        for _, row in there.iterrows()
    ]


def _front_line(front: Sequence[Mapping[str, Any]] | None) -> str:
    if not front:
        return ""
    shown = ", ".join(str(each["trial"]) for each in front[:_FRONT_SHOWN])
    more = f" and {len(front) - _FRONT_SHOWN} more" if len(front) > _FRONT_SHOWN else ""
    return f"{counted(len(front), 'trial')}: {shown}{more}"


def _best_line(best: Mapping[str, Any], metric: str) -> str:
    what = f"trial {best['trial']}: {metric} {show.shown(best['metric'])} after {best['batches']} batches"
    return f"{what}\n{show.shown(flatten(best['hparams']))}"


def _failures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    from dray.records.logs import failure_records

    return [
        {
            "trial": record["trial"],
            "again": record["event"] == "restarted",
            "why": record.get("why"),
            "kept": record.get("kept"),
            "where": record.get("where") or None,
            "batches": record.get("batches"),
            "error": record.get("error"),
            "time": show.iso(record.get("time")),
        }
        for record in failure_records(records)
    ]


def _failure_lines(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for all failures that came from the same line of the user's code."""
    from dray.records.logs import grouped_failures, short_error, where

    lines = []
    for kind in grouped_failures(failures):
        place = where(kind[-1])
        what = short_error(kind[-1]["error"])[0] + (f" ({place})" if place else "")
        times = Counter(failure["trial"] for failure in kind)
        some = ", ".join(f"{trial}" + (f" {count}x" if count > 1 else "") for trial, count in times.most_common(5))
        more = f" and {len(times) - 5} more" if len(times) > 5 else ""
        kept = {failure["kept"] for failure in kind if failure["kept"]}
        still = f"; in the extension, so still {' or '.join(sorted(kept))}" if kept else ""
        lines.append(f"trial {some}{more}: {what}{still}")
    return lines
