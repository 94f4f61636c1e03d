"""The JSON Schema of the config: valid itself, and it agrees with ``load_config`` on what a schema can express."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dray.config.faults import KINDS, SECTIONS
from dray.config.json_schema import json_schema
from dray.config.load import load_config
from dray.config.searcher import METHODS
from dray.config.section import Section
from dray.config.yaml_file import read_mapping
from dray.errors import ConfigError
from tests.config.configs import ASHA_CONFIG, with_field
from tests.searchers.helpers import needs_constraints

ROOT = Path(__file__).parents[2]
SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def is_loaded(config: dict[str, Any]) -> bool:
    try:
        load_config(config)
    except ConfigError:
        return False
    return True


def test_the_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


EXAMPLES = [
    pytest.param(
        path, id=f"{path.parent.name}/{path.name}", marks=needs_constraints if path.stem == "objectives" else ()
    )
    for path in sorted((ROOT / "examples").glob("*/*.yaml"))
]


@pytest.mark.parametrize("path", EXAMPLES)
def test_the_schema_accepts_the_examples_and_stored_configs(path: Path) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(read_mapping(path))] == []
    config = load_config(path)
    assert [error.message for error in VALIDATOR.iter_errors(config.to_dict())] == []
    assert load_config(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config


MODELS = [
    *(model for place, model in SECTIONS.items() if place not in KINDS),
    *(model for kinds in KINDS.values() for model in dict.fromkeys(kinds.models.values())),
]


@pytest.mark.parametrize("model", MODELS)
def test_every_field_is_described_and_takes_its_examples(model: type[Section]) -> None:
    schema = SCHEMA["$defs"][model.__name__] if model.place else SCHEMA
    assert schema["additionalProperties"] is False
    in_use = {name for name, field in schema["properties"].items() if "deprecated" not in field}
    assert in_use == set(model.model_fields)
    for name, field in schema["properties"].items():
        assert field["description"], name
        alone = jsonschema.Draft202012Validator({**field, "$defs": SCHEMA["$defs"]})
        for example in field.get("examples", ()):
            assert alone.is_valid(example), (name, example)


GOOD = [
    ("searcher.sampler", {"name": "tpe", "options": {"n_startup_trials": 3}}),
    ("min_validation_period", {"batches": 0}),
    ("hyperparameters.net", {"depth": {"type": "int", "minval": 1, "maxval": 3, "count": None}, "norm": None}),
    ("hyperparameters.act", {"type": "categorical", "vals": [{"type": "relu"}, "gelu"]}),
    ("hyperparameters.width", {"type": "int", "minval": 16.0, "maxval": 64, "step": 16, "log": False}),
    ("resources", {"slots_per_trial": 0, "is_single_node": True, "max_slots": 4, "priority": 3}),
    ("labels", {"sweep": True}),
    ("environment", {"image": {"cuda": "a:1"}, "environment_variables": ["A=1", "B="]}),
    ("log_policies", [{"pattern": "ECC", "action": {"type": "exclude_node"}, "name": "bad memory"}]),
    ("log_policies", [{"pattern": "out of memory", "actions": ["cancel_retries", {"signal": "oom"}]}]),
    ("checkpoint_storage", {"type": "shared_fs", "host_path": "/a", "checkpoint_path": "b", "propagation": "r"}),
]
BAD = [
    ("nam", "one"),
    ("searcher.name", "asa"),
    ("searcher.max_length", {"epochs": 1, "batches": 2}),
    ("searcher.mode", "standard"),  # adaptive_asha's
    ("searcher.sampler", {"options": {}, "nam": "tpe"}),
    ("checkpoint_storage", {"type": "s3"}),
    ("checkpoint_storage", {"type": "s3", "bucket": "b", "container_path": "/x"}),
    ("loggers", ["mlfow"]),
    ("hyperparameters.lr", {"type": "lg"}),
    ("hyperparameters.lr", {"type": "log", "minval": -4, "maxval": -1}),
    ("hyperparameters.lr", {"type": "log", "base": 0, "minval": -4, "maxval": -1}),
    ("hyperparameters.lr", {"type": "double", "minval": "1", "maxval": 2}),
    ("hyperparameters.lr", {"type": "int", "minval": 1, "maxval": 2, "base": 2}),
    ("hyperparameters.lr", {"type": "int", "minval": 1, "maxval": 2, "count": 0}),
    ("hyperparameters.lr", {"type": "categorical", "vals": []}),
    ("hyperparameters.net", {"lr": {"type": "categorical", "vals": 3}}),
    ("labels", [1]),
    ("max_restarts", -1),
    ("resources.slot", "tpu"),
    ("resources.slots_per_trial", 1.5),
    ("resources.slots_per_trial", {"min": 1}),
    ("environment.environment_variables", {"A": True}),
    ("log_policies", [{"action": "cancel_retries"}]),
]


@pytest.mark.parametrize(("path", "value"), GOOD)
def test_the_schema_accepts_what_is_loaded(path: str, value: Any) -> None:
    config = with_field(path, value, ASHA_CONFIG)
    assert is_loaded(config)
    assert [error.message for error in VALIDATOR.iter_errors(config)] == []


@pytest.mark.parametrize(("path", "value"), BAD)
def test_the_schema_refuses_what_is_not_loaded(path: str, value: Any) -> None:
    config = with_field(path, value, ASHA_CONFIG)
    assert not is_loaded(config)
    assert not VALIDATOR.is_valid(config)


@pytest.mark.parametrize("method", [*METHODS, "my_module:MyMethod"])
def test_the_schema_has_the_fields_of_each_method(method: str) -> None:
    values = yaml.safe_load(
        "{max_trials: 4, max_concurrent_trials: 2, num_rungs: 2, divisor: 3, variant: promotion, mode: standard, "
        "max_rungs: 3, bracket_rungs: [2], sampler: tpe, options: {}, points: [], smaller_is_better: false}"
    )
    least = {"name": method, "metric": "loss", "max_length": {"epochs": 16}}
    space = {"n": {"type": "int", "minval": 1, "maxval": 3, "count": 2}}
    ends = {"patience": 9}  # else `max_trials` is required, which is a rule about several fields
    for needed in ({}, {"max_trials": 4}, {"max_trials": 4, "num_rungs": 2}):
        config = {"searcher": {**least, **needed}, "hyperparameters": space, **ends}
        assert VALIDATOR.is_valid(config) == is_loaded(config), needed
        for field, value in values.items():
            config = {"searcher": {**least, **needed, field: value}, "hyperparameters": space, **ends}
            assert VALIDATOR.is_valid(config) == is_loaded(config), (needed, field)
