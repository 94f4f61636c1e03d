"""Checks of an experiment with ``isolation: sandbox`` before anything starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.cluster import bubblewrap
from dray.cluster.bubblewrap import why_impossible
from dray.cluster.node_check import REMEDIES
from dray.code.load import check_entrypoint, check_entrypoint_file
from dray.code.startup_hook import HOOK
from dray.code.trial_import import import_in_new_process
from dray.config.entrypoint import ClassName
from dray.errors import ConfigError
from dray.storage import Location

if TYPE_CHECKING:
    from dray.config.schema import ExperimentConfig

FIELD = "isolation"


def check_code(config: ExperimentConfig, code: str | os.PathLike[str], *, imports: bool = True) -> None:
    """Check the entrypoint in the experiment's code, and import it unless only sandboxes may. Arguments and errors are
    those of `check_entrypoint`."""
    if config.isolation.is_sandbox:
        check_entrypoint_file(config.entrypoint, code)
    else:
        check_entrypoint(config.entrypoint, code, imports=imports)


def check_sandbox(config: ExperimentConfig, code: Path | None, *, here: bool = True) -> None:
    """Check that the trials can run in sandboxes, if they must. `here`: whether on this machine, or one like it.

    Raises:
        ConfigError: they can't.
    """
    if not config.isolation.is_sandbox:
        return
    storage, source = config.checkpoint_storage.location, config.searcher.source_checkpoint_uuid
    for field, where in (
        ("checkpoint_storage", storage),
        ("searcher.source_checkpoint_uuid", None if source is None else Location.of(source)),
    ):
        if where is not None and not where.is_local:
            what = f"must be a directory with isolation: sandbox, whose trials have no network, got {where}"
            raise ConfigError([(field, f"{what}; give a directory, or set isolation: none")])
    if code is not None and (code / HOOK).is_file():
        what = "can't be used with isolation: sandbox, because it would run outside of the sandbox; remove it"
        raise ConfigError([(HOOK, what)], "The model's directory")
    if here and (why := why_impossible()):
        raise ConfigError([(FIELD, f"this machine {why}; {REMEDIES['sandbox']}")])


def import_in_sandbox(entrypoint: ClassName, directory: Path) -> str:
    """A `dray.code.trial_import.Importer` for code that may run only in sandboxes."""
    if why := why_impossible():
        return f"this machine {why}, where it would be imported on trial"

    def start(command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
        inside = bubblewrap.command(command, read=[directory])
        return subprocess.Popen(inside, env=bubblewrap.variables(env), **options)

    return import_in_new_process(entrypoint, directory, start)


def reject_sandbox(config: ExperimentConfig, what: str) -> None:
    """Raise a `ConfigError` if the config asks for a sandbox, which `what` does not have."""
    if config.isolation.is_sandbox:
        raise ConfigError([(FIELD, f"{what} has no sandbox, got isolation: sandbox; set isolation: none")])
