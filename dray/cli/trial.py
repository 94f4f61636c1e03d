"""``dray trial``."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from dray.cli import server, show
from dray.cli.arguments import (
    ExperimentArg,
    Follow,
    Json,
    JsonLine,
    TailArg,
    TrialArg,
    TrialOrBestArg,
    check_follow,
    values_by_name,
)
from dray.cli.errors import BadUse, exit_on_signals
from dray.cli.reader import last_values, read_experiment
from dray.code.patch import MAX_PATCH_BYTES, BadPatch, decoded, read_patch
from dray.errors import NoExperiment
from dray.serve.verbs.find import handle
from dray.serve.verbs.handle import Handle
from dray.text import counted, printable, shown

if TYPE_CHECKING:
    import pandas as pd

    from dray.records.directory import ExperimentDirectory
    from dray.records.trial_record import TrialRecord

DIFF_LINES = 200  # most lines of a diff that are printed

app = typer.Typer(
    help="Inspect trials: their hyperparameters, metrics and logs; stop, fork and add trials.", no_args_is_help=True
)
Given: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Hyperparameter of the new trial; can be repeated."),
]


@app.command(name="list")
def list_(
    experiment: ExperimentArg,
    best: Annotated[
        bool,
        typer.Option("--best", help="List only trials that have validated, the best first and failed ones last."),
    ] = False,
    state: Annotated[
        str | None,
        typer.Option(
            help="List only trials in this state: PENDING, RUNNING, PAUSED, COMPLETED, PRUNED, CANCELED, ERRORED, "
            "INVALID_HP or OUT_OF_MEMORY.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the trials of an experiment with the hyperparameters that differ between them.

    \b
    dray trial list latest --best
    dray t list digits --state ERRORED --json | jq '.[].trial'
    """
    with read_experiment(experiment) as read:
        from dray.records.timeline import gpu_types

        reader = read.reader
        trials = reader.ranked() if best else list(reader.trials.values())
        if state is not None:
            if state.upper() not in reader.states:
                known = ", ".join(sorted(reader.states)) or "none"
                raise BadUse(f"no trial of {read.stored.name} is in state {state!r}; the trials' states are: {known}")
            trials = [each for each in trials if each.state == state.upper()]
        gpus = gpu_types(read.stored.directory.metrics)
        if json:
            show.as_json([{**each.to_json(), "gpu_type": gpus.get(each.id)} for each in trials])
            return
        space = reader.config.hyperparameters
        names = [
            name
            for name in reader.hparam_names
            if name in reader.varying
            or (len(reader.trials) == 1 and isinstance(space.get(name.partition(".")[0]), Mapping))
        ]
        columns: dict[str, list[object]] = {
            "trial": [each.id for each in trials],
            "state": [each.state for each in trials],
            "batches": [each.batches for each in trials],
            "best at": [each.best_batches for each in trials],
            "last": [_reported(each.metric) for each in trials],
            "best": [each.best_metric for each in trials],
        }
        if any(each.ended_by == "divergence" for each in trials):  # PRUNED too, but not by the search
            columns["ended by"] = [each.ended_by for each in trials]
        if any(each.nan_since is not None for each in trials):
            columns["NaN since"] = [each.nan_since for each in trials]
        columns["restarts"] = [each.restarts for each in trials]
        if any(each.forked_from for each in trials):
            columns["forked from"] = [each.forked_from for each in trials]
        if any(each.repeat_of for each in trials):
            columns["repeat of"] = [each.repeat_of for each in trials]
        if any(each.code for each in trials):
            columns["code"] = [each.code for each in trials]
        if gpus:
            columns["GPU"] = [gpus.get(each.id, "") for each in trials]
        of_all = [{name: each.hparams[name] for name in names if name in each.hparams} for each in trials]
        columns["hyperparameters"] = list(of_all)
        show.table(
            list(columns),
            zip(*columns.values(), strict=True),
            left=["state", "ended by", "forked from", "repeat of", "code", "GPU", "hyperparameters"],
        )


@app.command()
def describe(experiment: ExperimentArg, trial: TrialArg = None, json: Json = False) -> None:
    """Describe a trial: its hyperparameters, metrics, checkpoints, and failures.

    \b
    dray trial describe latest best
    """
    with read_experiment(experiment) as read:
        from dray.records.metrics import read_trials
        from dray.records.reader import nan_since_text
        from dray.records.repeats import interval_text
        from dray.records.timeline import gpu_types
        from dray.records.trial_record import lineage, relatives
        from dray.serve.described import trial_in_full

        directory = read.stored.directory
        trial_ = read.reader.trials[read.trial(trial)]
        checkpoints = read.checkpoints(trial_.id)
        failed = [record for record in read.reader.failures if record["trial"] == trial_.id]
        metrics = last_values(read_trials(directory.metrics, [trial_.id]))
        logs = directory.trial(trial_.id) / "logs"
        mean = read.reader.mean_of_repeats(trial_.id)
        diff, family = _diff(directory, trial_), lineage(read.reader.trials, trial_.id)
        if json:
            show.as_json(
                {
                    **trial_in_full(read.reader, trial_.id),
                    "gpu_type": gpu_types(directory.metrics).get(trial_.id),
                    "metrics": metrics,
                    "diff": diff or None,
                    "logs": None if read.stored.is_copy else str(logs),
                }
            )
            return
        best = ""
        if trial_.best_batches is not None:
            best = f"{shown(trial_.best_metric)} after {counted(trial_.best_batches, 'batch')}"
            if mean is not None:
                best += f", from one seed; {interval_text(mean)} is the {read.reader.valued_by(trial_)}"
        show.fields(
            [
                ("trial", f"{trial_.id} of {read.stored.name}  {trial_.state}"),
                ("forked from", trial_.forked_from),
                ("repeat of", trial_.repeat_of),
                ("forked into", relatives(family["children"])),
                ("repeated by", relatives(family["repeats"])),
                ("code", trial_.code),
                ("hyperparameters", "\n".join(f"{name} = {shown(value)}" for name, value in trial_.hparams.items())),
                ("trained for", counted(trial_.batches, "batch")),
                ("diverged", show.red(nan_since_text(trial_.nan_since))),
                ("slow rank", trial_.straggler),
                (f"best {read.reader.metric}", best),
                ("last metrics", "\n".join(f"{key} = {_reported(value)}" for key, value in metrics.items())),
                ("started", trial_.started and show.clock(trial_.started, exact=True)),
                ("ended", trial_.ended and show.clock(trial_.ended, exact=True)),
                ("checkpoints", "\n".join(each.location.uri for each in checkpoints)),
                ("logs", "" if read.stored.is_copy else str(logs)),
            ]
        )
        if diff:
            lines = printable(diff).splitlines()
            more = f"\n... and {len(lines) - DIFF_LINES} more lines, in {directory.variants / str(trial_.code)}"
            shown_lines = "\n".join(lines[:DIFF_LINES]) + more * (len(lines) > DIFF_LINES)
            typer.echo(f"\nits code differs from the experiment's by:\n{shown_lines}")
        last = None
        for record in failed:
            again = "restarted" if record["event"] == "restarted" else "not restarted"
            if kept := record.get("kept"):
                again = f"not restarted in the extension, so still {kept}"
            error = "the same error as before" if record.get("error") == last else f"\n{record.get('error')}"
            typer.echo(printable(f"\nfailed at {show.clock(record.get('time'), exact=True)}, {again}: {error}"))
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
        from dray.records.logs import followed, trial_lines
        from dray.storage.disk import scratch
        from dray.storage.logs import fetch_logs

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

            def is_running() -> bool:
                read.reader.refresh()  # the trial starts again if the search is extended
                return bool(read.reader.is_running) and not read.reader.trials[number].has_ended

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
            metavar="training|validation|system",
            help="Print only training or validation metrics, or system metrics (system).",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Print only this metric; can be repeated.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Print the metrics of a trial, one line for each batch at which any were reported.

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
    from dray.records.metrics import read_system, read_trials

    run = local_run(experiment)
    if run is not None and trial in (None, "0", "best"):
        return 0, run.metrics(system=system)
    with read_experiment(experiment) as read:
        number, directory = read.trial(trial), read.stored.directory
        if not system:
            return number, read_trials(directory.metrics, [number])
        rows = read_system(directory.metrics)
        return number, rows[rows["trial_id"] == number]


def _diff(directory: ExperimentDirectory, trial: TrialRecord) -> str:
    """What a trial's code changes in the experiment's; "" if it is the same, or its files are not here."""
    with contextlib.suppress(NoExperiment):
        return directory.diff_of(trial.code) if trial.code else ""
    return ""


def _reported(value: float | None) -> str:
    return "NaN" if value is not None and math.isnan(value) else shown(value)


@app.command()
def stop(experiment: ExperimentArg, trial: TrialOrBestArg) -> None:
    """Stop a trial of an experiment; the search continues with the others.

    \b
    dray trial stop latest 9
    """
    with _asked(experiment) as it:
        it.stop_trial(trial)


@app.command()
def fork(
    experiment: ExperimentArg,
    trial: TrialOrBestArg,
    given: Given = None,
    at: Annotated[
        str,
        typer.Option(
            metavar="best|latest|BATCHES",
            help="Checkpoint to begin from: the best, the latest, or the one after this many batches.",
        ),
    ] = "best",
    json: JsonLine = False,
) -> None:
    """Start a trial from a checkpoint of another one, with its hyperparameters except those that are set.

    The search compares the new trial with the others at the rungs above the checkpoint. It does not count for
    max_trials.

    \b
    dray trial fork latest 7 --set lr=0.005
    dray t fork digits best --at latest
    """
    with _asked(experiment, json=json) as it:
        it.fork_trial(trial, at=at, hparams=values_by_name("--set", given))


@app.command()
def add(
    experiment: ExperimentArg,
    given: Given = None,
    patch: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Patch for the experiment's code (git diff, diff -u), which the trial runs; - reads standard input.",
            show_default=False,
        ),
    ] = None,
    code: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory with the code that the trial runs instead.", show_default=False),
    ] = None,
    json: JsonLine = False,
) -> None:
    """Add a trial with the hyperparameters that are set, or with other code.

    The other hyperparameters are drawn at random from the search space, or by the search's sampler if the trial has
    other code. The trial does not count for max_trials.

    \b
    dray trial add latest --set lr=0.005 --set hidden=64
    git diff | dray trial add latest --patch -
    """
    hparams = values_by_name("--set", given)
    if patch is not None and code is not None:
        raise BadUse("give --patch or --code, not both")
    try:
        if patch is None:
            text = None
        else:
            text = decoded(sys.stdin.buffer.read(MAX_PATCH_BYTES + 1)) if str(patch) == "-" else read_patch(patch)
    except BadPatch as error:
        raise BadUse(f"--patch: {error}") from None
    with _asked(experiment, json=json) as it:
        it.add_trial(hparams, patch=text, code=code)


@contextlib.contextmanager
def _asked(experiment: str, *, json: bool = False) -> Iterator[Handle]:
    """An experiment; the answer to a request for a trial is printed, and ends the command as the run here, if any."""
    with show.created(json) as say, exit_on_signals():
        from dray.experiment import requests

        def tell(decided: requests.Decided) -> None:
            is_later = decided["trial"] is None
            say(decided, "" if is_later else requests.told(decided))
            if is_later:
                server.tell(f"requested; carried out when {it.name} runs")

        it = handle(experiment, answered=tell)
        yield it
    if it.ran:
        server.finish(it.read(), it.typed)
