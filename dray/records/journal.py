"""The records of an experiment's journal: those of its search, and those of its driver."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from dray.records.directory import ExperimentDirectory
from dray.storage import Location
from dray.text import counted
from searchers import rows
from searchers.journal import Journal
from searchers.records import hparams_from_json, number_from_json
from searchers.rows import NUMBER, OPTIONAL_NUMBER, Fields, by_kind, has_fields

_TRIAL: Fields = {"trial": (int,)}
_TEXT = (str, NoneType)
_FAILURE: Fields = {**_TRIAL, **dict.fromkeys(("why", "where", "error", "kept"), _TEXT), "batches": OPTIONAL_NUMBER}
_fields_of = by_kind(
    "event",
    {
        "opened": {"version": (str, NoneType), "versions": (dict, NoneType)},
        "start": {"points": (int, NoneType), "rungs": (list, NoneType)},
        "started": {**_TRIAL, "hparams": (dict, NoneType)},
        "reported": {**_TRIAL, "step": NUMBER, "value": (*NUMBER, str, NoneType), "metrics": (list, NoneType)},
        "exited": {**_TRIAL, "reason": (str,)},
        "extended": {"max_trials": (int, NoneType), "max_length": OPTIONAL_NUMBER, "rungs": (list, NoneType)},
        "requested": {"trial": (int, NoneType), "source": (dict, NoneType)},
        "restarted": _FAILURE,
        "gave_up": _FAILURE,
        "damaged": _TRIAL,
        "ended": {"reason": (str,)},
        "alert": {"id": (int,), "kind": (str,), "text": (str,)},
        "told": {"id": (int,)},
        "limits": {"budget": (dict, NoneType), "until": (dict, NoneType), "patience": (int, NoneType)}
        | {"prices": (dict, NoneType)},
        "rejected": {"id": (str,), "error": (str,)},
        "unread": {"unread": (list,), "read": (list,)},
        "withheld": {**_TRIAL, "where": (str, NoneType), "error": (str,), "batches": (int,), "furthest": (int,)},
        "new_processes": {**_TRIAL, "text": (str,), "code": (str, NoneType)},
    },
    {"time": OPTIONAL_NUMBER},
)
_ACTIONS: Mapping[str, Fields] = {
    "create": {**_TRIAL, "source": (dict, NoneType), "repeat": (dict, NoneType), "code": (str, NoneType)},
    "stop": _TRIAL,
    "pause": _TRIAL,
    "resume": _TRIAL,
    "done": {"reason": (str,)},
}
_action = by_kind("action", _ACTIONS)
_source = has_fields({**_TRIAL, "step": NUMBER, "batches": (int, NoneType)})
_repeat = has_fields({**_TRIAL, "seed": (int,)})
_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_LATEST = 1e11  # Unix time in s, after the year 5000


def check(record: Any) -> str:
    """What is wrong with a record; "" if it may have been written."""
    if what := _fields_of(record):
        return what
    if not 0 <= (record.get("time") or 0) < _LATEST:
        return f"time is {record['time']!r}"
    if record["event"] == "unread" and not all(type(name) is str for name in (*record["unread"], *record["read"])):
        return "a name of a hyperparameter is not text"
    if record["event"] in ("started", "reported", "requested"):
        try:
            _to_json(record.get("hparams")).encode()
            hparams_from_json(record.get("hparams"))
        except (ValueError, RecursionError) as error:
            return f"its hyperparameters: {error}"
    if record["event"] == "reported":
        try:
            for value in (record.get("value"), *(record.get("metrics") or ())):
                number_from_json(value)
        except ValueError as error:
            return f"its value {error}"
    if type(actions := record.get("actions", [])) is not list:
        return f"actions is {actions!r:.60}"
    for action in actions:
        what = _action(action) or ("" if action["action"] in _ACTIONS else f"action is {action['action']!r:.60}")
        if not what and action.get("source"):
            what = _source(action["source"])
        if not what and action.get("repeat"):
            what = _repeat(action["repeat"])
        if what:
            return f"in actions, {what}"
    if record["event"] == "requested" and record.get("trial") is None:
        if not any(action["action"] == "create" for action in actions):
            return "its actions have no new trial"
        return _source(record["source"]) if record.get("source") else ""
    return ""


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All complete records. Raises as `Journal.read`."""
    return Journal.read(path, check)


class GrowingJournal:
    """The records of a journal, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0  # offset of the first unread byte
        self._lines = 0  # before it

    def new_records(self) -> tuple[list[dict[str, Any]], bool]:
        """The records since the last call, and whether the file was read anew because it has become shorter."""
        try:
            with rows.readable(self._path):
                is_another = self._path.stat().st_size < self._end
            self._end, self._lines = (0, 0) if is_another else (self._end, self._lines)
            data = rows.read(self._path, self._end)
        except FileNotFoundError:
            return [], False
        data = data[: rows.complete_size(data)]  # a line that reached the disk only in part is removed by resuming
        records = rows.strict(data, self._path, check, first=self._lines + 1)
        self._end += len(data)
        self._lines += len(records)
        return records, is_another


def lost_records(directory: ExperimentDirectory, records: int, *, where: Location | None = None) -> str:
    """What the journal has lost, and what to do; "" if nothing.

    It was emptied, cut, deleted, or replaced by an older copy: a crash loses no record that anything has acted on. An
    experiment that went on from it would be another search: trials would jump to checkpoints that it does not know,
    and others would get their numbers. The journal's lock file has the number of its records, here and beside its copy
    in an object store.

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
