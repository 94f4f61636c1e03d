"""``dray checkpoint``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from dray.cli import description, show
from dray.cli.arguments import (
    Batches,
    CheckpointArg,
    ExperimentArg,
    Json,
    Output,
    TrialOrAllArg,
    TrialOrBestArg,
    target,
)
from dray.cli.errors import FAILED, BadUse
from dray.cli.reader import ReadExperiment, opened, read_experiment
from dray.errors import NoExperiment
from dray.storage import CheckpointError, Location, holds_a_trial
from dray.text import counted, one_line, size

if TYPE_CHECKING:
    from dray.records.trial_record import TrialRecord

FormatOption: TypeAlias = Annotated[
    Literal["state-dict", "safetensors"],
    typer.Option("--format", metavar="state-dict|safetensors", help="Format of the weights."),
]

app = typer.Typer(help="List, verify, download and export checkpoints.", no_args_is_help=True)


@app.command(name="list")
def list_(experiment: ExperimentArg, trial: TrialOrAllArg = None, json: Json = False) -> None:
    """List the checkpoints of an experiment, without verifying them (see dray checkpoint verify).

    If the best one can't be used, standard error says why.

    \b
    dray checkpoint list latest best
    """
    with read_experiment(experiment) as read:
        checkpoints = read.checkpoints(None if trial is None else read.trial(trial))
        if checkpoints and not read.reader.is_running:
            with suppress(NoExperiment):  # none is the best yet
                if why := description.best_checkpoint(read, _run(read, trial or "best"))["checkpoint_error"]:
                    typer.echo(f"dray: {why}", err=True)
        trials = read.reader.trials
        values = {each.id: dict(zip(each.at, each.values, strict=True)) for each in trials.values()}
        found = [
            {
                **each.to_json(),
                "metric": values.get(each.trial, {}).get(each.batches),
                "is_best": each.trial in trials and trials[each.trial].best_batches == each.batches,
            }
            for each in checkpoints
        ]
        if json:
            show.as_json(found)
            return
        if not found:
            typer.echo("no checkpoints yet", err=True)
            return
        rows = [
            (
                each.trial,
                each.batches,
                row["metric"],
                "best" if row["is_best"] else "",
                size(each.size),
                f"trial_{each.trial}/{each.location.name}",
            )
            for each, row in zip(checkpoints, found, strict=True)
        ]
        show.table(["trial", "batches", read.reader.metric, "", "size", "name"], rows, left=["", "name"])
        typer.echo(f"in {read.stored.directory.storage}")


@app.command()
def verify(experiment: CheckpointArg, trial: TrialOrAllArg = None, json: Json = False) -> None:
    """Read checkpoints in full and compare them with their checksums. Exit code 1 if any is damaged.

    \b
    dray checkpoint verify latest
    """
    from dray.records.checkpoints import damage, list_checkpoints
    from dray.records.listing import open_experiment

    one = _one(experiment)
    if one is not None:
        places = [one]
    else:
        with open_experiment(experiment) as stored:
            number = None if trial is None else opened(stored).trial(trial)
            # While a driver runs, a checkpoint without a manifest is being written or deleted.
            runs = stored.overview().state in ("RUNNING", "UNKNOWN")
            places = [
                each.location
                for each in list_checkpoints(stored.directory)
                if number in (None, each.trial) and (each.is_complete or not runs)
            ]
    verified: dict[Location, str | None] = {}
    for place in places:
        try:
            verified[place] = damage(place)
        except FileNotFoundError as error:  # deleted since it was listed
            if one is not None:
                raise NoExperiment(str(error)) from None
    damaged = {place: why for place, why in verified.items() if why is not None}
    if json:
        show.as_json([{"path": place.uri, "is_whole": why is None, "why": why} for place, why in verified.items()])
    else:
        show.lines(why if str(place) in why else f"{place}: {why}" for place, why in damaged.items())
        typer.echo(f"{counted(len(verified), 'checkpoint')} verified, {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(FAILED)


@app.command()
def download(
    experiment: CheckpointArg, trial: TrialOrBestArg = "best", at: Batches = "best", output: Output = None
) -> None:
    """Download a checkpoint to a directory and verify it. The default is the experiment's best checkpoint.

    dray.pytorch.load_trial_from_checkpoint_path and searcher.source_checkpoint_uuid accept this directory.

    \b
    dray checkpoint download latest
    dray c download s3://bucket/results/digits-1 7 -o trial-7
    """
    from dray.records.checkpoints import download

    with _chosen(experiment, trial, at) as (place, name):
        path = target(output, name)
        download(place, path)
    typer.echo(path)


@app.command()
def export(
    experiment: CheckpointArg,
    trial: TrialOrBestArg = "best",
    at: Batches = "best",
    output: Output = None,
    form: FormatOption = "state-dict",
) -> None:
    """Export a checkpoint's weights and hyperparameters for use without dray.

    model.pt is the model's state_dict: model.load_state_dict(torch.load("model.pt", weights_only=True)). hparams.json
    holds the hyperparameters that the model was created with. The shards of a sharded model become one file. This
    needs no GPU, and only enough memory for the largest tensor.

    \b
    dray checkpoint export latest -o model
    dray checkpoint export latest --format safetensors
    """
    from dray.records.checkpoints import export

    with _chosen(experiment, trial, at) as (place, name):
        try:
            files = export(place, target(output, f"{name}-weights"), form)
        except ValueError as error:
            raise BadUse(one_line(error)) from None
    for file in files:
        typer.echo(file)


@contextmanager
def _chosen(experiment: str, trial: str, at: str) -> Iterator[tuple[Location, str]]:
    """A checkpoint, and a name for a directory with it.

    Raises, also for errors in the block:
        NoExperiment: there is no such checkpoint.
        BadUse: the checkpoint is damaged.
    """
    from dray.records.checkpoints import NoCheckpoint, choose, reading

    try:
        if (one := _one(experiment)) is not None:
            yield one, one.name
            return
        with read_experiment(experiment) as read:
            directory, record = read.stored.directory, _run(read, trial)
            path = choose(directory, record, at)
            place = Location.of(path).with_secrets_of(read.stored.directory.storage)
            with reading(directory, record, path):
                yield place, f"{read.stored.name}-trial_{record.id}-{place.name}"
    except (NoCheckpoint, FileNotFoundError) as error:
        raise NoExperiment(str(error)) from None
    except CheckpointError as error:
        raise BadUse(str(error)) from None


def _run(read: ReadExperiment, trial: str) -> TrialRecord:
    """The run that has a trial's checkpoint: of the best trial, it may be a repeat."""
    number = read.trial(trial)
    return read.reader.best_run(number) if trial == "best" else read.reader.trials[number]


def _one(where: str) -> Location | None:
    from dray.records.lookup import parse_location

    location = parse_location(where)
    named = location.name.startswith("checkpoint_")
    if not location.is_local:
        return location if named else None
    # Determined's checkpoints, and copies, have other names.
    is_one = location.path.is_dir() and (named or holds_a_trial(location.path))
    return Location.of(location.path.resolve()) if is_one else None
