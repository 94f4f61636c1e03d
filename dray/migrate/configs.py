"""Reads the experiment files of a model directory: faults and ignored fields, with their lines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import yaml

from dray.config.determined_fields import ignored_fields, without_ignored
from dray.config.entrypoint import ClassName, Entrypoint, parse_entrypoint
from dray.config.load import load_config
from dray.config.schema import ExperimentConfig
from dray.config.yaml_file import read_mapping
from dray.errors import ConfigError
from dray.migrate.finding import Finding
from dray.migrate.imports import is_installed
from dray.migrate.places import of_container
from dray.migrate.python import Sources
from dray.script import Script
from searchers.errors import SHOWN, shown

_LOOKS_LIKE_ONE = re.compile(r"^(searcher|entrypoint)\s*:", re.MULTILINE)
_AT_LINE = re.compile(r"line (\d+), column \d+")


class ExperimentFile:
    """One experiment file.

    Args:
        name: its path relative to the directory.
        path: its path.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        # The experiment file's directory may be the model's directory, instead of the one that is checked.
        self._folders = (PurePosixPath(), PurePosixPath(name).parent)
        self._text = path.read_text(encoding="utf-8", errors="replace")
        self._broken: Finding | None = None
        self.raw: dict[Any, Any] = {}
        try:
            self.raw = read_mapping(path)
        except ConfigError as error:
            [fault] = error.faults
            line = _AT_LINE.match(fault.path)
            self._broken = Finding(name, int(line[1]) if line else 0, "change", fault.what)

    @property
    def is_one(self) -> bool:
        """Whether it is an experiment file, and not another YAML file."""
        if self._broken is not None:
            return _LOOKS_LIKE_ONE.search(self._text) is not None
        others = ExperimentConfig.model_fields.keys() - {"entrypoint", "name", "description", "data", "labels"}
        resources = self.raw.get("resources")
        is_task = isinstance(resources, Mapping) and "slots" in resources  # a Determined task without trials
        return isinstance(self.raw.get("searcher"), Mapping) or (
            "entrypoint" in self.raw and not others.isdisjoint(self.raw) and not is_task
        )

    def findings(self, root: Path, sources: Sources, to_change: Set[str]) -> Iterator[Finding]:
        """The findings in this file, by line, without those about containers.

        Args:
            root: the model's directory.
            sources: its Python files.
            to_change: those of them that must be changed.
        """
        if self._broken is not None:
            yield self._broken
            return
        lines = Lines(self._text)
        changes: list[tuple[str, str]] = []
        try:
            load_config(without_ignored(self.raw))  # ignored fields are reported below
        except ConfigError as error:
            changes += [(fault.path, fault.what) for fault in error.faults]
        if "entrypoint" not in (path for path, _ in changes):
            wrong = _entrypoint(self.raw.get("entrypoint"), self._folders, root, sources)
            changes += [("entrypoint", wrong)] if wrong else []
        for (path, _), told in zip(changes, shown(changes), strict=False):
            yield Finding(self.name, lines.of(path), "change", told)
        if len(changes) > SHOWN:
            yield Finding(self.name, 0, "change", shown(changes)[-1])
        for section in ("data", "hyperparameters"):
            for path, text in _texts(self.raw.get(section), section):
                if (found := of_container(text, sources.mounts)) is not None:
                    yield Finding(self.name, lines.of(path), found[0], f"{path}: {found[1]}")
        for path, what in ignored_fields(self.raw):
            yield Finding(self.name, lines.of(path), "ignored", f"{path}: {what}")
        if changes:
            return
        command = f"dray experiment create {self.name} ."
        started = _started(parse_entrypoint(self.raw["entrypoint"]), self._folders, sources)
        first = sorted(to_change & sources.imports.reached(started)) if started is not None else []
        if first:
            yield Finding(self.name, 0, "blocked", f"change {' and '.join(first)} first; then: {command}")
        else:
            yield Finding(self.name, 0, "runs", command)


class Lines:
    """The line numbers of the fields of a YAML file.

    >>> Lines("name: a\\nsearcher:\\n  metric: loss\\n").of("searcher.metric")
    3
    """

    def __init__(self, text: str) -> None:
        self._root = yaml.compose(text, yaml.SafeLoader)

    def of(self, path: str) -> int:
        """The line of a field, or else of the innermost existing field around it; 0 if there is none."""
        node, line, left = self._root, 0, path
        while left and isinstance(node, yaml.MappingNode | yaml.SequenceNode):
            for name, mark, value in _items(node):
                if left == name or left.startswith((f"{name}.", f"{name}[")):
                    node, line, left = value, mark + 1, left[len(name) :].lstrip(".")
                    break
            else:
                break
        return line


def _items(node: yaml.MappingNode | yaml.SequenceNode) -> Iterator[tuple[str, int, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield str(key.value), key.start_mark.line, value
    else:
        for number, value in enumerate(node.value):
            yield str(number), value.start_mark.line, value
            yield f"[{number}]", value.start_mark.line, value


def _texts(value: object, path: str) -> Iterator[tuple[str, str]]:
    """All texts in a section, with their paths."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(each, f"{path}.{name}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _texts(each, f"{path}[{number}]")


_Folders: TypeAlias = tuple[PurePosixPath, ...]


def _entrypoint(entrypoint: object, folders: _Folders, root: Path, sources: Sources) -> str | None:
    """What is wrong with ``entrypoint``, as far as reading shows; None if nothing is.

    Args:
        entrypoint: as in the experiment file.
        folders: where it is looked for, relative to ``root``.
        root: the directory that is checked.
        sources: its Python files.
    """
    if not entrypoint:
        return "missing required field; for example model_def:DigitsTrial or python3 train.py"
    program = parse_entrypoint(entrypoint)
    files = _files(program, folders)
    is_there = any(os.path.isfile(root / file) for file in files)  # False for a name that no file can have
    if isinstance(program, Script) and program.file is not None:
        if is_there:
            return None
        return f"no script {program.file} in the directory; give the path of a script, relative to the directory"
    module, name = (program.module, program.name) if isinstance(program, ClassName) else (str(program.module), "")
    there = _started(program, folders, sources)
    if there is None:
        is_elsewhere = is_there or not name or is_installed(module)
        return (
            None if is_elsewhere else f"no module {module} in the directory or this environment; give an existing one"
        )
    if name and not sources.defines(there, name.partition(".")[0]):
        classes = ", ".join(sources.classes(there))
        return f"{there} has no class {name}; its classes are {classes or 'none'}"
    return None


def _files(program: Entrypoint, folders: _Folders) -> list[str]:
    """The paths where the Python of an entrypoint may be."""
    if isinstance(program, Script) and program.file is not None:
        return [str(folder / program.file) for folder in folders]
    place = PurePosixPath(*str(program.module).split("."))
    return [f"{folder / place}{end}" for folder in folders for end in (".py", "/__main__.py", "/__init__.py")]


def _started(program: Entrypoint, folders: _Folders, sources: Sources) -> str | None:
    """The Python file of the directory that an entrypoint starts; None if it is elsewhere, or can't be parsed."""
    return next((file for file in _files(program, folders) if sources.has(file)), None)
