"""The settings of a server."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from dray.config.faults import faults_of
from dray.config.notify import ServerNotify
from dray.config.section import Section
from dray.config.yaml_file import read_mapping
from dray.errors import ConfigError, Fault


class _ServerSettings(Section):
    """The settings of a server in a YAML file."""

    notify: ServerNotify = Field(default_factory=ServerNotify, description="alerts")


def server_notify(path: Path) -> ServerNotify:
    """The section ``notify`` of a server's settings; a `ConfigError` names all faults."""
    given = read_mapping(path)
    if unknown := [f"{name!s:.60}" for name in given if name != "notify"]:
        raise ConfigError([Fault(unknown[0], "unknown field; a server's settings have only notify")], str(path))
    try:
        found = _ServerSettings.model_validate(given).notify
    except ValidationError as error:
        raise ConfigError(faults_of(error), str(path)) from None
    if not found.has_receiver:
        raise ConfigError([Fault("notify", "has no receiver; give a url, a command, or both")], str(path))
    return found
