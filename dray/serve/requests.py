"""Requests to the search of an experiment on the server: its driver answers them, and an ended experiment goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from dray.experiment import requests
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.records.reader import ExperimentReader
from dray.serve.answers import BadInput
from dray.serve.control import ACTIVE, Control
from searchers.errors import IllegalEvent
from searchers.events import Requested

ANSWER_S = 10.0
"""How long to wait for the driver's answer; a driver that waits for slots gives none."""


def ask(control: Control, path: Path, make: Callable[[ExperimentReader], Requested]) -> dict[str, Any] | None:
    """Make a request to the search of an experiment.

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
        with closing(StoredExperiment.here(directory).read()) as reader:
            request = make(reader)
        requests.place(path, request)
        is_new = request.trial is None
        if is_new and state not in (*ACTIVE, "PAUSED"):  # what a person has paused waits
            control.reopen(path.name)

        def is_running() -> bool:
            now = control.experiment(path.name).state
            if is_new and now == "COMPLETED":  # the search was done before its driver saw the request
                now = control.reopen(path.name).state
            return now in ACTIVE

        answer = requests.wait(directory.journal, request, is_running=is_running, timeout_s=ANSWER_S)
    except IllegalEvent as error:
        raise BadInput(str(error)) from None
    return None if answer is None else requests.decided(answer)
