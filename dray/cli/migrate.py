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
    """Keeps this a group although it has only one command."""


@app.command()
def check(
    model_dir: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory of a model for Determined.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Report line by line what in a model directory runs here unchanged. Exit code 1 if something must be changed.

    Reads its Python, notebooks, experiment files and shell scripts, without importing or running them. Each line says
    change, look (it may need a change, only you can tell), ignored (it has no effect here) or runs.

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
