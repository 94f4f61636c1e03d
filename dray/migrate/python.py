"""Reads the Python of a model directory, without importing or running it: which of Determined's names it uses, and what
works only in Determined's containers."""

from __future__ import annotations

import ast
import difflib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping

from dray.compat.names import HOOKS
from dray.migrate.finding import Finding, Verdict
from dray.migrate.imports import Imports
from dray.migrate.names import is_nowhere, public, why_not
from dray.migrate.places import Mounts, of_container
from dray.migrate.scopes import TRIAL, Import, Scope, is_determineds
from dray.migrate.shell import of_command

VARIABLES: Mapping[str, str] = {
    "DET_CHIEF_IP": "MASTER_ADDR",
    "DET_EXPERIMENT_CONFIG": "dray.get_cluster_info().trial._config",
    "DET_EXPERIMENT_ID": "dray.get_cluster_info().trial.experiment_id",
    "DET_HPARAMS": "dray.get_cluster_info().trial.hparams",
    "DET_LATEST_CHECKPOINT": "dray.get_cluster_info().latest_checkpoint",
    "DET_SLOT_IDS": "dray.get_cluster_info().slot_ids",
    "DET_TASK_TYPE": "dray.get_cluster_info().task_type",
    "DET_TRIAL_ID": "dray.get_cluster_info().trial.trial_id",
    "DET_TRIAL_SEED": "dray.get_cluster_info().trial.trial_seed",
    "DET_USER_DATA": "dray.get_cluster_info().user_data",
}
"""Environment variables of Determined's tasks, and what to use instead."""

_CALLBACK = "determined.pytorch.PyTorchCallback"
_VARIABLE = re.compile(r"DET_[A-Z_]+")
# A program that starts its own workers has one of these in a command.
_LAUNCHER = re.compile(r"determined\.(launch|exec)\.\w+")
_LAUNCHED = (
    "dray runs the program in each of the trial's processes, one per slot; processes that it starts itself are not "
    "part of the trial: call here what such a process would do; core.init() knows the ranks"
)
_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
_RUNNERS = ("run", "call", "check_call", "check_output", "Popen", "system", "popen")


class Sources:
    """The Python files of a directory.

    Args:
        files: the text of each file, by its path relative to the directory.
        mounts: the experiment files' bind mounts; also an attribute.

    Attributes:
        imports: where their imports lead.
    """

    def __init__(self, files: Mapping[str, bytes], mounts: Mounts) -> None:
        self.mounts = mounts
        self._trees: dict[str, ast.Module] = {}
        self._scopes: dict[str, Scope | None] = {}
        self._broken: list[Finding] = []
        for name, text in files.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about the user's literals and escapes
                    self._trees[name] = ast.parse(text, filename=name)
            except (SyntaxError, ValueError, RecursionError) as error:
                line = getattr(error, "lineno", None) or 0
                what = f"Python {sys.version_info[0]}.{sys.version_info[1]} can't parse it: {_told(error)}; fix it"
                self._broken.append(Finding(name, line, "change", what))
        self.imports = Imports(files, self._trees)

    def findings(self) -> Iterator[Finding]:
        """The findings, file by file."""
        yield from self._broken
        for name, tree in self._trees.items():
            try:
                reader = _Reader(self, name, self._scope(name), tree)
                reader.visit(tree)
            except RecursionError:
                yield Finding(
                    name, 0, "look", "is too deeply nested to be checked; check yourself what it uses of Determined"
                )
                continue
            yield from sorted(set(reader.findings))
            if reader.uses:
                uses = f"{reader.uses} supported uses" if reader.uses > 1 else "1 supported use"
                yield Finding(name, 0, "runs", f"{uses} of Determined's API")

    def has(self, name: str) -> bool:
        """Whether there is such a file that could be parsed."""
        return name in self._trees

    def defines(self, name: str, attribute: str) -> bool:
        """Whether the module in this file has this name at its top level; also if a star import may bring it."""
        has_stars = any(
            isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
            for node in ast.walk(self._trees[name])
        )
        return has_stars or attribute in self._scope(name).names

    def classes(self, name: str) -> list[str]:
        """The classes at the top level of the module in this file."""
        return [node.name for node in self._trees[name].body if isinstance(node, ast.ClassDef)]

    # ------------------------------------------------------------------------------------------------- for readers
    def _scope(self, name: str) -> Scope:
        scope = self._scopes.get(name)
        if scope is None:
            self._scopes[name] = None  # for a module that imports itself
            scope = Scope(self._trees[name], None, lambda node: self._names_of(name, node), public)
            self._scopes[name] = scope
        return scope

    def _names_of(self, importer: str, node: ast.ImportFrom) -> Mapping[str, str | None] | None:
        """What the names of an imported module of this directory mean."""
        file = self.imports.file_of(importer, node.module or "", node.level)
        if file is None or (file in self._scopes and self._scopes[file] is None):
            return None  # in the second case it is being read: the modules import each other
        return self._scope(file).names


def _is_determineds_variable(text: str) -> bool:
    return _VARIABLE.fullmatch(text) is not None


def _variable(name: str) -> str:
    instead = f"use {VARIABLES[name]}" if name in VARIABLES else "there is no counterpart"
    return f"{name}: dray does not set this variable; {instead}"


def _told(error: Exception) -> str:
    return error.msg if isinstance(error, SyntaxError) else str(error)


class _Reader(ast.NodeVisitor):
    """Reads one file from top to end."""

    def __init__(self, sources: Sources, file: str, scope: Scope, tree: ast.Module) -> None:
        self.findings: list[Finding] = []
        self.uses = 0
        self._sources, self._file, self._scope = sources, file, scope
        self._guarded = set(_guarded(tree))
        self._texts = set(_docstrings(tree))

    def _find(self, node: ast.AST, verdict: Verdict, what: str) -> None:
        self.findings.append(Finding(self._file, getattr(node, "lineno", 0), verdict, what))

    # ------------------------------------------------------------------------------------------------- imports
    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._import(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module:
            return
        if not is_determineds(node.module):
            self._import(node, node.module)
            return
        for alias in node.names:
            self._import(node, node.module if alias.name == "*" else f"{node.module}.{alias.name}")

    def _import(self, node: Import, path: str) -> None:
        if is_determineds(path):
            # The alias lets names that dray lacks be imported, and raises at their first use; unknown names fail.
            if is_nowhere(path):
                self._find(node, "change", f"{path}: {why_not(path)}")
            elif why_not(path) is None:
                self.uses += 1
            return
        package = path.partition(".")[0]
        if node in self._guarded:
            return
        if package == "horovod" and not self._sources.imports.is_own(package):
            self._find(
                node,
                "change",
                "horovod: dray does not support Horovod; use torch.distributed, whose process group exists already, or "
                "a PyTorchTrial",
            )
        elif (missing := self._sources.imports.missing_package(path)) is not None:
            self._find(
                node,
                "look",
                f"no package {missing} in this environment; if it was part of the container image, install it on "
                "Ray's nodes",
            )

    # ------------------------------------------------------------------------------------------------- names
    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and self._scope.assigned(node) is None:
            self._use(node, self._scope.meaning(node))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._scope.meaning(node)
        if path is None:
            self.generic_visit(node)
            return
        variable = self._scope.assigned(node)
        if variable is None or (variable != path and why_not(variable) is None):
            self._use(node, path)
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        if not isinstance(inner, ast.Name):  # det.get_cluster_info().trial: the call is a use too
            self.visit(inner)

    def _use(self, node: ast.expr, path: str | None) -> None:
        if path is None:
            return
        reason = why_not(path)
        if reason is None:
            self.uses += 1
        else:
            self._find(node, "change", f"{path}: {reason}")

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        # An exception that dray lacks may be caught: nothing raises it.
        for each in node.body:
            self.visit(each)

    # ------------------------------------------------------------------------------------------------- scopes
    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        # Annotations are skipped: they use nothing.
        for each in (*node.decorator_list, *node.args.defaults, *(each for each in node.args.kw_defaults if each)):
            self.visit(each)
        self._within(node, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for each in (*node.args.defaults, *(each for each in node.args.kw_defaults if each)):
            self.visit(each)
        self._within(node, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
            self.visit(each)
        if any(self._scope.meaning(base) == TRIAL for base in node.bases):
            self._trial(node)
        if any(self._scope.meaning(base) == _CALLBACK for base in node.bases):
            self._callback(node)
        self._within(node, node.body)

    def _trial(self, node: ast.ClassDef) -> None:
        for each in node.body:
            match each:
                case ast.FunctionDef(name="train_batch", args=ast.arguments(args=arguments)) if any(
                    argument.arg == "model" for argument in arguments
                ):
                    self._find(
                        each,
                        "change",
                        "train_batch(batch, model, ...): from Determined before 0.13; create the model and optimizer "
                        "in __init__ with context.wrap_model() and wrap_optimizer(), keep them in self, and call "
                        "context.backward(loss) and context.step_optimizer(optimizer) here",
                    )

    def _callback(self, node: ast.ClassDef) -> None:
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name.startswith("on_") and each.name not in HOOKS:
                near = difflib.get_close_matches(each.name, HOOKS, n=1, cutoff=0.75)
                meant = f"; did you mean {near[0]}?" if near else ""
                self._find(each, "look", f"{each.name}: not a hook of PyTorchCallback, so dray does not call it{meant}")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def _within(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef,
        body: list[ast.stmt] | list[ast.expr],
    ) -> None:
        outer, self._scope = self._scope, self._scope.inner(node)
        for each in body:
            self.visit(each)
        self._scope = outer

    # ------------------------------------------------------------------------------------------------- texts
    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str) or node in self._texts:
            return
        if _is_determineds_variable(node.value):
            self._find(node, "look", _variable(node.value))
        if _LAUNCHER.fullmatch(node.value):
            self._find(node, "change", f"{node.value}: {_LAUNCHED}")
        found = of_container(node.value, self._sources.mounts)
        if found is not None:
            self._find(node, *found)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        # Reading a missing variable like this is an error; a variable that is set is the user's own.
        match node:
            case ast.Subscript(
                value=ast.Attribute(attr="environ") | ast.Name(id="environ"),
                slice=ast.Constant(value=str(name)),
                ctx=context,
            ) if _is_determineds_variable(name):
                if isinstance(context, ast.Load):
                    self._find(node, "change", _variable(name))
                self.visit(node.value)
            case _:
                self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if name in ("isinstance", "issubclass") and len(node.args) == 2:
            self.visit(node.args[0])  # isinstance() of a class that dray lacks is False
            return
        if name in _RUNNERS and node.args:
            match node.args[0]:
                case ast.Constant(value=str(command)):
                    told = of_command(command.split())
                case ast.List(elts=elements) | ast.Tuple(elts=elements):
                    told = of_command(
                        [
                            each.value
                            for each in elements
                            if isinstance(each, ast.Constant) and isinstance(each.value, str)
                        ]
                    )
                case _:
                    told = None
            if told is not None:
                self._find(node, "change", told)
        self.generic_visit(node)


def _guarded(tree: ast.Module) -> Iterator[ast.AST]:
    """Imports whose failure the file handles, or that are only for type checkers."""
    for node in ast.walk(tree):
        match node:
            case ast.Try(body=body, handlers=handlers) if any(_catches_imports(handler) for handler in handlers):
                parts = body
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), body=body):
                parts = body
            case _:
                continue
        for part in parts:
            yield from (each for each in ast.walk(part) if isinstance(each, ast.Import | ast.ImportFrom))


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(each is None or getattr(each, "id", None) in _IMPORT_ERRORS for each in caught)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Docstrings and other texts that nothing uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value
