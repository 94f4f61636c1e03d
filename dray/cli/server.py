"""Commands that go through the server: finding its experiments, following one, and reporting its end."""

from __future__ import annotations

import importlib
import itertools
import signal
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from dray.cli import show
from dray.cli.errors import FAILED, SIGNALLED, SOME_FAILED, BadUse
from dray.errors import ExperimentError, NoExperiment
from dray.records.overview import COMPLETED
from dray.serve.client import Server
from dray.serve.control import Submitted
from dray.serve.verbs.find import on_server
from dray.serve.verbs.handle import Handle
from dray.serve.verbs.on_server import OnServer
from dray.text import counted

if TYPE_CHECKING:
    from dray.records.overview import Overview

Detach: TypeAlias = Annotated[
    bool, typer.Option("--detach", "-d", help="Submit the experiment to the server and return, without following it.")
]
NoServer: TypeAlias = Annotated[
    bool,
    typer.Option("--no-server", help="Run the experiment in this process even if a server is up (see dray serve)."),
]


def tell(line: str) -> None:
    typer.echo(line, err=True)


def submitted_to(overview: Overview) -> Submitted | None:
    """An experiment's entry on the server, if it was submitted to one that is up."""
    from dray.records.root import results_root

    server = Server.find()
    if server is None or not server.is_here or Path(overview.path).parent.resolve() != results_root().resolve():
        return None
    try:
        return server.experiment(overview.name)
    except NoExperiment:
        return None


def change(experiment: str, **fields: Any) -> Submitted:
    """Change an experiment's share of the slots, its tags or its notes, which only a server has."""
    if (found := on_server(experiment)) is None:
        from dray.records.lookup import locate

        raise BadUse(f"no server is up that runs {locate(experiment)}; start one with: dray serve")
    return found[0].change(found[1], **fields)


def submit(server: Server, config: Path, changes: Sequence[str], code: Path, *, detach: bool, json: bool) -> None:
    from dray.display.text import searched_line
    from dray.serve.submission import submit_file

    try:
        sent, checked = submit_file(server, config, changes, code)
    except KeyboardInterrupt:
        tell("dray: the server may have the experiment already; see: dray experiment list")
        raise
    submitted(OnServer(server, sent.name, sent=sent), searched=searched_line(checked.space), detach=detach, json=json)


def submitted(it: OnServer, *, searched: str = "", detach: bool, json: bool) -> None:
    """Print the name of a newly submitted experiment, and follow it unless ``detach``."""
    assert it.sent is not None
    sent, number = it.sent, it.number
    label = it.name if number is None else f"experiment {number}: {it.name}"
    with show.created(json) as answer:
        answer({"number": number, **asdict(sent)}, label if detach else f"{label}, submitted to {it.server.url}")
        if searched:
            tell(searched)
        for field, value in sent.by_quota.items():
            tell(f"{field} is {value}, by the quota of token {sent.owner}")
        if sent.missing_secrets:
            names, give = ", ".join(sent.missing_secrets), "fork again with --config FIELD=VALUE"
            tell(f"it has no {names}: these belong to another token; to give your own, {give}")
        if not detach:
            follow(it)


def follow_log(server: Server, name: str, tail: int | None) -> None:
    """Print the log of an experiment in the server's results directory until the experiment ends."""
    lines: list[str] = []
    after = 0
    while (news := server.events(name, after))["lines"]:
        lines += news["lines"]
        after = news["next"]
    _print_log(OnServer(server, name), itertools.chain(show.last(lines, tail), server.follow(name, after, say=tell)))


def follow(it: Handle) -> None:
    """Print an experiment's log until it is no longer active, and then its result."""
    is_here = not isinstance(it, OnServer) or it.server.is_here
    if is_here:  # for the summary, while the experiment starts: pyarrow takes a while to import
        threading.Thread(target=importlib.import_module, args=("dray.display.best_trials",)).start()
    _print_log(it, it.lines(tell))
    seen = it.read()
    if is_here and seen.state in COMPLETED:
        _summary(seen.path)
    finish(seen, it.typed)


def finish(seen: Overview, typed: str) -> None:
    """Report an experiment's end, by a line and the exit code."""
    why = seen.why_failed(typed)
    if seen.state == "ERROR":
        raise ExperimentError(why)
    if why:
        tell(f"dray: {why}")
        raise typer.Exit(FAILED)
    if seen.failed:
        raise typer.Exit(SOME_FAILED)


def _print_log(it: Handle, lines: Iterable[str]) -> None:
    """Print a log until it ends, or Ctrl-C is pressed."""
    try:
        show.lines(lines)
    except KeyboardInterrupt:
        where, named = " on the server" * it.is_on_server, it.typed
        tell(
            f"\ndray: {it.name} continues{where}; follow it again with: dray experiment logs {named} -f; stop it "
            f"with: dray experiment stop {named}"
        )
        raise typer.Exit(SIGNALLED + signal.SIGINT) from None


def _summary(name: str) -> None:
    from dray.cli.reader import read_experiment
    from dray.display.best_trials import best_trials

    with read_experiment(name) as read:
        reader = read.reader
        for line in (reader.failure_summary(), reader.divergence_summary()):
            if line:
                typer.echo(show.red(line))
        show.lines(best_trials(reader, width=show.console().width))
        typer.echo(f"{counted(len(reader.trials), 'trial')} ({reader.state_summary()}). Results: {read.stored.where}")
