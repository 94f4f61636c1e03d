"""Imports users' model code, from one directory after another, in one process.

Such code may import `determined`: if that is not installed, it gets dray.
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

# Never a user's module, wherever they are: two copies of one of these in a process don't work together.
_OURS = frozenset({"__main__", "dray", "searchers", "ray", "torch", "numpy"})
_DRAY = f"{Path(__file__).parent}{os.sep}"  # also under the name of Determined's package
_PLACES = {*site.getsitepackages(), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))}
_INSTALLED = tuple({Path(place).resolve() for place in _PLACES})
_INSTALLED_TEXT = tuple(f"{place}{os.sep}" for place in {*_PLACES, *map(str, _INSTALLED)})
_SHOWN_TRACEBACK_LINES = 12

_current: Path | None = None  # the model directory that `use_model_dir` put on sys.path
_older: frozenset[str] = frozenset()  # the modules imported before, which are the driver's own
_read_while_importing = False  # whether a module has called `get_cluster_info()` while it was imported


@contextmanager
def import_from_path(path: str | os.PathLike[str]) -> Iterator[None]:
    """Import from a directory in a ``with`` block, as ``determined.import_from_path`` does.

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


def forget_model_dir() -> None:
    """Remove from ``sys.modules`` what was imported from the directory of ``use_model_dir`` since that call."""
    if _current is not None:
        _forget(_current, keep=_older)


def note_cluster_info_read() -> None:
    """Called by `get_cluster_info()`: a module that calls it while it is imported may keep the trial it gets."""
    global _read_while_importing
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _read_while_importing:
        # Not the program itself: it is executed again for each trial.
        _read_while_importing = frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"
        frame = frame.f_back


def forget_kept_cluster_info() -> None:
    """Call `forget_model_dir` if a module has read the cluster info while it was imported, since the last call."""
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
    """Remove modules loaded from elsewhere whose names ``directory`` has too; returns them by name."""
    names = {entry.stem for entry in directory.iterdir() if entry.suffix == ".py" or entry.is_dir()}
    gone = {}
    for name, module in list(sys.modules.items()):
        origin = _origin(name, module) if name.partition(".")[0] in names else None
        if origin is not None and not origin.is_relative_to(directory):
            gone[name] = sys.modules.pop(name)
    return gone


def is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    # Text is compared first: resolving the paths of all modules of torch and Ray takes 0.3 s.
    if file.startswith(_INSTALLED_TEXT):
        return True
    origin = Path(file).resolve()
    return any(origin.is_relative_to(installed) for installed in _INSTALLED)


def _origin(name: str, module: ModuleType) -> Path | None:
    """Where a user's module was imported from; None for an installed one, or one of dray's."""
    place = getattr(module, "__file__", None)
    if not isinstance(place, str):
        try:  # a package without __init__.py has no file, but a path; none if its parent could not be imported
            place = next(iter(getattr(module, "__path__", [])), None)
        except KeyError:
            return None
    if name.partition(".")[0] in _OURS or not isinstance(place, str) or place.startswith(_DRAY) or is_installed(place):
        return None
    return Path(place).resolve()


def import_model(name: str, directory: Path) -> ModuleType:
    """Import a module from ``directory``, which stays at the front of ``sys.path``."""
    # Here, not above: a worker imports this module first, and these import more.
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
    """The message that there is no such module, with the existing ones."""
    from searchers.errors import did_you_mean

    modules = sorted(file.stem for file in directory.glob("*.py"))
    existing = f"; its modules are {', '.join(modules[:12])}" if modules else ", which has no modules"
    return f"no module {name} in {directory}{did_you_mean(name, modules, existing)}"


def raised(name: str, directory: Path, error: BaseException, *, doing: str = "importing") -> str:
    """The message about an error in the user's file, with the end of the traceback, from that file on."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if Path(frame.filename).is_relative_to(directory)), len(frames))
    lines = "".join(
        [*traceback.format_list(frames[first:]), *traceback.format_exception_only(type(error), error)]
    ).splitlines()
    shown = "\n".join(f"    | {line}" for line in lines[-_SHOWN_TRACEBACK_LINES:])
    return f"{doing} {name} from {directory} raised {type(error).__name__}; fix it there:\n{shown}"
