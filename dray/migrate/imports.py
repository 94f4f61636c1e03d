"""Where the imports of a model directory's Python files lead: to files of it, or to packages."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath


class Imports:
    """The imports of a directory's Python files.

    Args:
        files: the paths of all of them, relative to the directory.
        trees: those that could be parsed.
    """

    def __init__(self, files: Iterable[str], trees: Mapping[str, ast.Module]) -> None:
        self._trees = trees
        self._folders = {part for name in files for part in PurePosixPath(name).parts[:-1]}
        self._modules = {PurePosixPath(name).stem for name in files if name.endswith(".py")}
        self._packages: dict[str, str] = {}

    def reached(self, name: str) -> set[str]:
        """This file, and those of the directory that it imports, also through others."""
        found, waiting = {name}, [name]
        while waiting:
            importer = waiting.pop()
            new = {file for node in ast.walk(self._trees[importer]) for file in self._files_of(importer, node)} - found
            found |= new
            waiting += new
        return found

    def _files_of(self, importer: str, node: ast.AST) -> Iterator[str]:
        """The files of the directory that a statement imports."""
        match node:
            case ast.Import(names=names):
                wanted = [(alias.name, 0) for alias in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                inner = [f"{module}.{alias.name}" if module else alias.name for alias in names]
                wanted = [(path, level) for path in (module or "", *inner)]
            case _:
                return
        for path, level in wanted:
            if (file := self.file_of(importer, path, level)) is not None:
                yield file

    def file_of(self, importer: str, module: str, level: int) -> str | None:
        """The file of the directory that has an imported module."""
        folder = PurePosixPath(importer).parent
        parts = module.split(".") if module else []
        if level:
            above = list(folder.parts)[: len(folder.parts) - (level - 1)]
            places = [PurePosixPath(*above, *parts)]
        else:
            places = [PurePosixPath(*parts), PurePosixPath(folder, *parts)]
        files = [file for place in places for file in (f"{place}.py", str(place / "__init__.py"))]
        return next((file for file in files if file in self._trees), None)

    def is_own(self, package: str) -> bool:
        """Whether a module or package of this name is anywhere in the directory."""
        return package in self._modules or package in self._folders

    def missing_package(self, module: str) -> str | None:
        """The package of a module, if it is missing and was not reported yet."""
        parts = module.split(".")
        if self.is_own(parts[0]) or parts[0] in sys.stdlib_module_names:
            return None
        for length in range(1, len(parts) + 1):
            package = ".".join(parts[:length])
            is_new = package not in self._packages
            if is_new:
                self._packages[package] = _where(package)
            if self._packages[package] == "nowhere":
                return package if is_new else None
            if self._packages[package] == "here":
                return None
        return None


def is_installed(module: str) -> bool:
    """Whether the module's package is installed in this environment."""
    return _where(module.partition(".")[0]) != "nowhere"


def _where(package: str) -> str:
    """``here``, ``nowhere``, or ``below`` for a namespace package such as google, of google.cloud."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return "nowhere"
    return "nowhere" if found is None else "below" if found.origin is None else "here"
