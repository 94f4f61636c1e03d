"""Turns pydantic's errors into messages: ``path: what was expected, what was given; what to write``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dray.config.determined_fields import NO_MORE, NOT_USED
from dray.config.resources import SLOT_FORMS
from dray.config.schema import SECTIONS
from dray.config.storage import SECRETS
from dray.errors import Fault
from searchers.errors import SHOWN

_UNKNOWN = "unknown field"
_KNOWN = f"{_UNKNOWN}; known fields are"
_KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def faults_of(error: ValidationError) -> list[Fault]:
    """All faults that pydantic found, in the order of the config's fields.

    Args:
        error: From validating a section, or the whole config.
    """
    found: list[Fault] = []
    listed: set[str] = set()
    for details in error.errors(include_url=False):
        fault = _fault(details, hint=len(found) < SHOWN)
        section = fault.path.rpartition(".")[0]
        if fault.what.startswith(_KNOWN):  # which is long: once for each section
            fault = fault._replace(what=_UNKNOWN) if section in listed else fault
            listed.add(section)
        found.append(fault)
    return found


def unknown_field(location: tuple[str, ...], name: str, *, hint: bool = True) -> Fault:
    """The fault of an unknown field; by default with the nearest known one, which takes a while to find."""
    path = ".".join((*location, name))
    if path in NO_MORE:
        return Fault(path, NO_MORE[path])
    if not hint:
        return Fault(path, _UNKNOWN)
    known = SECTIONS[location].model_fields
    prefix = path.removesuffix(name)
    also = [field.removeprefix(prefix) for field in NOT_USED if field.startswith(prefix)]
    near = difflib.get_close_matches(name, [*known, *(field for field in also if "." not in field)], n=1)
    if near:
        return Fault(path, f"{_UNKNOWN}; did you mean {near[0]}?")
    places = [".".join((*place, name)) for place, model in SECTIONS.items() if name in model.model_fields]
    places += [field for field in NOT_USED if field.rpartition(".")[2] == name]
    if places:
        return Fault(path, f"unknown field here; move it to {places[0]}")
    return Fault(path, f"{_KNOWN} {', '.join(sorted(known))}")


def missing_field(location: tuple[str, ...], name: str) -> Fault:
    """The fault of a missing field, with what it means and an example."""
    field = SECTIONS[location].model_fields[name]
    return Fault(".".join((*location, name)), f"required, got nothing; {field.description}, {_example(name, field)}")


def _fault(details: ErrorDetails, *, hint: bool) -> Fault:
    *location, name = (str(part) for part in details["loc"] if part not in SLOT_FORMS)
    place = tuple(location)
    if details["type"] == "extra_forbidden":
        return unknown_field(place, name, hint=hint)
    if details["type"] == "missing":
        return missing_field(place, name)
    return Fault(".".join((*location, name)), _what(details, place, name))


def _what(details: ErrorDetails, place: tuple[str, ...], name: str) -> str:
    kind, got, context = details["type"], details["input"], details.get("ctx", {})
    if name in SECRETS:
        return f"must be a string, got a {type(got).__name__}"
    if (*place, name)[0] in ("data", "environment") and kind != "value_error":  # it may contain a secret
        return f"must be a mapping of names to values, got a {type(got).__name__}"
    field = _field(place, name)
    example = f"; {_example(name, field)}" if field is not None else ""
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"must be one of {_choices(context)}, got {_shown(got)}{_nearest(got, context) or example}"
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, got {_shown(got)}{example}"
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters, got {len(got)}"
    if kind == "string_too_short":
        return f"must not be empty{example}"
    for limit, sign in (("gt", ">"), ("ge", ">="), ("le", "<=")):
        if limit in context:
            bound = context[limit]
            whole = isinstance(bound, float) and bound.is_integer()
            return f"must be {sign} {int(bound) if whole else bound}, got {_shown(got)}{example}"
    return f"{details['msg']}, got {_shown(got)}{example}"


def _field(place: tuple[str, ...], name: str) -> FieldInfo | None:
    # A location that is no field is inside a list or a free mapping: labels.0
    model: type[BaseModel] | None = SECTIONS.get(place)
    return None if model is None else model.model_fields.get(name)


def _example(name: str, field: FieldInfo) -> str:
    assert field.examples, f"{name} needs an example in the schema, its error messages show it"
    example = field.examples[0]
    return f"for example {name}: {str(example).lower() if isinstance(example, bool) else example}"


def _shown(got: object) -> str:
    kind = {str: "a string", bool: "a boolean", list: "a list", dict: "a mapping"}.get(type(got), type(got).__name__)
    return f"{got!r:.60} ({kind})" if isinstance(got, str | bool | list | Mapping) else repr(got)[:60]


def _choices(context: Mapping[str, Any]) -> str:
    return str(context["expected"]).replace("'", "").replace(" or ", ", ")


def _nearest(got: object, context: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(str(got), _choices(context).split(", "), n=1)
    return f"; did you mean {near[0]}?" if near else ""
