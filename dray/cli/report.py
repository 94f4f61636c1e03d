"""``dray report`` and ``dray ui``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dray.cli.arguments import ExperimentArg
from dray.cli.reader import read_experiment


def report(
    experiment: ExperimentArg,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write; by default, report.html in the experiment's directory.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a report on an experiment, finished or running, as one self-contained HTML file.

    \b
    dray report latest -o report.html
    """
    with read_experiment(experiment) as read:
        from dray.report import write_report

        # A copy's directory is removed when this command ends.
        out = Path(f"{read.stored.name}-report.html") if output is None and read.stored.is_copy else output
        typer.echo(write_report(read.stored.directory.path, out))


def ui(
    experiment: ExperimentArg,
    port: Annotated[int, typer.Option(help="Port of TensorBoard; optuna-dashboard uses the next free one.")] = 6006,
) -> None:
    """Serve TensorBoard and optuna-dashboard for an experiment, finished or running, until Ctrl-C.

    To see them from another machine: ssh -L 6006:localhost:6006 -L 6007:localhost:6007 HOST

    \b
    dray ui latest
    """
    from dray.records.listing import open_experiment
    from dray.report.ui import serve

    with open_experiment(experiment) as stored:
        serve(stored.directory.path, port=port, say=typer.echo)
