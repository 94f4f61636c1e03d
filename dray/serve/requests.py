"""Requests to the search of an experiment on the server: its driver answers them, and an ended experiment goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from dray.code.archive import BadArchive, unpack
from dray.code.ignore import leads_to_code
from dray.code.trial_import import fault_of_import
from dray.errors import Invalid
from dray.experiment import requests
from dray.experiment.request_files import RequestFiles
from dray.records.directory import ExperimentDirectory
from dray.records.journal import GrowingJournal
from dray.records.listing import StoredExperiment
from dray.records.reader import ExperimentReader
from dray.serve.control import ACTIVE, Control
from dray.serve.keys import Attempt
from dray.serve.outside import outside
from dray.serve.refusals import WrongState
from searchers.events import Requested

PACKED = ".tar.gz"


class ServedTrials(requests.Trials):
    """The trials of an experiment on the server, whose requests may be sent again."""

    answer_s = 10.0  # a driver that waits for slots gives none

    def __init__(self, control: Control, path: Path, attempt: Attempt) -> None:
        super().__init__(path)
        self._control, self._attempt = control, attempt
        control.experiment(path.name)  # raises if it was not submitted

    def ask(self, make: Callable[[ExperimentReader], Requested]) -> requests.Decided:
        """Make a request, unless an earlier attempt has made it."""
        if self._attempt.is_repeat:
            journal = GrowingJournal(ExperimentDirectory(self.path).journal)
            if (found := requests.answer(journal, Requested(id=self._attempt.id))) is not None:
                return requests.decision(found)
        return super().ask(lambda reader: replace(made := make(reader), id=self._attempt.id or made.id))

    def add_trial(
        self, hparams: Mapping[str, Any], *, patch: str | None = None, code: Path | None = None
    ) -> requests.Decided:
        if patch is None and code is None:
            return super().add_trial(hparams)
        return self.ask(lambda reader: outside(_add_with_code, self.path, hparams, patch, code))

    def is_active(self) -> bool:
        return self._control.experiment(self.path.name).state in ACTIVE

    def run_again(self, request: Requested) -> None:
        if self._control.experiment(self.path.name).state == "PAUSED":
            return  # what a person has paused waits
        try:
            self._control.act(self.path.name, "activate")
        except WrongState:  # the quota of its token has no room
            RequestFiles(ExperimentDirectory(self.path)).remove(request.id)
            raise


def _add_with_code(path: Path, hparams: Mapping[str, Any], patch: str | None, code: Path | None) -> Requested:
    """The request of a trial with code of its own, for `outside`. `code`: a directory beside its archive."""
    if code is not None:
        unpack_code(code)
    with closing(StoredExperiment.here(ExperimentDirectory.open(path)).read()) as reader:
        return requests.add(reader, hparams, patch=patch, code=code, importer=fault_of_import)


def unpack_code(code: Path) -> None:
    """Unpack code that was received into a new directory, from the archive beside it; for `outside`."""
    code.mkdir()
    try:
        with code.with_suffix(PACKED).open("rb") as file:
            links = unpack(file, code)
    except BadArchive as error:
        raise Invalid(str(error)) from None
    if followed := [link for link in links if leads_to_code(code / link, code)]:
        raise Invalid(f"the code has a link to a file of this machine: {followed[0]}; send the file itself")
