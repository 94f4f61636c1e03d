"""The section ``environment``: the environment of trials."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema

from dray.config.section import Section

#: Determined's names for the devices of slots; gpu is an older name for cuda.
DEVICES = ("cpu", "cuda", "gpu", "rocm")
#: What a name without a value looks like; anything else has another mistake in it.
_ALONE = re.compile(r"[A-Za-z_]\w*")
_ByName: TypeAlias = dict[str, str | None]


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
        pairs = [line.partition("=") if isinstance(line, str) else ("", "", "") for line in raw]
        are_right = [bool(name) if sign else _ALONE.fullmatch(name) is not None for name, sign, _ in pairs]
        wrong = [str(place) for place, is_right in enumerate(are_right, start=1) if not is_right]
        if wrong:
            raise ValueError(f"{where}must be a list of NAME=VALUE; these entries are not: {', '.join(wrong)} (from 1)")
        # A name alone is removed from the container's environment in Determined, as in Docker's API.
        return {name: value if sign else None for name, sign, value in pairs}
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


def _variables_schema() -> dict[str, Any]:
    """The JSON Schema of what ``_variables`` takes."""
    names: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
    by_name = {"type": "object", "additionalProperties": {"type": ["string", "number", "null"]}}
    of_a_device = {"anyOf": [names, by_name, {"type": ["string", "null"]}]}
    return {"anyOf": [names, {**by_name, "properties": dict.fromkeys(DEVICES, of_a_device)}]}


class Environment(Section):
    """The environment of trials."""

    place: ClassVar[str] = "environment"

    environment_variables: Annotated[
        dict[str, str | _ByName | None], BeforeValidator(_variables), WithJsonSchema(_variables_schema())
    ] = Field(
        default_factory=dict,
        description="variables to set before any code of the trial is imported: a list of NAME=VALUE (a NAME alone is "
        "unset), or a mapping; or one of these for each of cpu, cuda, rocm. Values are never stored or shown",
        examples=[["OMP_NUM_THREADS=4"]],
        repr=False,
    )

    def variables(self, device: Literal["cpu", "cuda", "rocm"]) -> dict[str, str | None]:
        """The variables for trials on this device; None for those to unset."""
        said = self.environment_variables
        found = {name: value for name, value in said.items() if not isinstance(value, dict)}
        for kind in (device, "gpu") if device == "cuda" else (device,):
            mine = said.get(kind)
            found |= mine if isinstance(mine, dict) else {}
        return found
