"""Reports the necessary changes in a model directory that was written for Determined.

It only reads files; nothing in the directory is imported or run. Names are followed through plain imports
(``import determined as det``, ``from determined.experimental import client``), not through variables or other modules:
names that it misses raise `dray.compat.NotSupported` at their first use.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from dray.code.ignore import code_of
from dray.compat.names import COUNTERPARTS, MEMBERS, MISSING, MODULES
from dray.config.load import parse_config
from dray.config.yaml_file import read_mapping
from dray.errors import ConfigError
from searchers.errors import SHOWN, shown

_SEARCHER = re.compile(r"^searcher\s*:", re.MULTILINE)
_LINE = re.compile(r"line (\d+), column \d+")
_EXCEPTIONS = ("Error", "Exception")
"""Endings of names for which `dray.compat` provides exception classes, which may be raised and caught."""


@dataclass(frozen=True, slots=True, order=True)
class Note:
    """A line that must be changed, or a field that is ignored."""

    file: str
    line: int  # from 1; 0 for the whole file
    verdict: Literal["change", "ignored"]  # change: an error until it is changed; ignored: without effect in dray
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.verdict}: {self.what}".replace(":0: ", ": ", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """The files that `check` has read, and its findings."""

    python: list[str]
    experiments: list[str]
    findings: list[Note]


def check(directory: Path) -> Migration:
    """Check the Python files and the experiment files of a model directory.

    Raises:
        ConfigError: there is no such directory, it can't be read, or it is too large to be code.
    """
    code = code_of(directory).files
    python = [name for name in code if name.endswith(".py")]
    findings = [finding for name in python for finding in _check_python(name, (directory / name).read_bytes())]
    experiments = []
    # Experiment files are often listed in .detignore.
    for name in sorted({*code, *(path.name for path in directory.iterdir() if path.is_file())}):
        if name.endswith((".yaml", ".yml")) and (found := _check_experiment(name, directory / name)) is not None:
            experiments.append(name)
            findings += found
    return Migration(python=python, experiments=experiments, findings=sorted(findings))


def _check_python(file: str, source: bytes) -> Iterator[Note]:
    """Each unsupported name at its first use."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        yield Note(file, getattr(error, "lineno", 0) or 0, "change", f"Python can't parse it: {error}")
        return
    for name, line in _uses(tree).items():
        if (instead := instead_of(name)) is not None:
            yield Note(file, line, "change", f"{name}: {instead}")


def _uses(tree: ast.Module) -> dict[str, int]:
    """Determined's dotted names that a module uses, with the line of their first use.

    Imports, annotations and except clauses do not count: they work for names that dray lacks.
    """
    imported: dict[str, str] = {}  # Determined's dotted names, by the name in this module
    lines: dict[str, int] = {}
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "determined":
                    imported[alias.asname or "determined"] = alias.name if alias.asname else "determined"
        elif isinstance(node, ast.ImportFrom) and not node.level and str(node.module).split(".")[0] == "determined":
            for alias in node.names:
                name = imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if alias.name != "*" and _known(name) in ("determined", *MODULES):  # else it would fail here
                    lines.setdefault(name, node.lineno)
        for field in ("annotation", "returns", "type"):  # "type" of `except`
            if isinstance(part := getattr(node, field, None), ast.expr):
                skipped.update(map(id, ast.walk(part)))
    for node in ast.walk(tree):  # a.b.c comes before its parts a.b and a
        root, *attributes = _parts(node)
        if root in imported and id(node) not in skipped:
            skipped.update(map(id, ast.walk(node)))
            name = ".".join([imported[root], *attributes])
            lines[name] = min(node.lineno, lines.get(name, node.lineno))  # type: ignore[attr-defined]
    return lines


def _parts(node: ast.AST) -> list[str]:
    """``["a", "b", "c"]`` for the expression ``a.b.c``; ``[""]`` for any other expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names, node = [node.attr, *names], node.value
    return [node.id, *names] if isinstance(node, ast.Name) else [""]


def instead_of(name: str) -> str | None:
    """The replacement of a dotted name of Determined's; None if dray has the name.

    >>> instead_of("determined.keras.TFKerasTrial")[:18]
    'dray has no Keras:'
    """
    known = _known(name)
    if known in MEMBERS:
        return MEMBERS[known]
    if known in MISSING:
        return None if name.endswith(_EXCEPTIONS) or known == "determined.errors" else MISSING[known]
    attribute = name.removeprefix(known).strip(".").partition(".")[0]
    if (known in COUNTERPARTS and known not in MODULES) or not attribute or attribute.startswith("__"):
        return None
    # Determined's private modules have the names of its public ones.
    public = "determined" + MODULES.get(known, "dray").removeprefix("dray")
    if f"{public}.{attribute}" in COUNTERPARTS:
        return None
    names = [each.rpartition(".")[2] for each in (*COUNTERPARTS, *MISSING) if each.rpartition(".")[0] == public]
    near = difflib.get_close_matches(attribute, names, n=1)
    return "neither Determined nor dray has it" + (f"; did you mean {public}.{near[0]}?" if near else "")


def _known(name: str) -> str:
    """The longest prefix of a name in the tables of `dray.compat.names`, else ``determined``."""
    while "." in name and not any(name in table for table in (COUNTERPARTS, MISSING, MEMBERS)):
        name = name.rpartition(".")[0]
    return name


def _check_experiment(file: str, path: Path) -> list[Note] | None:
    """The faults and ignored fields of an experiment file; None for any other YAML file (it has no searcher)."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if _SEARCHER.search(text) is None:
        return None
    try:
        raw = read_mapping(path)
    except ConfigError as error:
        [(where, what)] = error.faults
        line = _LINE.match(where)
        return [Note(file, int(line[1]) if line else 0, "change", what)]
    if not isinstance(raw["searcher"], dict):
        return None
    parsed = parse_config(raw)
    root = yaml.compose(text, yaml.SafeLoader)
    lines = [*(_line(root, fault.path) for fault in parsed.faults[:SHOWN]), 0]  # 0 is for "... and 3 more"
    changes = [Note(file, line, "change", what) for line, what in zip(lines, shown(parsed.faults), strict=False)]
    return changes + [
        Note(file, _line(root, path), "ignored", f"{path}: {why}") for path, why in parsed.ignored.items()
    ]


def _line(root: Any, path: str) -> int:
    """The line of a field such as ``searcher.metric`` or ``labels[0]``; of its section if the field is missing; 0 for
    the whole file."""
    node, line = root, 0
    for part in re.split(r"[.\[]", path.replace("]", "")):
        items = node.value if isinstance(node, yaml.MappingNode | yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            named = {key.value: (key, value) for key, value in items}
        else:
            named = {str(number): (item, item) for number, item in enumerate(items)}
        if part not in named:
            break
        key, node = named[part]
        line = key.start_mark.line + 1
    return line
