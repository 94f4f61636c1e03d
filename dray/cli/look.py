"""``dray report`` and ``dray ui``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dray.cli.arguments import Experiment
from dray.cli.errors import told
from dray.cli.reading import reading


def report(
    experiment: Experiment,
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
    with told(), reading(experiment) as read:
        from dray.report import write_report

        # A copy's directory is removed when this command ends.
        out = Path(f"{read.it.name}-report.html") if output is None and read.it.is_copy else output
        typer.echo(write_report(read.it.directory.path, out))


def ui(
    experiment: Experiment,
    port: Annotated[int, typer.Option(help="Port of TensorBoard; optuna-dashboard uses the next free one.")] = 6006,
) -> None:
    """Serve TensorBoard and optuna-dashboard for an experiment, finished or running, until Ctrl-C.

    To see them from another machine: ssh -L 6006:localhost:6006 -L 6007:localhost:6007 HOST

    \b
    dray ui latest
    """
    with told():
        from dray.records.listing import found
        from dray.report.ui import serve

        with found(experiment) as it:
            serve(it.directory.path, port=port, say=typer.echo)
