"""The driver of an experiment: all its decisions, in one object without Ray, threads, files or a clock.

It owns the search. The ranks of its trials report here, Tune's handle fetches the results for the search to decide on,
and the desk announces which trial has a lease. Each message is recorded, decided on and answered, in this order: the
driver passes effects to `emit`, and the shell (`dray.experiment.run.Run`, or a simulation) carries them out. If the
process dies, another one continues from the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dray.config.schema import ExperimentConfig
from dray.config.searcher import COUNTED
from dray.display.counts import Counts
from dray.errors import ConfigError, ExperimentError, FoundInTraining
from dray.experiment.alerts import Alerts
from dray.experiment.effects import Answered, Append, Bind, Effect, EndRun, Fail, ToDesk
from dray.experiment.limits import Limits
from dray.experiment.restarts import Restarts
from dray.experiment.results import PendingResults
from dray.experiment.retention import Policy, Retention, checkpoints_needed
from dray.experiment.unread import UnreadHparams
from dray.leases import messages
from dray.leases.effects import Reply, Say
from dray.leases.messages import CheckpointSaved, DeskReport, LeaseGranted, Message, ReportReceived, TrialLeft
from dray.records.spending import Usage
from dray.records.trial_record import unread_line
from dray.rpc.wire import Malformed
from dray.text import cut
from searchers.answers import Answer, carry_out, decide
from searchers.errors import IllegalEvent, SpaceError
from searchers.events import Requested, Started, TrialResult
from searchers.search import Record, Search
from searchers.views import NEVER_BEST, State

RUNNABLE: tuple[State, ...] = ("PENDING", "RUNNING")  # states of trials that should have workers
MAX_ERROR = 64 << 10
"""Most letters of a trial's error that are kept."""
CALLS = ("report", "may_commit", "saved", "damaged", "improves", "best", "fetch")
"""Methods of `ExperimentDriver` that workers and Tune's handle may call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSearch:
    """A search that is ready to run: started, with its events going to the journal."""

    search: Search
    config: ExperimentConfig  # the experiment's config, as extended
    # The journal before the search was opened; `RunCore.begin` empties it, because it may be large
    records: list[dict[str, Any]]
    limits: Limits
    alerts: Alerts
    new_limits: Record | None = None  # to be recorded if the experiment goes on with them


@dataclass(slots=True)
class _Lease:
    """A live lease of a trial."""

    number: int
    trial: int
    # Rank 0's calls that wait for the search's decision, by the number of the result; None if the call was answered
    # early because the run is closing
    waiting: dict[int, Hashable | None] = field(default_factory=dict)
    freed: bool = False  # its group can train another trial, while its last checkpoint is written


class ExperimentDriver:
    """One run of an experiment, from its journal's state to the end of the search.

    Args:
        opened: the experiment's search.
        emit: called with each effect.
        resume: a hint for error messages on how to resume the experiment.
    """

    def __init__(self, opened: OpenSearch, emit: Callable[[Effect], None], *, resume: str = "resume it") -> None:
        config, self.search = opened.config, opened.search
        self._resume = resume
        self._config, self._emit = config, emit
        self._unread = UnreadHparams(opened.records)
        self._restarts = Restarts(
            opened.records, max_restarts=config.max_restarts, code_of=self.search.code_of, emit=emit
        )
        self.retention = Retention(
            Policy.of(config.checkpoint_storage, smaller_is_better=config.searcher.sign == 1, repeat=config.repeat),
            needs=lambda trial: checkpoints_needed(self.search.trials[trial]),
            reached=self._reached,
            is_repeat=lambda trial: self.search.repeat(trial) is not None,
            reported=lambda trial: self.search.trials[trial].last_batches,
            emit=emit,
        )
        self._results = PendingResults()
        self._fetching: Hashable | None = None  # the handle's call that waits for results
        self.handle: int | None = None  # process id of Tune's handle after its first fetch
        self._leases: dict[int, _Lease] = {}
        self._current: dict[int, int] = {}  # the latest lease of each trial; earlier ones are fenced off
        self._requested: set[str] = set()  # ids of requests that were answered
        self._best: float | None = None
        self._best_by = (-1, -1)  # trial and lease of the best score
        self._closing = False
        self.limits = opened.limits
        self._now = 0.0  # at the last tick
        self._held: set[int] = set()  # trials that don't run any more, because the budget is nearly spent
        self.counts = Counts(restarts=self._restarts.counted)
        self.has_trained = False  # a trial has reported

    def begin(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Queue the trials that can run. This must be the first call.

        Args:
            records: the journal's records so far.
        """
        self.search.log = self._log
        sign = self._config.searcher.sign
        trials = self.search.trials.values()
        self._best = min(
            (sign * trial.best for trial in trials if trial.best is not None and trial.state not in NEVER_BEST),
            default=None,
        )
        self.retention.recover(records)
        self._pin_sources(self.search.live)
        for trial, reason in self._restarts.given_up.items():
            self._results.add(trial, outcome=reason)
        self._hand_over()  # in a server's process, the handle may already be waiting
        live = self.search.live.values()
        runnable = [each.id for each in live if each.state in RUNNABLE and each.id not in self._restarts.given_up]
        self._enqueue(runnable, first=False)

    def request(self, request: Requested, check: Callable[[Requested], None]) -> None:
        """Carry out a request that has an id, once, and record the answer with it.

        Args:
            check: raises an `IllegalEvent` if the source's checkpoint does not exist.
        """
        if request.id in self._requested or self._closing or self.search.done is not None:
            return  # the next run carries out what is new
        try:
            check(request)
            if request.source is not None and request.source.batches is not None:
                self.retention.check(request.source.trial, request.source.batches)
            answer = carry_out(self.search, request)
        except IllegalEvent as error:
            self._append({"event": "rejected", "id": request.id, "error": str(error)})
        else:
            self._pin_sources(answer.creates)
            self._act(answer)
        self._requested.add(request.id)
        self._emit(Answered(request.id))

    def _pin_sources(self, trials: Iterable[int]) -> None:
        """Keep the checkpoint that each trial begins from until it has its own."""
        for trial in trials:
            if (source := self.search.source(trial)) is not None and source.batches is not None:
                self.retention.pin(trial, (source.trial, source.batches))

    def _reached(self, trial: int) -> int:
        """The number of rungs that a trial has reached; -1 if it can't be the best trial, or has not ended."""
        search = self.search
        counts = search.objectives is None and search.trials[trial].ended and search.can_be_best(trial)
        return search.num_reached(trial) if counts else -1

    def close(self) -> None:
        """Let running trials save and leave; they continue in a later run. Idempotent."""
        self._closing = True
        for lease in self._leases.values():
            self._answer_all(lease, "interrupt")
        self._to_desk("close")

    def tick(self, usage: Usage, now: float) -> None:
        """Apply the experiment's limits.

        Args:
            usage: what has been spent.
            now: time in seconds, from any clock.
        """
        self._now = now
        if self._closing or self.search.done is not None:
            return
        self.limits.spend(usage)
        if self.limits.is_nearly_spent:
            self._wind_down()
        if self.limits.reason:
            self._append({"event": "ended", "reason": self.limits.reason})
            self.close()
            self._emit(EndRun())

    def _wind_down(self) -> None:
        """Let only those trials run that reach their next rung with the rest of the budget."""
        live = [view for view in self.search.live.values() if view.id not in self._held and view.state in RUNNABLE]
        waiting = [view.id for view in live if view.id not in self._current and not self._results.ends(view.id)]
        if held := [trial for trial in waiting if not self._may_begin(trial)]:
            self._held.update(held)
            self._to_desk("withdraw", held)
        training = [lease.trial for lease in self._leases.values() if not lease.freed]
        goals = {trial: self._goal(trial) for trial in training if trial not in self._held}
        for trial in self.limits.late(goals, len(training), self._now):
            self._held.add(trial)
            self._answer_all(self._leases[self._current[trial]], "interrupt")
            self._to_desk("cancel", trial)
        if not self._leases and self._results.is_empty and len(held) == len(waiting):
            self.limits.give_up_rest()

    def _may_begin(self, trial: int) -> bool:
        return trial not in self._held and self.limits.may_begin(self._goal(trial) - self._step(trial))

    def _step(self, trial: int) -> float:
        source = self.search.source(trial)
        reached = self.search.trials[trial].last_step or 0
        return max(reached, self.limits.step(trial), 0 if source is None else source.step)

    def _goal(self, trial: int) -> float:
        """The next rung of a trial; its step if none is known. A repeat is of use only if it gets to its end."""
        step, rungs = self._step(trial), self.search.method.rungs
        rungs = rungs if self.search.repeat(trial) is None else rungs[-1:]
        return next((rung for rung in rungs if rung > step), step)

    def end(self) -> None:
        """End the run, and with it Tune's handle, whether the search is done or not."""
        if self._fetching is not None:
            self._emit(Reply(self._fetching, None))
            self._fetching = None

    @property
    def is_drained(self) -> bool:
        """Whether no trial has workers and, before an early end, the search has decided on the last reports."""
        decides = bool(self.limits.reason) and self.handle is not None and self.search.done is None
        return not self._leases and (self._results.is_empty or not decides)

    # ------------------------------------------------------------------ calls of rank 0
    def report(self, call: Hashable, lease: int, report: DeskReport, decides: bool) -> None:
        """Handle a report. The reply tells the trial what to do.

        Args:
            lease: the number of the trial's lease.
            report: the report.
            decides: whether the search decides on it, so that the reply is its decision. A final report is the trial's
                end, and its reply does not wait for a decision.

        Raises:
            Malformed: the report's rows are not metrics, or its step is invalid.
        """
        if (state := self._live(lease)) is None:
            self._emit(Reply(call, "fenced"))
            return
        trial, rows = state.trial, report.rows
        if not report.is_valid:
            raise Malformed(f"a report of trial {trial} with other rows than metrics, or at step {report.step}")
        self.has_trained = True
        self.counts.reports += 1
        self._emit(ReportReceived(lease=lease, trial=trial, rows=rows, step=report.step))
        if report.read is not None and (
            record := self._unread.add(self.search.space.root, self.search.params(trial), report.read)
        ):
            self._append(record)
            if line := unread_line(record["unread"], record["read"]):
                self._emit(Say(f"warning: {line}"))
        # Not those of system metrics alone, whose batches depend on the clock.
        if self._restarts.reached(trial, max((row["batches"] for row in rows if row["kind"] != "system"), default=-1)):
            self._need_new(self.search.live)
        if (step := self._trained_to(report)) is not None:
            self.limits.trained(trial, step, self._now)
        leaves = self._closing or trial in self._held
        if not decides:
            self._emit(Reply(call, "interrupt" if leaves else "continue"))
            return
        outcome = "completed" if report.final else None
        metrics = tuple(report.metrics)
        batches = None if report.step is None else max((row["batches"] for row in rows), default=None)
        number = self._results.add(
            trial, step=report.step, value=report.value, metrics=metrics, outcome=outcome, batches=batches
        )
        if report.final:
            self._emit(Reply(call, "continue"))
        else:
            state.waiting[number] = call
            if leaves:
                self._answer_all(state, "interrupt")
        self._hand_over()

    def _trained_to(self, report: DeskReport) -> float | None:
        """The length that a trial has trained, in the searcher's unit, as far as its report says."""
        unit = self._config.searcher.unit
        if unit not in COUNTED:
            return report.step
        return max((row[unit] for row in report.rows if row[unit] is not None), default=report.step)

    def may_commit(self, call: Hashable, lease: int) -> None:
        """Reply whether rank 0 may commit a checkpoint: its earlier reports are recorded, and the trial has no newer
        lease."""
        self._emit(Reply(call, self._live(lease) is not None))

    def saved(
        self, call: Hashable, trial: int, checkpoint: str, batches: int, value: float | None, seconds: float | None
    ) -> None:
        """Note that a trial has committed a checkpoint, or resumed from it; also in a lease that has ended."""
        self._check_trial(trial)
        self._restarts.saved(trial, batches)
        self.retention.saved(trial, batches, checkpoint, value)
        self._emit(CheckpointSaved(trial=trial, checkpoint=checkpoint, batches=batches, value=value, seconds=seconds))

    def damaged(self, call: Hashable, trial: int, checkpoint: str, why: str) -> None:
        """Note that a trial has skipped a damaged checkpoint."""
        self._check_trial(trial)
        self.retention.damaged(trial, checkpoint, why)

    def improves(self, call: Hashable, lease: int, score: float) -> None:
        """Reply whether ``score`` (smaller is better) is the experiment's best so far, and record it if so.

        The reply is also True if the trial with the best score reports it again in a later lease: the earlier lease
        cannot have saved it, or the trial would have continued from there.
        """
        state = self._live(lease)
        is_best = False
        if state is not None:
            trial, number = self._best_by
            again = score == self._best and trial == state.trial and number != lease
            if is_best := self._best is None or score < self._best or again:
                self._best, self._best_by = score, (state.trial, lease)
        self._emit(Reply(call, is_best))

    def best(self, call: Hashable) -> None:
        """Reply with the best score so far (smaller is better), or None."""
        self._emit(Reply(call, self._best))

    def _check_trial(self, trial: int) -> None:
        if trial not in self.search.trials:
            raise Malformed(f"a checkpoint of trial {trial}, which does not exist")

    def _live(self, lease: int) -> _Lease | None:
        """The lease with this number, unless it is over or fenced off by a later one of the same trial."""
        state = self._leases.get(lease)
        return state if state is not None and self._current.get(state.trial) == lease else None

    # ------------------------------------------------------------------ Tune
    def fetch(self, call: Hashable, process: int) -> None:
        """Reply to Tune's handle with the results that await a decision, one per trial; None when the search is over.

        Args:
            process: the handle's process id; a new process gets all unanswered results again.
        """
        if self._fetching is not None:  # one of the two callers has died; the other one will ask again
            self._emit(Reply(self._fetching, []))
        self._fetching = call
        if process != self.handle:
            self.handle = process
            self.counts.handles_started += 1
            self._results.hand_over_again()
        self._hand_over()
        if self.search.done is not None:
            self.end()

    def _hand_over(self) -> None:
        if self._fetching is not None and (due := self._results.take()):
            self._emit(Reply(self._fetching, due))
            self._fetching = None

    def decide(self, results: Sequence[TrialResult]) -> None:
        """Let the search decide on the results that Tune passes, except those answered through an earlier process of
        the handle."""
        answers = []
        for result in results:
            if self._results.awaits(result.trial, result.number):
                try:
                    answer = decide(self.search, result)
                except Exception as error:  # for example from the user's own method
                    failure = ExperimentError(f"the search failed: {error}")
                    failure.__cause__ = error
                    self._emit(Fail(failure))
                    break
                self._results.answer(result.trial, answer.decision)
                answers.append(answer)
                self._pin_sources(answer.creates)  # before any decision lets a checkpoint be deleted
        for answer in answers:
            self._act(answer)
        self._hand_over()

    def _act(self, answer: Answer) -> None:
        """Carry out a decision of the search."""
        trial = answer.trial
        is_request = answer.number < 0
        if not is_request:
            self.counts.decisions[answer.decision] += 1
        lease = self._leases.get(self._current.get(trial, 0))
        if lease is not None and answer.decision == "stop":
            # The lease may wait for a later result, because a restarted trial repeats reports that await a decision.
            self._answer_all(lease, "stop")
        elif lease is not None and (call := lease.waiting.pop(answer.number, None)) is not None:
            self._emit(Reply(call, answer.decision))
        withdrawn = [*answer.stops, *([trial] if answer.decision != "continue" else ())]
        if withdrawn:
            if is_request and answer.decision == "stop":
                self._to_desk("cancel", trial)  # it may not report for long
            self._to_desk("withdraw", withdrawn)
            for each in withdrawn:
                if self.search.trials[each].ended:
                    self.retention.unpin(each)
            self.retention.changed(withdrawn)
        if answer.resumes:
            self.retention.changed(answer.resumes)
            # Before new trials: the search has chosen them as the most promising. But a trial that takes turns waits.
            if others := [each for each in answer.resumes if each != trial]:
                self._enqueue(others, first=True)
            if trial in answer.resumes:
                self._enqueue([trial], first=False)
        if answer.creates:
            self._enqueue(list(answer.creates), first=is_request and answer.decision == "continue")
        if answer.done:
            self._to_desk("close")
            self.end()

    # ------------------------------------------------------------------ messages of the desk
    def on(self, message: Message) -> None:
        """Handle a message of the desk about a lease of a trial, or about worker groups of this kind."""
        match message:
            case messages.LeaseGranted():
                self._granted(message)
            case messages.TrialLeft():
                self._left(message)
            case messages.GroupFreed(lease=lease, trial=trial):
                self._leases[lease].freed = True
                self.limits.leaves(trial)
            case messages.LeaseOver():
                self._over(message.lease)
            case messages.WorkerUnfit(why=why):
                self._emit(Fail(self._error_of(why)))
            case _:
                raise AssertionError(f"not for a driver: {message}")

    def _granted(self, granted: LeaseGranted) -> None:
        """Draw the hyperparameters of a trial with a new lease, and begin it."""
        trial, number = granted.trial, granted.lease
        self._leases[number] = _Lease(number, trial)
        if (earlier := self._current.get(trial)) is not None:
            self._answer_all(self._leases[earlier], "fenced")
        self._current[trial] = number
        view = self.search.trials[trial]
        if not self._may_begin(trial):
            self._held.add(trial)
        if view.state not in RUNNABLE or self._closing or self._results.ends(trial) or trial in self._held:
            self._to_desk("drop", number)
            return
        self.limits.begins(trial)
        try:
            self.search.on(Started(trial=trial))
        except SpaceError as error:
            self._emit(Fail(FoundInTraining(error.faults, "The search")))
            return
        hparams, source = self.search.params(trial), self.search.source(trial)
        self._emit(
            Bind(
                lease=number,
                trial=trial,
                seed=self.search.seed_of(trial),
                hparams=hparams,
                last_step=view.last_step,
                was_completed=trial in self._restarts.ended_before,
                source=source,
                is_changed=source is not None and hparams != self.search.params(source.trial),
                code=self.search.code_of(trial),
            )
        )

    def _answer_all(self, lease: _Lease, answer: messages.Reply) -> None:
        for number, call in lease.waiting.items():
            if call is not None:
                self._emit(Reply(call, answer))
                lease.waiting[number] = None

    def _over(self, number: int) -> None:
        lease = self._leases.pop(number)
        self._answer_all(lease, "fenced")
        if self._current.get(lease.trial) == number:
            del self._current[lease.trial]
            self.limits.leaves(lease.trial)

    def _left(self, left: TrialLeft) -> None:
        """Handle a trial that has left its group. A failed trial restarts, or the search learns through Tune that it
        has ended."""
        trial, left = left.trial, replace(left, error=cut(left.error, MAX_ERROR))
        if left.outcome in ("completed", "stopped", "paused", "diverged") and self._restarts.reuse.succeeded(trial):
            self._need_new(self.search.live)
        # After a trial's final report, errors of its processes don't count.
        has_ended = self.search.trials[trial].ended or self._results.ends(trial)
        if left.outcome not in ("errored", "diverged", "invalid_hp") or has_ended:
            return
        if left.fatal and self.search.code_of(trial) is not None:  # the other trials have other code
            left = replace(left, fatal=False, no_restart="a restart would not change its code")
        if left.fatal:
            field_path, _, fault = left.error.partition(": ")
            self._emit(Fail(FoundInTraining([(field_path, fault)])))
        elif (reason := self._restarts.end_of(left)) is not None:
            self._results.add(trial, outcome=reason)
            self._hand_over()
        elif self.search.trials[trial].state == "RUNNING" and self._current.get(trial, left.lease) == left.lease:
            # A trial that was paused, or paused and queued again, meanwhile continues when its turn comes.
            self._enqueue([trial], first=True)

    def _error_of(self, why: messages.Unfit) -> Exception:
        resume = f"; then {self._resume}" if why.resumable else ""
        if not why.faults:
            return ExperimentError(f"{why.message}{resume}")
        kind = FoundInTraining if self.has_trained else ConfigError
        return kind([(path, f"{what}{resume}") for path, what in why.faults], why.source)

    def _enqueue(self, trials: Sequence[int], *, first: bool) -> None:
        self._need_new(trials)
        self._to_desk("enqueue", trials, first)

    def _need_new(self, trials: Iterable[int]) -> None:
        """Let those of these trials run in new processes whose code needs that."""
        if needing := [trial for trial in trials if self._restarts.reuse.needs_new(trial)]:
            self._to_desk("need_new", needing)

    # ------------------------------------------------------------------ effects
    def _log(self, record: Mapping[str, Any]) -> None:
        self.limits.record(record)
        self._append(record)

    def _append(self, record: Mapping[str, Any], *, wait: bool = True) -> None:
        self._emit(Append(record, wait))

    def _to_desk(self, method: str, *args: Any) -> None:
        self._emit(ToDesk(method, args))
