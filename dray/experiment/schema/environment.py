"""The section ``environment``: the environment of trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from dray.experiment.schema.section import Section

#: Determined's names for the devices of slots; gpu is an older name for cuda.
DEVICES = ("cpu", "cuda", "gpu", "rocm")


def _variables(raw: object) -> object:
    """A list of ``NAME=VALUE``, or a mapping, or one of these for each kind of device."""
    if not isinstance(raw, Mapping):
        return _named(raw, "")
    found: dict[str, Any] = {}
    for name, value in raw.items():
        if name in DEVICES and not isinstance(value, str):
            found[name] = {} if value is None else _named(value, f"{name}: ")
        else:
            found |= _named({name: value}, "")
    return found


def _named(raw: object, where: str) -> dict[str, str]:
    """The variables by name. Values may be secrets, so messages don't contain them."""
    if isinstance(raw, list):
        pairs = [line.partition("=") if isinstance(line, str) else ("", "", "") for line in raw]
        wrong = [str(place) for place, (name, sign, _) in enumerate(pairs, start=1) if not name or not sign]
        if wrong:
            raise ValueError(f"{where}must be a list of NAME=VALUE, which number {', '.join(wrong)} of it is not")
        return {name: value for name, _, value in pairs}
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where}must be a list of NAME=VALUE, or a mapping, got a {type(raw).__name__}")
    found = {}
    for name, value in raw.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise ValueError(f"{where}must have names of variables, got {name!r}")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            told = f"{where}{name} must be text, got a {type(value).__name__}; write it in quotes"
            raise ValueError(told)
        found[name] = str(value)
    return found


class Environment(Section):
    """The environment of trials."""

    environment_variables: Annotated[dict[str, str | dict[str, str]], BeforeValidator(_variables)] = Field(
        default_factory=dict,
        description="set before any code of the trial is imported: a list of NAME=VALUE, or a mapping; or one of these "
        "for each of cpu, cuda, rocm. Values are stored and shown nowhere",
        examples=["[OMP_NUM_THREADS=4]"],
        repr=False,
    )

    def variables(self, device: Literal["cpu", "cuda", "rocm"]) -> dict[str, str]:
        """The variables for trials on this device."""
        said = self.environment_variables
        found = {name: value for name, value in said.items() if isinstance(value, str)}
        for kind in (device, "gpu") if device == "cuda" else (device,):
            mine = said.get(kind)
            found |= mine if isinstance(mine, dict) else {}
        return found
