"""``dray migrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dray.cli import show
from dray.cli.arguments import Json
from dray.cli.errors import FAILED, BadUse, told

app = typer.Typer(help="Migrate from Determined.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps this a group although it has only one command."""


@app.command()
def check(
    model_dir: Annotated[
        Path, typer.Argument(metavar="DIR", help="Model directory written for Determined.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Report, line by line, what in a model directory runs unchanged. Exit code 1 if anything must be changed.

    Reads Python files, notebooks, experiment configs and shell scripts, without importing or running them. Each line
    says change, look (may need a change: check it yourself), ignored (has no effect here), blocked (runs once the code
    that it starts is changed) or runs.

    \b
    dray migrate check .
    dray migrate check vision/resnet --json
    """
    with told():
        from dray.migrate import check as checked_directory

        if not model_dir.is_dir():
            raise BadUse(f"DIR must be a directory with a model's code, got {model_dir}, which is not a directory")
        checked = checked_directory(model_dir)
        if json:
            show.as_json(checked.to_dict())
        elif not checked.findings:
            raise BadUse(
                f"nothing in {model_dir} uses Determined: no Python file imports it, no YAML file is an experiment "
                "config; give a model directory written for Determined"
            )
        else:
            typer.echo("\n".join(checked.lines()))
            typer.echo(checked.summary)
        raise typer.Exit(0 if checked.runs else FAILED)
