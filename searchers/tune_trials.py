"""The trials of a search that Ray Tune runs: the mapping between Tune's trials and the search's, and pending decisions.

The searcher and the scheduler in `tune`, which Tune calls, pass everything to one `TuneTrials`. It depends on Tune only
through the protocol `TuneTrial`.

    suggest() ────────▶ Started     the hyperparameters are drawn, since Tune needs them before it has resources
    report() ─────────▶ Reported    and Exited("completed") at the method's whole length
       the decision ◀── Stop, Pause, neither
    next_to_resume() ◀─ Resume      and Stop of a trial that did not just report
    end() ────────────▶ Exited("completed"), ("errored"), ("canceled")

The state follows from the search's journal and a record of each `suggest`. `Tuner.restore` restores the search and
Tune's trials from Tune's last save, but the two may differ: Tune copies its files to the storage one after another, and
may die in between. A trial that only the search knows is therefore suggested again, with its hyperparameters; one that
only Tune knows is ended; the status of the others is set from the search. Results after the last save are reported
again, which all methods tolerate.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from searchers.answers import Answer, carry_out, decide
from searchers.errors import FieldError, IllegalEvent
from searchers.events import Decision, Reason, Requested, Started, TrialResult
from searchers.search import Record, Search

logger = logging.getLogger(__name__)

PENDING, PAUSED, TERMINATED, ERROR = "PENDING", "PAUSED", "TERMINATED", "ERROR"
"""Values of `ray.tune.experiment.Trial.status`."""


class TuneTrial(Protocol):
    """The part of `ray.tune.experiment.Trial` that is used here."""

    @property
    def trial_id(self) -> str: ...

    @property
    def status(self) -> str: ...

    @property
    def checkpoint(self) -> object | None: ...

    @property
    def last_result(self) -> Mapping[str, Any]: ...

    def set_status(self, status: str) -> None: ...


class TuneTrials:
    """The trials of a search that Tune runs.

    Args:
        search: A new or a replayed search.
        records: The journal to which the search appends; the ids of its trials in Tune are recorded here too.
        metric, time_attr: The entries of Tune's results with a trial's value and its length.
        max_concurrent: Maximum number of trials that Tune may have pending or running; None: no limit but the method's.
    """

    def __init__(
        self, search: Search, records: list[Record], *, metric: str, time_attr: str, max_concurrent: int | None
    ) -> None:
        self.search, self.records = search, records
        self._metric, self._time_attr, self._max_concurrent = metric, time_attr, max_concurrent
        self._is_restored = search.started  # until Tune has added its trials again
        if not search.started:
            search.start()
        self._numbers = {str(each["id"]): int(str(each["trial"])) for each in records if each["event"] == "suggested"}
        self._live: dict[int, TuneTrial] = {}  # trials that Tune has not ended, by number
        pending = [view for view in search.trials.values() if view.state == "PENDING"]
        self._creates = deque(view.id for view in pending if view.hparams is None)
        self._resumes = [view.id for view in pending if view.hparams is not None]  # to resume once Tune has paused them
        self._stops: list[int] = []

    def suggest(self, tune_id: str) -> dict[str, object] | None:
        """Assign the next trial to this id of Tune's, and return its hyperparameters; None if there is none now.

        Raises:
            SpaceError: The sampler found no point.
        """
        self._find_lost()
        if not self._creates or self._is_full():
            return None
        number = self._creates.popleft()
        self.search.on(Started(trial=number))
        # This follows "started": if a copy of the records ends between the two, the trial is suggested again.
        self.records.append({"event": "suggested", "trial": number, "id": tune_id})
        self._numbers[tune_id] = number
        return self.search.params(number)

    def add(self, trial: TuneTrial) -> None:
        """Add a trial that is new to Tune, restarts after a failure, or comes back after `Tuner.restore`.

        Raises:
            FieldError: The trial does not belong to this search.
        """
        number = self._numbers.get(trial.trial_id)
        if number is None:
            self._add_unknown(trial)
            return
        view, is_again = self.search.trials[number], number in self._live
        if view.ended:
            if not _has_ended(trial):
                trial.set_status(ERROR if view.state == "ERRORED" else TERMINATED)
            return
        self._live[number] = trial
        is_waiting = view.state == "PAUSED" or number in self._resumes
        # Tune may have died while it paused the trial. Without a checkpoint, the trial trains to its pause again.
        if is_waiting and not is_again and not _has_ended(trial) and _has_checkpoint(trial):
            trial.set_status(PAUSED)

    def _add_unknown(self, trial: TuneTrial) -> None:
        if not self._is_restored:
            message = f"trial {trial.trial_id} was not suggested by this scheduler's searcher; use it without a wrapper"
            raise FieldError([("tune.TuneConfig.search_alg", message)])
        logger.warning("trial %s does not continue: it has failed in the search, or is not known there", trial.trial_id)
        if not _has_ended(trial):
            trial.set_status(TERMINATED)

    def report(self, tune_id: str, result: Mapping[str, Any]) -> Decision:
        """Decide on a live trial's result.

        Raises:
            FieldError: The result has the metric, but lacks the length or another metric.
        """
        number = self._numbers[tune_id]
        step, rungs = self._step(number, result), self.search.method.rungs
        is_complete = step is not None and rungs and step >= rungs[-1]
        return self._take(number, result, step, "completed" if is_complete else None).decision

    def request(self, request: Requested) -> int:
        """Create or stop a trial on request. Returns its number in the search.

        Raises:
            IllegalEvent: See `Search.request`; or the new trial is to begin from another trial's checkpoint.
        """
        if request.source is not None:
            raise IllegalEvent(
                "a trial of Tune can't begin from another trial's checkpoint; leave out source, and give the other "
                "trial's hyperparameters"
            )
        answer = carry_out(self.search, request)
        self._queue(answer)
        if request.trial is None:
            return answer.creates[0]
        self._queue_stop(request.trial)
        return request.trial

    def end(self, tune_id: str, result: Mapping[str, Any], reason: Reason) -> None:
        """End a trial with this result, which may be new, its last one, or empty."""
        number = self._numbers.get(tune_id)
        if number is None or self._live.pop(number, None) is None:
            return
        step, last_step = self._step(number, result), self.search.trials[number].last_step
        is_new = step is not None and (last_step is None or step > last_step)
        self._take(number, result, step if is_new else None, reason)

    def next_to_resume(self, stop: Callable[[TuneTrial], None]) -> TuneTrial | None:
        """Return a paused trial to resume, after starting it again in the search; None if there is none.

        Args:
            stop: Called first with each waiting trial that is to end.

        Raises:
            ValueError: The trial has no checkpoint.
        """
        self._find_lost()
        for number in list(self._stops):
            trial = self._live.get(number)
            # A running trial ends with its next result, or once Tune has paused it.
            if trial is None or trial.status in (PENDING, PAUSED):
                self._stops.remove(number)
                if trial is not None:
                    stop(trial)
        for number in self._resumes:
            trial = self._live[number]
            if trial.status == PAUSED and not self._is_full():
                if not _has_checkpoint(trial):
                    raise ValueError(
                        f"trial {trial.trial_id} was paused and is to be resumed, but has saved no checkpoint: save "
                        "one with each result (tune.report(metrics, checkpoint=...), or save_checkpoint() of a class), "
                        "or use a method that does not pause trials, such as ASHA"
                    )
                self._start_again(number)
                return trial
        return None

    def _start_again(self, number: int) -> None:
        self._resumes.remove(number)
        self.search.on(Started(trial=number))

    def _find_lost(self) -> None:
        """End trials that Tune has ended without notice; suggest those again that Tune did not restore."""
        for trial in list(self._live.values()):
            if trial.status == ERROR:  # its actor could not be reset
                self.end(trial.trial_id, trial.last_result, "errored")
            elif trial.status == TERMINATED and trial.last_result.get("done"):  # Tune saved that, but not our decision
                self.report(trial.trial_id, trial.last_result)
                self.end(trial.trial_id, trial.last_result, "completed")
            elif trial.status == TERMINATED:  # `Tuner.restore` was told to skip it
                self.end(trial.trial_id, trial.last_result, "canceled")
        if self._is_restored:
            self._is_restored = False
            running = [view.id for view in self.search.trials.values() if view.state == "RUNNING"]
            lost = [number for number in (*self._resumes, *running) if number not in self._live]
            self._resumes = [number for number in self._resumes if number in self._live]
            self._creates.extendleft(reversed(lost))

    def _is_full(self) -> bool:
        if self._max_concurrent is None:
            return False
        return sum(trial.status != PAUSED for trial in self._live.values()) >= self._max_concurrent

    def _take(self, number: int, result: Mapping[str, Any], step: float | None, outcome: Reason | None) -> Answer:
        """Pass a result to the search, and queue its decisions on other trials."""
        if number in self._resumes:  # it already runs, e.g. after a failure while Tune paused it
            self._start_again(number)
        objectives = self.search.objectives
        answer = decide(
            self.search,
            TrialResult(
                number=result.get("training_iteration", 0),
                trial=number,
                step=step,
                value=None if step is None else result[self._metric],
                metrics=() if step is None or objectives is None else objectives.measured(result),
                outcome=outcome,
            ),
        )
        self._queue(answer)
        return answer

    def _queue(self, answer: Answer) -> None:
        """Queue the decisions on other trials."""
        self._creates.extend(answer.creates)
        for resumed in answer.resumes:  # lost trials are suggested again
            (self._resumes if resumed in self._live else self._creates).append(resumed)
        for stopped in answer.stops:
            self._queue_stop(stopped)

    def _queue_stop(self, number: int) -> None:
        for queue in (self._creates, self._resumes):
            if number in queue:
                queue.remove(number)
        self._stops.append(number)

    def _step(self, number: int, result: Mapping[str, Any]) -> float | None:
        """Return the length at which this result has the metric; None if the metric is missing."""
        if self._metric not in result:  # by default Tune raises an error first
            return None
        if self._time_attr not in result:
            message = f"is not in a result of trial {number}, which has {', '.join(sorted(result))}"
            hint = "report it with the metric, or name another"
            raise FieldError([("time_attr", f"{self._time_attr!r} {message}; {hint}")])
        names = self.search.objectives.names if self.search.objectives else ()
        if missing := [name for name in names if name not in result]:
            message = f"a result of trial {number} lacks {', '.join(missing)}; it has {', '.join(sorted(result))}"
            raise FieldError([("objectives", f"{message}; report all of them together")])
        step: float = result[self._time_attr]
        return step


def _has_ended(trial: TuneTrial) -> bool:
    return trial.status in (TERMINATED, ERROR)


def _has_checkpoint(trial: TuneTrial) -> bool:
    # A TorchTrainer in a trainable keeps its checkpoints itself; ray.tune.integration.ray_train reports their paths.
    return trial.checkpoint is not None or trial.last_result.get("checkpoint_path") is not None
