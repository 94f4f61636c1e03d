"""How the command ends: an exit code, and one message for what is the user's to mend. What is ours ends in a
traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from dray.cluster.failure import users_line
from dray.cluster.startup_hook import HOOK, StartupHookFailed
from dray.experiment.errors import ConfigError, ExperimentError, NoExperiment
from dray.script import ScriptFailed
from dray.storage import StorageError, StorageFull
from searchers.errors import JournalError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

# Typer brings its own copy of click; in either, what is wrong with a command line is one of these.
_UsageError: Any
_ClickException: Any
_UsageError, _ClickException = typer.BadParameter.__mro__[1:3]


class BadUse(ValueError):
    """A command that can't be carried out as it was given; its message is one line."""


def run(command: Any, arguments: Sequence[str] | None) -> NoReturn:
    """Carry out a command of Typer's, and exit."""
    try:
        code = command(args=arguments, prog_name="dray", standalone_mode=False)
    except _UsageError as error:
        message, code = _one_line(error.format_message()), BAD_INPUT
        if message:  # else no command was given, and its help was printed
            code = _tell(message + (f"; see {error.ctx.command_path} --help" if error.ctx else ""), BAD_INPUT)
    except _ClickException as error:
        code = _tell(_one_line(error.format_message()), BAD_INPUT)
    except (typer.Abort, KeyboardInterrupt):
        code = _tell("stopped by Ctrl-C", INTERRUPTED)
    except BrokenPipeError:  # `dray ... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def told() -> Iterator[None]:
    """Around a command: what can go wrong in it, in one message and an exit code.

    Raises:
        typer.Exit: in the place of what was told.
    """
    try:
        yield
    except (ConfigError, NoExperiment, BadUse, JournalError) as error:  # the last: damaged, or another driver writes it
        raise typer.Exit(_tell(str(error), BAD_INPUT)) from None
    except StartupHookFailed as error:
        raise typer.Exit(_tell(f"{HOOK} {error}", BAD_INPUT)) from None
    except ScriptFailed as error:
        raise typer.Exit(_tell("\n".join([str(error), *users_line(error, None)]), FAILED)) from None
    # ConnectionError: there is no such Ray cluster.
    except (ExperimentError, StorageError, StorageFull, PermissionError, ConnectionError) as error:
        raise typer.Exit(_tell(str(error), FAILED)) from None
    except KeyboardInterrupt:
        raise typer.Exit(_tell("stopped by Ctrl-C", INTERRUPTED)) from None


def _tell(message: str, code: int) -> int:
    typer.echo(f"dray: {message}", err=True)
    return code


def _one_line(message: str) -> str:
    line = " ".join(message.split()).rstrip(".?").replace(". Did", "; did")  # of Typer: two sentences
    return line[:1].lower() + line[1:]
