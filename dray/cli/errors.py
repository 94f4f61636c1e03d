"""Exit codes and error messages of the command. An error that the user can fix is one message; an error in the user's
code is a traceback of the user's files; a bug in dray is a whole traceback."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import threading
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn

import typer

from dray.code.startup_hook import HOOK, StartupHookFailed
from dray.environment import TRACEBACK
from dray.errors import RAY, ConfigError, ExperimentError, FoundInTraining, Invalid, NoExperiment
from dray.experiment.interrupts import STDERR, Interrupts, restore_handlers, set_handlers, signal_of
from dray.imports import has_model_dir
from dray.leases.failure import has_users_frames, is_drays_file, is_users_file, users_line, users_traceback
from dray.script import ScriptFailed
from dray.serve.refusals import Refused, WrongState
from dray.storage import StorageError, StorageFull
from dray.storage.errors import is_full
from dray.text import one_line, printable
from dray.training.errors import SearcherMetricError
from searchers.errors import DamagedFile, JournalError

FAILED, BAD_INPUT, SOME_FAILED = 1, 2, 3
EXTRAS = {"mcp": "mcp", "mcp_types": "mcp", "anyio": "mcp"}
"""The extra of dray that brings a package which only some commands need."""
SIGNALLED = 128  # added to the number of the signal that stopped the command, as shells do
_UNKNOWN = "no such command"
_GROUPS = {"exp": "experiment", "job": "experiment", "run": "experiment", "ckpt": "checkpoint"}
"""Groups by their names in other tools, also in the plural."""
_MEANT = {
    **dict.fromkeys(("run", "train", "start", "submit", "launch", "new", "sweep"), "create"),
    **dict.fromkeys(("show", "status", "info", "inspect", "get", "view"), "describe"),
    **dict.fromkeys(("cancel", "abort", "terminate", "down"), "stop"),
    **dict.fromkeys(("rm", "remove"), "delete"),
    **dict.fromkeys(("ps", "ls", "queue"), "list"),
    **dict.fromkeys(("log", "tail"), "logs"),
    **dict.fromkeys(("pull", "get-model"), "download"),
    "compare": "diff",
}
"""Commands by their names in Determined, SkyPilot, W&B and Docker."""
_MEANT_IN = {
    "trial": {"kill": "stop", "delete": "stop", "create": "add"},
    "token": {"delete": "revoke", "kill": "revoke"},
    "checkpoint": {"describe": "list"},
}
"""Commands that have another name in one group."""
_ENDS_MORE = frozenset({"kill", "stop", "delete", "pause"})
"""Never suggested from another group: what ends a trial there ends an experiment."""

# click's classes of usage errors, or those of the copy of click in newer versions of Typer.
_UsageError: Any
_ClickException: Any
_UsageError, _ClickException = typer.BadParameter.__mro__[1:3]


class BadUse(ValueError):
    """Invalid usage of a command; the message is one line."""


def run(command: Any, arguments: Sequence[str] | None, everything: Callable[[], Any]) -> NoReturn:
    """Run a click command, and end the process. `everything`: returns the command with all groups, for suggestions."""
    sys.excepthook = show_uncaught  # rather than a handler, so that a debugger stops where the error was raised
    try:
        code = command(args=arguments, prog_name="dray", standalone_mode=False)
    except _UsageError as error:
        message, code = _in_our_style(error.format_message()), BAD_INPUT
        if message:  # empty without a command: then the help was printed
            known = ""
            if _UNKNOWN in message:
                words = sys.argv[1:] if arguments is None else arguments
                known = _of_determined(words) or _elsewhere(error, everything())
            see = f"; see {error.ctx.command_path} --help" if error.ctx else ""
            code = _print_error(f"{_UNKNOWN}; {known}" if known else message + see, BAD_INPUT)
    except _ClickException as error:
        code = _print_error(_in_our_style(error.format_message()), BAD_INPUT)
    except typer.Abort:
        code = _report_signal(KeyboardInterrupt())
    except KeyboardInterrupt as stopped:
        code = _report_signal(stopped)
    _flush()
    code = code if isinstance(code, int) else 0
    # Not if users' code, which may have open files, was imported: a local run, or a search method.
    if arguments is None and "dray.cluster.connection" in sys.modules and not has_model_dir():
        with exit_on_signals():
            _exit_with_ray(code)
    sys.exit(code)


def _exit_with_ray(code: int) -> NoReturn:
    """End the process as multiprocessing ends its own: waiting for its threads and exit handlers, but without the half
    second that Ray's exit handler sleeps and the second in which Python frees the modules of Ray and torch."""
    import ray

    atexit.unregister(ray.shutdown)
    ray.shutdown()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


@contextmanager
def handle_errors() -> Iterator[None]:
    """Turn a command's expected errors into one message and an exit code. `command` wraps every command in it."""
    try:
        yield
    except (FoundInTraining, SearcherMetricError, ExperimentError, StorageError, StorageFull, Refused) as error:
        raise typer.Exit(_print_error(str(error), FAILED)) from None
    except (ConfigError, NoExperiment, Invalid, WrongState, BadUse, DamagedFile, JournalError) as error:
        raise typer.Exit(_print_error(str(error), BAD_INPUT)) from None
    except StartupHookFailed as error:
        raise typer.Exit(_print_error(f"{HOOK} {error}", BAD_INPUT)) from None
    except ScriptFailed as error:
        raise typer.Exit(_print_error("\n".join([str(error), *users_line(error, None)]), FAILED)) from None
    except BdbQuit:
        raise typer.Exit(_print_error("the debugger was left, which ended the run", FAILED)) from None
    except (PermissionError, ConnectionError) as error:  # ConnectionError: for example, no such Ray cluster
        if users_line(error, None):  # from the trial's code, with --local
            raise
        if isinstance(error, BrokenPipeError):  # in `dray ... | head`, after head has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit from None
        raise typer.Exit(_print_error(str(error), FAILED)) from None
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("dray", "searchers") or users_line(error, None):
            raise
        needs = f"'dray-train[{EXTRAS[package]}]'" if package in EXTRAS else f"dray-train '{RAY}'"
        message = f"{one_line(error)}; this command needs it: pip install {needs}"
        raise typer.Exit(_print_error(message, FAILED)) from None
    except OSError as error:
        if users_line(error, None):
            raise
        if error.errno == errno.EROFS:
            what = f"can't write to {error.filename2 or error.filename}: {error.strerror}"
            cure = "set DRAY_HOME, or the config's checkpoint_storage, to a directory that you can write to"
            raise typer.Exit(_print_error(f"{what}; {cure}", FAILED)) from None
        if (full := is_full(error)) is None:
            raise
        where = f" to {written}" if (written := full.filename2 or full.filename) else ""  # of a copy, not what was read
        message = f"can't write{where}: {full.strerror}; free some space: all records are intact"
        raise typer.Exit(_print_error(message, FAILED)) from None
    except KeyboardInterrupt as stopped:
        raise typer.Exit(_report_signal(stopped)) from None


def show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that no command expects, as `sys.excepthook`: an error in the user's code with the frames of the
    user's files, a check of dray's own or of a library as its message, and a bug in dray with all frames."""
    while trace is not None and is_users_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next  # the program that has called dray
    frames = traceback.extract_tb(trace)
    if os.environ.get(TRACEBACK) or not frames:
        sys.__excepthook__(kind, error, trace)
        return
    whole, last = "".join(traceback.format_exception(kind, error, trace)), frames[-1]
    _flush()
    if has_users_frames(whole):
        _print_error(
            f"an error in your code; {TRACEBACK}=1 also shows the frames of libraries\n{users_traceback(whole)}", FAILED
        )
    elif not is_drays_file(last.filename):
        what = "".join(traceback.format_exception_only(error)).strip()
        _print_error(f"{what}\nraised in {last.filename}:{last.lineno}; {TRACEBACK}=1 shows all frames", FAILED)
    elif (last.line or "").startswith("raise ") and not isinstance(error, AssertionError):
        _print_error(str(error), FAILED)
    else:
        sys.__excepthook__(kind, error, trace)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP end the process at once within the block, with one line.

    `Experiment.run` installs its own handlers, which call these at the second signal.
    """

    def end(number: int, frame: FrameType | None) -> None:
        cause = _signal_name(signal.Signals(number)) + ("" if Interrupts.begun else "; nothing was started")
        with suppress(OSError):  # the terminal may be closed
            os.write(STDERR, f"dray: stopped by {cause}\n".encode())
        os._exit(SIGNALLED + number)

    before = set_handlers(end)
    try:
        yield
    finally:
        restore_handlers(before)


def _flush() -> None:
    """Flush the output, or drop it if the terminal was closed: Python would drop it too, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _report_signal(stopped: KeyboardInterrupt) -> int:
    number = signal_of(stopped)
    return _print_error(f"stopped by {_signal_name(number)}", SIGNALLED + number)


def _signal_name(number: signal.Signals) -> str:
    return "Ctrl-C" if number == signal.SIGINT else number.name


def _elsewhere(error: Any, everything: Any) -> str:
    """A suggestion of a command with this meaning in the same group or, unless it ends something, in other groups; ""
    if there is none."""
    word = error.message.split("'")[1] if "'" in error.message else ""
    groups = {name: group for name, group in everything.commands.items() if not group.hidden}
    here = error.ctx.command.name if error.ctx.parent is not None else ""
    here = next((name for name in groups if here and name[0] == here), here)  # e, t, c
    group = _GROUPS.get(single := word.removesuffix("s"), single)
    if not here and word not in _MEANT and hasattr(groups.get(group), "commands"):
        return f"did you mean dray {group}"
    word = _MEANT.get(word, word)
    word = _MEANT_IN.get(here, {}).get(word, word)
    if here and word in error.ctx.command.commands:
        return f"did you mean {f'dray {here}' if here in groups else error.ctx.command_path} {word}"
    if here and word in _ENDS_MORE:
        return ""
    meant = [f"dray {name} {word}" for name, group in groups.items() if word in getattr(group, "commands", {})]
    return f"did you mean {' or '.join(meant)}" if meant else ""


def _of_determined(arguments: Sequence[str]) -> str:
    """A suggestion in place of a command that only Determined has; "" if there is none."""
    from dray.compat.names import COMMANDS

    short = {"e": "experiment", "t": "trial", "c": "checkpoint", "lt": "list-trials", "lc": "list-checkpoints"}
    group, action, *_ = [*(short.get(word, word) for word in arguments if not word.startswith("-")), "", ""]
    for command in (f"{group} {action}", group):
        if command in COMMANDS:
            return f"instead of det {command}, use {COMMANDS[command]}"
    return ""


def _print_error(message: str, code: int) -> int:
    with suppress(OSError):  # the terminal may be closed
        typer.echo(f"dray: {printable(message.rstrip())}", err=True)
    return code


def _in_our_style(message: str) -> str:
    line = one_line(message).rstrip(".?").replace(". Did", "; did")  # Typer writes two sentences
    return line[:1].lower() + line[1:]
