"""Read the experiment files of a model directory: faults, and what is not used, with the lines on which they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from dray.experiment.command import parse_entrypoint
from dray.experiment.config import load_config
from dray.experiment.determined_fields import not_used, without_not_used
from dray.experiment.errors import ConfigError
from dray.experiment.migrate.finding import Finding
from dray.experiment.migrate.python import Sources
from dray.experiment.schema import ExperimentConfig
from dray.experiment.yaml_file import read_mapping

_LOOKS_LIKE_ONE = re.compile(r"^(searcher|entrypoint)\s*:", re.MULTILINE)
_AT_LINE = re.compile(r"line (\d+), column \d+")


class ExperimentFile:
    """One experiment file.

    Args:
        name: from the directory on.
        path: where it is.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
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
        """Whether it is an experiment's, and not another file of YAML."""
        if self._broken is not None:
            return _LOOKS_LIKE_ONE.search(self._text) is not None
        others = ExperimentConfig.model_fields.keys() - {"entrypoint", "name", "description", "data", "labels"}
        return isinstance(self.raw.get("searcher"), Mapping) or (
            "entrypoint" in self.raw and not others.isdisjoint(self.raw)
        )

    def findings(self, root: Path, sources: Sources) -> Iterator[Finding]:
        """What there is to say of it, but for what it says of containers, line by line.

        Args:
            root: the model's directory.
            sources: the Python in it.
        """
        if self._broken is not None:
            yield self._broken
            return
        lines = Lines(self._text)
        changes = []
        try:
            load_config(without_not_used(self.raw))  # those are told below
        except ConfigError as error:
            changes += [(fault.path, fault.what) for fault in error.faults]
        if "entrypoint" not in (path for path, _ in changes):
            wrong = _entrypoint(self.raw.get("entrypoint"), PurePosixPath(self.name).parent, root, sources)
            changes += [("entrypoint", wrong)] if wrong else []
        for path, what in changes:
            yield Finding(self.name, lines.of(path), "change", f"{path}: {what}")
        for path, what in not_used(self.raw):
            yield Finding(self.name, lines.of(path), "ignored", f"{path}: {what}")
        if not changes:
            yield Finding(self.name, 0, "runs", f"dray experiment create {self.name} .")


class Lines:
    """The lines on which the fields of a YAML file stand.

    >>> Lines("name: a\\nsearcher:\\n  metric: loss\\n").of("searcher.metric")
    3
    """

    def __init__(self, text: str) -> None:
        self._root = yaml.compose(text, yaml.SafeLoader)

    def of(self, path: str) -> int:
        """The line of a field, or else of the innermost one around it that is there; 0 if there is none."""
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


def _entrypoint(entrypoint: object, beside: PurePosixPath, root: Path, sources: Sources) -> str | None:
    """What is wrong with what ``entrypoint`` names, as far as reading tells; None if nothing is.

    Args:
        entrypoint: as the experiment file has it.
        beside: the experiment file's directory, which may be the model's in the place of the whole.
        root: the directory.
        sources: the Python in it.
    """
    if not entrypoint:
        return "required, got nothing; for example model_def:DigitsTrial or python3 train.py"
    program = parse_entrypoint(entrypoint)
    folders = [PurePosixPath(), beside]
    if not isinstance(program, str) and program.file is not None:
        if any((root / folder / program.file).is_file() for folder in folders):
            return None
        return f"no script {program.file} in the directory; give the path of one from there on"
    module, _, name = program.partition(":") if isinstance(program, str) else (str(program.module), "", "")
    place = PurePosixPath(*module.split("."))
    files = [f"{folder / place}{end}" for folder in folders for end in (".py", "/__main__.py", "/__init__.py")]
    there = next((file for file in files if sources.has(file)), None)
    if there is None:
        is_elsewhere = any((root / file).is_file() for file in files) or not name
        return None if is_elsewhere else f"no module {module} in the directory; give one that is there"
    if name and not sources.defines(there, name.partition(".")[0]):
        classes = ", ".join(sources.classes(there))
        return f"{there} has no class {name}; its classes are {classes or 'none'}"
    return None
