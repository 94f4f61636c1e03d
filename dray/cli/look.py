"""``dray ui``."""

from __future__ import annotations

from typing import Annotated

import typer

from dray.cli.arguments import Experiment
from dray.cli.errors import told


def ui(
    experiment: Experiment,
    port: Annotated[int, typer.Option(help="Of TensorBoard; optuna-dashboard has the next one that is free.")] = 6006,
) -> None:
    """Look at an experiment in a browser: TensorBoard and optuna-dashboard, until Ctrl-C; also while it runs.

    From another machine: ssh -L 6006:localhost:6006 -L 6007:localhost:6007 HOST

    \b
    dray ui latest
    """
    with told():
        from dray.experiment.found import found
        from dray.experiment.ui import serve

        with found(experiment) as it:
            serve(it.directory.path, port=port, say=typer.echo)
