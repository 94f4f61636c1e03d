"""``dray cluster``."""

from __future__ import annotations

from typing import Annotated

import typer

from dray.cli import show
from dray.cli.arguments import Json
from dray.cli.errors import told

app = typer.Typer(help="The Ray cluster that experiments run on.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """A group also with one command."""


@app.command()
def status(
    address: Annotated[
        str | None,
        typer.Option(help="Of the cluster; RAY_ADDRESS by default, as for an experiment.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Show the nodes of the Ray cluster that an experiment would run on, and what of them is free.

    \b
    RAY_ADDRESS=head:6379 dray cluster status
    """
    with told():
        from dray.cluster.status import status

        found = status(address)
        if json:
            show.as_json(found)
            return
        if found["address"] is None:
            typer.echo(
                f"RAY_ADDRESS is not set: an experiment starts a Ray of its own on this machine, {found['cpus']} CPUs"
            )
            return
        rows = [
            (
                node["address"],
                "alive" if node["is_alive"] else "gone",
                node["cpus"],
                node["gpus"],
                show.size(node["memory"]),
            )
            for node in found["nodes"]
        ]
        show.table(["node", "state", "CPUs", "GPUs", "memory"], rows, left=["node", "state"])
        free = f"{found['cpus_free']} of {found['cpus']} CPUs and {found['gpus_free']} of {found['gpus']} GPUs"
        typer.echo(f"Ray at {found['address']}: {free} are free")
