"""The files of requests to a search, as its driver reads them; see `dray.experiment.requests`."""

from __future__ import annotations

from dataclasses import replace

from dray.records.directory import ExperimentDirectory
from searchers import rows
from searchers.errors import DamagedFile, IllegalEvent
from searchers.events import Requested
from searchers.records import request_from_json

DIRECTORY = "requests"


class RequestFiles:
    """The requests to an experiment that wait for an answer."""

    def __init__(self, directory: ExperimentDirectory) -> None:
        self._directory, self._folder = directory, directory.path / DIRECTORY

    def waiting(self) -> list[Requested]:
        """The requests, the oldest first."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                with rows.readable(path, ValueError):
                    found.append(replace(request_from_json(rows.document(path)), id=path.stem))
            except FileNotFoundError:  # it was removed meanwhile
                continue
            except DamagedFile as error:
                rows.say(str(error))
        return found

    def check(self, request: Requested) -> None:
        """Raise an `IllegalEvent` if the checkpoint that the new trial begins from, or its code, does not exist."""
        if request.code is not None and not self._directory.has_variant(request.code):
            raise IllegalEvent(f"the experiment has no variant {request.code[:40]!r} of its code")
        if (source := request.source) is None or source.batches is None:
            return
        if not self._directory.store(source.trial).is_complete(source.batches):
            raise IllegalEvent(f"trial {source.trial} has no checkpoint at batch {source.batches} any more")

    def remove(self, request_id: str) -> None:
        """Remove a request that has an answer."""
        (self._folder / f"{request_id}.json").unlink(missing_ok=True)
