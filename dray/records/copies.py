"""Downloading and deleting experiments."""

from __future__ import annotations

import shutil
from contextlib import nullcontext, suppress
from pathlib import Path

from dray.records.checkpoints import damage, list_checkpoints, new_directory
from dray.records.directory import ExperimentDirectory, unlink_from_results
from dray.records.listing import StoredExperiment
from dray.storage import RemoteDirectory, StorageError
from searchers.journal import Journal

TRIES = 5
NOT_COPIED = ("journal.jsonl.lock", "storage.json", "secrets.yaml")


def download(found: StoredExperiment, target: Path) -> list[str]:
    """Copy an experiment, from this machine and from its object store, into a new directory.

    Returns:
        An error for each damaged checkpoint; they are copied too.
    """
    directory = found.directory
    damages = []
    with new_directory(target) as partial:
        _copy(directory.path, partial)
        if not directory.storage.is_local:
            _fetch(RemoteDirectory(directory.storage), partial)
        there = {(each.trial, each.batches) for each in list_checkpoints(directory)}
        for each in list_checkpoints(ExperimentDirectory(partial)):
            if (each.trial, each.batches) not in there:  # deleted during the copy, which may be incomplete
                shutil.rmtree(each.location.path)
            elif (why := damage(each.location)) is not None:
                damages.append(why.replace(str(partial), str(target)))
    return damages


def _copy(source: Path, target: Path) -> None:
    """Copy a tree, ignoring files that are deleted meanwhile."""
    try:
        shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    except shutil.Error as error:  # lists the files that could not be copied; all others are there
        left = [why for path, _, why in error.args[0] if Path(path).exists()]
        if left:
            raise OSError(f"can't copy {source}: {left[0]}") from None


def _fetch(remote: RemoteDirectory, target: Path) -> None:
    for _ in range(TRIES):
        with suppress(FileNotFoundError):  # deleted since it was listed
            remote.download(target, [name for name in remote.sizes() if not (target / name).exists()])
            return
    raise StorageError(f"{remote.location} changes faster than it can be copied; try again when it has ended")


def delete(found: StoredExperiment) -> None:
    """Delete an experiment, here and in its object store.

    Its config goes first, so that an interrupted deletion leaves no experiment that could be resumed.
    """
    directory = found.directory
    # The lock keeps others from resuming it while it is being deleted.
    with Journal(directory.journal) if not found.is_copy else nullcontext():
        if not directory.storage.is_local:
            RemoteDirectory(directory.storage).delete(first=directory.config_file.name)
        if not found.is_copy:
            directory.config_file.unlink(missing_ok=True)
            shutil.rmtree(directory.path)
            unlink_from_results(directory.path)
