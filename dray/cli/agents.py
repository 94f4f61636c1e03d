"""``dray mcp`` and ``dray agents``, for agents."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from dray.cli.errors import BadUse

app = typer.Typer(help="Print what agents need to know about dray.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make this a group although it has only one command."""


@app.command()
def skill() -> None:
    """Print how an agent should work with dray, as a skill file.

    \b
    mkdir -p .claude/skills/dray
    dray agents skill > .claude/skills/dray/SKILL.md
    """
    from dray.agents import docs

    typer.echo(docs.page(docs.SKILL), nl=False)


def mcp(
    http: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve MCP over HTTP at this address, for agents that have a token of the server; by default, over "
            "standard input and output.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Give agents tools for the experiments of a running dray serve, by the Model Context Protocol (MCP).

    Agents start it themselves. Configure the command dray with the argument mcp.

    \b
    dray mcp
    dray mcp --http 8700
    """
    host, port = ("", 0) if http is None else _address(http)
    from dray.agents import server

    if http is None:
        server.serve_stdio()
        return
    from dray.records.root import results_root
    from dray.serve.address import token_for

    token_for(host, results_root())  # what other machines can reach needs a token that is hard to guess
    server.found()
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise BadUse(f"--http {http}: can't listen there: {error.strerror}; give another port or host") from None
    typer.echo(f"MCP at http://{f'[{host}]' if ':' in host else host}:{port}/mcp", err=True)
    server.serve_http(host, port)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise BadUse(f"--http {text}: must be PORT or HOST:PORT, such as 8700 or 127.0.0.1:8700")
    return host.strip("[]") or "127.0.0.1", int(port)
