"""Forking: a new experiment with the code of another one, and its config with some changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dray.code import archive
from dray.records.directory import ExperimentDirectory
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
