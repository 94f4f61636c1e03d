"""A user's program, run in this process as ``python3 train.py --epochs 1`` would run it in one of its own.

What the program imports stays imported, so that a second run is quick; the program itself is executed anew.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

_PACKAGE = f"{Path(__file__).parent}{os.sep}"


class ScriptFailed(RuntimeError):
    """The program ended with an exit code other than 0, or within a call of ours; the traceback says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A program to run: a file, or a module as with ``python3 -m``.

    Args:
        command: As the user wrote it, for messages.
        file: Path of the program, from the model's directory on; None if it is a module.
        module: Its name; None if it is a file.
        arguments: What the program finds in ``sys.argv[1:]``.
    """

    command: str
    file: str | None = None
    module: str | None = None
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert (self.file is None) != (self.module is None), "a program is either a file or a module"

    def run(self, directory: Path) -> None:
        """Run it to its end, in ``directory``, which `dray.imports.use_model_dir` was given before.

        ``sys.argv``, ``sys.path``, ``__main__`` and the working directory are afterwards as they were.

        Raises:
            ScriptFailed: it exited with a code other than 0, or in the midst of training. What it raises besides is not
                caught.
        """
        with _as_it_was():
            os.chdir(directory)
            try:
                if self.file is not None:
                    self._run_file(directory / self.file)
                else:
                    assert self.module is not None
                    # argv[0] is put right by runpy, which looks the module up.
                    sys.argv[:] = [self.module, *self.arguments]
                    runpy.run_module(self.module, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = _exit_code(end)
                if code or _within_ours(end):
                    told = f"{self.command} exited with code {code}"
                    if not code:
                        told += " in the midst of training; to end that early, call context.set_stop_requested(True)"
                    raise ScriptFailed(told).with_traceback(end.__traceback__) from None

    def _run_file(self, path: Path) -> None:
        # Not by runpy.run_path(), which has another argv[0] than Python, and looks into the file's kind each time.
        main = ModuleType("__main__")
        main.__dict__.update(__file__=str(path), __builtins__=__builtins__)
        sys.modules["__main__"] = main
        sys.argv[:] = [str(self.file), *self.arguments]
        if sys.path[:1] != [str(path.parent)]:
            sys.path.insert(0, str(path.parent))
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), main.__dict__)


def _exit_code(end: SystemExit) -> int:
    """What Python would end with; it prints what is no number."""
    if end.code is None or isinstance(end.code, int):
        return int(end.code or 0)
    print(end.code, file=sys.stderr)
    return 1


def _within_ours(end: SystemExit) -> bool:
    """Whether the program has called us, and exited in what we called: training, which it left so."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(end.__traceback__)]
    return any(file.startswith(_PACKAGE) and file != __file__ for file in files)


@contextmanager
def _as_it_was() -> Iterator[None]:
    argv, path, main, directory = list(sys.argv), list(sys.path), sys.modules["__main__"], os.getcwd()
    try:
        yield
    finally:
        sys.argv[:], sys.path[:], sys.modules["__main__"] = argv, path, main
        os.chdir(directory)


def users_traceback(error: BaseException, directory: Path) -> str:
    """The traceback of ``error`` from its first line in a file below ``directory`` on; all of it if there is none."""
    trace = error.__traceback__
    while trace is not None and not Path(trace.tb_frame.f_code.co_filename).is_relative_to(directory):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
