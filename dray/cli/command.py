"""The command ``dray``: its groups and its help."""

from __future__ import annotations

import copy
import functools
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.main

import dray
from dray.cli import (
    agents,
    bisect,
    checkpoint,
    cluster,
    demo,
    diff,
    experiment,
    files,
    probe,
    queue,
    report,
    serve,
    trial,
)
from dray.cli.errors import handle_errors, run
from dray.private import withhold_writing

PURPOSE = "Train PyTorch models and search their hyperparameters on Ray."
FIRST_DAY = """\
dray demo                            run an example search
dray experiment create asha.yaml .   run a search
dray experiment list                 list experiments and their progress
dray experiment describe latest      show the best trials, and failures
dray checkpoint export latest        export the best model's weights"""
EXAMPLES = f"""{PURPOSE}

\b
{FIRST_DAY}
dray trial logs latest 7 -f          follow the output of trial 7

EXPERIMENT is the number of an experiment in ~/dray_results (or DRAY_HOME), its name or a unique part of its name,
'latest', a path, or s3://...

Short forms: dray ls, dray e create, dray t logs, dray c list. Shell completion: dray --install-completion.

Exit codes: 0 done, 1 failed, 2 bad usage or config, 3 done but some trials failed, 128+n stopped by signal n.
"""
HELP = ["-h", "--help"]

app = typer.Typer(
    help=EXAMPLES,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": HELP},
)
for short, group in (("e", experiment), ("t", trial), ("c", checkpoint)):
    group.app.command(name="ls", hidden=True)(group.list_)
    app.add_typer(group.app, name=group.__name__.rpartition(".")[2])
    app.add_typer(group.app, name=short, hidden=True)
app.command(name="ls", hidden=True)(experiment.list_)
experiment.app.command(name="diff", hidden=True)(diff.diff)
app.add_typer(files.app, name="config")
app.add_typer(cluster.app, name="cluster")
app.command()(demo.demo)
app.command()(diff.diff)
app.command()(bisect.bisect)
app.command()(files.preview)
app.command()(probe.probe)
app.command()(report.report)
app.command()(report.ui)
app.command()(files.migrate)
app.add_typer(serve.app, name="serve")
app.command()(agents.mcp)
app.add_typer(agents.app, name="agents")
_groups = (app, experiment.app, queue.sets, trial.app, checkpoint.app, files.app, cluster.app, serve.tokens, agents.app)
for _group in _groups:
    for _registered in _group.registered_commands:
        assert _registered.callback is not None
        _registered.callback = handle_errors()(_registered.callback)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dray {dray.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    logging.basicConfig(level=logging.WARNING, format=dray.LOG_FORMAT)
    if context.invoked_subcommand is None:
        typer.echo(f"{PURPOSE}\n\n{FIRST_DAY}\n\nAll commands: dray --help")


def main(arguments: Sequence[str] | None = None) -> None:
    withhold_writing()
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the caller has closed it
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # texts of others may have letters that the terminal can't write
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if arguments is None else arguments
    run(_command(words[0] if words else ""), arguments, lambda: _command(""))


@functools.cache
def _command(first: str) -> Any:
    """The click command for a command line that begins with the word `first`.

    It has only the commands that `first` names, because making the others takes longer than most commands run. If
    `first` names none, as for help and completion, it has all. Cached for tests, which run hundreds.
    """
    part = copy.copy(app)
    part.registered_groups = [group for group in app.registered_groups if group.name == first]
    part.registered_commands = [each for each in app.registered_commands if _name(each) == first]
    is_named = part.registered_groups or part.registered_commands or first == "--version"
    command = typer.main.get_command(part if is_named else app)
    _tidy(command)
    return command


def _name(command: Any) -> str:
    return command.name or typer.main.get_command_name(command.callback.__name__)


def _tidy(command: Any) -> None:
    """Tidy the help: join the lines of each paragraph, as Typer wraps them but keeps line breaks, and omit the type
    of flags, which is always <bool>."""
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(each if each.startswith("\b") else each.replace("\n", " ") for each in paragraphs)
    for option in command.get_params(command.context_class(command, help_option_names=HELP)):
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _tidy(inner)
