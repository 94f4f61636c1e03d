"""What requests name, and ask to change or delete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dray.errors import NoExperiment
from dray.records import copies
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.serve.answers import BadInput
from dray.serve.control import ACTIVE, Control, NotSubmitted, WrongState

MAX_TAGS, MAX_TAG, MAX_NOTES = 50, 100, 100_000
"""Most tags, and most characters of a tag and of the notes."""


def experiment_path(results: Path, name: str) -> Path:
    """The directory of an experiment, by a decoded name from a URL. If there is none of this name, in particular one
    with a slash, or a hidden one: `NoExperiment`."""
    path = results / name
    if name and not name.startswith(".") and "/" not in name and "\0" not in name:
        # Links are those that `link_into_results` makes, to a directory of the same name.
        is_ours = not path.is_symlink() or Path(os.readlink(path)).name == name
        if is_ours and (path / "experiment.yaml").is_file():
            return path.resolve()
    raise NoExperiment(f"no experiment {name[:100]!r} in the results directory")


def delete(control: Control, path: Path) -> None:
    """Delete an experiment and its checkpoints, here and in its object store. If it runs, or waits to: `WrongState`;
    if a driver that the server knows nothing of runs it: `JournalError`."""
    with contextlib.suppress(NotSubmitted):
        state = control.experiment(path.name).state
        if state in ACTIVE:
            raise WrongState(f"{path.name} is {state}; stop it first")
    copies.delete(StoredExperiment.here(ExperimentDirectory.open(path)))


def change_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The change that a request's body asks for, of `dray.serve.control.Share` and of tags and notes; else
    `BadInput`."""
    known = ("priority", "weight", "max_slots", "tags", "notes")
    if unknown := [name for name in body if name not in known]:
        raise BadInput(f"{unknown[0][:40]} can't be changed; only {', '.join(known)} can")
    change: dict[str, Any] = {}
    if "priority" in body:
        change["priority"] = whole(body, "priority", most=99)
    if "weight" in body:
        change["weight"] = _weight(body["weight"])
    if "max_slots" in body:
        change["max_slots"] = None if body["max_slots"] is None else whole(body, "max_slots")
    if (tags := body.get("tags")) is not None:
        good = isinstance(tags, list) and all(isinstance(tag, str) and 0 < len(tag) <= MAX_TAG for tag in tags)
        if not good or len(tags) > MAX_TAGS:
            raise BadInput(f"tags must be a list of at most {MAX_TAGS} texts, each of 1 to {MAX_TAG} characters")
        change["tags"] = tuple(dict.fromkeys(tags))
    if (notes := body.get("notes")) is not None:
        if not isinstance(notes, str) or len(notes) > MAX_NOTES:
            raise BadInput(f"notes must be text of at most {MAX_NOTES:,} characters")
        change["notes"] = notes
    return change


def whole(body: Mapping[str, Any], name: str, *, most: int = 1_000_000_000) -> int | None:
    """A field that is an integer from 1, else `BadInput`; None if it is not given."""
    if name not in body:
        return None
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        limits = f"from 1 to {most}" if most < 1000 else "from 1"
        raise BadInput(f"{name} must be an integer {limits}, got {value!r:.40}")
    return value


def _weight(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1_000_000:
        raise BadInput(f"weight must be a number > 0, at most 1000000, got {value!r:.40}")
    return float(value)
