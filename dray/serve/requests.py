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
from dray.experiment import requests
from dray.experiment.request_files import RequestFiles
from dray.records.directory import ExperimentDirectory
from dray.records.journal import GrowingJournal
from dray.records.listing import StoredExperiment
from dray.records.reader import ExperimentReader
from dray.serve.answers import BadInput
from dray.serve.control import ACTIVE, Control
from dray.serve.keys import Attempt
from dray.serve.refusals import WrongState
from searchers.errors import IllegalEvent
from searchers.events import Requested

PACKED = ".tar.gz"
ONLY = Attempt()
ANSWER_S = 10.0
"""How long to wait for the driver's answer; a driver that waits for slots gives none."""


def ask(
    control: Control, path: Path, make: Callable[[ExperimentReader], Requested], attempt: Attempt = ONLY
) -> dict[str, Any] | None:
    """Make a request to the search of an experiment, unless an earlier attempt has made it.

    Returns:
        The new trial or the stopped one, as `requests.decided` describes it; None if no driver has answered yet, so
        that the next one carries the request out.

    Raises:
        NotSubmitted: the experiment was not submitted to the server.
        BadInput: the request can't be carried out.
    """
    state = control.experiment(path.name).state
    directory = ExperimentDirectory.open(path)
    try:
        earlier = Requested(id=attempt.id)
        if attempt.is_repeat and (found := requests.answer(GrowingJournal(directory.journal), earlier)) is not None:
            return requests.decided(requests.checked(found))
        with closing(StoredExperiment.here(directory).read()) as reader:
            request = make(reader)
        if attempt.id:
            request = replace(request, id=attempt.id)
        requests.place(path, request)
        is_new = request.trial is None
        if is_new and state not in (*ACTIVE, "PAUSED"):  # what a person has paused waits
            try:
                control.reopen(path.name)
            except WrongState:  # the quota of its token has no room
                RequestFiles(directory).remove(request.id)
                raise

        def is_running() -> bool:
            now = control.experiment(path.name).state
            if is_new and now == "COMPLETED":  # the search was done before its driver saw the request
                now = control.reopen(path.name).state
            return now in ACTIVE

        answer = requests.wait(directory.journal, request, is_running=is_running, timeout_s=ANSWER_S)
    except IllegalEvent as error:
        raise BadInput(str(error)) from None
    return None if answer is None else requests.decided(answer)


def add_with_code(path: Path, hparams: Mapping[str, Any], patch: str | None, code: Path | None) -> Requested:
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
        raise BadInput(str(error)) from None
    if followed := [link for link in links if leads_to_code(code / link, code)]:
        raise BadInput(f"the code has a link to a file of this machine: {followed[0]}; send the file itself")
