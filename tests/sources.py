"""The syntax trees of dray's and searchers' files, which several tests look through."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """All nodes of each file, by its path in the repository."""
    files = [path for package in ("dray", "searchers") for path in (ROOT / package).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): list(ast.walk(ast.parse(path.read_text()))) for path in files}


def imported(node: ast.AST) -> list[str]:
    """The dotted names that an import names, without those that are relative."""
    match node:
        case ast.ImportFrom(module=str(module), names=names, level=0):
            return [f"{module}.{alias.name}" for alias in names]
        case ast.Import(names=names):
            return [alias.name for alias in names]
    return []


def dotted(node: ast.AST) -> str:
    """A name with its attributes; empty if it is none."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            owner = dotted(value)
            return owner and f"{owner}.{attribute}"
    return ""


def at_import(module: ast.AST) -> Iterator[ast.AST]:
    """The imports below a module, a class or a block that no function has to be called for."""
    for child in ast.iter_child_nodes(module):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler) and not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef
        ):
            yield from at_import(child)
