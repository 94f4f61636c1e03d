"""Reads the notebooks of a model directory: the Python and the shell commands in their cells."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, field, replace

from dray.migrate.finding import Finding

# Cell magics whose cell is still Python.
_OF_PYTHON = ("%%time", "%%timeit", "%%capture", "%%prun")
_OF_A_SHELL = ("%%bash", "%%sh", "%%script bash", "%%script sh")


@dataclass(frozen=True, slots=True)
class Notebook:
    """The code of a notebook, line by line, cell after cell.

    Attributes:
        python: the lines that Python runs; others are empty, or ``pass``.
        shell: the lines that a shell runs; others are empty.
    """

    python: list[str] = field(default_factory=list)
    shell: list[str] = field(default_factory=list)
    _places: list[str] = field(default_factory=list)

    def placed(self, finding: Finding) -> Finding:
        """A finding with its cell instead of a line of the joined code: a notebook has no lines."""
        if not finding.line:
            return finding
        return replace(finding, line=0, what=f"{self._places[finding.line - 1]}: {finding.what}")

    def _add(self, cell: int, source: str) -> None:
        lines = source.splitlines()
        first = lines[0].strip() if lines else ""
        is_python = not first.startswith("%%") or first.startswith(_OF_PYTHON)
        python = [_python(line) if is_python else "" for line in lines]
        try:
            ast.parse("\n".join(python))
        except (SyntaxError, ValueError, RecursionError):
            python = [""] * len(lines)  # another language, or a draft
        self.python.extend(python)
        self.shell.extend(lines if first.startswith(_OF_A_SHELL) else map(_shell, lines))
        self._places.extend(f"cell {cell}, line {number}" for number in range(1, len(lines) + 1))


def read_notebook(text: str) -> Notebook:
    """A notebook's code; empty if the text is no notebook.

    >>> read_notebook('{"cells": [{"cell_type": "code", "source": ["!ls\\\\n", "a = 1"]}]}').python
    ['pass', 'a = 1']
    """
    found = Notebook()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return found
    cells = content.get("cells") if isinstance(content, dict) else None
    for number, cell in enumerate(cells if isinstance(cells, list) else [], 1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source")
            found._add(number, "".join(map(str, source)) if isinstance(source, list) else str(source or ""))
    return found


def _python(line: str) -> str:
    code = line.strip()
    if code.startswith(("%", "!", "?")) or code.endswith("?"):
        return line[: len(line) - len(line.lstrip())] + "pass"
    return line


def _shell(line: str) -> str:
    code = line.strip()
    return code.lstrip("!") if code.startswith("!") else ""
