"""Commands that go through the server: finding its experiments, following one, and reporting its end."""

from __future__ import annotations

import importlib
import itertools
import shlex
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import typer

from dray.cli import show
from dray.cli.errors import FAILED, SIGNALLED, SOME_FAILED, BadUse
from dray.errors import ExperimentError, NoExperiment
from dray.serve.client import WAIT_S, Server
from dray.serve.control import ACTIVE, Submitted
from dray.serve.refusals import NotSubmitted
from dray.text import counted

if TYPE_CHECKING:
    from dray.records.overview import Overview

T = TypeVar("T")
END = 1 << 59  # an offset beyond every journal's end

Detach: TypeAlias = Annotated[
    bool, typer.Option("--detach", "-d", help="Submit the experiment to the server and return, without following it.")
]
NoServer: TypeAlias = Annotated[
    bool,
    typer.Option("--no-server", help="Run the experiment in this process even if a server is up (see dray serve)."),
]


def tell(line: str) -> None:
    typer.echo(line, err=True)


def find(experiment: str) -> tuple[Server, str] | None:
    """The server, and an experiment's name there; None if no server is up, or the experiment is elsewhere."""
    server = Server.find()
    if server is None or "://" in experiment:
        return None
    if server.is_here:
        from dray.records.lookup import locate

        return server, Path(locate(experiment)).name
    try:
        return server, server.named(experiment)
    except NoExperiment:
        from dray.records.lookup import locate

        try:
            locate(experiment)
        except NoExperiment:
            pass
        else:
            return None  # it is on this machine, not on the server's
        raise


def seen(overview: Overview) -> tuple[Overview, Submitted | None]:
    """An experiment's overview, with the server's state, and its entry on the server if it was submitted to one."""
    from dray.records.root import results_root

    server = Server.find()
    if server is None or not server.is_here or Path(overview.path).parent.resolve() != results_root().resolve():
        return overview, None
    try:
        submitted = server.experiment(overview.name)
    except (NoExperiment, NotSubmitted):
        return overview, None
    return overview.on_server(submitted.state, submitted.error), submitted


def must(experiment: str, verb: Callable[[Server, str], T], *, without: str = "") -> T:
    """Call a verb that only a server has; ``without`` names the subcommand for use without a server, if any."""
    found, instead = find(experiment), f"dray experiment {without} {shlex.quote(experiment)}"
    if found is None:
        from dray.records.lookup import locate

        hint = f"; without one: {instead}" if without else ""
        raise BadUse(f"no server is up that runs {locate(experiment)}; start one with: dray serve{hint}")
    try:
        return verb(*found)
    except NotSubmitted:
        raise BadUse(f"{found[1]} was not submitted to the server{f'; use: {instead}' if without else ''}") from None


def submit(server: Server, config: Path, changes: Sequence[str], code: Path, *, detach: bool, json: bool) -> None:
    from dray.display.text import searched_line
    from dray.serve.submission import submit_file

    sent, checked = submit_file(server, config, changes, code)
    submitted(server, sent, searched=searched_line(checked.space), detach=detach, json=json)


def submitted(server: Server, sent: Submitted, *, searched: str = "", detach: bool, json: bool) -> None:
    """Print the name of a newly submitted experiment, and follow it unless ``detach``."""
    name, number = sent.name, server.number(sent.name)
    label = name if number is None else f"experiment {number}: {name}"
    with show.created(json) as answer:
        answer({"number": number, **asdict(sent)}, label if detach else f"{label}, submitted to {server.url}")
        if searched:
            tell(searched)
        for field, value in sent.by_quota.items():
            tell(f"{field} is {value}, by the quota of token {sent.owner}")
        if sent.missing_secrets:
            names, give = ", ".join(sent.missing_secrets), "fork again with --config FIELD=VALUE"
            tell(f"it has no {names}: these belong to another token; to give your own, {give}")
        if not detach:
            follow(server, name)


def begin(experiment: str, verb: Callable[[Server, str], Submitted]) -> tuple[Server, str, int] | None:
    """Call a verb that runs an experiment again. Returns the server, the experiment's name, and the offset of its
    journal's end before; None if it was not submitted to a running server."""
    found = find(experiment)
    if found is None:
        return None
    server, name = found
    after = server.events(name, END)["next"]
    try:
        verb(server, name)
    except NotSubmitted:
        return None
    return server, name, after


def begun(server: Server, name: str, after: int, *, detach: bool) -> None:
    tell(f"{name} continues on the server at {server.url}")
    if not detach:
        follow(server, name, after)


def follow_log(server: Server, name: str, tail: int | None) -> None:
    """Print the log of an experiment in the server's results directory until the experiment ends."""
    lines: list[str] = []
    after = 0
    while (news := server.events(name, after))["lines"]:
        lines += news["lines"]
        after = news["next"]
    _print_log(server, name, after, lines if tail is None else lines[max(0, len(lines) - tail) :])


def follow(server: Server, name: str, after: int = 0) -> None:
    """Print an experiment's log until it is no longer active, and then its result."""
    if server.is_here:  # for the summary, while the experiment starts: pandas takes half a second to import
        threading.Thread(target=importlib.import_module, args=("dray.display.best_trials",)).start()
    _print_log(server, name, after)
    finish(server, name, summary=True)


def wait(server: Server, name: str) -> dict[str, Any]:
    """Wait until an experiment is no longer active. Returns its last events, see `Server.events`."""
    for _ in server.follow(name, END, say=tell):
        pass
    return server.events(name, END)


def finish(server: Server, name: str, *, summary: bool) -> None:
    """Report an experiment's end, by a line and the exit code."""
    from dray.records.overview import COMPLETED
    from dray.serve.submission import why_failed

    why, news = why_failed(server, name), server.events(name, END)
    if summary and server.is_here and news["state"] in COMPLETED:
        _summary(name)
    if news["state"] == "ERROR":
        raise ExperimentError(why)
    if why:
        tell(f"dray: {why}")
        raise typer.Exit(FAILED)
    if news["failed"]:
        raise typer.Exit(SOME_FAILED)


def stop(server: Server, name: str) -> bool:
    """Stop an experiment and wait until its trials have saved; a second call ends it at once. Returns False if it was
    not submitted to the server."""
    try:
        if server.events(name, END)["state"] == "STOPPING":
            tell(f"ending {name} at once")
            server.act(name, "kill")
        else:
            server.act(name, "stop")
            tell(f"stopping {name}: waiting until its running trials have saved a checkpoint")
    except NotSubmitted:
        return False
    while (state := server.events(name, END, wait_s=WAIT_S)["state"]) in ACTIVE:
        pass
    from dray.records.overview import COMPLETED

    ended = state in (*COMPLETED, "ERROR")
    tell(
        "it ended on its own in the meantime"
        if ended
        else f"stopped; resume with: dray experiment resume {server.typed(name)}"
    )
    return True


def delete(path: str) -> bool:
    """Delete an experiment through the server of its results directory, which would start it again otherwise. Returns
    False if there is no such server."""
    from dray.records.root import results_root

    server, where = Server.find(), Path(path)
    if server is None or not server.is_here or (results_root() / where.name).resolve() != where.resolve():
        return False
    server.delete(where.name)
    return True


def _print_log(server: Server, name: str, after: int, lines: Sequence[str] = ()) -> None:
    """Print lines and then a log's new lines, until the experiment is no longer active or Ctrl-C is pressed."""
    try:
        for line in itertools.chain(lines, server.follow(name, after, say=tell)):
            typer.echo(line)
    except KeyboardInterrupt:
        named = server.typed(name)
        tell(
            f"\ndray: {name} continues on the server; follow it again with: dray experiment logs {named} -f; stop it "
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
