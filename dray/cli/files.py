"""``dray config``, ``dray preview`` and ``dray migrate``, which only read files."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dray.cli import show
from dray.cli.arguments import Changes, Config, Json, ModelDir
from dray.cli.errors import FAILED, BadUse
from dray.text import counted

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
    trials_per_hour: Annotated[
        float | None,
        typer.Option(help="Full-length trials that the cluster trains per hour, to estimate the search's duration."),
    ] = None,
    json: Json = False,
) -> None:
    """Preview a search without running it: brackets, rungs, trials at each rung, and the total.

    \b
    dray preview asha.yaml --trials-per-hour 12
    """
    from dray.config.load import load_config
    from dray.experiment.preview import preview_as_dict, show_preview

    if trials_per_hour is not None and not 0 < trials_per_hour < math.inf:
        raise BadUse(f"--trials-per-hour must be a number > 0, got {trials_per_hour:g}")
    checked, code = load_config(config, changes or ()), model_dir if model_dir is not None else config.parent
    if json:
        show.as_json(preview_as_dict(checked, model_dir=code))
    else:
        show_preview(checked, model_dir=code, trials_per_hour=trials_per_hour, console=show.console())


def migrate(
    model_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Model directory written for Determined.")],
    json: Json = False,
) -> None:
    """Report necessary changes in a model directory written for Determined. Exit code 1 if there are any.

    Reads Python files and experiment configs, without importing or running them. Each line says change (not supported,
    with the replacement) or ignored (has no effect here).

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
