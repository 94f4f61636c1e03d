"""``dray demo``."""

from __future__ import annotations

from pathlib import Path

import typer

import dray
from dray.cli import experiment


def demo() -> None:
    """Run an example search in about a minute: 64 models learn to read digits, and ASHA stops bad ones early.

    Prints the location of the model and the experiment file, which you can copy and change.
    """
    package = Path(dray.__file__).parent
    installed = package / "demo"  # where the wheel has the example
    code = installed if installed.exists() else package.parent / "examples" / "digits"
    typer.echo(f"dray experiment create {code}/asha.yaml", err=True)
    typer.echo(f"to change the model or the search, copy them: cp -r {code} digits", err=True)
    experiment.create(code / "asha.yaml")
