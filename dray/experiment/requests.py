"""Requests to a search, as files in its experiment's directory until its driver has recorded the answers.

A file `requests/ID.json` is one `searchers.Requested`, in the journal's JSON. The experiment's driver, or its next one,
carries out each once, in the order of the ids, which begin with the time.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dray.records.checkpoints import list_checkpoints
from dray.records.reader import ExperimentReader
from searchers.errors import IllegalEvent
from searchers.events import Requested, Source
from searchers.journal import Journal
from searchers.records import request_from_json, request_to_json

DIRECTORY = "requests"


def new_id() -> str:
    return f"{time.time_ns():020d}-{secrets.token_hex(4)}"


def place(directory: Path, request: Requested) -> None:
    """Leave a request for the experiment's driver."""
    folder = directory / DIRECTORY
    folder.mkdir(exist_ok=True)
    temporary = folder / f".{request.id}"
    temporary.write_text(json.dumps(request_to_json(request)))
    temporary.rename(folder / f"{request.id}.json")


def waiting(directory: Path) -> list[Requested]:
    """The requests without an answer, the oldest first."""
    found = []
    for path in sorted((directory / DIRECTORY).glob("*.json")):
        try:
            request = request_from_json(json.loads(path.read_text()))
        except (OSError, ValueError):  # removed meanwhile, or not a request
            continue
        found.append(replace(request, id=path.stem))
    return found


def remove(directory: Path, request: Requested) -> None:
    """Remove a request that has an answer."""
    (directory / DIRECTORY / f"{request.id}.json").unlink(missing_ok=True)


def answer(journal: Path, request: Requested) -> Mapping[str, Any] | None:
    """The journal's record of the answer: "requested" with the search's actions, or "rejected" with the error."""
    return next((record for record in Journal.read(journal) if record.get("id") == request.id), None)


def source_of(reader: ExperimentReader, trial: int, at: str = "best") -> Source:
    """The checkpoint from which a fork of a trial begins.

    Args:
        at: "best", "latest", or a number of batches.

    Raises:
        IllegalEvent: there is no such checkpoint with a validation.
    """
    if trial not in reader.trials:
        raise IllegalEvent(f"there is no trial {trial}; the trials are 0 to {len(reader.trials) - 1}")
    record = reader.trials[trial]
    complete = (each.batches for each in list_checkpoints(reader.directory, trial) if each.is_complete)
    saved = {str(batches): batches for batches in complete if batches in record.at}
    wanted = {"best": record.best_batches, "latest": max(saved.values(), default=None)}.get(at, at)
    if str(wanted) not in saved:
        named = f"at batch {at}" if at.isdigit() else at
        has = f"has validated checkpoints at batches {', '.join(saved)}" if saved else "has none yet"
        raise IllegalEvent(f"trial {trial} has no checkpoint {named} with a validation; it {has}")
    batches = saved[str(wanted)]
    match reader.config.searcher.unit:
        case "batches":
            step: float = batches
        case "epochs":
            epochs = record.epochs[record.at.index(batches)]
            assert epochs is not None
            step = round(epochs) if math.isclose(epochs, round(epochs)) else epochs
        case "records":
            step = batches * int(record.hparams.get("global_batch_size", 1))
        case unit:
            raise IllegalEvent(f"trials whose length is measured by a metric ({unit}) can't be forked")
    return Source(trial=trial, step=step, batches=batches)
