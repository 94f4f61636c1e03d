"""Loads what ``entrypoint`` names, a trial's class or a program that trains one, or raises one clear error."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from dray.code.startup_hook import HOOK
from dray.compat import real_package_hint
from dray.config.entrypoint import EXAMPLES, ClassName, Entrypoint
from dray.errors import EntrypointError, ImportRaisedError
from dray.imports import import_model, is_installed, module_file, no_module, raised, use_model_dir
from dray.script import Script
from dray.text import some
from searchers.errors import did_you_mean

if TYPE_CHECKING:
    from dray.pytorch import PyTorchTrial


# What can give a module names that its syntax tree does not show. Methods such as model.eval() and modules() can't.
_HIDDEN_NAMES = re.compile(
    rb"\bimport[\s\\]*\*|(?<![.\w])(?:eval|exec|globals|locals|vars|__getattr__)\b|\bmodules\b(?!\()"
    rb"|\b(?:__dict__|__globals__|f_globals|builtins|importlib|__import__)\b"
)
_LITERALS = {ast.List: "list", ast.Tuple: "tuple", ast.Dict: "dict", ast.Set: "set", ast.Lambda: "function"}


def tells_class(source: bytes, module: str, name: str, others: Iterable[str]) -> bool:
    """Whether a module's source shows that it has a class. False: only an import can tell.

    Args:
        name: of the class; what is nested in it is not looked for.
        others: attributes that the module has besides those in its source.

    Raises:
        EntrypointError: it certainly has none.
    """
    try:
        bound = _bindings(ast.parse(source))
    except (RecursionError, MemoryError):
        return False
    outermost, _, nested = name.partition(".")
    nodes = bound.get(outermost, ())
    got = _no_trial(nodes[0]) if len(nodes) == 1 and not nested else ""
    if outermost in others or (nodes and not got):
        return True
    if _HIDDEN_NAMES.search(source):
        return False
    classes = sorted(each for each, nodes in bound.items() if any(isinstance(node, ast.ClassDef) for node in nodes))
    raise not_a_trial(module, name, got, classes, "classes")


def not_a_trial(module: str, name: str, got: str, known: Sequence[str], noun: str) -> EntrypointError:
    """The error for an entrypoint that names `got` instead of a trial's class, or nothing if it is ""."""
    what = f"{module}:{name} must be a subclass of PyTorchTrial, got {got}" if got else f"{module} has no class {name}"
    others = [each for each in known if each != name]
    if others:
        hint = did_you_mean(name, others, f"; its {'other ' * (name in known)}{noun} are {some(others, 12)}")
    else:
        hint = f"; {'derive it' if known else f'it has no {noun}: derive one'} from dray.pytorch.PyTorchTrial"
    return EntrypointError([("entrypoint", what + hint)])


def _bindings(tree: ast.Module) -> Mapping[str, Sequence[ast.AST]]:
    """The nodes that bind each of a module's names, in any order."""
    found: dict[str, list[ast.AST]] = defaultdict(list)
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        names: list[str] = []
        inside: Iterable[ast.AST] = ast.iter_child_nodes(node)
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
                inside = (each for each in ast.walk(node) if isinstance(each, ast.Global | ast.NamedExpr))
            case ast.Import() | ast.ImportFrom():
                names = [(each.asname or each.name).partition(".")[0] for each in node.names]
            case ast.Global():
                names = node.names
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                names, inside = [name], [value]
            case ast.AnnAssign():
                inside = ()
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
            ):
                names = [name]
        for name in names:
            found[name].append(node)
        todo += inside
    return found


def _no_trial(node: ast.AST) -> str:
    """What a name is that only this node binds, if that is certainly no trial's class; else ""."""
    match node:
        case ast.ClassDef(bases=[], keywords=[], decorator_list=[]):
            return "another class"
        case ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]):
            return "a value of type function"
        case ast.Import(names=names) if not any(each.asname and "." in each.name for each in names):
            return "a value of type module"
        case ast.Assign(value=ast.Constant(value=value)) | ast.AnnAssign(value=ast.Constant(value=value)):
            return f"a value of type {type(value).__name__}"
        case ast.Assign(value=value) | ast.AnnAssign(value=value) if type(value) in _LITERALS:
            return f"a value of type {_LITERALS[type(value)]}"
    return ""


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


def check_entrypoint(entrypoint: Entrypoint | None, model_dir: str | os.PathLike[str], *, imports: bool = True) -> None:
    """Check the entrypoint before Ray starts; raises as ``load_entrypoint``.

    With a ``startup-hook.sh`` only the workers import the model, after the hook has installed what it needs.

    Args:
        imports: import the class although its source shows that it is there.
    """
    if check_entrypoint_file(entrypoint, model_dir) and not imports:
        return
    try:
        load_entrypoint(entrypoint, model_dir)
    except ImportRaisedError:
        if not (Path(model_dir) / HOOK).is_file():
            raise


def check_entrypoint_file(entrypoint: Entrypoint | None, model_dir: str | os.PathLike[str]) -> bool:
    """Check that the file of an entrypoint exists, can be parsed, and has the class, in milliseconds: nothing is
    imported. False: only an import can tell whether it has the class."""
    if entrypoint is None:
        raise _error("entrypoint", f"missing required field; {EXAMPLES}")
    directory = _directory(model_dir)
    if not isinstance(entrypoint, ClassName):
        _check_program(entrypoint, directory)
        return True
    module = entrypoint.module
    file = module_file(directory, module)
    if file is None:
        _check_elsewhere(module, directory)
        file = _file_elsewhere(module)
        is_pythons = module.partition(".")[0] in sys.stdlib_module_names
        if is_pythons and (file is None or is_installed(str(file))):
            raise _error("entrypoint", f"{module} is a module of Python, so it has no trials; {EXAMPLES}")
    if file is None:
        return False
    beside = {each.stem for each in file.parent.iterdir()} if file.name == "__init__.py" else ()
    return tells_class(_source(file, directory), module, entrypoint.name, beside)


def _check_program(program: Script, directory: Path) -> None:
    if program.file is None:
        if (file := module_file(directory, str(program.module), runs=True)) is None:
            _check_elsewhere(str(program.module), directory)
            return
    else:
        file = directory / program.file
        if os.path.isdir(file):  # Path.is_dir raises if a name is too long for the file system
            what = f"{program.file} in {directory} is a directory; for a package: python3 -m package"
            raise _error("entrypoint", what)
        if not os.path.isfile(file):
            scripts = sorted(str(each.relative_to(directory)) for each in directory.rglob("*.py"))
            hint = did_you_mean(program.file, scripts, f"; its scripts are {', '.join(scripts[:12]) or 'none'}")
            raise _error("entrypoint", f"no script {program.file} in {directory}{hint}")
    if not _source(file, directory).strip():
        raise _error("entrypoint", f"{file} is empty, so it trains nothing; {EXAMPLES}")


def _check_elsewhere(name: str, directory: Path) -> None:
    """Check that a module that the directory does not have can be elsewhere: only its outermost package is checked."""
    outermost = name.partition(".")[0]
    try:
        # Elsewhere, __main__ is another program.
        is_there = outermost != "__main__" and importlib.util.find_spec(outermost) is not None
    except ValueError:  # somebody has put a module of this name into sys.modules
        is_there = False
    if not is_there or module_file(directory, outermost, runs=True) is not None:
        raise _error("entrypoint", no_module(name, directory))


def _file_elsewhere(name: str) -> Path | None:
    """The source of an installed module, without importing its packages as `importlib.util.find_spec` does."""
    origin, path = None, None
    for package in accumulate(name.split("."), "{}.{}".format):
        if (spec := PathFinder.find_spec(package, path)) is None:
            return None
        origin, path = spec.origin, spec.submodule_search_locations
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _source(path: Path, directory: Path) -> bytes:
    """The source of a file that can be parsed."""
    source = path.read_bytes()
    try:
        compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        name = str(path.relative_to(directory)) if path.is_relative_to(directory) else str(path)
        raise _error("entrypoint", raised(name, directory, error, doing="reading")) from None
    except (RecursionError, MemoryError):
        pass  # as nested as this, it may be parsed from a lower stack, as by the workers
    return source


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
    # A module that has not imported this has no trials. It imports torch, so a bad module is reported sooner without.
    base = getattr(sys.modules.get("dray.pytorch"), "PyTorchTrial", None)
    found: object = module
    for part in name.split("."):  # a nested class has a dotted name
        found = getattr(found, part, None)
    if base is not None and isinstance(found, type) and issubclass(found, base):
        return found
    if isinstance(found, type) and (real := real_package_hint()):
        what = f"{module.__name__}:{name} must be a subclass of PyTorchTrial, got another class; {real}"
        raise _error("entrypoint", what)
    trials = [
        key
        for key, value in vars(module).items()
        if base is not None and isinstance(value, type) and issubclass(value, base) and value is not base
    ]
    kind = "another class" if isinstance(found, type) else f"a value of type {type(found).__name__}"
    raise not_a_trial(module.__name__, name, "" if found is None else kind, trials, "trials")


def _error(path: str, what: str) -> EntrypointError:
    return EntrypointError([(path, what)])
