"""Imports of users' model code, from one directory after another, in one process.

If `determined` is not installed, importing it gives dray.
"""

from __future__ import annotations

import importlib
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType

from dray.compat import install_if_absent

# Never treated as a user's module, because two copies of one of these in a process don't work together.
_OURS = frozenset({"__main__", "dray", "searchers", "ray", "torch", "numpy"})
_DRAY = f"{Path(__file__).parent}{os.sep}"  # also under the name of Determined's package
_PLACES = {*site.getsitepackages(), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))}
_INSTALLED = tuple({Path(place).resolve() for place in _PLACES})
_INSTALLED_TEXT = tuple(f"{place}{os.sep}" for place in {*_PLACES, *map(str, _INSTALLED)})
_SHOWN_TRACEBACK_LINES = 12
_SHOWN_LETTERS = 1_000  # of each line

_current: Path | None = None  # the model directory that `use_model_dir` put on sys.path
_older: frozenset[str] = frozenset()  # the driver's own modules, imported before
_read_while_importing = False  # whether a module has called `get_cluster_info()` during its import


@contextmanager
def import_from_path(path: str | os.PathLike[str]) -> Iterator[None]:
    """Import from a directory in a ``with`` block, like ``determined.import_from_path``.

    Modules imported from it are forgotten afterwards, so that several directories can each have a ``model_def``:

    .. code-block:: python

        with dray.import_from_path(checkpoint_dir / "code"):
            import model_def as old
        import model_def as new

    Args:
        path: the directory; its modules take precedence over any others of the same names.
    """
    directory = Path(path).resolve()
    install_if_absent()
    hidden = _forget_clashes(directory)
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    before = set(sys.modules)
    try:
        yield
    finally:
        _forget(directory, keep=before)
        sys.modules.update(hidden)
        if str(directory) in sys.path:
            sys.path.remove(str(directory))


def use_model_dir(path: str | os.PathLike[str]) -> None:
    """Import from a directory from now on, instead of the previous one.

    It stays on ``sys.path``: model code may import inside functions, and DataLoader workers import by name.
    """
    global _current, _older
    install_if_absent()
    directory = Path(path).resolve()
    if _current != directory:
        if _current is not None and str(_current) in sys.path:
            sys.path.remove(str(_current))
        forget_model_dir()
        _older = frozenset(sys.modules)
    _forget_clashes(directory)
    if sys.path[:1] != [str(directory)]:
        sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    _current = directory


def has_model_dir() -> bool:
    """Whether this process may have imported users' code."""
    return _current is not None


def forget_model_dir() -> None:
    """Remove the modules imported from the directory of ``use_model_dir`` since that call from ``sys.modules``."""
    if _current is not None:
        _forget(_current, keep=_older)


def note_cluster_info_read() -> None:
    """Called by `get_cluster_info()`: a module that calls it during its import may keep the trial that it gets."""
    global _read_while_importing
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _read_while_importing:
        # The program itself does not count: it is executed again for each trial.
        _read_while_importing = frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"
        frame = frame.f_back


def forget_kept_cluster_info() -> None:
    """Call `forget_model_dir` if a module has read the cluster info during its import, since the last call."""
    global _read_while_importing
    if _read_while_importing:
        forget_model_dir()
    _read_while_importing = False


def _forget(directory: Path, *, keep: Collection[str]) -> None:
    for name, module in list(sys.modules.items()):
        origin = None if name in keep else _origin(name, module)
        if origin is not None and origin.is_relative_to(directory):
            del sys.modules[name]


def _forget_clashes(directory: Path) -> dict[str, ModuleType]:
    """Remove modules from elsewhere with the same names as modules in ``directory``, and return them by name."""
    names = {entry.stem for entry in directory.iterdir() if entry.suffix == ".py" or entry.is_dir()}
    gone = {}
    for name, module in list(sys.modules.items()):
        origin = _origin(name, module) if name.partition(".")[0] in names else None
        if origin is not None and not origin.is_relative_to(directory):
            gone[name] = sys.modules.pop(name)
    return gone


def is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    # Comparing text first is faster: resolving the paths of all modules of torch and Ray takes 0.3 s.
    if file.startswith(_INSTALLED_TEXT):
        return True
    origin = Path(file).resolve()
    return any(origin.is_relative_to(installed) for installed in _INSTALLED)


def _origin(name: str, module: ModuleType) -> Path | None:
    """The file of a user's module; None for an installed module, or one of dray's."""
    # Not by getattr(): a module's own __getattr__ may import something that is not installed, as in transformers.
    names = getattr(module, "__dict__", {})
    place = names.get("__file__")
    if not isinstance(place, str):
        try:  # a package without __init__.py has no file, but a path, unless its parent could not be imported
            place = next(iter(names.get("__path__", [])), None)
        except KeyError:
            return None
    if name.partition(".")[0] in _OURS or not isinstance(place, str) or place.startswith(_DRAY) or is_installed(place):
        return None
    return Path(place).resolve()


def import_model(name: str, directory: Path) -> ModuleType:
    """Import a module from ``directory``, which stays at the front of ``sys.path``."""
    # Imported here, because a worker imports this module first, before these.
    from dray.errors import EntrypointError, ImportRaisedError

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
    # The next attempt, perhaps with a corrected file, must not find a partial import.
    forget_model_dir()
    raise ImportRaisedError([("entrypoint", raised(name, directory, failure))]) from failure


def module_file(directory: Path, module: str, *, runs: bool = False) -> Path | None:
    """The file of a module or package in ``directory``, or with ``runs`` the one that ``python3 -m`` runs; None if
    there is none."""
    place = directory.joinpath(*module.split("."))
    package, file = place / "__init__.py", place.with_suffix(".py")
    for each in (file, place / "__main__.py", package) if runs else (package, file):
        if os.path.isfile(each):  # Path.is_file raises if a name is too long for the file system
            return each
    return None


def no_module(name: str, directory: Path) -> str:
    """The message for a missing module, which names the existing ones."""
    from searchers.errors import did_you_mean

    modules = sorted(file.stem for file in directory.glob("*.py"))
    existing = f"; its modules are {', '.join(modules[:12])}" if modules else ", which has no modules"
    return f"no module {name} in {directory}{did_you_mean(name, modules, existing)}"


def raised(name: str, directory: Path, error: BaseException, *, doing: str = "importing") -> str:
    """The message for an error in the user's file, with the end of the traceback, from that file on."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if Path(frame.filename).is_relative_to(directory)), len(frames))
    lines = "".join(
        [*traceback.format_list(frames[first:]), *traceback.format_exception_only(type(error), error)]
    ).splitlines()
    shown = "\n".join(f"    | {line:.{_SHOWN_LETTERS}}" for line in lines[-_SHOWN_TRACEBACK_LINES:])
    return f"{doing} {name} from {directory} raised {type(error).__name__}; fix it there:\n{shown}"
