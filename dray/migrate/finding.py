"""The findings of a check of a model directory for Determined."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["change", "look", "ignored", "blocked", "runs"]
"""It must be changed; it may need a change, only the user can tell; it has no effect here; it runs once code that it
starts is changed; it runs unchanged."""

_CELL = re.compile(r"cell \d+, line \d+")

SHOWN = 12
"""The places that are named of findings that say the same."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One line of a check's output.

    Attributes:
        file: path relative to the directory; empty if it is about this environment.
        line: of the file, from 1; 0 if it is about the whole file.
        verdict: whether something must be changed.
        what: what was found, and what to write instead.
    """

    file: str
    line: int
    verdict: Verdict
    what: str

    def __str__(self) -> str:
        where = ":".join(part for part in (self.file, str(self.line or "")) if part)
        return f"{where or 'this environment'}: {self.verdict}: {self.what}"

    @property
    def advice(self) -> str:
        """What it says, without the cell of a notebook and the name of Determined's that it says it of."""
        said = self.what.removeprefix(f"{self.cell}: ")
        name, _, rest = said.partition(": ")
        return rest if name.startswith("determined.") else said

    @property
    def cell(self) -> str:
        """The line of a notebook: ``cell 3, line 2``; else empty."""
        found = _CELL.match(self.what)
        return found[0] if found is not None else ""


def told_once(findings: Iterable[Finding]) -> Iterator[str]:
    """The findings as text, a line each; those with the same advice in one line, where the first of them is."""
    groups: dict[object, list[Finding]] = {}
    for each in findings:
        alone = each.verdict in ("blocked", "runs")
        groups.setdefault(each if alone else (each.verdict, each.advice), []).append(each)
    for first, *others in groups.values():
        rest = list(dict.fromkeys((each.file, each.cell or str(each.line)) for each in others))
        yield f"{first}{f'; also {_places(rest)}' if rest else ''}"


def _places(places: list[tuple[str, str]]) -> str:
    """``model_def.py:9, 12, train.py:4 and 30 more``"""
    files = groupby(places[:SHOWN], key=lambda place: place[0])
    named = ", ".join(f"{file}:{', '.join(line for _, line in found)}" for file, found in files)
    return named if len(places) <= SHOWN else f"{named} and {len(places) - SHOWN} more"
