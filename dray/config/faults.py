"""Turns pydantic's errors into messages: ``path: the requirement, the value given; the remedy``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dray.config.determined_fields import IGNORED_FIELDS, REMOVED_FIELDS
from dray.config.resources import SlotRange
from dray.config.schema import ExperimentConfig
from dray.config.searcher import BY_METHOD
from dray.config.section import ABSENT, CLASS, UNKNOWN, Kinds, Section
from dray.config.storage import BY_TYPE, SECRETS
from dray.config.yaml_file import as_yaml
from dray.errors import Fault
from searchers.errors import SHOWN, FieldError, did_you_mean


def _models(model: type[Section]) -> Iterator[type[Section]]:
    """A section's model, and those of the sections in it. For a section of several kinds: the model with the fields of
    all kinds."""
    yield model
    for field in model.model_fields.values():
        kinds = [each.unknown for each in field.metadata if isinstance(each, Kinds)]
        for each in kinds or _types(field.annotation):
            if isinstance(each, type) and issubclass(each, Section):
                yield from _models(each)


def _types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _types(inner)


#: The model of each section by its path.
SECTIONS = {model.place: model for model in _models(ExperimentConfig)}
KINDS = {"searcher": BY_METHOD, "checkpoint_storage": BY_TYPE}  # the sections of several kinds

_UNKNOWN = "unknown field"
_KNOWN = f"{_UNKNOWN}; known fields are"
_KINDS_OF_VALUES = {
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
#: Fields whose path is followed, in pydantic's locations, by the form that was tried.
_WITH_FORMS = (*KINDS, SlotRange.place)


def faults_of(error: ValidationError) -> list[Fault]:
    """All faults that pydantic found in a config, in the order of its fields."""
    found: list[Fault] = []
    listed: set[str] = set()
    for details in error.errors(include_url=False):
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, FieldError):  # its paths are complete
            found += (Fault(path, what) for path, what in cause.faults)
            continue
        field = _located(details)
        if details["type"] == "missing" and field.kind == UNKNOWN and not field.is_common:
            continue
        what = _what(details, field, hint=len(found) < SHOWN)
        if what.startswith(_KNOWN):  # a long message: once for each section
            what = _UNKNOWN if field.section in listed else what
            listed.add(field.section)
        found.append(Fault(field.path, what))
    return found


def missing_field(path: str) -> Fault:
    """The fault of a missing field, with its meaning and an example."""
    section, _, name = path.rpartition(".")
    field = _fields_of(section)[name]
    return Fault(path, f"missing required field; {field.description}, {_example(name, field)}")


class _Field(NamedTuple):
    """The place of a fault that pydantic found."""

    section: str
    name: str
    kind: str

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}".removeprefix(".")

    @property
    def is_common(self) -> bool:
        return self.section not in KINDS or all(
            self.name in model.model_fields for model in KINDS[self.section].models.values()
        )


def _located(details: ErrorDetails) -> _Field:
    names: list[str] = []
    kind, parts = "", iter(details["loc"])
    for part in parts:
        if isinstance(part, int):
            names[-1] += f"[{part}]"
        else:
            names.append(part)
        if ".".join(names) in _WITH_FORMS:
            kind = str(next(parts, kind))
    return _Field(".".join(names[:-1]), names[-1], kind)


def _fields_of(section: str) -> Mapping[str, FieldInfo]:
    """The fields of a section, or of an entry of a list of sections (``searcher.metrics[2]``); {} for other paths."""
    model = SECTIONS.get(re.sub(r"\[\d+\]", "[]", section))
    return {} if model is None else model.model_fields


def _what(details: ErrorDetails, field: _Field, *, hint: bool) -> str:
    if details["type"] == "missing":
        return missing_field(field.path).what
    if details["type"] != "extra_forbidden":
        return _wrong_value(details, field)
    if field.path in REMOVED_FIELDS:
        return REMOVED_FIELDS[field.path]
    if field.section in KINDS and field.name in SECTIONS[field.section].model_fields:
        return _of_other_kinds(field)
    return _unknown_field(field.section, field.name) if hint else _UNKNOWN


def _unknown_field(section: str, name: str) -> str:
    """The message for an unknown field, with the nearest known one, which takes a while to find."""
    known = _fields_of(section)
    prefix = f"{section}." if section else ""
    ignored = [path.removeprefix(prefix) for path in IGNORED_FIELDS if path.startswith(prefix)]
    if near := did_you_mean(name, [*known, *(field for field in ignored if "." not in field)]):
        return _UNKNOWN + near
    places = [f"{place}.{name}".removeprefix(".") for place, model in SECTIONS.items() if name in model.model_fields]
    places += [path for path in IGNORED_FIELDS if path.rpartition(".")[2] == name]
    if places:
        return f"unknown field here; move it to {places[0]}"
    return f"{_KNOWN} {', '.join(sorted(known))}"


def _of_other_kinds(field: _Field) -> str:
    kinds = KINDS[field.section]
    needed = " or ".join(each for each, model in kinds.models.items() if field.name in model.model_fields)
    if field.kind == ABSENT:
        return f"needs {kinds.field}: {needed}"
    instead = "put it below options, if the class takes it" if field.kind == CLASS else f"use {kinds.field}: {needed}"
    return f"{field.kind} has no such field; remove it, or {instead}"


def _wrong_value(details: ErrorDetails, field: _Field) -> str:
    kind, got, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if field.name in SECRETS or field.path == "notify.url":
        return f"must be a string, got a {type(got).__name__}"
    # It may contain a secret, such as notify's URL in its place.
    if field.path.partition(".")[0] in ("data", "environment") or field.path == "notify":
        return f"must be a mapping of names to values, got a {type(got).__name__}"
    known = _fields_of(field.section).get(field.name)
    example = f"; {_example(field.name, known)}" if known is not None else ""
    if kind == "literal_error":
        choices = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        return f"must be one of {choices}, got {_shown(got)}{did_you_mean(got, choices.split(', '), example)}"
    if kind in _KINDS_OF_VALUES:
        return f"must be {_KINDS_OF_VALUES[kind]}, got {_shown(got)}{example}"
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters, got {len(got)}"
    if kind in ("string_too_short", "too_short"):
        return f"must not be empty{example}"
    for limit, sign in (("gt", ">"), ("ge", ">="), ("le", "<=")):
        if limit in context:
            bound = context[limit]
            whole = isinstance(bound, float) and bound.is_integer()
            return f"must be {sign} {int(bound) if whole else bound}, got {_shown(got)}{example}"
    return f"{details['msg']}, got {_shown(got)}{example}"


def _example(name: str, field: FieldInfo) -> str:
    assert field.examples, f"{name} needs an example in the schema, its error messages show it"
    return f"for example {name}: {as_yaml(field.examples[0])}"


def _shown(got: object) -> str:
    kind = {str: "a string", bool: "a boolean", list: "a list", dict: "a mapping"}.get(type(got), type(got).__name__)
    return f"{got!r:.60} ({kind})" if isinstance(got, str | bool | list | Mapping) else repr(got)[:60]
