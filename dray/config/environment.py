"""The section ``environment``: the environment of trials."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from dray.config.section import Section

#: Determined's names for the devices of slots; gpu is an older name for cuda.
DEVICES = ("cpu", "cuda", "gpu", "rocm")
_ENTRY = re.compile(r"[^=]+=.*|[A-Za-z_]\w*", re.DOTALL)
_ByName: TypeAlias = dict[str, str | None]
_Form: TypeAlias = list[str] | dict[str, str | float | None]


def _variables(raw: object) -> object:
    """A list of ``NAME=VALUE``, or a mapping, or one of these for each kind of device; None is for what to unset."""
    if not isinstance(raw, Mapping):
        return _named(raw, "")
    found: dict[str, Any] = {}
    for name, value in raw.items():
        if name in DEVICES and not isinstance(value, str):
            found[name] = {} if value is None else _named(value, f"{name}: ")
        else:
            found |= _named({name: value}, "")
    return found


def _named(raw: object, where: str) -> _ByName:
    """The variables by name. Values may be secrets, so messages don't contain them."""
    if isinstance(raw, list):
        valid = [isinstance(entry, str) and _ENTRY.fullmatch(entry) is not None for entry in raw]
        if not all(valid):
            wrong = ", ".join(str(place) for place, is_valid in enumerate(valid, start=1) if not is_valid)
            raise ValueError(f"{where}must be a list of NAME=VALUE; these entries are not: {wrong} (from 1)")
        # A name alone is removed from the container's environment in Determined, as in Docker's API.
        return {name: value if sign else None for name, sign, value in (entry.partition("=") for entry in raw)}
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where}must be a list of NAME=VALUE or a mapping, got a {type(raw).__name__}")
    found: _ByName = {}
    for name, value in raw.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise ValueError(f"{where}must map names of variables to values, got the name {name!r}")
        if isinstance(value, bool) or not isinstance(value, str | int | float | None):
            raise ValueError(f"{where}{name} must be a string, got a {type(value).__name__}; write it in quotes")
        found[name] = None if value is None else str(value)
    return found


class Environment(Section):
    """The environment of trials."""

    place: ClassVar[str] = "environment"

    environment_variables: Annotated[
        dict[str, str | _ByName | None],
        BeforeValidator(_variables, json_schema_input_type=_Form | dict[str, str | float | _Form | None]),
    ] = Field(
        default_factory=dict,
        description="variables to set before any code of the trial is imported: a list of NAME=VALUE (a NAME alone is "
        "unset), or a mapping; or one of these for each of cpu, cuda, rocm. Values are never stored or shown",
        examples=[["OMP_NUM_THREADS=4"]],
        repr=False,
    )

    def variables(self, device: Literal["cpu", "cuda", "rocm"]) -> dict[str, str | None]:
        """The variables for trials on this device; None for those to unset."""
        given = self.environment_variables
        found = {name: value for name, value in given.items() if not isinstance(value, dict)}
        for kind in (device, "gpu") if device == "cuda" else (device,):
            variables = given.get(kind)
            found |= variables if isinstance(variables, dict) else {}
        return found
