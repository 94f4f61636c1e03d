"""Runs a user's program in this process as ``python3 train.py --epochs 1`` would in a new one.

The program's imports stay loaded, so that a second run starts quickly; the program itself is executed again. Its own
modules are imported again if one of them calls ``get_cluster_info()`` during its import, as it may keep the trial.
"""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dray.compat import path_for_children, real_package_hint
from dray.imports import forget_kept_cluster_info

_PACKAGE = f"{Path(__file__).parent}{os.sep}"


class ScriptFailed(RuntimeError):
    """The program exited with a code other than 0, or inside a call to dray; the traceback shows the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A program to run: a file, or a module as with ``python3 -m``.

    Args:
        command: the user's command, for messages.
        file: the program's path, relative to the model directory; None for a module.
        module: the module's name; None for a file.
        arguments: the program's ``sys.argv[1:]``.
        written: the user's text if it differs from the command: a list of words, or a command with one of Determined's
            launchers; else "".
    """

    command: str
    file: str | None = None
    module: str | None = None
    arguments: tuple[str, ...] = ()
    written: str | tuple[str, ...] = ""

    def __post_init__(self) -> None:
        assert (self.file is None) != (self.module is None), "a program is either a file or a module"

    def run(self, directory: Path) -> None:
        """Run the program in ``directory``, after a call of `dray.imports.use_model_dir`.

        ``sys.argv``, ``sys.path``, ``__main__``, the working directory and the environment variables for child
        processes (PATH, PYTHONPATH) are restored afterwards.

        Raises:
            ScriptFailed: it exited with a code other than 0, or during training. Its other exceptions are not caught.
        """
        with _process_state_restored():
            os.chdir(directory)
            try:
                if self.file is not None:
                    self._run_file(directory / self.file)
                else:
                    assert self.module is not None
                    # runpy finds the module, and corrects argv[0].
                    sys.argv[:] = [self.module, *self.arguments]
                    runpy.run_module(self.module, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = _exit_code(end)
                if code or _exited_in_training(end):
                    what = f"{self.command} exited with code {code}"
                    if not code:
                        what += " during training; to end training early, call context.set_stop_requested(True)"
                    raise ScriptFailed(what).with_traceback(end.__traceback__) from None

    def never_trained(self, rank: int = 0) -> str:
        """The message for a program that ended without an error, but gave the search nothing to compare."""
        if real := real_package_hint():
            return f"entrypoint: {self.command} trained without dray: {real}"
        where = f" on rank {rank}" if rank else ""
        return (
            f"entrypoint: {self.command} ended{where} without calling Trainer.fit(), or with a call that ended at "
            "once, so the search has nothing to compare; when it runs as __main__, create a Trainer within "
            "pytorch.init() and call its fit(), or report validation metrics with core.init()"
        )

    def _run_file(self, path: Path) -> None:
        # Unlike Python, runpy.run_path() sets a different argv[0], and first looks for a package or an archive.
        main = ModuleType("__main__")
        main.__dict__.update(__file__=str(path), __builtins__=__builtins__)
        sys.modules["__main__"] = main
        sys.argv[:] = [str(self.file), *self.arguments]
        if sys.path[:1] != [str(path.parent)]:
            sys.path.insert(0, str(path.parent))
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), main.__dict__)


def _exit_code(end: SystemExit) -> int:
    """Python's exit code for this exception. Like Python, this prints a code that is not an int."""
    if end.code is None or isinstance(end.code, int):
        return int(end.code or 0)
    print(end.code, file=sys.stderr)
    return 1


def _exited_in_training(end: SystemExit) -> bool:
    """Whether the program exited inside a call to dray."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(end.__traceback__)]
    return any(file.startswith(_PACKAGE) and file != __file__ for file in files)


@contextmanager
def _process_state_restored() -> Iterator[None]:
    argv, path, main, directory = list(sys.argv), list(sys.path), sys.modules["__main__"], os.getcwd()
    variables = {name: os.environ.get(name) for name in ("PATH", "PYTHONPATH")}
    try:
        # As in an activated environment.
        _add_entry("PATH", sysconfig.get_path("scripts"), first=True)
        _add_entry("PYTHONPATH", path_for_children(), first=False)
        yield
    finally:
        sys.argv[:], sys.path[:], sys.modules["__main__"] = argv, path, main
        os.chdir(directory)
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        forget_kept_cluster_info()


def _add_entry(variable: str, entry: str, *, first: bool) -> None:
    value = os.environ.get(variable, "")
    if entry and entry not in value.split(os.pathsep):
        parts = [entry, value] if first else [value, entry]
        os.environ[variable] = os.pathsep.join(part for part in parts if part)


def users_traceback(error: BaseException, directory: Path) -> str:
    """The traceback of ``error`` from its first frame in a file in ``directory``; all of it if there is none."""
    trace = error.__traceback__
    while trace is not None and not Path(trace.tb_frame.f_code.co_filename).is_relative_to(directory):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
