"""The output of ``dray experiment list`` and ``describe``, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import typer

from dray.cli import server, show
from dray.cli.errors import BadUse
from dray.cli.reader import ReadExperiment, journal, last_values
from dray.records.overview import ExperimentState, Overview
from dray.serve.client import Server
from dray.serve.control import ACTIVE, submitted_from
from dray.serve.control import ExperimentState as ServerState
from dray.text import counted, duration, fields_of, printable, shown, some

if TYPE_CHECKING:
    from dray.records.local_runs import LocalRun
    from dray.records.reader import ExperimentReader
    from dray.records.trial_record import TrialRecord

STATES = {*get_args(ExperimentState), *get_args(ServerState)}
"""The states of experiments, without and with a server."""
_FRONT_SHOWN = 20
_ALERTS_SHOWN = 10


def show_all(where: str | None, *, states: Sequence[str] = (), limit: int | None = None, json: bool) -> None:
    """Print the experiments in a directory or store; None: in the results directory, or on the server of
    ``DRAY_SERVER``.

    Args:
        states: only those in one of these states; () for all.
        limit: only so many, the newest.
    """
    if unknown := set(states) - STATES:
        raise BadUse(f"--state {sorted(unknown)[0]}: must be one of {', '.join(sorted(STATES))}")
    up = Server.find() if where is None else None
    submitted: dict[str, Mapping[str, Any]] = {}
    if up is None or up.is_here:
        from dray.records.listing import list_experiments

        found = list_experiments(where)
    if up is not None:
        rows = up.experiments()
        submitted = {row["name"]: row["submitted"] for row in rows if row["submitted"]}
        if not up.is_here:
            found = list(map(Overview.from_json, rows))
        else:
            there = [(each, submitted.get(each.name)) for each in found]
            found = [each if of is None else each.on_server(of["state"], of["error"]) for each, of in there]
    there_are = bool(found)
    found = [each for each in found if not states or each.state in states]
    older = 0 if limit is None else max(0, len(found) - limit)
    found = found[older:]
    if json:
        from dray.serve.described import listed

        there = [(each, submitted.get(each.name)) for each in found]
        show.as_json([listed(each.name, each, None if of is None else submitted_from(of)) for each, of in there])
        return
    if found:
        _table(found, submitted, with_slots=up is not None)
    for each in found:
        if each.state == "DAMAGED":
            typer.echo(f"{each.name} can't be read: {each.why}", err=True)
        elif each.state in (*ACTIVE, "STOPPED") and each.why:
            typer.echo(f"{each.name}: {each.why}", err=True)
    if older:
        typer.echo(f"{counted(older, 'older one')} {'is' if older == 1 else 'are'} not shown", err=True)
    if there_are and not found:
        typer.echo(f"no experiments are {' or '.join(states)}", err=True)
    elif not found:
        from dray.records.directory import results_root

        typer.echo(f"no experiments in {where or results_root()} yet", err=True)


def _table(found: list[Overview], submitted: Mapping[str, Mapping[str, Any]], *, with_slots: bool) -> None:
    rows: list[list[object]] = []
    for each in found:
        failed = f", {each.failed} failed" if each.failed else ""
        trials = f"{each.ended}/{each.total}{failed}"
        slots = [submitted.get(each.name, {}).get("slots") or None] if with_slots else []
        best = [each.method, each.best_metric, each.metric, show.clock(each.began)]
        rows.append([each.number, each.name, each.state, *slots, trials, *best])
    headings = ["#", "name", "state", *(["slots"] if with_slots else [])]
    headings += ["trials", "method", "best", "metric", "started"]
    if any(each.left_s is not None for each in found):
        headings.append("left")
        rows = [[*row, _left(each)] for row, each in zip(rows, found, strict=True)]
    if any(each.budget for each in found):
        headings.append("budget")
        rows = [[*row, each.usage] for row, each in zip(rows, found, strict=True)]
    owners = [submitted.get(each.name, {}).get("owner", "") for each in found]
    if any(owners):
        headings.append("owner")
        rows = [[*row, owner] for row, owner in zip(rows, owners, strict=True)]
    show.table(headings, rows, left=["name", "state", "method", "metric", "left", "budget", "owner"])


def _left(each: Overview) -> str:
    from dray.text import rough_time

    return "" if each.left_s is None else f"about {rough_time(each.left_s)}"


def as_json(read: ReadExperiment) -> dict[str, Any]:
    from dray.records.failures import failure_groups
    from dray.records.rungs import rung_estimates
    from dray.serve.described import described

    reader = read.reader
    records = journal(read.stored)[: reader.records]  # it may have grown since
    return {
        **fields_of(described(reader, reader.overview(), server.submitted_to(reader.overview()))),
        "best": _best(read, reader.best()),
        "lowest": _best(read, reader.lowest(), own=True),
        "pareto_front": _front(read),
        "restarts": sum(failure["event"] == "restarted" for failure in reader.failures),
        "failure_groups": failure_groups(reader.failures),
        "rungs": rung_estimates(reader.config, records),
        "config": read.stored.directory.config().to_dict(),
    }


def describe(read: ReadExperiment) -> None:
    from dray.display.best_trials import best_trials
    from dray.records.rungs import rung_estimates
    from dray.serve.described import listed, with_standing

    reader = read.reader
    records = journal(read.stored)[: reader.records]  # it may have grown since
    submitted = server.submitted_to(reader.overview())
    seen = listed(reader.name, reader.overview(), submitted)
    best, config, searcher = _best(read, reader.best()), reader.config, reader.config.searcher
    order = "smaller is better" if reader.sign == 1 else "larger is better"
    compared = [f"{reader.metric}, {order}"]
    if searcher.objectives is not None:
        compared = list(map(str, searcher.objectives.metrics))
    of_all = f"{seen.ended} of {seen.total} ended"
    left = seen.left_s is not None and f", {_left(seen)} left"
    states = reader.state_summary()
    if seen.state in ("STOPPED", "ERROR") or seen.reason:
        states = states.replace(" running", " interrupted")
    storage, front, best_line = read.stored.directory.storage, reader.front(), reader.no_best_reason()
    if best is not None:
        best_line = _result(reader, best)
    lowest = _best(read, reader.lowest(), own=True)
    now = with_standing(reader, seen).standing.sentence
    resumes = seen.state == "STOPPED" and not reader.lost_records()
    show.fields(
        [
            ("experiment", f"{seen.label}  {seen.state}"),
            ("now", now),
            ("ended", seen.reason),
            ("error", "" if seen.why is None or seen.why in now else show.red(seen.why)),
            ("waits", "" if submitted is None or submitted.slots else submitted.why),
            ("failed", show.red(reader.failure_summary())),
            ("warning", seen.unread),
            ("diverged", show.red(reader.divergence_summary())),
            ("slow ranks", reader.straggler_summary()),
            ("description", config.description),
            ("labels", ", ".join(config.labels)),
            ("submitted by", "" if submitted is None or not submitted.owner else f"token {submitted.owner}"),
            ("tags", "" if submitted is None else ", ".join(submitted.tags)),
            ("notes", "" if submitted is None else submitted.notes),
            ("stored in", seen.path),
            ("checkpoints in", "" if storage.is_local else str(storage)),
            ("search", f"{searcher.name} on {'; '.join(compared)}"),
            ("rungs", "\n".join(each.sentence(searcher.unit) for each in rung_estimates(config, records))),
            ("each trial on", config.resources.share),
            ("started", f"{show.clock(seen.began, exact=True)}, ran for {duration(seen.ran_s)}{left or ''}"),
            ("budget", seen.usage),
            ("trials", f"{of_all}: {states}" if states else of_all),
            ("best", best_line),
            ("Pareto front", front and f"{counted(len(front), 'trial')}: {some(front, _FRONT_SHOWN)}"),
            ("checkpoint", "" if best is None else best["checkpoint"] or show.red(best["checkpoint_error"])),
            ("lowest" if reader.sign == 1 else "highest", "" if lowest is None else _result(reader, lowest)),
            ("failures", "\n".join(_failure_lines(reader.failures))),
            ("processes", "\n".join(reader.new_processes)),
            ("alerts", "\n".join(map(_alert_line, reader.alerts[-_ALERTS_SHOWN:]))),
            ("next", reader.next_summary() if seen.reason else ""),
            ("resume with", f"dray experiment resume {read.stored.typed}" if resumes else ""),
        ]
    )
    if reader.ranked():
        typer.echo()
        show.lines(best_trials(reader, width=show.console().width))


def _result(reader: ExperimentReader, best: Mapping[str, Any]) -> str:
    from dray.records.repeats import interval_text
    from dray.records.trial_record import flatten

    at = f"{best['best_batches']} of {counted(best['batches'], 'batch')}"
    what, after = f"trial {best['trial']}: {reader.metric}", f"after {at}"
    if (mean := best["repeated"]) is not None:
        run = f"{shown(best['checkpoint_metric'])} {after} in its best run"
        what += f" {interval_text(mean)}, {best['best_by']}; {run}"
    else:
        what += f" {shown(best['metric'])} {after}{', from one seed' if reader.finalists() else ''}"
    return f"{what}\n{shown(flatten(best['hparams']))}"


def _best(read: ReadExperiment, trial: TrialRecord | None, *, own: bool = False) -> dict[str, Any] | None:
    """A trial by the value that ranks it, or by that of its `own` run."""
    if trial is None:
        return None
    run = trial if own else read.reader.best_run(trial.id)
    return {
        "trial": trial.id,
        "metric": trial.best_metric if own else read.reader.value_of(trial),
        "best_by": "one seed" if own else read.reader.valued_by(trial),
        "checkpoint_metric": run.best_metric,
        "batches": run.batches,
        "best_batches": run.best_batches,
        "hparams": trial.drawn,
        **best_checkpoint(read, run),
        "repeated": None if own else read.reader.mean_of_repeats(trial.id),
    }


def best_checkpoint(read: ReadExperiment, run: TrialRecord) -> dict[str, str | None]:
    """The checkpoint of a run's best validation, or why it can't be used."""
    from dray.records.checkpoints import NoCheckpoint, choose

    try:
        return {"checkpoint": choose(read.stored.directory, run), "checkpoint_error": None}
    except NoCheckpoint as error:
        return {"checkpoint": None, "checkpoint_error": str(error)}


def _front(read: ReadExperiment) -> list[dict[str, Any]] | None:
    """The Pareto front, the best in the first objective first; None if the search has one metric."""
    reader = read.reader
    if not reader.is_pareto:
        return None
    return [{"trial": trial} | reader.trials[trial].best_metrics for trial in reader.front()]


def _failure_lines(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each group of failures from the same line of the user's code."""
    from dray.records.logs import grouped_failures, short_error, where

    lines = []
    for kind in grouped_failures(failures):
        place = where(kind[-1])
        what = short_error(kind[-1].get("error"))[0] + (f" ({place})" if place else "")
        times = Counter(failure["trial"] for failure in kind)
        trials = [f"{trial}" + (f" {count}x" if count > 1 else "") for trial, count in times.most_common()]
        kept = {failure["kept"] for failure in kind if failure.get("kept")}
        still = f"; in the extension, so still {' or '.join(sorted(kept))}" if kept else ""
        lines.append(f"trial {some(trials, 5)}: {what}{still}")
    return lines


def _alert_line(alert: Mapping[str, Any]) -> str:
    """What people were told, and why they were not."""
    unsent = f" (not sent: {alert['error']})" if alert["error"] else ""
    return f"{show.clock(alert['time'], exact=True)} {printable(alert['text'])}{unsent}"


def local_details(run: LocalRun) -> dict[str, Any]:
    """The fields of a local run's description that its overview does not have, as JSON."""
    return {
        "batches": max((row["batches"] for row in run.rows), default=0),
        "metrics": last_values(run.metrics()),
        "checkpoints": [{"batches": batches, "path": path} for batches, path in run.checkpoints],
    }


def describe_local(run: LocalRun, overview: Overview) -> None:
    found = local_details(run)
    resumable = found["checkpoints"] and overview.state != "COMPLETED"
    resume = f'fit(..., latest_checkpoint="{found["checkpoints"][0]["path"]}")' if resumable else ""
    if resumable and run.searcher:  # it has a config; of a script it may be one of its own
        resume = f"dray experiment create ... --local --path {run.path}\nin a script: {resume}"
    best = "" if run.best is None else f"{overview.metric} {shown(run.best[0])} after {counted(run.best[1], 'batch')}"
    show.fields(
        [
            ("local run", f"{overview.name}  {overview.state}"),
            ("failed with", printable(overview.failure or "")),
            ("stored in", overview.path),
            ("started", f"{show.clock(overview.began, exact=True)}, ran for {duration(overview.ran_s)}"),
            ("trained for", counted(found["batches"], "batch")),
            ("slow rank", run.straggler),
            ("best", best),
            ("last metrics", "\n".join(f"{name} = {shown(value)}" for name, value in found["metrics"].items())),
            ("checkpoints", "\n".join(each["path"] for each in found["checkpoints"])),
            ("resume with", resume),
        ]
    )
