"""``dray experiment``."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

import dray
from dray.cli import description, queue, server, show
from dray.cli.arguments import (
    Changes,
    Config,
    ExperimentArg,
    Follow,
    Json,
    JsonLine,
    ModelDir,
    Output,
    TailArg,
    Traceback,
    check_follow,
    target,
    values_by_name,
)
from dray.cli.errors import FAILED, SOME_FAILED, BadUse, exit_on_signals
from dray.cli.reader import journal, read_experiment
from dray.cli.server import Detach, NoServer
from dray.errors import NoExperiment
from dray.records.overview import COMPLETED
from dray.script import Script
from dray.serve.address import URL
from dray.serve.client import Server
from dray.serve.verbs.find import handle, on_server
from dray.serve.verbs.handle import Handle
from dray.serve.verbs.on_server import OnServer
from dray.text import counted, fields_of, size

app = typer.Typer(help="Create, inspect, stop, resume and extend experiments.", no_args_is_help=True)


@app.command()
def create(
    config: Config,
    model_dir: ModelDir = None,
    changes: Changes = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run one trial in this process, without Ray, for debugging.")
    ] = False,
    path: Annotated[
        Path | None,
        typer.Option(
            "--path",
            help="Directory for the experiment. If it has one already, here or in its object store, continue that one.",
        ),
    ] = None,
    storage_path: Annotated[
        str | None, typer.Option(help="Store checkpoints in this directory, or in s3://BUCKET/PREFIX.")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Print the experiment's log until it ends; the default without --detach."),
    ] = False,
    detach: Detach = False,
    no_server: NoServer = False,
    traceback: Traceback = False,
    json: JsonLine = False,
) -> None:
    """Create an experiment from a config file and run it until it ends.

    If a server is up (see dray serve), submit it to the server and follow it there, unless --local, --path or
    --storage-path is given.

    \b
    dray experiment create asha.yaml .           model code in this directory
    dray experiment create asha.yaml . --local   one trial, for a debugger
    dray experiment create asha.yaml . --detach  submit it to the server
    dray experiment create asha.yaml . --config searcher.max_trials=8
    dray experiment create asha.yaml . --path results/digits   run it again to continue
    """
    if local and storage_path is not None:
        raise BadUse("--storage-path can't be used with --local, which stores everything in one directory; use --path")
    if detach and follow:
        raise BadUse("--detach does not follow; give only one of --detach and --follow")
    here = local or no_server or path is not None or storage_path is not None
    code = model_dir or config.parent
    if not here and (at := Server.find()) is not None:
        server.submit(at, config, changes or (), code, detach=detach, json=json)
        return
    given = {"--local": local, "--path": path, "--storage-path": storage_path, "--no-server": no_server}
    _check_not_detached(detach, *(option for option, value in given.items() if value))
    os.environ.pop(URL, None)  # else `Experiment` would submit it
    with nullcontext() if local else exit_on_signals():
        from dray.config.load import load_config

        _log_info()
        checked = load_config(config, changes or ())
        if local:
            from dray.code.load import check_entrypoint_file

            check_entrypoint_file(checked.entrypoint, code)  # before torch is imported
            from dray.experiment.local import run_local
            from dray.records.listing import local_overview
            from dray.records.local_runs import LocalRun

            again = ["dray", "experiment", "create", str(config), *([] if model_dir is None else [str(model_dir)])]
            again += [word for change in changes or () for word in ("--config", change)]
            with show.created(json) as answer:
                directory = run_local(checked, code, path=path, command=shlex.join([*again, "--local"]))
                answer(local_overview(LocalRun(directory)), f"results: {directory}")
        else:
            # Printed first, because importing the model and torch takes seconds.
            what = checked.entrypoint
            doing = f"starting {what.command}" if isinstance(what, Script) else f"importing {what}"
            typer.echo(f"{checked.name}: {doing} ...", err=True)
            _run(dray.Experiment.of_command(checked, model_dir=code, path=path, storage_path=storage_path), json=json)


@app.command()
def fork(
    experiment: ExperimentArg,
    changes: Changes = None,
    detach: Detach = False,
    no_server: NoServer = False,
    json: JsonLine = False,
) -> None:
    """Create an experiment with the code of another one and with some fields of its config changed.

    If a server is up, submit it to the server and follow it there.

    \b
    dray experiment fork latest --config hyperparameters.lr=0.02
    """
    from dray.config.yaml_file import by_field

    it = handle(experiment, here=no_server)
    if it.server is None:
        _check_not_detached(detach, *["--no-server"] * no_server, experiment=experiment)
        _log_info()
    it = it.fork(by_field(changes or ()))
    if isinstance(it, OnServer):
        server.submitted(it, detach=detach, json=json)
        return
    with exit_on_signals(), show.created(json) as answer:
        try:
            it.activate()
        finally:
            if json:
                answer(it.read(), "")
    server.finish(it.read(), it.typed)


@app.command(name="list")
def list_(
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="WHERE", help="Directory, or s3://BUCKET/PREFIX; by default, ~/dray_results (or DRAY_HOME)."
        ),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(help="List only those in this state, one of those above; can be repeated."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="List only the newest N.", metavar="N", min=1)] = None,
    json: Json = False,
) -> None:
    """List experiments and local runs with their state, progress and best metric, the newest last.

    RUNNING: a driver runs it. STOPPED: no driver runs it; it can be resumed. COMPLETED: it has ended. PARTLY_FAILED: it
    has ended, and some of its trials failed. ERROR: it has ended without a completed trial. UNKNOWN: its end is not
    recorded, as in a local run that was killed. DAMAGED: its files can't be read. A server adds QUEUED, PREEMPTED,
    RESTARTING, STOPPING and PAUSED, and a column of the slots in use.

    \b
    dray experiment list
    dray experiment list --state RUNNING --state QUEUED
    dray e list --limit 10
    dray e list s3://bucket/results --json | jq -r '.[].name'
    """
    description.show_all(where, states=[each.upper() for each in state or ()], limit=limit, json=json)


@app.command()
def describe(experiment: ExperimentArg, json: Json = False) -> None:
    """Describe an experiment: its state, its trials by state, the best trials, and failures.

    \b
    dray experiment describe latest
    dray e describe digits --json | jq .best.hparams
    """
    from dray.records.listing import local_overview
    from dray.records.lookup import local_run

    if (run := local_run(experiment)) is not None:
        if json:
            show.as_json({**fields_of(local_overview(run)), **description.local_details(run)})
        else:
            description.describe_local(run, local_overview(run))
        return
    with read_experiment(experiment) as read:
        if json:
            show.as_json(description.as_json(read))
        else:
            description.describe(read)


@app.command()
def logs(experiment: ExperimentArg, follow: Follow = False, tail: TailArg = None, json: Json = False) -> None:
    """Print the log of an experiment: the events in its journal. For a trial's output, see dray trial logs.

    \b
    dray experiment logs latest -f
    """
    from dray.records.listing import open_experiment
    from dray.records.logs import event_lines, followed_events

    check_follow(follow, json)
    if follow and (found := on_server(experiment)) is not None:
        server.follow_log(*found, tail)
        return
    with open_experiment(experiment) as stored:
        records = journal(stored)
        if json:
            show.as_json(show.last(records, tail))
            return
        config = stored.directory.config()
        show.lines(show.last(list(event_lines(config, records)), tail))
        if follow and not stored.is_copy:
            show.lines(followed_events(stored.directory.journal, config, len(records)))


@app.command()
def stop(experiment: ExperimentArg) -> None:
    """Stop an experiment, as Ctrl-C in its own terminal does: its running trials save a checkpoint first.

    Waits until it has ended. To end it at once, run this command again.

    \b
    dray experiment stop latest
    """
    it = handle(experiment)
    _end(it, it.stop())


@app.command()
def pause(experiment: ExperimentArg) -> None:
    """Pause an experiment that runs or is queued on a server. Its running trials save a checkpoint first.

    Without a server, this is the same as stop.

    \b
    dray experiment pause latest
    """
    it = handle(experiment)
    _end(it, it.pause())


@app.command()
def kill(experiment: ExperimentArg) -> None:
    """End an experiment at once. Its running trials lose all training since their last checkpoints.

    \b
    dray experiment kill latest
    """
    it = handle(experiment)
    _end(it, it.kill())


@app.command()
def wait(experiment: ExperimentArg) -> None:
    """Wait until an experiment has ended, and exit as create would: 0, 1 if it failed or was stopped, 3 if some of its
    trials failed.

    \b
    dray experiment wait latest && dray report latest
    """
    it = handle(experiment)
    server.finish(it.wait(server.tell), it.typed)


@app.command()
def activate(experiment: ExperimentArg) -> None:
    """Run an experiment again, as resume does, but do not follow it on a server.

    \b
    dray experiment activate latest
    """
    _run_again(experiment, detach=None)


@app.command()
def resume(experiment: ExperimentArg, detach: Detach = False) -> None:
    """Resume an experiment that was stopped or whose driver died, on the server if it was submitted to one.

    \b
    dray experiment resume latest
    """
    _run_again(experiment, detach=detach)


@app.command()
def extend(
    experiment: ExperimentArg,
    max_trials: Annotated[int | None, typer.Option(help="New total number of trials.", min=1)] = None,
    max_length: Annotated[
        int | None, typer.Option(help="New length of a trial, in the unit of the config.", min=1)
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TOTAL", help="New total: time=4h, slot_hours=80 or usd=400; can be repeated."),
    ] = None,
    until: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=VALUE", help="New target, such as validation_loss=0.04; can be repeated."),
    ] = None,
    patience: Annotated[int | None, typer.Option(help="New patience, in trials.", min=1)] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE=USD", help="New price of a slot-hour, such as A100=2.9; can be repeated."),
    ] = None,
    detach: Detach = False,
) -> None:
    """Extend an experiment, finished or not, with more or longer trials, or with other limits, and run it.

    \b
    dray experiment extend latest --max-trials 128
    dray experiment extend latest --budget time=4h
    """
    given = {
        "max_trials": max_trials,
        "max_length": max_length,
        "budget": values_by_name("--budget", budget),
        "until": values_by_name("--until", until),
        "patience": patience,
        "prices": values_by_name("--price", price),
    }
    extension = {field: value for field, value in given.items() if value}
    if not extension:
        raise BadUse("nothing to extend; give --max-trials, --max-length, --budget, --until, --patience or --price")
    _run_again(experiment, detach=detach, **extension)


@app.command()
def download(experiment: ExperimentArg, output: Output = None) -> None:
    """Download an experiment from an object store to a directory, and verify its checkpoints.

    The copy is complete: dray.Result and all commands, including resume, accept its path.

    \b
    dray experiment download s3://bucket/results/digits-1 -o digits-1
    """
    from dray.records import copies
    from dray.records.listing import open_experiment

    with open_experiment(experiment) as stored:
        path = target(output, stored.name)
        damages = copies.download(stored, path)
    typer.echo(path)
    for damage in damages:
        typer.echo(f"dray: {damage}", err=True)
    if damages:
        raise typer.Exit(FAILED)


@app.command()
def delete(
    experiment: ExperimentArg,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking for confirmation.")] = False,
) -> None:
    """Delete an experiment and its checkpoints, here and in its object store, after confirmation.

    Refuses to delete an experiment that is running.

    \b
    dray experiment delete digits-asha-20261121-175912-ab9a
    """
    it = handle(experiment)
    if not yes:
        from dray.records.checkpoints import list_checkpoints
        from dray.records.listing import open_experiment

        with open_experiment(experiment) as stored:
            checkpoints, storage = list_checkpoints(stored.directory), stored.directory.storage
            what = f"{counted(len(checkpoints), 'checkpoint')}, {size(sum(each.size for each in checkpoints))}"
            places = stored.where if stored.is_copy or storage.is_local else f"{stored.where} and {storage}"
            _ask(f"Delete {places} ({what})?")
    it.delete()
    server.tell(f"deleted {it.name}")


app.add_typer(queue.sets, name="set")


def _end(it: Handle, state: str) -> None:
    """Wait for the end of an experiment, and print its state and how to continue it."""
    if state == "STOPPING":
        server.tell(f"{it.name} is STOPPING: its running trials save a checkpoint; to end it at once, stop it again")
        state = it.wait(server.tell).state
    ended_itself = state in (*COMPLETED, "ERROR")
    hint = "it ended by itself" if ended_itself else f"continue it with: dray experiment resume {it.typed}"
    server.tell(f"{it.name} is {state}; {hint}")


def _run_again(experiment: str, *, detach: bool | None, **extension: Any) -> None:
    """Run an experiment again. `detach`: None: without following it, where that is possible."""
    with exit_on_signals():
        it = handle(experiment)
        if not it.is_on_server:
            _check_not_detached(bool(detach), experiment=experiment)
            _log_info()
        state = it.extend(**extension) if extension else it.activate()
    if it.ran:
        server.finish(it.read(), it.typed)
        return
    server.tell(f"{it.name} is {state}")
    if detach is False:
        server.follow(it)


def _check_not_detached(detach: bool, *options: str, experiment: str = "") -> None:
    """`BadUse` if an experiment is to be detached that runs in this process: because of these options, or because no
    server is up to which it was submitted."""
    if not detach:
        return
    if options:
        here = f"{options[0]} runs the experiment in this process; leave one of them out"
        config = ", and set checkpoint_storage in the config" if options[0] == "--storage-path" else ""
        raise BadUse(f"--detach submits to a server, but {here}{config}")
    if (at := Server.find()) is not None:
        raise BadUse(f"{experiment} was not submitted to the server at {at.url}, so it runs here: leave out --detach")
    raise BadUse("--detach needs a server, and none is up; start one with: dray serve")


def _run(experiment: dray.Experiment, *, json: bool = False) -> None:
    from dray.records.listing import open_experiment
    from searchers.views import FAILED_STATES

    with show.created(json) as answer:
        try:
            states = experiment.run().trials["state"]
        finally:
            if json:
                with suppress(NoExperiment), open_experiment(experiment.path) as stored:
                    answer(stored.overview(), "")
    if not set(states).isdisjoint(FAILED_STATES):
        raise typer.Exit(SOME_FAILED)


def _log_info() -> None:
    """Log at level INFO in commands that train: with ``--local`` this includes the trial's own ``logging.info``."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in root.handlers:
        handler.setFormatter(_Formatter(dray.LOG_FORMAT))


class _Formatter(logging.Formatter):
    """What dray itself says is the command's output: without level, process and logger."""

    def format(self, record: logging.LogRecord) -> str:
        is_ours = record.levelno == logging.INFO and record.name.partition(".")[0] == "dray"
        return record.getMessage() if is_ours else super().format(record)


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise BadUse(f"{question} There is no terminal to confirm it on; give --yes")
    if not typer.confirm(question):
        raise typer.Exit(FAILED)
