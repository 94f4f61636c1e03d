"""``dray serve``."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dray.cli import show
from dray.cli.arguments import Json, JsonLine, values_by_name
from dray.cli.errors import BadUse, handle_errors
from dray.text import counted, fields_of

app = typer.Typer(invoke_without_command=True)
tokens = typer.Typer(help="Tokens for other users and programs, with limits.", no_args_is_help=True)
app.add_typer(tokens, name="token")


@app.callback()
@handle_errors()
def serve(
    context: typer.Context,
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
    settings: Annotated[
        Path | None,
        typer.Option(
            "--settings",
            metavar="FILE",
            help="YAML file with a section notify, for alerts about all experiments and idle slots.",
        ),
    ] = None,
    root_path: Annotated[
        str,
        typer.Option(
            help="Path below which a reverse proxy serves it, such as /lab/dray, or the whole URL there, to accept "
            "requests for its host name, too.",
            show_default=False,
        ),
    ] = "",
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
    dray serve token create agent --slots 4 --slot-hours 10
    """
    if context.invoked_subcommand is not None:
        return
    if status:
        _status(json)
        return
    if json:
        raise BadUse("--json prints the state of a server; give it with --status")
    from dray.config.server_settings import server_notify
    from dray.records.root import results_root
    from dray.serve.address import token_for
    from dray.serve.client import Server
    from dray.serve.root_path import RootPath

    root = RootPath.parse(root_path) if root_path else RootPath()
    notify = None if settings is None else server_notify(settings)
    token_for(host, results_root())  # refused before Ray starts
    there = Server.find()
    if there is not None and there.is_here:
        raise BadUse(f"a server is up already, at {there.url}; see: dray serve --status")
    cluster = address or os.environ.get("RAY_ADDRESS") or "local"
    starting = "starting Ray on this machine" if cluster == "local" else f"connecting to the Ray cluster at {cluster}"
    typer.echo(f"{starting} ...")  # before the imports, which take a second
    from dray.serve.server import serve as run

    run(host=host, port=port, address=address, idle_s=idle_s, say=typer.echo, notify=notify, root=root)


@tokens.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A new name, which its experiments show.")],
    scope: Annotated[
        str,
        typer.Option(
            metavar="read|submit|operate",
            help="read: see everything; submit: also submit experiments, and change its own; operate: change all.",
        ),
    ] = "submit",
    slots: Annotated[
        int | None, typer.Option(help="Maximum number of slots that its experiments use together.")
    ] = None,
    slot_hours: Annotated[float | None, typer.Option(help="Slot-hours that its experiments may spend, ever.")] = None,
    usd: Annotated[
        float | None, typer.Option(help="US dollars that its experiments may spend, ever; needs --price.")
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE=USD", help="Price of a slot-hour, such as A100=2.9; can be repeated."),
    ] = None,
    experiments: Annotated[
        int | None, typer.Option(help="Maximum number of its experiments that are queued or running.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="Smallest priority number of its experiments.")] = None,
    sandbox: Annotated[
        bool, typer.Option("--sandbox", help="Run the trials of its experiments in sandboxes (isolation).")
    ] = False,
    json: JsonLine = False,
) -> None:
    """Create a token and print it. It is shown only once. A running server accepts it at once.

    \b
    dray serve token create agent --slots 4 --slot-hours 10 --experiments 20 --priority 50
    dray serve token create reader --scope read
    """
    from dray.records.root import results_root
    from dray.serve import tokens as file
    from dray.serve.quota import Quota

    quota = Quota(
        slots=slots,
        slot_hours=slot_hours,
        usd=usd,
        experiments=experiments,
        priority=priority,
        prices=values_by_name("--price", price),
        sandbox=sandbox,
    )
    token = file.create(results_root(), name, scope, quota)
    with show.created(json) as answer:
        answer({"name": name, "scope": scope, "quota": asdict(quota), "token": token}, token)
    typer.echo(f"created {name}; it is not shown again: use it as DRAY_SERVER_TOKEN, with DRAY_SERVER", err=True)


@tokens.command(name="list")
def list_(json: Json = False) -> None:
    """List all tokens but the server's own: their limits and, while a server is up, what is left of them.

    \b
    dray serve token list
    """
    from dray.records.root import results_root
    from dray.serve import tokens as file
    from dray.serve.client import Server
    from dray.serve.quota import NOTHING

    server = Server.find()
    if server is not None:
        found = server.tokens()
    else:
        known = file.read(results_root() / file.STATE / file.FILE).values()
        nothing = {"used": None, "reserved": None, "left": None}
        found = [{**file.dated_account(each, NOTHING), "quota": fields_of(each.quota), **nothing} for each in known]
    if json:
        show.as_json(found)
        return
    headings = ["name", "scope", "slots", "slot-hours", "usd", "experiments", "priority", "created", ""]
    show.table(headings, [_token_row(each) for each in found], left=["name", "scope", ""])


@tokens.command()
def revoke(name: Annotated[str, typer.Argument(metavar="NAME", help="A token's name.")]) -> None:
    """Refuse a token from now on. Its experiments continue until you stop them.

    \b
    dray serve token revoke agent
    """
    from dray.records.root import results_root
    from dray.serve import tokens as file

    file.revoke(results_root(), name)
    typer.echo(f"revoked {name}; its experiments go on", err=True)


def _token_row(each: dict[str, Any]) -> list[object]:
    """What is left of each limit, and the limit."""
    quota, left = each["quota"], each["left"]

    def shown(name: str) -> str:
        if quota[name] is None:
            return "-"
        return f"{quota[name]:g}" if left is None else f"{left[name]:.4g} of {quota[name]:g} left"

    limits = [shown(name) for name in ("slots", "slot_hours", "usd", "experiments")]
    priority = "-" if quota["priority"] is None else quota["priority"]
    states = ["sandbox"] * quota["sandbox"] + ["revoked"] * (each["revoked"] is not None)
    return [each["name"], each["scope"], *limits, priority, show.clock(each["created"], exact=True), ", ".join(states)]


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
        headings = ["#", "name", "state", "priority", "weight", "slots", "waiting", "trials", "owner", "why"]
        show.table(headings, [_row(each) for each in queue], left=["name", "state", "owner", "why"])


def _row(each: dict[str, Any]) -> list[object]:
    submitted, share = each["submitted"], each["submitted"]["share"]
    slots = f"{submitted['slots']:g}" + (f" of {share['max_slots']}" if share["max_slots"] else "")
    trials = f"{each['ended']}/{each['total']}"
    shown = [each["number"], each["name"], each["state"], share["priority"], f"{share['weight']:g}"]
    return [*shown, slots, submitted["waiting"], trials, submitted["owner"], submitted["why"]]
