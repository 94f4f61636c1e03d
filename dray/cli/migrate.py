"""``dray migrate``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dray.cli import show
from dray.cli.arguments import Json
from dray.cli.errors import FAILED, BadUse
from dray.text import counted


def migrate(
    model_dir: Annotated[
        Path, typer.Argument(metavar="DIR", help="Model directory written for Determined.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Report what must change in a model directory written for Determined. Exit code 1 if anything must.

    Reads Python files and experiment configs, without importing or running them. Each line says change (not supported,
    and what to use instead) or ignored (has no effect here).

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
