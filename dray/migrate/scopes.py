"""Resolves an expression in a file to one of Determined's names, without importing or running anything.

A name means what its scope binds it to: an import, an assignment of such a name, a call with a known result type
(``info = det.get_cluster_info()``), an annotation, an attribute of ``self``. Anything else means nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

DETERMINED = "determined"

RESULTS: Mapping[str, str] = {
    "determined.get_cluster_info": "determined.ClusterInfo",
    "determined.core.init": "determined.core.Context",
    "determined.pytorch.init": "determined.pytorch.PyTorchTrialContext",
}
"""The classes that functions return. Calling a class returns that class."""

ATTRIBUTES: Mapping[str, str] = {
    "determined.ClusterInfo.trial": "determined.TrialInfo",
    "determined.core.Context.checkpoint": "determined.core.CheckpointContext",
    "determined.core.Context.distributed": "determined.core.DistributedContext",
    "determined.core.Context.info": "determined.ClusterInfo",
    "determined.core.Context.preempt": "determined.core.PreemptContext",
    "determined.core.Context.profiler": "determined.core.ProfilerContext",
    "determined.core.Context.searcher": "determined.core.SearcherContext",
    "determined.core.Context.train": "determined.core.TrainContext",
    "determined.pytorch.PyTorchTrialContext.distributed": "determined.core.DistributedContext",
}
"""The classes of attributes."""

_Scoped: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_SCOPED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
Import: TypeAlias = ast.Import | ast.ImportFrom

TRIAL, _CONTEXT = "determined.pytorch.PyTorchTrial", "determined.pytorch.PyTorchTrialContext"

Elsewhere: TypeAlias = Callable[[ast.ImportFrom], "Mapping[str, str | None] | None"]
"""Returns what the names of another module of the directory mean; None if it is not in the directory."""


def is_determineds(path: str | None) -> bool:
    """Whether a dotted name belongs to Determined."""
    return path is not None and (path == DETERMINED or path.startswith(f"{DETERMINED}."))


class Scope:
    """The names of a module, a class or a function.

    Args:
        node: the module, class or function.
        outer: the scope around it.
        elsewhere: returns what names of other modules mean.
        public: returns the names that ``from determined.x import *`` brings.

    Attributes:
        names: what each name bound here means; None if it is not Determined's.
    """

    def __init__(
        self, node: _Scoped, outer: Scope | None, elsewhere: Elsewhere, public: Callable[[str], Iterable[str]]
    ) -> None:
        self.names: dict[str, str | None] = {}
        self._modules: dict[str, Mapping[str, str | None]] = {}  # imported modules of the directory: their names
        self._imported: set[str] = set()
        self._node, self._outer, self._elsewhere, self._public = node, outer, elsewhere, public
        self._of_self: dict[str, str] = {}
        own = list(_own(node))
        for each in own:
            if isinstance(each, ast.Import | ast.ImportFrom):
                self._import(each)
        self._imported.update(name for name, path in self.names.items() if path is not None)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            self._parameters(node.args)
        for each in own:
            self._bind(each)
        if isinstance(node, ast.ClassDef):
            self._bind_attributes_of_self(node)

    def inner(self, node: _Scoped) -> Scope:
        """The scope of a class or function within this one."""
        return Scope(node, self, self._elsewhere, self._public)

    # ------------------------------------------------------------------------------------------------- reading
    def meaning(self, expression: ast.expr | None) -> str | None:
        """Determined's dotted name that an expression means: of a module, a function, or a class.

        An instance has the name of its class.
        """
        match expression:
            case ast.Name(id=name):
                return self._lookup(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self._self(name)
            case ast.Attribute(value=value, attr=name):
                of = self.meaning(value)
                if of is None:
                    return self._of_module(value).get(name)
                return ATTRIBUTES.get(f"{of}.{name}", f"{of}.{name}")
            case ast.Call(func=function, args=arguments):
                called = self.meaning(function)
                if called is None:
                    return _imported_by_name(function, arguments)
                return RESULTS.get(called) or (called if is_class_name(called) else None)
            case ast.NamedExpr(value=value) | ast.Await(value=value):
                return self.meaning(value)
            case _:
                return None

    def assigned(self, expression: ast.expr) -> str | None:
        """What the variable at the start of an expression means; None if there is none, or it is an import.

        A variable's value was reported where it was assigned.
        """
        while isinstance(expression, ast.Attribute):
            match expression:
                case ast.Attribute(value=ast.Name(id="self"), attr=name):
                    return self._self(name)
            expression = expression.value
        if not isinstance(expression, ast.Name):
            return None
        scope = self._of(expression.id)
        return None if scope is None or expression.id in scope._imported else scope.names[expression.id]

    def _annotated(self, annotation: ast.expr | None) -> str | None:
        match annotation:
            case ast.Subscript(slice=inner):  # Optional[...]
                return self._annotated(inner)
            case ast.BinOp(left=left, right=right):
                return self._annotated(left) or self._annotated(right)
            case ast.Constant(value=str(text)):
                return self._annotated(_parsed(text))
            case _:
                return self.meaning(annotation)

    def _lookup(self, name: str) -> str | None:
        scope = self._of(name)
        return None if scope is None else scope.names[name]

    def _of(self, name: str) -> Scope | None:
        """The scope that binds a name as seen from here."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names and (scope is self or not isinstance(scope._node, ast.ClassDef)):
                return scope
            scope = scope._outer
        return None

    def _of_module(self, expression: ast.expr) -> Mapping[str, str | None]:
        """The names of the module that an expression means, if that is in the directory; else none."""
        parts: list[str] = []
        while isinstance(expression, ast.Attribute):
            parts, expression = [expression.attr, *parts], expression.value
        scope = self._of(expression.id) if isinstance(expression, ast.Name) else None
        if scope is None or not isinstance(expression, ast.Name):
            return {}
        return scope._modules.get(".".join([expression.id, *parts]), {})

    def _self(self, name: str) -> str | None:
        scope: Scope | None = self
        while scope is not None:
            if isinstance(scope._node, ast.ClassDef):
                return scope._of_self.get(name)
            scope = scope._outer
        return None

    # ------------------------------------------------------------------------------------------------- binding
    def _import(self, node: Import) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name if alias.asname else alias.name.partition(".")[0]
                self._set(alias.asname or path, path if is_determineds(path) else None)
                self._import_module(alias.name, 0, alias.asname or alias.name)
            return
        if not node.level and is_determineds(node.module):
            for alias in node.names:
                names = self._public(str(node.module)) if alias.name == "*" else [alias.name]
                for name in names:
                    self._set(alias.asname or name, f"{node.module}.{name}")
            return
        there = self._elsewhere(node) or {}
        for alias in node.names:
            if alias.name != "*" and alias.name not in there:
                self._import_module(
                    ".".join(filter(None, [node.module, alias.name])), node.level, alias.asname or alias.name
                )
            if alias.name == "*":
                for name, meaning in there.items():
                    self._set(name, meaning)
            else:
                self._set(alias.asname or alias.name, there.get(alias.name))

    def _import_module(self, path: str, level: int, name: str) -> None:
        names = self._elsewhere(ast.ImportFrom(module=path, names=[], level=level))
        if names is not None:
            self._modules[name] = names

    def _set(self, name: str, path: str | None) -> None:
        # In `try: import determined as det`, `except ImportError: det = None` the import counts.
        if self.names.get(name) is None:
            self.names[name] = path

    def _parameters(self, arguments: ast.arguments) -> None:
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for each in every:
            if each is not None:
                self.names[each.arg] = self._annotated(each.annotation)
        if len(every) > 1 and every[1] is not None and self._is_constructor_of_a_trial():
            self.names[every[1].arg] = self.names[every[1].arg] or _CONTEXT

    def _is_constructor_of_a_trial(self) -> bool:
        around = self._outer._node if self._outer is not None else None
        if not isinstance(around, ast.ClassDef) or getattr(self._node, "name", None) != "__init__":
            return False
        assert self._outer is not None
        return any(self._outer.meaning(base) == TRIAL for base in around.bases)

    def _bind(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self._set(name, None)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.NamedExpr(target=ast.Name(id=name), value=value)
            ):
                self._set(name, self.meaning(value))
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=given):
                self._set(name, self.meaning(given) or self._annotated(annotation))
            case ast.withitem(context_expr=value, optional_vars=ast.Name(id=name)):
                self._set(name, self.meaning(value))
            case ast.Name(id=name, ctx=ast.Store()):
                self._set(name, None)
            case ast.ExceptHandler(name=str(name)):
                self._set(name, None)

    def _bind_attributes_of_self(self, node: ast.ClassDef) -> None:
        for method in node.body:
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                scope = self.inner(method)
                for each in _own(method):
                    match each:
                        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
                            path = scope.meaning(value)
                            if path is not None:
                                self._of_self.setdefault(name, path)


def is_class_name(path: str) -> bool:
    """Whether a dotted name looks like that of a class."""
    return path.rpartition(".")[2][:1].isupper()


def _own(node: _Scoped) -> Iterator[ast.AST]:
    """The nodes of a scope, in the order of the file, without those of inner scopes."""
    body = [node.body] if isinstance(node, ast.Lambda) else node.body
    waiting: list[ast.AST] = list(reversed(body))
    while waiting:
        each = waiting.pop()
        yield each
        if not isinstance(each, _SCOPED):
            waiting += reversed(list(ast.iter_child_nodes(each)))


def _imported_by_name(function: ast.expr, arguments: list[ast.expr]) -> str | None:
    """``importlib.import_module("determined.pytorch")``"""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    match arguments:
        case [ast.Constant(value=str(path))] if name == "import_module" and is_determineds(path):
            return path
    return None


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None
