"""The JSON Schema of an experiment's config file, for editors: the fields of ``schema`` with their short forms, and
which fields go with which search method and kind of storage.

It accepts everything that ``load_config`` accepts. Rules that JSON Schema can't express (``rules.py``: a batch that
slots can share, the bounds of a space, a program that sets its own length) are left to ``load_config``.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from dray.config.determined_fields import IN_SHARED_FS, NOT_USED
from dray.config.environment import DEVICES
from dray.config.length import UNITS
from dray.config.loggers import Loggers
from dray.config.rules import REQUIRED
from dray.config.schema import ExperimentConfig
from dray.config.searcher import SEARCHER_FIELDS, searcher_fields
from dray.config.storage import STORAGE_FIELDS

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_CLASS = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
_NULL = {"type": "null"}
_SECTIONS = (
    "Searcher",
    "Resources",
    "Optimizations",
    "Environment",
    "CheckpointStorage",
    "Loggers",
    "MLflow",
    "WandB",
    "Reproducibility",
)


def json_schema() -> dict[str, Any]:
    """A new copy of the schema, as plain data."""
    found = ExperimentConfig.model_json_schema()
    definitions = found["$defs"]
    for section in (found, *definitions.values()):
        section["description"] = " ".join(section["description"].partition("\n\n")[0].split())
    for node in _nodes(found):
        node.pop("title", None)
        if "examples" in node:
            node["examples"] = [each for text in node["examples"] if (each := _example(text)) is not None]
    del definitions["Length"]
    definitions["Hyperparameters"], definitions["Hyperparameter"] = _hyperparameters()
    root, searcher = found["properties"], definitions["Searcher"]["properties"]
    _replace(searcher, "name", {"anyOf": [{"enum": list(SEARCHER_FIELDS)}, {"type": "string", "pattern": _CLASS}]})
    _replace(searcher, "max_length", _length(1))
    _replace(searcher, "sampler", {"anyOf": [{"type": "string", "minLength": 1}, {"$ref": "#/$defs/SamplerChoice"}]})
    for period in ("min_validation_period", "min_checkpoint_period"):
        _replace(root, period, _units(0))
    _replace(root, "hyperparameters", {"$ref": "#/$defs/Hyperparameters"})
    places = [{"type": "string", "minLength": 1}, {"$ref": "#/$defs/CheckpointStorage"}]
    _replace(root, "checkpoint_storage", {"anyOf": places})
    logger = [{"enum": list(Loggers.model_fields)}, {"$ref": "#/$defs/Loggers"}]
    _replace(root, "loggers", {"anyOf": [*logger, {"type": "array", "items": {"anyOf": logger}}]})
    _older_forms(root, definitions)
    definitions["Searcher"]["allOf"] = list(_methods())
    definitions["CheckpointStorage"]["allOf"] = list(_kinds_of_storage())
    found["required"] = ["searcher"]  # the name is taken from the file if it is missing
    found["description"] = "What to train, how to search its hyperparameters, and where to run it."
    for section in (found, *(definitions[name] for name in _SECTIONS)):
        for name, field in section["properties"].items():
            if name not in section.get("required", ()):
                _allow_null(field)
    _pass_over(found, definitions)
    return {"$schema": DIALECT, "title": "dray experiment config", **found}


def _older_forms(root: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Allow the older forms of Determined's configs."""
    definitions.pop("LogPolicy", None)
    text, names = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
    _replace(root, "labels", {"anyOf": [names, {"type": "object", "description": "its names"}]})
    nothing_or_text = {"type": ["string", "null"]}
    action = {"anyOf": [nothing_or_text, {"type": "object"}]}
    policy = {**dict.fromkeys(("pattern", "name", "signal"), nothing_or_text), "policy": action, "action": action}
    policy["actions"] = {"type": "array", "items": action}
    named = [{"required": ["pattern"]}, {"required": ["name"]}]
    items = {"type": "object", "properties": policy, "allOf": [{"anyOf": named}], "additionalProperties": False}
    _replace(root, "log_policies", {"type": "array", "items": items})
    _replace(root, "records_per_epoch", {"type": "integer", "minimum": 0})
    slots = definitions["Resources"]["properties"]["slots_per_trial"]
    for form in slots.get("anyOf", slots.get("oneOf", ())):
        if form.get("type") == "integer":
            form["minimum"] = 0
    variables: dict[str, Any] = {"type": "object", "additionalProperties": {"type": ["string", "number", "null"]}}
    of_a_device = {"anyOf": [names, variables, text, dict(_NULL)]}
    forms = [names, {**variables, "properties": dict.fromkeys(DEVICES, of_a_device)}]
    _replace(definitions["Environment"]["properties"], "environment_variables", {"anyOf": forms})


def _pass_over(root: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Allow ignored fields, as deprecated: editors strike them through."""
    for path, why in NOT_USED.items():
        section, _, name = path.rpartition(".")
        inner = _section_of(root, definitions, section) if section else root
        if section != "log_policies":  # this one is a list with several forms
            inner["properties"][name] = {"description": f"ignored: {why}", "deprecated": True}
    known = definitions["CheckpointStorage"]["properties"]
    known["checkpoint_path"] = {"description": "older name of storage_path, of shared_fs", "deprecated": True}


def _section_of(root: dict[str, Any], definitions: dict[str, Any], name: str) -> dict[str, Any]:
    field = root["properties"][name]
    return next((definitions[target] for target in re.findall(r"#/\$defs/(\w+)", json.dumps(field))), {})


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    """All mappings that are schemas, including those below mappings of names to schemas."""
    if isinstance(node, dict):
        yield node
        for key, value in node.items():
            if key in ("properties", "$defs"):
                yield from _nodes(list(value.values()))
            elif key not in ("default", "examples"):
                yield from _nodes(value)
    elif isinstance(node, list):
        for value in node:
            yield from _nodes(value)


def _example(text: Any) -> Any:
    """The example's value: examples are written as YAML, for messages."""
    if not isinstance(text, str):
        return text
    return text if text.endswith("...") else yaml.safe_load(text)


def _replace(fields: dict[str, Any], name: str, form: Mapping[str, Any]) -> None:
    """Replace the form of a field, and keep its description."""
    kept = {key: value for key, value in fields[name].items() if key in ("description", "examples", "default")}
    fields[name] = {**kept, **form}


def _allow_null(field: dict[str, Any]) -> None:
    """Allow null, which means the default."""
    if field.get("default", 0) is None:
        del field["default"]
    alternatives = field.get("anyOf")
    if alternatives is not None:
        if _NULL not in alternatives:
            alternatives.append(dict(_NULL))
        return
    form = {key: field.pop(key) for key in list(field) if key not in ("description", "examples", "default")}
    field["anyOf"] = [form, dict(_NULL)]


def _length(minimum: int) -> dict[str, Any]:
    return {"anyOf": [_units(minimum), {"type": "integer", "minimum": minimum, "description": "in batches"}]}


def _units(minimum: int) -> dict[str, Any]:
    number = {"type": "integer", "minimum": minimum}
    units = {"type": "object", "properties": {unit: dict(number) for unit in UNITS}, "additionalProperties": False}
    return {**units, "minProperties": 1, "maxProperties": 1}


def _hyperparameters() -> tuple[dict[str, Any], dict[str, Any]]:
    """A mapping of names to constants, spaces, and nested mappings of the same form."""
    number, whole = {"type": "number"}, {"type": "integer"}
    count = {"type": ["integer", "null"], "minimum": 1, "description": "number of values in a grid"}

    def step(form: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": [form["type"], "null"], "exclusiveMinimum": 0}

    kinds: dict[str, dict[str, Any]] = {
        "const": {"val": {}},
        "categorical": {"vals": {"type": "array", "minItems": 1}},
        "int": {"minval": whole, "maxval": whole, "count": count, "step": step(whole), "log": {"type": "boolean"}},
        "double": {"minval": number, "maxval": number, "count": count, "step": step(number)},
        "log": {
            "base": {**number, "exclusiveMinimum": 0},
            "minval": {**number, "description": "an exponent of base"},
            "maxval": {**number, "description": "an exponent of base"},
            "count": count,
            "step": step(number),
        },
    }
    spaces = [
        {
            "if": {"properties": {"type": {"const": kind}}},
            "then": {
                "properties": {"type": True} | copy.deepcopy(fields),
                "required": [name for name in fields if name not in ("count", "step", "log")],
                "additionalProperties": False,
            },
        }
        for kind, fields in kinds.items()
    ]
    one = {
        "description": "A constant; a space, which has a type; or a mapping of nested hyperparameters.",
        "examples": [64, {"type": "log", "base": 10, "minval": -4, "maxval": -1}],
        "if": {"type": "object"},
        "then": {
            "if": {"required": ["type"]},
            "then": {"properties": {"type": {"enum": list(kinds)}}, "allOf": spaces},
            "else": {"$ref": "#/$defs/Hyperparameters"},
        },
    }
    return {"type": "object", "additionalProperties": {"$ref": "#/$defs/Hyperparameter"}}, one


def _methods() -> Iterator[dict[str, Any]]:
    """Which fields of ``searcher`` each method allows and requires."""
    every = frozenset().union(*SEARCHER_FIELDS.values(), searcher_fields("a:B"))
    forms: dict[str, dict[str, Any]] = {name: {"const": name} for name in SEARCHER_FIELDS}
    for name, form in [*forms.items(), ("a:B", {"type": "string", "pattern": _CLASS})]:
        others = sorted(every - searcher_fields(name))
        then: dict[str, Any] = {"properties": {field: dict(_NULL) for field in others}}
        if name in REQUIRED:
            then["required"] = list(REQUIRED[name])
            then["properties"] |= {field: {"not": dict(_NULL)} for field in REQUIRED[name]}
        yield {"if": {"properties": {"name": form}, "required": ["name"]}, "then": then}


def _kinds_of_storage() -> Iterator[dict[str, Any]]:
    every = frozenset().union(*STORAGE_FIELDS.values())
    for kind, fields in STORAGE_FIELDS.items():
        passed_over = {path.partition(".")[2] for path in IN_SHARED_FS} if kind == "shared_fs" else set()
        then: dict[str, Any] = {"properties": {name: dict(_NULL) for name in sorted(every - {*fields, *passed_over})}}
        said: dict[str, Any]
        if kind is None:
            said = {"properties": {"type": dict(_NULL)}}
        else:
            said = {"properties": {"type": {"const": kind}}, "required": ["type"]}
            if kind != "directory":  # its only path has two names
                then["required"] = [fields[0]]
        yield {"if": said, "then": then}
