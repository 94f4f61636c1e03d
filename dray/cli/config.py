"""``dray config`` and ``dray preview``, which need only a config file."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from dray.cli import show
from dray.cli.arguments import Changes, Config, Json, ModelDir
from dray.cli.errors import BadUse

app = typer.Typer(help="Print the schema of experiment configs.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps this a group although it has only one command."""


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
        typer.Option(help="Full-length trials that the cluster trains per hour, to estimate the time that it takes."),
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
