"""The result of a command."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Its exit code and output."""

    code: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        """The one strict JSON value on standard output."""
        assert self.code == 0, self.err

        def refuse(constant: str) -> Any:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.out, parse_constant=refuse)

    def is_one_line(self) -> str:
        """The error, which is one line that begins with the command's name."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.out == ""
        assert self.err.startswith("dray: ")
        assert self.err.count("\n") == 1, self.err
        return self.err
