"""Requests to a search, as files in its experiment's directory until its driver has recorded the answers.

A file `requests/ID.json` is one `searchers.Requested`, in the journal's JSON. The experiment's driver, or its next one,
carries out each once, in the order of the ids, which begin with the time.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import NotRequired, TypedDict

from dray.code.trial_import import Importer, import_in_new_process
from dray.errors import Invalid
from dray.experiment import variants
from dray.experiment.request_files import DIRECTORY
from dray.private import replaced
from dray.records.checkpoints import LAST, NoCheckpoint, choose
from dray.records.directory import ExperimentDirectory
from dray.records.journal import GrowingJournal
from dray.records.trial_record import flatten
from dray.storage.disk import sync
from dray.text import shown
from dray.training.units import amount
from searchers.errors import SpaceError
from searchers.events import Requested, Source
from searchers.journal import Journal
from searchers.records import hparams_from_json, request_to_json

if TYPE_CHECKING:
    from dray.records.reader import ExperimentReader
    from dray.records.trial_record import TrialRecord

ANSWER_S = 30.0
"""How long to wait for a running driver's answer."""
POLL_S = 0.1


def new_id() -> str:
    return f"{time.time_ns():020d}-{secrets.token_hex(4)}"


def place(directory: Path, request: Requested) -> None:
    """Leave a request for the experiment's driver."""
    folder = directory / DIRECTORY
    folder.mkdir(exist_ok=True)
    with replaced(folder / f"{request.id}.json") as unnamed:
        unnamed.write_text(json.dumps(request_to_json(request)))
    sync(folder)  # its name too


def answer(journal: GrowingJournal, request: Requested) -> Mapping[str, Any] | None:
    """The answer among the new records of the journal: "requested" with the search's actions, or "rejected" with the
    error."""
    return next((record for record in journal.new_records()[0] if record.get("id") == request.id), None)


def wait(
    journal: Path, request: Requested, *, is_running: Callable[[], bool], timeout_s: float
) -> Mapping[str, Any] | None:
    """Wait for the answer to a request.

    Args:
        is_running: returns whether a driver may answer.

    Returns:
        The journal's record; None if no driver has answered, so that a later one will.
    """
    until = time.monotonic() + timeout_s
    growing = GrowingJournal(journal)  # each record is read once
    while True:
        may_answer = is_running() and time.monotonic() < until  # before the journal: a driver that ends may answer last
        if (found := answer(growing, request)) is not None:
            return found
        if not may_answer:
            return None
        time.sleep(POLL_S)


class Origin(TypedDict):
    trial: int
    step: float  # length trained, in the searcher's unit
    batches: int


class Decided(TypedDict):
    """What a request has led to."""

    # the new trial, or the stopped one; null if no driver has answered yet, and the next one will carry the request out
    trial: int | None
    source: NotRequired[Origin]  # the checkpoint that the new trial begins from, if any
    hparams: NotRequired[Mapping[str, Any]]  # those that were given to the new trial
    code: NotRequired[str]  # the variant of the code that the new trial runs, if any


class Trials:
    """Forks, adds and stops trials of an experiment in a directory: asks its driver, or the next one.

    All raise `Invalid` if the request makes no sense or the search rejects it.

    Args:
        answered: called with each decision, also if the experiment then fails in this process.
    """

    answer_s = ANSWER_S

    def __init__(self, path: Path, answered: Callable[[Decided], None] = lambda decided: None) -> None:
        self.path, self._answered = path, answered

    def fork_trial(self, trial: int | str, *, at: str | int = "best", hparams: Mapping[str, Any]) -> Decided:
        """Start a trial from a checkpoint of another one: "best", "latest", or a number of batches."""
        return self.ask(lambda reader: fork(reader, trial, str(at), hparams))

    def add_trial(self, hparams: Mapping[str, Any], *, patch: str | None = None, code: Path | None = None) -> Decided:
        """Add a trial, with the code of the experiment, with a unified diff of it, or with that in a directory."""
        return self.ask(lambda reader: add(reader, hparams, patch=patch, code=code))

    def stop_trial(self, trial: int | str) -> Decided:
        """Stop a trial; the search continues with the others."""
        return self.ask(lambda reader: stop(reader, trial))

    def ask(self, make: Callable[[ExperimentReader], Requested]) -> Decided:
        """Leave a request for the experiment's driver, and wait for the answer. An experiment that has ended runs again
        for a new trial."""
        from dray.records.listing import StoredExperiment  # pyarrow

        directory = ExperimentDirectory.open(self.path)
        with closing(StoredExperiment.here(directory).read()) as reader:
            request = make(reader)
        place(self.path, request)

        waiting = partial(wait, directory.journal, request, is_running=self.is_active, timeout_s=self.answer_s)
        found = waiting()
        if found is None and request.trial is None and not self.is_active():
            try:
                self.run_again(request)
            except BaseException:
                self._answered(decision(waiting()))
                raise
            found = waiting()
        decided = decision(found)
        self._answered(decided)
        return decided

    def is_active(self) -> bool:
        """Whether a driver may answer."""
        return Journal.writer(ExperimentDirectory(self.path).journal) is not None

    def run_again(self, request: Requested) -> None:
        """Run an experiment that has ended, for a request. Here nothing: the next run carries it out."""


def decision(found: Mapping[str, Any] | None) -> Decided:
    """What an answer says. Raises `Invalid` if the search has rejected the request."""
    if found is None:
        return {"trial": None}
    if "error" in found:
        raise Invalid(found["error"])
    action = next(action for action in found["actions"] if action["action"] in ("create", "stop"))
    return cast("Decided", {name: value for name, value in action.items() if name != "action"})


def told(new: Mapping[str, Any]) -> str:
    """What was decided, such as "trial 64, from trial 7 at batch 352, lr = 0.005"."""
    if "hparams" not in new:
        return f"trial {new['trial']} is stopped"
    source = new.get("source")
    begins = "" if source is None else f", from trial {source['trial']} at batch {source['batches']}"
    given = cast("dict[str, Any]", hparams_from_json(new["hparams"]))
    values = "".join(f", {name} = {shown(value)}" for name, value in flatten(given).items())
    code = f", code {new['code']}" if "code" in new else ""
    return f"trial {new['trial']}{begins}{code}{values}"


def fork(reader: ExperimentReader, trial: int | str, at: str, hparams: Mapping[str, Any]) -> Requested:
    """The request of a fork. Raises `Invalid` if there is no such checkpoint or hyperparameter."""
    return _new(reader, hparams, source_of(reader, trial, at))


def add(
    reader: ExperimentReader,
    hparams: Mapping[str, Any],
    *,
    patch: str | None = None,
    code: Path | None = None,
    importer: Importer = import_in_new_process,
) -> Requested:
    """The request of a trial from the start.

    Args:
        patch: a unified diff; the trial runs the experiment's code with it applied.
        code: a directory; the trial runs the code in it.

    Raises:
        Invalid: there is no such hyperparameter, or the code can't be used.
    """
    request = _new(reader, hparams)
    if patch is not None and code is not None:
        raise Invalid("give a patch or a directory of code, not both")
    if patch is not None:
        return replace(request, code=variants.from_patch(reader.directory, patch, importer))
    if code is not None:
        return replace(request, code=variants.from_directory(reader.directory, code, importer))
    return request


def stop(reader: ExperimentReader, trial: int | str) -> Requested:
    """The request that a trial stops. Raises `Invalid` if there is no such trial, or it has ended."""
    record = _trial(reader, trial)
    if record.has_ended:
        raise Invalid(f"trial {record.id} has ended: it is {record.state}")
    return Requested(id=new_id(), trial=record.id)


def _new(reader: ExperimentReader, hparams: Mapping[str, Any], source: Source | None = None) -> Requested:
    # The search checks them too, but its driver may not be running.
    try:
        given = reader.config.space.given(hparams)
    except SpaceError as error:
        raise Invalid(str(error)) from None
    size = given.get("global_batch_size", 1)
    if not isinstance(size, int) or size < 1:
        raise Invalid(f"hyperparameters.global_batch_size: must be an integer >= 1, got {size}")
    _reject_lost_records(reader)
    return Requested(id=new_id(), source=source, hparams=given)


def _reject_lost_records(reader: ExperimentReader) -> None:
    if lost := reader.lost_records():
        raise Invalid(lost)


def _trial(reader: ExperimentReader, trial: int | str) -> TrialRecord:
    _reject_lost_records(reader)
    return reader.trial(trial)


def source_of(reader: ExperimentReader, trial: int | str, at: str = "best") -> Source:
    """The checkpoint from which a fork of a trial begins.

    Args:
        at: "best", that of its best validation; "last" of those that are kept, or "latest"; or a number of batches.

    Raises:
        Invalid: there is no such checkpoint with a validation.
    """
    record = _trial(reader, trial)
    trial = record.id
    store = reader.directory.store(trial)
    validated = sorted(batches for batches, _ in store.listed() if batches in record.at and store.is_complete(batches))
    if not validated:
        raise Invalid(f"trial {trial} has no checkpoint with a validation yet")
    if at.isdigit() and int(at) not in validated:
        has = f"it has validated checkpoints at batches {', '.join(map(str, validated))}"
        raise Invalid(f"trial {trial} has no checkpoint at batch {at} with a validation; {has}")
    try:
        batches = store.batches_of(choose(reader.directory, record, validated[-1] if at in LAST else at))
    except NoCheckpoint as error:
        raise Invalid(str(error)) from None
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
            raise Invalid(f"trials whose length is measured by a metric ({unit}) can't be forked")
    if reader.rungs and step >= reader.rungs[-1]:
        # The search checks this too, but an experiment that has ended would run for it.
        length = amount(f"{reader.rungs[-1]:.10g}", reader.config.searcher.unit)
        raise Invalid(
            f"nothing is left to train after batch {batches} of trial {trial}: the searcher's max_length is {length}; "
            "extend the search, or begin from an earlier checkpoint"
        )
    return Source(trial=trial, step=step, batches=batches)
