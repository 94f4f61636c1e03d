"""Finds out that an experiment's journal has lost records: it was emptied, cut, deleted, or replaced by an older copy.

A crash loses no record that anything has acted on, so an experiment that went on from such a journal would be another
search: trials would jump to checkpoints that it does not know, and others would get their numbers.

The journal's lock file has the number of its records, here and beside its copy in an object store. Without that number,
as in experiments of earlier versions, trials that have files or metrics but have not started give a loss away.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable

from dray.records.directory import ExperimentDirectory
from dray.storage import Location
from dray.text import counted, some
from searchers.journal import Journal

_TRIAL = re.compile(r"trial_(\d+)")
_SHOWN = 8


def lost_records(
    directory: ExperimentDirectory,
    records: int,
    started: Collection[object],
    known: Iterable[int],
    *,
    where: Location | None = None,
) -> str:
    """What the journal has lost, and what to do; "" if nothing.

    Args:
        directory: the experiment's directory.
        records: the number of records in its journal.
        started: the trials that have started, by the journal.
        known: the trials that other files know.
        where: the object store from which the directory was copied, if it was.
    """
    if (lost := Journal.num_lost(directory.journal, records)) is not None:
        what = f"has {counted(records, 'record', ',')}, but had {records + lost:,}"
        return _error(directory, what, where) if lost else ""
    there = {int(found[1]) for name in _names(directory) if (found := _TRIAL.fullmatch(name))}
    unknown = sorted(({*known} | there).difference(started))
    if not unknown or (len(unknown) == 1 and _is_torn(directory)):  # its start may be the incomplete line
        return ""
    trials = f"trial{'s' * (len(unknown) > 1)} {some(unknown, _SHOWN)}"
    return _error(directory, f"says nothing of {trials}, although the experiment has files or metrics of them", where)


def _error(directory: ExperimentDirectory, what: str, where: Location | None) -> str:
    journal, copy = str(directory.journal), ""
    if where is not None:
        journal = str(where.child(directory.journal.name))
    elif not directory.storage.is_local:
        copy = f"; or move {directory.path} away and resume its copy: dray experiment resume {directory.storage}"
    return (
        f"{journal} {what}: it was cut, deleted, or replaced by an older copy. The search can't continue without these "
        "records. Restore the file from a backup that has them, or, from an older one, the whole directory, with its "
        f"checkpoints and {directory.journal.name}.lock{copy}; or begin a new experiment from a checkpoint of this one "
        "(searcher.source_checkpoint_uuid: the checkpoint's directory)"
    )


def _names(directory: ExperimentDirectory) -> list[str]:
    return os.listdir(directory.path) if directory.path.is_dir() else []


def _is_torn(directory: ExperimentDirectory) -> bool:
    """Whether the journal's last line is incomplete."""
    try:
        return directory.journal.read_bytes()[-1:] not in (b"", b"\n")
    except FileNotFoundError:
        return False
