"""``dray config``, ``dray preview`` and ``dray migrate``, which only read files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dray.cli import show
from dray.cli.arguments import Changes, Config, Json, ModelDir
from dray.cli.errors import FAILED, BadUse
from dray.text import counted

_MAX_NUMBER = 1e9
"""The largest time, in seconds, and price that a preview takes: with larger ones, sums would overflow."""

app = typer.Typer(help="Print the schema of experiment configs.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make this a group although it has only one command."""


@app.command()
def schema() -> None:
    """Print the JSON Schema of the experiment config file, for editors to complete and check it.

    \b
    dray config schema > dray.schema.json

    Then put this in the config file's first line: # yaml-language-server: $schema=dray.schema.json
    """
    from dray.config.json_schema import json_schema

    show.as_json(json_schema())


def preview(
    config: Config,
    model_dir: ModelDir = None,
    changes: Changes = None,
    seconds_per_epoch: Annotated[
        float | None, typer.Option(help="Mean time of an epoch, to estimate hours and slot-hours.")
    ] = None,
    seconds_per_batch: Annotated[
        float | None, typer.Option(help="Mean time of a batch, for lengths in batches.")
    ] = None,
    seconds_per_trial: Annotated[
        float | None, typer.Option(help="Mean time of a trial of full length, in any unit.")
    ] = None,
    like: Annotated[
        str | None, typer.Option(metavar="EXPERIMENT", help="Take the times measured in this experiment instead.")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(help="US dollars per slot-hour, to estimate the cost; by default, from prices in CONFIG."),
    ] = None,
    json: Json = False,
) -> None:
    """Preview a search without running it: brackets, rungs, trials at each rung, the total, and how long it takes.

    \b
    dray preview asha.yaml --seconds-per-epoch 12 --price 2.9
    dray preview asha.yaml --like 41 --config resources.max_slots=8
    """
    from dray.code.load import check_entrypoint_file
    from dray.config.load import load_config
    from dray.experiment.preview import measured_rates, preview_search, unit_of
    from searchers.previews import Rates

    options = {
        "--seconds-per-epoch": seconds_per_epoch,
        "--seconds-per-batch": seconds_per_batch,
        "--seconds-per-trial": seconds_per_trial,
        "--price": price,
    }
    for option, number in options.items():
        if number is not None and not 0 < number <= _MAX_NUMBER:
            raise BadUse(f"{option} must be a number > 0, at most {_MAX_NUMBER:g}, got {number:g}")
    given = {"--like": like, **options}
    times = [option for option in given if option != "--price" and given[option] is not None]
    if len(times) > 1:
        raise BadUse(f"give only one of {' and '.join(times)}: each says how long training takes")
    if price is not None and not times:
        raise BadUse("--price needs the time that training takes: give --seconds-per-epoch, or --like EXPERIMENT")
    checked, code = load_config(config, changes or ()), model_dir if model_dir is not None else config.parent
    if checked.entrypoint is not None:
        check_entrypoint_file(checked.entrypoint, code)
    rates, unit = None, unit_of(checked.searcher)
    if like is not None:
        rates = measured_rates(like, checked.searcher)
    elif seconds_per_trial is not None:
        rates = Rates(mean=seconds_per_trial / (checked.searcher.length or 1))
    elif (seconds := {"epochs": seconds_per_epoch, "batches": seconds_per_batch}.get(unit)) is not None:
        rates = Rates(mean=seconds)
    elif times:
        fit = {"epochs": "--seconds-per-epoch", "batches": "--seconds-per-batch"}.get(unit, "--seconds-per-trial")
        raise BadUse(f"this search has its length in {unit}, so {times[0]} does not fit; give {fit}")
    found = preview_search(checked, model_dir=code, rates=rates, price=price)
    if json:
        show.as_json(found.as_dict())
    else:
        found.show(show.console())


def migrate(
    model_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Model directory written for Determined.")],
    json: Json = False,
) -> None:
    """Report what must be changed in a model directory written for Determined. Exit code 1 if there is anything.

    Reads Python files and experiment configs, without importing or running them. Each line says change (not supported,
    with what to use instead) or ignored (no effect here).

    \b
    dray migrate .
    dray migrate vision/resnet --json
    """
    from dray.migrate import check

    if not model_dir.is_dir():
        raise BadUse(f"DIR must be a directory with a model's code, got {model_dir}, which is not a directory")
    checked = check(model_dir)
    to_change = sum(finding.verdict == "change" for finding in checked.findings)
    if json:
        show.as_json(
            {
                "directory": str(model_dir),
                "runs": not to_change,
                "experiments": checked.experiments,
                "findings": [asdict(finding) for finding in checked.findings],
            }
        )
    else:
        for finding in checked.findings:
            typer.echo(finding)
        python = counted(len(checked.python), "Python file")
        configs = counted(len(checked.experiments), "experiment config")
        ignored = len(checked.findings) - to_change
        typer.echo(f"checked {python} and {configs}: {to_change} to change, {ignored} ignored")
    raise typer.Exit(FAILED if to_change else 0)
