"""Submitting an experiment to a server, following it, and reading its result."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dray.code.archive import pack
from dray.config.yaml_file import read_mapping, with_changes
from dray.errors import ConfigError, ExperimentError
from dray.serve.client import Server
from dray.serve.control import Submitted
from dray.serve.verbs.on_server import OnServer

if TYPE_CHECKING:
    from dray.config.schema import ExperimentConfig
    from dray.records.result import Result

_PLACES = ("checkpoint_storage", "prices", "searcher.source_trial_id", "searcher.source_checkpoint_uuid")
"""Fields whose paths may be relative to the working directory."""


def submit_file(server: Server, config: Path, changes: Sequence[str], code: Path) -> tuple[Submitted, ExperimentConfig]:
    """Submit the experiment of a config file, with `changes` to its fields as for `load_config`.

    The server checks the config as a local run would, in a process that has imported dray already. Meanwhile this
    process loads it too, for its warnings and for the display. It loads it first only if a field depends on this
    process's environment or working directory.
    """
    content = with_changes(read_mapping(config), changes)
    if not code.is_dir():
        what = f"no such directory: {code}; give the directory with the model's code"
        raise ConfigError([("model_dir", what)], str(config))
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(_load, config, changes)
        if os.environ.get("DRAY_STORAGE") or any(_has(content, field) for field in _PLACES):
            text, packed = prepared(loading.result(), code)
        else:
            if content.get("name") is None:
                content["name"] = config.stem
            text, packed = yaml.safe_dump(content, sort_keys=False), pack(code)
        try:
            return server.submit(text, packed), loading.result()
        except ConfigError as error:
            raise ConfigError(error.faults, str(config)) from None


def _load(config: Path, changes: Sequence[str]) -> ExperimentConfig:
    from dray.config.load import load_config

    return load_config(config, changes)


def _has(content: Mapping[Any, Any], field: str) -> bool:
    place: Any = content
    for name in field.split("."):
        if not isinstance(place, Mapping) or place.get(name) is None:
            return False
        place = place[name]
    return True


def prepared(config: ExperimentConfig, code: Path) -> tuple[str, bytes]:
    """The experiment as it is sent: its config as YAML, with its secrets, and its code, packed.

    Paths that are relative to the working directory, or come from this process's environment, are made absolute. The
    model is not imported here: imports take seconds, and the experiment's own process on the server does it.

    Raises:
        ConfigError: the entrypoint's module or script, or the source checkpoint, does not exist; or the code is too
            large.
    """
    from dray.code.load import check_entrypoint_file
    from dray.experiment.checkpoint_source import with_source, with_storage
    from dray.records.secrets import check_secrets, unmasked

    check_entrypoint_file(config.entrypoint, code)
    check_secrets(config)
    checked = with_source(with_storage(config, None))
    where = checked.checkpoint_storage.location
    if where is not None and where.is_local:
        checked = with_storage(checked, where.path.absolute())
    return yaml.safe_dump(unmasked(checked), sort_keys=False), pack(code)


def run_on_server(
    server: Server,
    config: ExperimentConfig,
    code: Path,
    *,
    say: Callable[[str], None],
    begun: Callable[[str], None] = lambda name: None,
) -> Result:
    """Submit an experiment, follow it to its end, and read its result: `dray.Experiment.run` with a server.

    The experiment continues if this call is interrupted. `say` is called with each line of its log, `begun` with its
    name after the submission.

    Raises:
        ConfigError: with every fault of the config.
        ExperimentError: it failed, or was stopped or paused; or its results are only on the server's machine.
        ConnectionError: the server does not answer.
    """
    name = server.submit(*prepared(config, code)).name
    begun(name)
    found = OnServer(server, name)
    for line in found.lines(say):
        say(line)
    if why := found.read().why_failed(found.typed):
        raise ExperimentError(why)
    if not server.is_here:
        raise ExperimentError(f"{name} has completed; its results are with the server, in {server.status().results}")
    from dray.records.result import Result

    return Result(name)


def reject_objects(**given: object) -> None:
    """Raise a `ConfigError` for arguments that exist only in this process, such as ``trial``, ``method`` or
    ``sampler``, unless they are None."""
    what = "can't be sent to a server: put it into a module of model_dir, and name it in the config"
    if faults := [(name, what) for name, value in given.items() if value is not None]:
        raise ConfigError(faults, "The experiment")
