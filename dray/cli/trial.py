"""``dray trial``."""

from __future__ import annotations

import contextlib
import json as json_
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dray.cli import show
from dray.cli.arguments import ExperimentArg, Follow, Json, TailArg, TrialArg, check_follow
from dray.cli.errors import BadUse
from dray.cli.reader import ExperimentReader, last_values, read_experiment
from dray.records.hparams import flatten

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(help="Inspect trials: their hyperparameters, metrics and logs.", no_args_is_help=True)


@app.command(name="list")
def list_(
    experiment: ExperimentArg,
    best: Annotated[
        bool,
        typer.Option("--best", help="List the best first, failed trials last, and only those that have validated."),
    ] = False,
    state: Annotated[
        str | None,
        typer.Option(help="List only trials in this state: RUNNING, COMPLETED, ERRORED, ...", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """List the trials of an experiment with the hyperparameters that differ between them.

    \b
    dray trial list latest --best
    dray t list digits --state ERRORED --json | jq '.[].trial'
    """
    with read_experiment(experiment) as read:
        numbers = read.ranked["trial_id"].tolist() if best else list(read.trials)
        if state is not None:
            states = {row["state"] for row in read.trials.values()}
            if state.upper() not in states:
                known = ", ".join(sorted(states)) or "none"
                raise BadUse(f"no trial of {read.stored.name} is in state {state!r}; the trials' states are: {known}")
            numbers = [each for each in numbers if read.trials[each]["state"] == state.upper()]
        if json:
            show.as_json([_trial(read, each) for each in numbers])
            return
        names = _differing(read.hparams.values(), read.config.hyperparameters)
        rows = []
        any_since = any(read.trials[number]["nan_since"] is not None for number in numbers)
        any_gpu = any("gpu_type" in read.trials[number] for number in numbers)
        validated = set(read.validations["trial_id"])
        for number in numbers:
            row = read.trials[number]
            drawn = {name: value for name, value in flatten(read.hparams.get(number, {})).items() if name in names}
            rows.append(
                (
                    number,
                    row["state"],
                    row["batches"],
                    "NaN" if math.isnan(row["metric"]) and number in validated else row["metric"],
                    row["best_metric"],
                    *([row["nan_since"]] if any_since else []),
                    row["restarts"],
                    *([row["gpu_type"]] if any_gpu else []),
                    drawn,
                )
            )
        since, gpu = ["NaN since"] if any_since else [], ["GPU"] if any_gpu else []
        headings = ["trial", "state", "batches", "last", "best", *since, "restarts", *gpu, "hyperparameters"]
        show.table(headings, rows, left=["state", "GPU", "hyperparameters"])


@app.command()
def describe(experiment: ExperimentArg, trial: TrialArg = None, json: Json = False) -> None:
    """Describe a trial: its hyperparameters, metrics, checkpoints, and failures.

    \b
    dray trial describe latest best
    """
    with read_experiment(experiment) as read:
        from dray.records.logs import failure_records
        from dray.records.outcomes import nan_since_text

        number = read.trial(trial)
        about = _trial(read, number)
        checkpoints = read.checkpoints(number)
        failed = [record for record in failure_records(read.records) if record.get("trial") == number]
        rows = read.result.metrics
        metrics = last_values(rows[(rows["trial_id"] == number) & rows["kind"].isin(["training", "validation"])])
        logs = read.stored.directory.trial(number) / "logs"
        if json:
            show.as_json(
                {
                    **about,
                    "metrics": metrics,
                    "checkpoints": [{"batches": each.batches, "path": each.location.uri} for each in checkpoints],
                    "errors": [record.get("error") for record in failed],
                    "logs": None if read.stored.is_copy else str(logs),
                }
            )
            return
        name = read.config.searcher.first_metric
        at = "" if about["best_batches"] is None else f" after {about['best_batches']} batches"
        show.fields(
            [
                ("trial", f"{number} of {read.stored.name}  {about['state']}"),
                (
                    "hyperparameters",
                    "\n".join(f"{key} = {show.shown(v)}" for key, v in flatten(about["hparams"]).items()),
                ),
                ("trained for", f"{about['batches']} batches"),
                ("diverged", show.red(nan_since_text(about["nan_since"]))),
                (f"best {name}", "" if about["best_metric"] is None else f"{show.shown(about['best_metric'])}{at}"),
                ("last metrics", "\n".join(f"{key} = {_reported(value)}" for key, value in metrics.items())),
                ("started", about["started"] and show.clock(_seconds(read, number, "started"), exact=True)),
                ("ended", about["ended"] and show.clock(_seconds(read, number, "ended"), exact=True)),
                ("checkpoints", "\n".join(each.location.uri for each in checkpoints)),
                ("logs", "" if read.stored.is_copy else str(logs)),
            ]
        )
        last = None
        for record in failed:
            again = "restarted" if record["event"] == "restarted" else "not restarted"
            if kept := record.get("kept"):
                again = f"not restarted in the extension, so still {kept}"
            error = "the same error as before" if record.get("error") == last else f"\n{record.get('error')}"
            typer.echo(f"\nfailed at {show.clock(record.get('time'), exact=True)}, {again}: {error}")
            last = record.get("error")


@app.command()
def logs(
    experiment: ExperimentArg,
    trial: TrialArg = None,
    follow: Follow = False,
    tail: TailArg = None,
    rank: Annotated[
        int | None,
        typer.Option(help="Print only the output of this worker; by default, of all.", show_default=False, min=0),
    ] = None,
    json: Json = False,
) -> None:
    """Print the log of a trial: the standard output and standard error of its workers.

    \b
    dray trial logs latest 7 -f
    dray t logs digits best -n 20
    """
    with read_experiment(experiment) as read, contextlib.ExitStack() as stack:
        from dray.records.logs import GrowingFile, followed, trial_lines
        from dray.storage.disk import scratch
        from dray.storage.logs import fetch_logs
        from searchers.journal import Journal

        check_follow(follow, json)
        number = read.trial(trial)
        directory = read.stored.directory
        local, fetched = directory.trial(number) / "logs", stack.enter_context(scratch("logs"))
        if not directory.storage.is_local:
            fetch_logs(directory.storage.child(f"trial_{number}"), local, fetched)
        new = trial_lines(fetched, local, rank=rank)
        lines = new(not follow)
        if json:
            show.as_json(show.last(lines, tail))
            return
        show.lines(show.last(lines, tail))
        if follow:
            journal, ended = GrowingFile(directory.journal), False

            def is_running() -> bool:
                nonlocal ended
                for event in _starts_and_ends(number, journal.new_lines()):
                    ended = event == "exited"  # it starts again if the search is extended
                return not ended and Journal.writer(directory.journal) is not None

            show.lines(followed(new, is_running))
        elif not lines:
            typer.echo(f"trial {number} has printed nothing" + ("" if rank is None else f" on rank {rank}"), err=True)


@app.command()
def metrics(
    experiment: ExperimentArg,
    trial: TrialArg = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="Print only training or validation metrics, or figures of the machine (system).", show_default=False
        ),
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Print only this metric; can be repeated.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Print the metrics of a trial, one line for each point in its training at which any were reported.

    \b
    dray trial metrics latest best --kind validation
    dray t metrics digits 7 --json | jq -c '.[] | [.batches, .name, .value]'
    """
    number, rows = _metrics(experiment, trial, system=kind == "system")
    for column, wanted in (("kind", [kind] if kind else []), ("name", name or [])):
        known = sorted(set(rows[column]))
        for each in wanted:
            if each not in known:
                names = ", ".join(known) or "none"
                raise BadUse(f"trial {number} has no metric of {column} {each!r}; the {column}s are: {names}")
        rows = rows[rows[column].isin(wanted)] if wanted else rows
    if json:
        columns = ["batches", "epochs", "kind", "name", "value", "time"]
        show.as_json([dict(zip(columns, row, strict=True)) for row in rows[columns].itertuples(index=False)])
        return
    if rows.empty:
        typer.echo(f"trial {number} has reported no metrics yet", err=True)
        return
    both = rows["kind"].nunique() > 1
    heading = rows["kind"].str.cat(rows["name"], sep=" ") if both else rows["name"]
    # As text, since a missing value is NaN in the table.
    values = rows["value"].astype(object).where(rows["value"].notna(), "NaN")
    wide = rows.assign(heading=heading, value=values).pivot_table(
        index=["batches", "epochs"], columns="heading", values="value", aggfunc="last", dropna=False, observed=True
    )
    wide = wide.dropna(how="all")
    show.table(
        ["batches", "epochs", *map(str, wide.columns)],
        [(*index, *values) for index, values in zip(wide.index, wide.to_numpy().tolist(), strict=True)],
    )


def _metrics(experiment: str, trial: str | None, *, system: bool) -> tuple[int, pd.DataFrame]:
    from dray.records.lookup import local_run
    from dray.records.metrics import read_system

    run = local_run(experiment)
    if run is not None and trial in (None, "0", "best"):
        return 0, run.metrics(system=system)
    with read_experiment(experiment) as read:
        number = read.trial(trial)
        rows = read_system(read.stored.directory.metrics) if system else read.result.metrics
        return number, rows[rows["trial_id"] == number]


def _trial(read: ExperimentReader, number: int) -> dict[str, Any]:
    row = read.trials[number]
    return {
        "trial": number,
        "state": row["state"],
        "hparams": read.hparams.get(number, {}),
        "batches": row["batches"],
        "metric": _number(row["metric"]),
        "best_metric": _number(row["best_metric"]),
        "best_batches": read.best_batches.get(number),
        "nan_since": row["nan_since"],
        "restarts": row["restarts"],
        "gpu_type": row.get("gpu_type") or None,
        "started": show.iso(_seconds(read, number, "started")),
        "ended": show.iso(_seconds(read, number, "ended")),
    }


def _reported(value: float) -> str:
    return "NaN" if math.isnan(value) else show.shown(value)


def _number(value: Any) -> float | None:
    return None if value != value else float(value)


def _seconds(read: ExperimentReader, number: int, column: str) -> float | None:
    """A time of the table as Unix time; the table's are in UTC, and NaT is none."""
    value = read.trials[number][column]
    return float(value.tz_localize("UTC").timestamp()) if value == value else None


def _differing(hparams: Collection[Mapping[str, Any]], space: Mapping[str, Any]) -> set[str]:
    """The names of hyperparameters that differ between trials, or that only some have; with one trial, all drawn."""
    seen: dict[str, list[str]] = {}
    for values in hparams:
        for name, value in flatten(values).items():
            if isinstance(space.get(name.partition(".")[0]), Mapping):
                seen.setdefault(name, []).append(str(value))
    return {
        name for name, values in seen.items() if len(set(values)) > 1 or len(values) < len(hparams) or len(hparams) == 1
    }


def _starts_and_ends(number: int, lines: list[str]) -> Iterator[str]:
    """A trial's "started" and "exited" events, from lines of the journal."""
    for line in lines:
        if '"started"' in line or '"exited"' in line:  # parsing only these lines is faster
            record = json_.loads(line)
            if record.get("trial") == number and record.get("event") in ("started", "exited"):
                yield record["event"]
