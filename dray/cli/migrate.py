"""``dray migrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dray.cli import show
from dray.cli.arguments import Json
from dray.cli.errors import FAILED, BadUse, told

app = typer.Typer(help="From Determined to dray.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """A group also with one command."""


@app.command()
def check(
    model_dir: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory of a model for Determined.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Tell line by line what of a model directory runs here as it is; exit code 1 if something must be changed.

    Reads its Python, its experiment files and its shell scripts; imports and runs none of them. Each line says change,
    look (only you know whether), ignored (it does nothing here) or runs.

    \b
    dray migrate check .
    dray migrate check vision/resnet --json
    """
    with told():
        from dray.experiment.migrate import check as checked_directory

        if not model_dir.is_dir():
            raise BadUse(f"DIR must be the directory of a model's code, got {model_dir}, which is none")
        checked = checked_directory(model_dir)
        if json:
            show.as_json(checked.to_dict())
        elif not checked.findings:
            raise BadUse(
                f"nothing in {model_dir} is for Determined: no Python imports it, and no YAML is an experiment"
            )
        else:
            typer.echo("\n".join(map(str, checked.findings)))
            typer.echo(checked.summary)
        raise typer.Exit(0 if checked.runs else FAILED)
