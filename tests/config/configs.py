"""A config to change, and the faults of a changed one."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dray.config.load import load_config
from dray.errors import ConfigError

ASHA_CONFIG: dict[str, Any] = {
    "name": "digits-asha",
    "entrypoint": "model_def:DigitsTrial",
    "hyperparameters": {
        "global_batch_size": 64,
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
        "hidden": {"type": "int", "minval": 16, "maxval": 256},
    },
    "searcher": {
        "name": "asha",
        "metric": "validation_loss",
        "smaller_is_better": True,
        "max_length": {"epochs": 16},
        "max_trials": 64,
        "divisor": 4,
        "num_rungs": 3,
    },
    "resources": {"slots_per_trial": 1},
    "min_validation_period": {"epochs": 1},
    "reproducibility": {"experiment_seed": 7},
}


def with_field(path: str, value: Any, base: dict[str, Any]) -> dict[str, Any]:
    """A copy of this config with another value of a field, ``searcher.divisor``; ``...`` removes it."""
    config = copy.deepcopy(base)
    *sections, field = path.split(".")
    place = config
    for section in sections:
        place = place.setdefault(section, {})
    if value is ...:
        del place[field]
    else:
        place[field] = value
    return config


def changed(base: dict[str, Any] = ASHA_CONFIG, /, **fields: Any) -> dict[str, Any]:
    """ASHA_CONFIG with fields replaced: ``searcher__divisor=1``."""
    for path, value in fields.items():
        base = with_field(path.replace("__", "."), value, base)
    return base


def faults(source: Any) -> dict[str, str]:
    """What is wrong with this config, by path."""
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    found = caught.value.faults
    assert len({fault.path for fault in found}) == len(found), "one fault a field"
    return dict(found)
