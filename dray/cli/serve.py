"""``dray serve``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from dray.cli import show
from dray.cli.arguments import Json
from dray.cli.errors import BadUse
from dray.text import counted


def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen at; other machines reach it only if you change this.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port of the page and the API; the next free one if it is in use.", min=1, max=65535)
    ] = 8600,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster to train on; by default that of RAY_ADDRESS, or one on this machine."),
    ] = None,
    idle_s: Annotated[float, typer.Option(help="End worker groups after this many idle seconds.", min=0)] = 600.0,
    status: Annotated[
        bool, typer.Option("--status", help="Print the state and the queue of the running server.")
    ] = False,
    json: Json = False,
) -> None:
    """Serve experiments: a queue, worker processes that stay up from one experiment to the next, and a live page.

    While it is up, dray experiment create submits to it. Ctrl-C lets running trials save a checkpoint; queued and
    running experiments continue when the server starts again.

    \b
    dray serve
    dray experiment create asha.yaml . --detach
    dray serve --status
    """
    if status:
        _status(json)
        return
    if json:
        raise BadUse("--json prints the state of a server; give it with --status")
    from dray.records.root import results_root
    from dray.serve.address import token_for
    from dray.serve.client import Server

    token_for(host, results_root())  # refused before Ray starts
    there = Server.find()
    if there is not None and there.is_here:
        raise BadUse(f"a server is up already, at {there.url}; see: dray serve --status")
    from dray.serve.server import serve as run

    run(host=host, port=port, address=address, idle_s=idle_s, say=typer.echo)


def _status(json: bool) -> None:
    from dray.serve.client import Server
    from dray.serve.control import ACTIVE

    server = Server.find()
    if server is None:
        raise BadUse("no server is up; start one with: dray serve")
    state = server.status()
    queue = [each for each in server.experiments() if each["submitted"] and each["state"] in (*ACTIVE, "PAUSED")]
    queue.sort(key=lambda each: (each["submitted"]["share"]["priority"], each["submitted"]["submitted"]))
    if json:
        show.as_json({"url": server.url, "page": server.page, **asdict(state), "queue": queue})
        return
    counts = ", ".join(f"{count} {name.lower()}" for name, count in state.experiments.items() if count)
    show.fields(
        [
            ("page", server.page),
            ("cluster", state.cluster),
            ("results", state.results),
            ("up since", show.clock(state.since, exact=True)),
            ("slots", f"{state.busy:g} of {state.slots:g} busy, {counted(state.groups, 'worker group')}"),
            ("experiments", counts or "none yet"),
        ]
    )
    if queue:
        typer.echo()
        headings = ["#", "name", "state", "priority", "weight", "slots", "waiting", "trials"]
        show.table(headings, [_row(each) for each in queue], left=["name", "state"])


def _row(each: dict[str, Any]) -> list[object]:
    submitted, share = each["submitted"], each["submitted"]["share"]
    slots = f"{submitted['slots']:g}" + (f" of {share['max_slots']}" if share["max_slots"] else "")
    trials = f"{each['ended']}/{each['total']}"
    shown = [each["number"], each["name"], each["state"], share["priority"], f"{share['weight']:g}"]
    return [*shown, slots, submitted["waiting"], trials]
