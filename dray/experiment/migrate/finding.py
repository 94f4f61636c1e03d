"""The findings of a check of a model directory for Determined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["change", "look", "ignored", "runs"]
"""It must be changed; it may need a change, only the user can tell; it has no effect here; it runs unchanged."""


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
