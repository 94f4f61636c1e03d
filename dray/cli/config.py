"""``dray config``."""

from __future__ import annotations

import typer

from dray.cli import show

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
