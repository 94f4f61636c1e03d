"""Differences between two experiments: their configs, field by field, and their code."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dray.config.yaml_file import read_mapping
from dray.records.directory import ExperimentDirectory

MAX_TEXT_BYTES = 1 << 20
"""Larger files are compared as a whole: comparing their lines would take minutes."""
_NOTHING = object()


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field that differs, or that only one config has: its path, such as ``hyperparameters.lr.minval``, and its
    values under ``"a"`` and ``"b"`` for the first and the second experiment."""

    path: str
    values: Mapping[str, Any]

    def shown(self, side: str) -> str:
        return json.dumps(self.values[side], default=str) if side in self.values else "-"


def config_difference(a: ExperimentDirectory, b: ExperimentDirectory) -> list[FieldDifference]:
    """The fields in which the configs differ; a mapping that only one of them has is one field."""
    return list(_fields(read_mapping(a.config_file), read_mapping(b.config_file), ""))


def _fields(a: Any, b: Any, path: str) -> Iterator[FieldDifference]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in {**a, **b}:
            yield from _fields(a.get(name, _NOTHING), b.get(name, _NOTHING), f"{path}.{name}".removeprefix("."))
    elif a != b:
        yield FieldDifference(path, {side: value for side, value in (("a", a), ("b", b)) if value is not _NOTHING})


def code_difference(a: ExperimentDirectory, b: ExperimentDirectory) -> list[str]:
    """The lines of a unified diff of the code; one line for each differing file that is binary or too large."""
    lines: list[str] = []
    for name in sorted(_files(a.code) | _files(b.code)):
        files = [each.code / name for each in (a, b)]
        before, after = (file.read_bytes() if file.is_file() else None for file in files)
        if before == after:
            continue
        old, new = f"a/{name}", f"b/{name}"
        try:
            was, now = _text(before or b""), _text(after or b"")
        except ValueError:
            was, now = [], []
        sides = ("/dev/null" if before is None else old), ("/dev/null" if after is None else new)
        found = difflib.unified_diff(was, now, sides[0], sides[1], lineterm="")
        lines += list(found) or [f"Files {sides[0]} and {sides[1]} differ"]
    return lines


def _files(code: Path) -> set[str]:
    found = (path.relative_to(code) for path in code.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


def _text(content: bytes) -> list[str]:
    """The lines of a file; a ValueError if it is binary or too large."""
    if len(content) > MAX_TEXT_BYTES or b"\0" in content:
        raise ValueError
    return content.decode().splitlines()
