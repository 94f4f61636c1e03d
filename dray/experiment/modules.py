"""Imports a module of the model's directory, or raises one error that says why it can't."""

from __future__ import annotations

import difflib
import importlib
import traceback
from pathlib import Path
from types import ModuleType

from dray.experiment.errors import EntrypointError, ImportRaisedError
from dray.imports import forget_model_dir, use_model_dir

_SHOWN_TRACEBACK_LINES = 12


def import_model(name: str, directory: Path) -> ModuleType:
    """Import a module from ``directory``, which stays at the front of ``sys.path``, as with ``load_trial_class``.

    Raises:
        EntrypointError: there is no such module, or it raises when it is imported.
    """
    use_model_dir(directory)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(missing + "."):
            raise EntrypointError([("entrypoint", no_module(name, directory))]) from None
        failure: BaseException = error
    except (Exception, SystemExit) as error:
        failure = error
    # The next attempt, with a corrected file, must not find a partial import.
    forget_model_dir()
    raise ImportRaisedError([("entrypoint", raised(name, directory, failure))]) from failure


def module_file(directory: Path, module: str) -> Path | None:
    """The file of a module or package in ``directory``; None if there is none."""
    place = directory.joinpath(*module.split("."))
    for file in (place.with_suffix(".py"), place / "__main__.py", place / "__init__.py"):
        if file.is_file():
            return file
    return None


def no_module(name: str, directory: Path) -> str:
    """The message that there is no such module, with those that there are."""
    modules = sorted(file.stem for file in directory.glob("*.py"))
    near = difflib.get_close_matches(name, modules, n=1)
    if near:
        there = f"; did you mean {near[0]}?"
    else:
        there = f"; its modules are {', '.join(modules[:12])}" if modules else ", which has no modules"
    return f"no module {name} in {directory}{there}"


def raised(name: str, directory: Path, error: BaseException, *, doing: str = "importing") -> str:
    """The message about an error in the user's file, with the end of the traceback, from that file on."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if Path(frame.filename).is_relative_to(directory)), len(frames))
    lines = "".join(
        [*traceback.format_list(frames[first:]), *traceback.format_exception_only(type(error), error)]
    ).splitlines()
    shown = "\n".join(f"    | {line}" for line in lines[-_SHOWN_TRACEBACK_LINES:])
    return f"{doing} {name} from {directory} raised {type(error).__name__}; fix it there:\n{shown}"
