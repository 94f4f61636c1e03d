"""The JSON Schema of experiment config files, for editors: the schema of the models, and of hyperparameters.

It accepts everything that ``load_config`` accepts; only ``load_config`` checks the rules about several fields
(``rules.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dray.config.schema import ExperimentConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    found = ExperimentConfig.model_json_schema()
    definitions = found["$defs"]
    definitions["Hyperparameters"], definitions["Hyperparameter"] = _hyperparameters()
    forms = found["properties"]["hyperparameters"]["anyOf"]
    forms[0] = {"$ref": "#/$defs/Hyperparameters"}
    found["description"] = "What to train, how to search its hyperparameters, and where to run it."
    return {"$schema": DIALECT, "title": "dray experiment config", **found}


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
                "properties": {"type": True, **fields},
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
