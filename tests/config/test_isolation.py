"""The field ``isolation``: what a sandbox needs, and what would run or reach beyond it."""

from __future__ import annotations

from typing import Any

import pytest

from dray.config.load import load_config
from dray.config.rules import beyond_sandbox
from dray.config.schema import ExperimentConfig, Isolation
from dray.errors import ConfigError

SEARCHER = {"name": "random", "metric": "loss", "max_length": {"batches": 1}, "max_trials": 1}


def config(**fields: Any) -> ExperimentConfig:
    return load_config({"entrypoint": "model_def:Trial", "searcher": SEARCHER, "isolation": "sandbox", **fields})


@pytest.mark.parametrize("given", ["sandbox", {"name": "sandbox"}, {"name": "sandbox", "read": ["/data/../data/a"]}])
def test_a_name_alone_is_short_for_the_section(given: Any) -> None:
    found = config(isolation=given)
    assert found.isolation.is_sandbox
    assert found.isolation.read == (["/data/a"] if "read" in given else [])
    assert load_config(found.to_dict()).isolation == found.isolation
    assert config(isolation=None).isolation == Isolation()
    assert not Isolation().is_sandbox


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"resources": {"slots_per_trial": 2}}, "isolation: sandbox needs resources.slots_per_trial: 1, got 2"),
        ({"resources": {"slots_per_trial": 0.5}}, "isolation: sandbox needs resources.slots_per_trial: 1, got 0.5"),
        ({"searcher": {**SEARCHER, "name": "my:Method"}}, "searcher.name: can't be my:Method with isolation: sandbox"),
        ({"searcher": {**SEARCHER, "sampler": "my:Own"}}, "searcher.sampler.name: can't be my:Own with isolation"),
        ({"notify": {"command": "id"}}, "notify.command: can't be given with isolation: sandbox"),
        ({"isolation": {"read": ["/data"]}}, "isolation.read: has no effect without name: sandbox"),
        ({"isolation": {"name": "sandbox", "read": ["data"]}}, "must be an absolute path"),
        ({"isolation": {"name": "sandbox", "read": ["/data/.."]}}, "can't be /, of which each sandbox has its own"),
        ({"isolation": "jail"}, "isolation.name: must be one of none, sandbox, got 'jail'"),
    ],
)
def test_what_a_sandbox_cant_have_is_reported(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**fields)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, []),
        ({"isolation": "none"}, ["isolation"]),
        ({"isolation": {"name": "sandbox", "read": ["/root"]}}, ["isolation.read"]),
        ({"searcher": {**SEARCHER, "source_checkpoint_uuid": "/root/.ssh"}}, ["searcher.source_checkpoint_uuid"]),
        ({"checkpoint_storage": {"type": "directory", "container_path": "/etc"}}, ["checkpoint_storage"]),
        ({"notify": {"url": "http://10.0.0.1/"}, "loggers": ["mlflow"]}, ["notify.url", "loggers.mlflow"]),
    ],
)
def test_what_a_config_reaches_beyond_its_sandboxes_is_found(fields: dict[str, Any], names: list[str]) -> None:
    assert [fault.path for fault in beyond_sandbox(config(**fields))] == names
