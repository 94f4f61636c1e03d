"""``dray report`` and ``dray ui``."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Annotated

import typer

from dray.cli.arguments import ExperimentArg
from dray.cli.reader import read_experiment
from dray.errors import NoExperiment


def report(
    experiment: ExperimentArg,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; by default, report.html in the experiment's directory."),
    ] = None,
) -> None:
    """Write a report on an experiment, finished or running, as one self-contained HTML file.

    \b
    dray report latest -o report.html
    """
    with read_experiment(experiment) as read:
        from dray.report.report import write

        typer.echo(write(read.stored, read.reader, output))


def ui(
    experiment: Annotated[
        str | None, typer.Argument(metavar="[EXPERIMENT]", help="Also serve its TensorBoard and optuna-dashboard.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of TensorBoard; optuna-dashboard uses the next free one.")] = 6006,
) -> None:
    """Serve a live page of all experiments until Ctrl-C, or print the URL of the server's page (see dray serve).

    With an experiment, finished or running, also serve its TensorBoard and optuna-dashboard.

    To open them on another machine: ssh -L 8600:localhost:8600 -L 6006:localhost:6006 -L 6007:localhost:6007 HOST

    \b
    dray ui
    dray ui latest
    """
    from dray.records.root import results_root

    with contextlib.ExitStack() as stack:
        from dray.records.listing import open_experiment
        from dray.records.lookup import local_run

        if experiment is None:
            path = None
        elif (run := local_run(experiment)) is not None:
            path = run.path
        else:
            path = stack.enter_context(open_experiment(experiment)).directory.path
        if (page := _page(results_root().resolve(), stack)) is not None:
            typer.echo(f"page              {page}")
        if path is not None:
            from dray.serve.boards import serve

            serve(path, port=port, say=typer.echo)
        elif page is None:
            raise NoExperiment(f"no experiments in {results_root()} yet")
        else:
            typer.echo("press Ctrl-C to stop it")
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()


def _page(results: Path, stack: contextlib.ExitStack) -> str | None:
    """The URL of the server's page, or of one that is served until the stack is closed; None if there is nothing to
    show."""
    from dray.serve.client import Server

    server = Server.find()
    if server is not None:
        return server.page
    if not results.is_dir():
        return None
    from dray.serve.address import token_for
    from dray.serve.app import PORT, listening
    from dray.serve.control import Browsing
    from dray.serve.tokens import Tokens

    token = token_for("127.0.0.1", results)
    url = stack.enter_context(listening(Browsing(results), results, "127.0.0.1", PORT, Tokens(results, token)))
    return Server(url, token).page
