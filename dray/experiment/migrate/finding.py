"""What a check finds in a model directory of Determined's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["change", "look", "ignored", "runs"]
"""It must be changed; it may need to be, which only the user knows; it does nothing here; it runs as it is."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One line of a check.

    Attributes:
        file: from the directory on; empty where it is about this environment.
        line: of the file, from 1; 0 where it is about all of the file.
        verdict: what is to be done about it.
        what: what is there, and what to write instead.
    """

    file: str
    line: int
    verdict: Verdict
    what: str

    def __str__(self) -> str:
        where = ":".join(part for part in (self.file, str(self.line or "")) if part)
        return f"{where or 'this environment'}: {self.verdict}: {self.what}"
