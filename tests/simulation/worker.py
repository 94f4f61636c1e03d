"""The ranks of simulated worker groups.

Rank 0 runs the real loop, `dray.training.loop.drive`, on a trial that counts its batches, and sends what
`dray.worker.host`, `dray.worker.reports` and `dray.worker.link` send. The other ranks follow it, as ranks do that meet
in collectives.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dray.desk.connection import DeskUnreachable
from dray.desk.failure import Failure
from dray.desk.messages import Departure, DeskReport, LeaseOutcome
from dray.training.loop import Outcome, Publish, Train, Validate, drive
from dray.training.progress import Progress
from dray.worker.lifecycle import Lifecycle
from tests.simulation.cluster import Rank
from tests.simulation.experiment import Checkpoint, Experiment
from tests.simulation.world import Connection, Failed, Future, Steps

MAX_IN_FLIGHT = 16
COLLECTIVE = Departure(outcome="errored", error="a collective failed", failure=Failure(kind="collective"))


@dataclass(slots=True, kw_only=True)
class Lease:
    """As `dray.worker.lease.TrialLease`."""

    number: int
    run: int
    experiment: Experiment
    trial: int
    hparams: dict[str, Any]
    last_step: float | None
    was_completed: bool


class LeaseLost(Exception):
    """The trial runs elsewhere."""


class TrialFailed(Exception):
    """The trial's code has raised an exception.

    Args:
        departure: how this rank leaves.
    """

    def __init__(self, departure: Departure) -> None:
        super().__init__(departure)
        self.departure = departure


class RankN(Rank):
    """A rank that is not the chief."""

    def serve(self, lease: Lease, driver: Connection) -> Steps:
        departure = yield self.group.signal(lease.number, self.rank)
        if departure is None:
            if self.world.random.random() < 0.3:
                yield Future()  # it waits for the others in a collective, until its process is ended
            departure = COLLECTIVE
        return departure


class Rank0(Rank):
    """The chief."""

    def serve(self, lease: Lease, driver: Connection) -> Steps:
        self.lease, self._to = lease, driver
        self._life = Lifecycle()
        self._in_flight: deque[Future] = deque()
        self._rows: list[dict[str, Any]] = []
        self._unsaved: list[dict[str, Any]] = []
        self._stop: Future | None = None
        self._broken = self.group.signal(lease.number, 0)
        self._validation: float | None = None
        self._why_diverged = ""
        self._trained = 0
        lease.experiment.facts.begins(lease.run, lease.number, lease.trial)
        others: Departure | None
        try:
            departure = others = yield from self._run(lease)
        except (LeaseLost, DeskUnreachable):
            departure = Departure(outcome="interrupted")
            others = self.world.random.choice((None, departure))
        except TrialFailed as failed:
            departure, others = failed.departure, None
            if departure.outcome == "invalid_hp":
                others = departure
        for rank in range(1, self.group.size):
            self.world.at(self.world.delay(), self.group.signal(lease.number, rank).resolve, others)
        if self._rows and departure.outcome != "interrupted":
            self._to.call("report", lease.number, DeskReport(rows=tuple(self._rows)), False)
        return departure

    def _run(self, lease: Lease) -> Steps:
        at = Progress()
        ended = yield from self._resume(lease)
        if ended is not None:
            return Departure(outcome=ended, error=self._why_diverged)
        if self._resumed is not None:
            at, self._trained = self._resumed.at, self._resumed.trained
        if lease.experiment.is_invalid(lease.hparams):
            raise TrialFailed(Departure(outcome="invalid_hp", error="these hyperparameters"))
        steps, outcome = drive(lease.experiment.plan, at), None
        while True:
            try:
                command = next(steps) if outcome is None else steps.send(outcome)
            except StopIteration:
                break
            match command:
                case Train():
                    outcome = yield from self._train(lease, command.until)
                case Validate():
                    outcome = yield from self._validate(lease, compare=command.compare)
                case Publish():
                    outcome = yield from self._publish(lease, command)
        # As `Reports.complete`.
        if self._life.outcome == "completed" and self._life.state != "completed":
            yield from self._send(replace(self._final or DeskReport(), final=True), wait=True)
            self._life.on("complete")
        while self._in_flight:
            yield self._in_flight.popleft()
        return Departure(outcome=self._life.outcome, error=self._why_diverged)

    # ------------------------------------------------------------------ as `RayHost.resume` and `Reports.resume`
    def _resume(self, lease: Lease) -> Steps:
        self._resumed: Checkpoint | None = None
        self._final: DeskReport | None = None
        store = lease.experiment.store
        while store.is_away:
            yield 1.0
        for checkpoint in store.latest_first(lease.trial):
            if not checkpoint.is_valid:
                self._to.tell("damaged", lease.trial, checkpoint.id, "it is damaged")
                continue
            self._resumed = checkpoint
            break
        lease.experiment.facts.resumed(lease.trial, 0 if self._resumed is None else self._resumed.batches)
        if self._resumed is None:
            return None
        batches, carried = self._resumed.batches, self._resumed.carried
        self._to.tell("saved", lease.trial, self._resumed.id, batches, self._resumed.metric, None)
        step, known = carried.step, lease.last_step
        is_new = step is not None and (known is None or step > known)
        was_final = carried.final
        if lease.was_completed and not is_new:
            carried = replace(carried, final=False)
        if step is not None:
            self._final = replace(carried, rows=())
        stop = yield from self._send_report(carried, wait=(self._resumed.decides and is_new) or carried.final)
        outcome: LeaseOutcome = self._life.outcome
        if stop or carried.final:
            return outcome
        return "diverged" if not was_final and self._diverges(carried.rows) else None

    # ------------------------------------------------------------------ the commands of the loop
    def _train(self, lease: Lease, until: int) -> Steps:
        world, experiment, begin = self.world, lease.experiment, self._trained
        error = experiment.next_error(lease.trial, begin, until)
        goal = until if error is None else error.batch
        if self._stop is None and world.random.random() < 0.7:
            self._stop = self.desk.call("stop_wanted", lease.number)
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
        trained = goal if why == "trained" else min(goal, begin + math.ceil((world.now - began) / rate))
        self._trained = trained
        if why == "stop":
            return Outcome(batches=trained, leave=trained < until, interrupted=trained < until)
        if error is not None:
            experiment.raised(error)
            stale = error.kind if error.kind in ("oom", "device") else ""
            departure = Departure(
                outcome="errored", error=f"{error.kind} in train_batch", failure=error.failure, stale=stale
            )
            if error.rank % self.group.size:
                self.group.signal(lease.number, error.rank % self.group.size).resolve(departure)
                raise TrialFailed(COLLECTIVE)
            raise TrialFailed(departure)
        return Outcome(batches=trained)

    def _validate(self, lease: Lease, *, compare: bool) -> Steps:
        yield lease.experiment.setup.batch_s
        self._validation = lease.experiment.loss(lease.hparams, self._trained)
        if not compare or not math.isfinite(self._validation):
            return Outcome()
        is_best = yield self._to.call("improves", lease.number, self._validation)
        return Outcome(is_best=is_best)

    def _publish(self, lease: Lease, command: Publish) -> Steps:
        """As `Executor.publish`, `RayHost.commit` and `Reports.from_fit`."""
        batches, value = command.at.batches, self._validation
        self._validation = None
        if command.save:
            yield from self._commit(lease, command, value)
        self._life.on("fit")
        if command.interrupted:
            self._life.on("interrupt")
        message = self._message(command, value)
        if not command.save:
            self._unsaved += message.rows
        if value is not None and command.decides and math.isfinite(value):
            self._to.tell("improves", lease.number, value)
        if self._life.outcome != "completed":
            return Outcome(stop=(yield from self._send_report(message, wait=False)))
        waits = command.decides or command.final
        if value is None and not command.save and not waits and self.world.random.random() < 0.5:
            self._rows += message.rows
        else:
            yield from self._send_report(message, wait=waits)
            if waits and not message.final:
                lease.experiment.facts.answered(lease.trial, batches, self._reply)
        return Outcome(stop=self._life.should_return or (not command.final and self._diverges(message.rows)))

    def _diverges(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a loss is NaN, and the trial stops for that."""
        if not self.lease.experiment.setup.stops_on_nan or not any(math.isnan(row["value"]) for row in rows):
            return False
        self._life.on("diverge")
        self._why_diverged = "loss is nan"
        return True

    def _message(self, command: Publish, value: float | None) -> DeskReport:
        batches = command.at.batches
        row = {"batches": batches, "epochs": None, "kind": "training", "name": "loss", "value": 0.5, "time": 0.0}
        completes = not command.interrupted and self._life.outcome == "completed"
        if value is None:
            return DeskReport(rows=(row,), final=command.final and completes)
        validation = {**row, "kind": "validation", "value": value}
        return DeskReport(rows=(row, validation), step=batches, value=value, final=command.final and completes)

    def _commit(self, lease: Lease, command: Publish, value: float | None) -> Steps:
        batches, experiment = command.at.batches, lease.experiment
        carried = self._message(command, value)
        carried = replace(carried, rows=(*self._unsaved, *carried.rows))
        self._unsaved.clear()
        if not (yield self._to.call("may_commit", lease.number)):
            raise LeaseLost
        while experiment.store.is_away:
            yield 1.0
        if self._trained != batches:
            raise Failed(f"trial {lease.trial} has trained {self._trained} batches, and saves at {batches}")
        checkpoint = Checkpoint(
            trial=lease.trial,
            batches=batches,
            trained=self._trained,
            at=command.at,
            carried=carried,
            decides=command.decides,
            metric=value,
        )
        experiment.store.commit(checkpoint)
        self._to.tell("saved", lease.trial, checkpoint.id, batches, value, 0.1)

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
            message = replace(message, rows=(*self._rows, *message.rows))
            self._rows = []
        answer = self._to.call("report", self.lease.number, message, wait)
        if wait:
            return (yield answer)
        self._in_flight.append(answer)
        reply = "continue"
        while self._in_flight and reply == "continue":
            if len(self._in_flight) <= MAX_IN_FLIGHT and not self._in_flight[0].done:
                break
            reply = yield self._in_flight.popleft()
        return reply
