"""Forking: a new experiment with the code of another one, and its config with some changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dray.code import archive
from dray.config.yaml_file import with_changes
from dray.records.directory import ExperimentDirectory
from dray.records.secrets import unmasked, with_secrets
from dray.serve.answers import BadInput
from dray.serve.control import Control, Submitted
from dray.serve.draft import Draft
from dray.storage.disk import scratch


def fork(control: Control, draft: Draft, owner: str = "", request: str = "") -> Submitted:
    """Submit the code of the experiment that a draft forks, as a new experiment.

    Args:
        owner: the name of the token that forks it.
        request: see `Control.submit`.

    Raises:
        BadInput: the experiment has no copy of its code, because its class was sent from a notebook, say.
        ConfigError: with every fault of the new config.
    """
    assert draft.forked is not None
    with code_of(ExperimentDirectory.open(draft.forked)) as code:
        return control.submit(draft, code, owner, request)


@contextmanager
def code_of(directory: ExperimentDirectory) -> Iterator[Path]:
    """A copy of an experiment's code, within the block. An experiment without one is `BadInput`."""
    if not directory.has_code:
        raise BadInput(f"{directory.path.name} has no copy of its code, so nothing else can run it")
    with scratch("fork") as code:
        archive.copy(directory.code, code)
        yield code


def by_field(changes: Sequence[str]) -> dict[str, Any]:
    """Changes such as ``searcher.max_trials=8`` as a mapping from fields to values, for `fork`."""
    with_changes({}, changes)
    pairs = [change.partition("=")[::2] for change in changes]
    return {field.strip(): with_changes({}, [f"value={text}"])["value"] for field, text in pairs}


def changed(directory: ExperimentDirectory, changes: Sequence[str]) -> dict[Any, Any]:
    """An experiment's config, with its secrets and with changes such as ``searcher.max_trials=8``."""
    content = unmasked(with_secrets(directory.config(), directory.secrets_file))
    if directory.storage_file.exists():
        content["checkpoint_storage"] |= dict(directory.storage.secrets)
    return with_changes(content, changes)
