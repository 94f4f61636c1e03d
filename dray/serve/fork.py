"""A new experiment with another one's code, and its config with some changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dray.code import archive
from dray.config.yaml_file import with_changes
from dray.records.directory import ExperimentDirectory
from dray.records.secrets import unmasked, with_secrets
from dray.serve.answers import BadInput
from dray.serve.control import Control, Submitted
from dray.storage.scratch import scratch


def fork(control: Control, path: Path, config: Mapping[str, Any] | str) -> Submitted:
    """Submit it.

    Args:
        control: the server.
        path: the other experiment's directory.
        config: fields to change, such as ``{"searcher.max_trials": 8}``, or the text of a whole YAML file.

    Raises:
        BadInput: the experiment has no copy of its code, because its class was sent from a notebook, say.
        ConfigError: with every fault of the new config.
    """
    directory = ExperimentDirectory.open(path)
    if not directory.has_code:
        raise BadInput(f"{path.name} has no copy of its code, so nothing else can run it")
    text = config if isinstance(config, str) else yaml.safe_dump(_changed(directory, config), sort_keys=False)
    with scratch("fork") as code:
        archive.copy(directory.code, code)
        return control.submit(text, code)


def _changed(directory: ExperimentDirectory, changes: Mapping[str, Any]) -> dict[Any, Any]:
    content = unmasked(with_secrets(directory.config(), directory.secrets_file))
    if directory.storage_file.exists():
        content["checkpoint_storage"] |= dict(directory.storage.secrets)
    # JSON is YAML; characters as they are, because YAML knows no surrogates.
    texts = {field: json.dumps(value, ensure_ascii=False) for field, value in changes.items()}
    return with_changes(content, [f"{field}={text}" for field, text in texts.items()])
