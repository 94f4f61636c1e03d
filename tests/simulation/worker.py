"""The ranks of simulated worker groups.

Rank 0 runs the real loop, `dray.training.loop.drive`, on a trial that counts its batches, and sends
the same messages as `dray.worker.host`, `dray.worker.reports` and `dray.worker.link`. The other ranks follow it, like
ranks that meet in collectives.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dray.desk.connection import DeskUnreachable
from dray.desk.failure import Failure
from dray.desk.messages import Departure, DeskReport, LeaseOutcome, Row
from dray.experiment.effects import Bind
from dray.training.loop import Outcome, Publish, Train, Validate, drive
from dray.training.progress import Progress
from dray.worker.lifecycle import Lifecycle
from dray.worker.link import MAX_IN_FLIGHT
from tests.simulation.cluster import Rank
from tests.simulation.experiment import Checkpoint, Experiment
from tests.simulation.world import Connection, Failed, Future, Steps

COLLECTIVE = Departure(outcome="errored", error="a collective failed", failure=Failure(kind="collective"))


class Lease(NamedTuple):
    """A lease, like `dray.worker.lease.TrialLease`. `run` is the experiment's run that granted it."""

    bind: Bind
    run: int
    experiment: Experiment


class LeaseLost(Exception):
    """Raised when the trial runs elsewhere."""


class TrialFailed(Exception):
    """Raised for an exception in the trial's code. Its argument is this rank's exit."""


class RankN(Rank):
    """A rank other than the chief."""

    def serve(self, lease: Lease, driver: Connection) -> Steps:
        departure = yield self.group.signal(lease.bind.lease, self.rank)
        if departure is None:
            if self.world.random.random() < 0.3:
                yield Future()  # waits for the others in a collective until its process is ended
            departure = COLLECTIVE
        return departure


class Rank0(Rank):
    """The chief."""

    def serve(self, lease: Lease, driver: Connection) -> Steps:
        self._bind, run, self._experiment = lease
        self._number, self._trial = self._bind.lease, self._bind.trial
        self._to = driver
        self._life = Lifecycle()
        self._in_flight: deque[Future] = deque()
        self._rows: list[Row] = []
        self._unsaved: list[Row] = []
        self._stop: Future | None = None
        self._broken = self.group.signal(self._number, 0)
        self._validation: float | None = None
        self._final: DeskReport | None = None
        self._why_diverged = ""
        self._trained, self._lineage = 0, ()
        self._experiment.facts.begins(run, self._number, self._trial, self._bind.code)
        others: Departure | None
        try:
            departure = others = yield from self._run()
        except (LeaseLost, DeskUnreachable):
            departure = Departure(outcome="interrupted")
            others = self.world.random.choice((None, departure))
        except TrialFailed as failed:
            departure = failed.args[0]
            others = departure if departure.outcome == "invalid_hp" else None
        if others is not None and self.group.size > 1 and self._number % 12 == 7:
            # The others leave by themselves, while this rank waits for them in a collective.
            others = replace(others, alone=True)
        for rank in range(1, self.group.size):
            self.world.at(self.world.delay(), self.group.signal(self._number, rank).resolve, others)
        if self._rows and departure.outcome != "interrupted":
            self._to.call("report", self._number, DeskReport(rows=tuple(self._rows)), False)
        if others is not None and others.alone:
            yield Future()
        return departure

    def _run(self) -> Steps:
        store = self._experiment.store
        while store.is_away:
            yield 1.0
        at, found, source = Progress(), None, self._bind.source
        for checkpoint in store.latest_first(self._trial):
            if checkpoint.is_valid:
                found = checkpoint
                at, self._trained, self._lineage = found.at, found.trained, found.lineage
                break
            self._to.tell("damaged", self._trial, checkpoint.id, "it is damaged")
        if found is None and source is not None:
            begun = store.trials[source.trial].get(source.batches or 0)
            if begun is None and self._experiment.facts.needs_source(self._trial):
                raise Failed(f"{self._experiment.name}: trial {self._trial} begins from {source}, which was deleted")
            if begun is None or not begun.is_valid:
                failure = Failure(kind="error", where="CheckpointError")
                raise TrialFailed(Departure(outcome="errored", error="it has no source", failure=failure))
            at, self._trained = begun.at, begun.trained
            self._lineage = (*begun.lineage, (begun.trial, begun.batches))
        self._experiment.facts.resumed(self._trial, self._trained, self._lineage)
        if found is not None and (ended := (yield from self._resume(found))) is not None:
            return Departure(outcome=ended, error=self._why_diverged)
        if self._is_reused and self._experiment.setup.once == "trial":
            failure = Failure(kind="error", where="ValueError in __init__", batches=0)
            raise TrialFailed(Departure(outcome="errored", error="duplicated", failure=failure, reused=True))
        if self._experiment.is_invalid(self._bind.hparams):
            raise TrialFailed(Departure(outcome="invalid_hp", error="these hyperparameters"))
        steps, outcome = drive(self._experiment.plan, at), None
        while True:
            try:
                command = next(steps) if outcome is None else steps.send(outcome)
            except StopIteration:
                break
            match command:
                case Train():
                    outcome = yield from self._train(command.until)
                case Validate():
                    outcome = yield from self._validate(compare=command.compare)
                case Publish():
                    outcome = yield from self._publish(command)
        # As `Reports.complete`.
        if self._life.outcome == "completed" and self._life.state != "completed":
            yield from self._send(replace(self._final or DeskReport(), final=True), wait=True)
            self._life.on("complete")
        while self._in_flight:
            yield self._in_flight.popleft()
        return Departure(outcome=self._life.outcome, error=self._why_diverged)

    # ------------------------------------------------------------------ as `RayHost.resume` and `Reports.resume`
    def _resume(self, found: Checkpoint) -> Steps:
        self._to.tell("saved", self._trial, found.id, found.batches, found.metric, None)
        carried, step, known = found.carried, found.carried.step, self._bind.last_step
        was_final, is_new = carried.final, step is not None and (known is None or step > known)
        if self._bind.was_completed and not is_new:
            carried = replace(carried, final=False)
        if step is not None:
            self._final = replace(carried, rows=())
        stop = yield from self._send_report(carried, wait=(found.decides and is_new) or carried.final)
        stop = stop or (not was_final and self._diverges(carried.rows))
        outcome: LeaseOutcome = self._life.outcome
        return outcome if stop or carried.final else None

    # ------------------------------------------------------------------ the commands of the loop
    def _train(self, until: int) -> Steps:
        world, experiment, begin = self.world, self._experiment, self._trained
        error = experiment.next_error(self._trial, begin, until)
        goal = until if error is None else error.batch
        if self._stop is None and world.random.random() < 0.7:
            self._stop = self.desk.call("stop_wanted", self._number)
        wake = Future()
        began, rate = world.now, experiment.setup.batch_s * world.random.uniform(0.5, 2.0)
        world.at((goal - begin) * rate, wake.resolve, "trained")
        self._broken.then(lambda _: wake.resolve("broken"))
        if self._stop is not None:
            self._stop.then(lambda stop: stop.value and wake.resolve("stop"))
        why = yield wake
        if why == "broken":
            if world.random.random() < 0.3:
                yield Future()
            raise TrialFailed(COLLECTIVE)
        self._trained = goal if why == "trained" else min(goal, begin + math.ceil((world.now - began) / rate))
        if why == "stop":
            return Outcome(batches=self._trained, leave=self._trained < until, interrupted=self._trained < until)
        if error is not None:
            experiment.raised(error)
            stale = error.kind if error.kind in ("oom", "device") else ""
            departure = Departure(outcome="errored", error=error.kind, failure=error.failure, stale=stale)
            if rank := error.rank % self.group.size:
                self.group.signal(self._number, rank).resolve(departure)
                departure = COLLECTIVE
            raise TrialFailed(departure)
        return Outcome(batches=self._trained)

    def _validate(self, *, compare: bool) -> Steps:
        yield self._experiment.setup.batch_s
        self._validation = self._experiment.loss(self._bind.hparams, self._trained)
        if not compare or not math.isfinite(self._validation):
            return Outcome()
        is_best = yield self._to.call("improves", self._number, self._validation)
        return Outcome(is_best=is_best)

    def _publish(self, command: Publish) -> Steps:
        """Publish a report, like `Executor.publish`, `RayHost.commit` and `Reports.from_fit`."""
        value, self._validation = self._validation, None
        if command.save:
            yield from self._commit(command, value)
        self._life.on("fit")
        if command.interrupted:
            self._life.on("interrupt")
        message = self._message(command, value)
        if not command.save:
            self._unsaved += message.rows
        if value is not None and command.decides and math.isfinite(value):
            self._to.tell("improves", self._number, value)
        if self._life.outcome != "completed":
            return Outcome(stop=(yield from self._send_report(message, wait=False)))
        waits = command.decides or command.final
        if value is None and not command.save and not waits and self.world.random.random() < 0.5:
            self._rows += message.rows
        else:
            yield from self._send_report(message, wait=waits)
            if waits and not message.final:
                self._experiment.facts.answered(self._trial, command.at.batches, self._reply)
        return Outcome(stop=self._life.should_return or (not command.final and self._diverges(message.rows)))

    def _diverges(self, rows: Sequence[Row]) -> bool:
        """Whether a loss is NaN and the trial therefore stops."""
        if not self._experiment.setup.stops_on_nan or not any(math.isnan(row["value"]) for row in rows):
            return False
        self._life.on("diverge")
        self._why_diverged = "loss is nan"
        return True

    def _message(self, command: Publish, value: float | None) -> DeskReport:
        batches = command.at.batches
        row = {"batches": batches, "epochs": None, "kind": "training", "name": "loss", "value": 0.5, "time": 0.0}
        final = command.final and not command.interrupted and self._life.outcome == "completed"
        if value is None:
            return DeskReport(rows=(row,), final=final)
        return DeskReport(
            rows=(row, {**row, "kind": "validation", "value": value}), step=batches, value=value, final=final
        )

    def _commit(self, command: Publish, value: float | None) -> Steps:
        batches, store, message = command.at.batches, self._experiment.store, self._message(command, value)
        carried = replace(message, rows=(*self._unsaved, *message.rows))
        self._unsaved.clear()
        if not (yield self._to.call("may_commit", self._number)):
            raise LeaseLost
        while store.is_away:
            yield 1.0
        if self._trained != batches:
            raise Failed(f"trial {self._trial} has trained {self._trained} batches, and saves at {batches}")
        checkpoint = Checkpoint(
            trial=self._trial,
            batches=batches,
            trained=self._trained,
            at=command.at,
            carried=carried,
            decides=command.decides,
            metric=value,
            lineage=self._lineage,
        )
        store.commit(checkpoint)
        self._to.tell("saved", self._trial, checkpoint.id, batches, value, 0.1)

    # ------------------------------------------------------------------ as `TrialLink.send` and `Reports._obey`
    def _send_report(self, message: DeskReport, *, wait: bool) -> Steps:
        self._reply = yield from self._send(message, wait=wait)
        if message.final:
            self._life.on("complete")
        if self._reply == "fenced":
            self._life.on("lose")
            raise LeaseLost
        if self._reply != "continue":
            self._life.on(self._reply)
        return self._life.should_return

    def _send(self, message: DeskReport, *, wait: bool) -> Steps:
        if self._rows:
            message, self._rows = replace(message, rows=(*self._rows, *message.rows)), []
        answer = self._to.call("report", self._number, message, wait)
        if wait:
            return (yield answer)
        self._in_flight.append(answer)
        reply = "continue"
        while self._in_flight and reply == "continue":
            if len(self._in_flight) <= MAX_IN_FLIGHT and not self._in_flight[0].done:
                break
            reply = yield self._in_flight.popleft()
        return reply
