"""Requests to the search of an experiment on the server: its driver answers them, and an ended experiment goes on."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dray.code.trial_import import IMPORT_S, START_S, fault_of_import
from dray.config.entrypoint import ClassName
from dray.experiment import requests
from dray.experiment.request_files import RequestFiles
from dray.records.directory import ExperimentDirectory
from dray.records.journal import GrowingJournal
from dray.records.listing import StoredExperiment
from dray.records.reader import ExperimentReader
from dray.serve.answers import BadInput
from dray.serve.control import ACTIVE, Control, WrongState
from dray.serve.keys import Attempt
from searchers.errors import IllegalEvent
from searchers.events import Requested

TEMPLATE = "dray.serve.processes"  # what the template of the server's processes has imported
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


def import_in_fork(entrypoint: ClassName, directory: Path) -> str:
    """A `dray.code.trial_import.Importer` in a fork of the template, which has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([TEMPLATE])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_import_on_trial, args=(theirs, entrypoint, directory), daemon=True)
    process.start()
    theirs.close()
    try:
        if ours.poll(START_S + IMPORT_S):
            return str(ours.recv())
    except (EOFError, OSError):
        pass
    finally:
        process.kill()
        process.join()
        ours.close()
    return f"the process that imports {entrypoint.module} ended without an answer, or gave none"


def _import_on_trial(answer: Connection, entrypoint: ClassName, directory: Path) -> None:
    os.setsid()
    answer.send(fault_of_import(entrypoint, directory))
