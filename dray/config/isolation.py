"""The field ``isolation``: what keeps a trial's code away from the rest of its machine."""

from __future__ import annotations

import os
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from dray.config.section import Section, named

OWN = ("/", "/dev", "/proc", "/tmp")
"""Directories of which each sandbox has its own."""


def _absolute(path: str) -> str:
    if not os.path.isabs(path):
        raise ValueError(f"must be an absolute path, the same on all nodes, got {path!r}")
    if (found := os.path.normpath(path)) in OWN:
        raise ValueError(f"can't be {found}, of which each sandbox has its own; name what is needed in it")
    return found


class Isolation(Section):
    """What keeps a trial's code away from the rest of its machine. ``isolation: sandbox`` is short for ``{name:
    sandbox}``."""

    place: ClassVar[str] = "isolation"

    name: Literal["none", "sandbox"] = Field(
        default="none",
        description="sandbox: each trial runs in a process of its own, without network, that sees only its code, its "
        "directory and the installed programs and libraries, and can write only to its directory; needs bubblewrap",
        examples=["sandbox"],
    )
    read: list[Annotated[str, AfterValidator(_absolute)]] = Field(
        default_factory=list,
        description="other files and directories that a trial in a sandbox may read, such as its data",
        examples=[["/data/cifar"]],
    )

    @property
    def is_sandbox(self) -> bool:
        return self.name == "sandbox"


IsolationField: TypeAlias = Annotated[
    Isolation, BeforeValidator(named, json_schema_input_type=Literal["none", "sandbox"] | Isolation)
]
