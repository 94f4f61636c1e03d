"""What the source of a module tells of a trial's class, before anything is imported."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from dray.errors import EntrypointError
from dray.text import some
from searchers.errors import did_you_mean

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
