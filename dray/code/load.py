"""Loads what ``entrypoint`` names, a trial's class or a program that trains one, or raises one clear error."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from dray.code.startup_hook import HOOK
from dray.compat import real_package_hint
from dray.config.entrypoint import EXAMPLES, ClassName, Entrypoint
from dray.errors import EntrypointError, ImportRaisedError
from dray.imports import import_model, module_file, no_module, raised, use_model_dir
from dray.script import Script
from searchers.errors import did_you_mean

if TYPE_CHECKING:
    from dray.pytorch import PyTorchTrial


def load_entrypoint(entrypoint: Entrypoint | None, model_dir: str | os.PathLike[str]) -> type[PyTorchTrial] | Script:
    """Import the class that ``entrypoint`` names from ``model_dir``, or find the program there without running it.

    Otherwise this is like ``load_trial_class``.
    """
    if entrypoint is None:
        raise _error("entrypoint", f"missing required field; {EXAMPLES}")
    if isinstance(entrypoint, ClassName):
        trial_class = load_trial_class(entrypoint, model_dir)
        try:
            inspect.signature(trial_class).bind(None)
        except TypeError as error:
            raise _error(
                "entrypoint",
                f"{entrypoint} is created with the context as its only argument, which its constructor does not accept "
                f"({error}); give its other parameters defaults, or give the program that creates it, such as python3 "
                "train.py",
            ) from None
        return trial_class
    directory = _directory(model_dir)
    use_model_dir(directory)
    _check_program(entrypoint, directory)
    return entrypoint


def check_entrypoint(entrypoint: Entrypoint | None, model_dir: str | os.PathLike[str]) -> None:
    """Check the entrypoint before Ray starts; raises as ``load_entrypoint``.

    With a ``startup-hook.sh`` only the workers import the model, after the hook has installed what it needs.
    """
    try:
        load_entrypoint(entrypoint, model_dir)
    except ImportRaisedError:
        if not (Path(model_dir) / HOOK).is_file():
            raise


def check_entrypoint_file(entrypoint: Entrypoint | None, model_dir: str | os.PathLike[str]) -> None:
    """Check that the file of an entrypoint exists and can be parsed, in milliseconds: nothing is imported."""
    if entrypoint is None:
        raise _error("entrypoint", f"missing required field; {EXAMPLES}")
    directory = _directory(model_dir)
    if isinstance(entrypoint, ClassName):
        _check_module(entrypoint.module, directory)
    else:
        _check_program(entrypoint, directory)


def _check_program(program: Script, directory: Path) -> None:
    if program.file is None:
        _check_module(str(program.module), directory)
        return
    path = directory / program.file
    if os.path.isdir(path):  # Path.is_dir raises if a name is too long for the file system
        raise _error("entrypoint", f"{program.file} in {directory} is a directory; for a package: python3 -m package")
    if not os.path.isfile(path):
        scripts = sorted(str(file.relative_to(directory)) for file in directory.rglob("*.py"))
        hint = did_you_mean(program.file, scripts, f"; its scripts are {', '.join(scripts[:12]) or 'none'}")
        raise _error("entrypoint", f"no script {program.file} in {directory}{hint}")
    _check_syntax(path, directory)


def _check_module(name: str, directory: Path) -> None:
    if (file := module_file(directory, name)) is not None:
        _check_syntax(file, directory)
        return
    # A module outside of the directory may have this name; only its outermost package is checked.
    outermost = name.partition(".")[0]
    if module_file(directory, outermost) is not None or importlib.util.find_spec(outermost) is None:
        raise _error("entrypoint", no_module(name, directory))


def _check_syntax(path: Path, directory: Path) -> None:
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        name = str(path.relative_to(directory)) if path.is_relative_to(directory) else str(path)
        raise _error("entrypoint", raised(name, directory, error, doing="reading")) from None


def load_trial_class(entrypoint: ClassName, model_dir: str | os.PathLike[str]) -> type[PyTorchTrial]:
    """Import a trial's class from ``model_dir``.

    The directory stays at the front of ``sys.path`` until another one is given. Modules of the previous one are
    forgotten first, so that two experiments in one process can each have their own ``model_def``.
    """
    return _find(import_model(entrypoint.module, _directory(model_dir)), entrypoint.name)


def _directory(model_dir: str | os.PathLike[str]) -> Path:
    directory = Path(model_dir)
    if not directory.is_dir():
        raise _error("model_dir", f"no such directory: {directory}; give the directory with the model's code")
    return directory.resolve()


def _find(module: ModuleType, name: str) -> type[PyTorchTrial]:
    # Imported here because it imports torch: a bad module is reported sooner.
    from dray.pytorch import PyTorchTrial

    found: object = module
    for part in name.split("."):  # a nested class has a dotted name
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, PyTorchTrial):
        return found
    trials = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, PyTorchTrial) and value is not PyTorchTrial
    ]
    near = difflib.get_close_matches(name, trials, n=1)
    if isinstance(found, type) and (real := real_package_hint()):
        hint = real
    elif near:
        hint = f"did you mean {module.__name__}:{near[0]}?"
    elif trials:
        hint = f"its trials are {', '.join(trials)}"
    else:
        hint = "it has no trials: derive one from dray.pytorch.PyTorchTrial"
    if found is None:
        raise _error("entrypoint", f"{module.__name__} has no class {name}; {hint}")
    kind = "another class" if isinstance(found, type) else f"a value of type {type(found).__name__}"
    raise _error("entrypoint", f"{module.__name__}:{name} must be a subclass of PyTorchTrial, got {kind}; {hint}")


def _error(path: str, what: str) -> EntrypointError:
    return EntrypointError([(path, what)])
