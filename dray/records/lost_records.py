"""Finds out that an experiment's journal has lost records: it was emptied, cut, deleted, or replaced by an older copy.

A crash loses no record that anything has acted on, so an experiment that went on from such a journal would be another
search: trials would jump to checkpoints that it does not know, and others would get their numbers.

The journal's lock file has the number of its records, here and beside its copy in an object store.
"""

from __future__ import annotations

from dray.records.directory import ExperimentDirectory
from dray.storage import Location
from dray.text import counted
from searchers.journal import Journal


def lost_records(directory: ExperimentDirectory, records: int, *, where: Location | None = None) -> str:
    """What the journal has lost, and what to do; "" if nothing.

    Args:
        directory: the experiment's directory.
        records: the number of records in its journal.
        where: the object store from which the directory was copied, if it was.
    """
    lost = Journal.num_lost(directory.journal, records)
    if not lost:
        return ""
    journal, copy = str(directory.journal), ""
    if where is not None:
        journal = str(where.child(directory.journal.name))
    elif not directory.storage.is_local:
        copy = f"; or move {directory.path} away and resume its copy: dray experiment resume {directory.storage}"
    return (
        f"{journal} has {counted(records, 'record', ',')}, but had {records + lost:,}: it was cut, deleted, or "
        "replaced by an older copy. The search can't continue without these records. Restore the file from a backup "
        "that has them, or, from an older one, the whole directory, with its checkpoints and "
        f"{directory.journal.name}.lock{copy}; or begin a new experiment from a checkpoint of this one "
        "(searcher.source_checkpoint_uuid: the checkpoint's directory)"
    )
