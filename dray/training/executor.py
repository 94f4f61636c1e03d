"""Performs the loop's commands with torch: trains, validates, publishes, and reports what was seen.

Every rank has one. What differs between ranks (a stop requested on one of them, the host's answer to the chief) is
agreed on here, in one exchange per command, before the loop is told.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from typing_extensions import assert_never

from dray.training import checkpoint, metrics, rng
from dray.training.agreement import heard, told
from dray.training.cursor import Cursor
from dray.training.distributed import DistributedContext
from dray.training.errors import DataExhausted, InvalidHP, PeerFailed, SearcherMetricError, ShouldExit
from dray.training.host import Host, Reached, Report
from dray.training.loop import Command, Publish, Seen, Train, Validate, drive
from dray.training.optimisation import Optimisation
from dray.training.plan import Plan
from dray.training.progress import Progress
from dray.training.reducers import Reducer, ReducerRegistry
from dray.training.saver import Saver
from dray.training.spread import SpreadModel, hang_up, is_hung_up
from dray.training.stopping import StopLine
from dray.training.trial import Callback, Scalars, Trial
from dray.training.usage import Usage

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Why a rank leaves the loop, and whether to save what it has trained."""

    #: The weakest reason first. "hung_up": another rank has cut the connection, for one of the other reasons.
    KINDS: ClassVar = ("hung_up", "exit", "exhausted", "invalid_hp", "failed")

    kind: Literal["hung_up", "exit", "exhausted", "invalid_hp", "failed"]
    save: bool = True
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPart:
    """One rank's share of a validation: metrics over its own batches, and what it contributes to the reducers."""

    metrics: Mapping[str, Any]
    slot: list[Any]
    reducers: Mapping[str, Reducer] = field(default_factory=dict)
    batches: int = 0


def run(plan: Plan, at: Progress, executor: Executor) -> Progress:
    """Run a plan to its end, under the executor's profiler.

    Raises:
        InvalidHP, DataExhausted: raised after what was trained has been saved.
    """
    steps = drive(plan, at)
    seen: Seen | None = None
    with executor.stop_line.watched(), _watched(executor), executor.profiler or contextlib.nullcontext():
        while True:
            try:
                command = next(steps) if seen is None else steps.send(seen)
            except StopIteration as end:
                executor.finish()
                return end.value  # type: ignore[no-any-return]
            # Outside the try: a StopIteration that escapes from a trial's code is the trial's error, not our end.
            try:
                seen = executor.perform(command)
            except BaseException:
                executor.abandon()
                raise


@contextlib.contextmanager
def _watched(executor: Executor) -> Iterator[None]:
    """Let the host see how far training is, during the block."""
    executor.host.watch(executor.progress)
    try:
        yield
    finally:
        # The host outlives the executor, and must not keep it or its DataLoader workers alive.
        last = executor.progress()
        executor.host.watch(lambda: last)


class Executor:
    """Performs the commands of one rank.

    Args:
        trial, callbacks: the user's.
        optimisation, reducers, cursor: shared with the trial's context.
        device: the device of the batches.
        to_device: moves a batch to the device; None leaves batches where they are.
        peers: the trial's ranks.
        host: called on the chief only, with the exceptions that `Host` lists.
        training_data: an endless iterator, already at the right position.
        validation_data: None on the ranks that don't validate.
        full_dataset: validate by `evaluate_full_dataset`, on the chief.
        description: returns what every checkpoint says about the trial; called at the first one.
        listens_to_batches: whether any rank has a callback with `on_training_workload_end`, which gets each batch's
            metrics.
        hears_of_checkpoints: whether a callback of this rank has a hook for written checkpoints: then training waits
            for the write, on all ranks.
        scalars: where the chief writes metrics for TensorBoard.
        profiler: a `torch.profiler.profile`, stepped after each batch.
        best: whether to ask the host which validations are worth saving.
    """

    def __init__(
        self,
        *,
        trial: Trial,
        callbacks: Mapping[str, Callback],
        optimisation: Optimisation,
        reducers: ReducerRegistry,
        cursor: Cursor,
        device: torch.device,
        to_device: Callable[[Any], Any] | None,
        peers: DistributedContext,
        host: Host,
        training_data: Iterator[Any],
        validation_data: Any,
        full_dataset: bool,
        description: Callable[[], checkpoint.Description],
        listens_to_batches: bool,
        hears_of_checkpoints: bool,
        scalars: Scalars,
        profiler: Any = None,
        best: bool = False,
    ) -> None:
        self.trial = trial
        self.callbacks = callbacks
        self.optimisation = optimisation
        self.reducers = reducers
        self.cursor = cursor
        self.device = device
        self.to_device = to_device
        self.peers = peers
        self.host = host
        self.training_data = training_data
        self.validation_data = validation_data
        self.full_dataset = full_dataset
        self.description = description
        self.profiler = profiler
        self.best = best
        self.hears_of_checkpoints = hears_of_checkpoints
        self.is_chief = peers.rank == 0
        self._scalars = scalars
        self._metrics = metrics.TrainingMetrics(keep_batches=listens_to_batches)
        forward: Callable[[Any], Any] = optimisation.amp.forward if optimisation.amp else lambda method: method
        self._train_batch = forward(trial.train_batch)
        self._evaluate_batch = forward(_evaluate_batch(trial))
        self._evaluate_all = forward(trial.evaluate_full_dataset)
        self._epoch_starts = [_epoch_start(callback) for callback in callbacks.values()]
        self._saver = Saver(host)
        self._trained = cursor.initial_batch
        self._evaluated = 0
        self.stop_line = StopLine(peers, host.asked_to_stop, lambda: self._trained)
        if self.is_chief and scalars.enabled and self._trained > 0:
            # A trial that was killed resumes from its last checkpoint, and writes some batches again. The validation at
            # that checkpoint stays.
            scalars.restart(self._trained + 1)
        self._usage = Usage(device)
        self._training: dict[str, Any] | None = None
        self._validation: dict[str, Any] | None = None
        self._pending: BaseException | None = None

    def progress(self) -> tuple[int, int]:
        """As `Host.watch` needs it: (batches trained, batches of the latest validation)."""
        return self._trained, self._evaluated

    def perform(self, command: Command) -> Seen:
        """Perform a command of the loop."""
        began, before = time.perf_counter(), self._trained
        match command:
            case Train():
                seen, phase = self.train(command), "training"
            case Validate():
                seen, phase = self.validate(command), "validating"
            case Publish():
                seen, phase = self.publish(command), "waiting"
            case _:
                assert_never(command)
        self._usage.spent(phase, time.perf_counter() - began, self._trained - before)
        return seen

    def finish(self) -> None:
        """Wait until the last checkpoint is saved, and raise the exception that ended training, if any."""
        self._on_chief("saving the last checkpoint", self._saver.finish)
        self._raise_pending()

    def abandon(self) -> None:
        """After an error: wait for the checkpoint that is being saved."""
        self._saver.abandon()

    def _raise_pending(self) -> None:
        if self._pending is not None:
            raise self._pending

    # ------------------------------------------------------------------------------------------------------- train

    def train(self, command: Train) -> Seen:
        self.reducers.reset(training=True)
        self._metrics.keep_times = self.is_chief and self._scalars.enabled
        self._metrics.reset()
        first = self._trained
        for model in self.optimisation.models:
            if not model.training or self._trained == self.cursor.initial_batch:
                model.train()
        slot, leave = self._attempt(lambda: self._train_until(command.until))
        if leave is not None:
            # The others may be in backward, waiting for this rank's gradients.
            hang_up(self.optimisation.models)
        values = self._metrics.take_values()
        scalars = values if self._scalars.enabled else None
        own = (self._trained, leave, metrics.sums_of(values), slot, scalars, self._usage.machine())
        ranks = self.peers.allgather(own)
        self._usage.hear([row[5] for row in ranks])
        if self._metrics.keep_times:
            self._write_batches(first, [row[4] for row in ranks if row[4] is not None])
        if any(row[1] for row in ranks):
            hang_up(self.optimisation.models)
        leave = self._agree([row[1] for row in ranks])
        self._trained = min(row[0] for row in ranks)
        averages: dict[str, Any] = dict(metrics.average_sums([row[2] for row in ranks]))
        if leave is not None:
            self._training = averages or None
            return Seen(batches=self._trained, leave=True, save_on_leave=leave.save)
        if self._trained < command.until:
            self._training = averages or None
            return Seen(batches=self._trained, leave=True, interrupted=True)
        reduced = self.reducers.cross_slot([row[3] or [] for row in ranks], training=True)
        averages.update({name: metrics.to_numpy(value) for name, value in reduced.items()})
        self._training = averages
        self._write_scalars(reduced)
        if self._metrics.keep_batches:
            _, leave = self._attempt(lambda: self._workload_end(averages))
            leave = self._agree(self.peers.allgather(leave))
            if leave is not None:
                return Seen(batches=self._trained, leave=True, save_on_leave=leave.save)
        return Seen(batches=self._trained)

    def _train_until(self, until: int) -> list[Any]:
        """The hot path. Returns what this rank contributes to the reducers."""
        trial, cursor, optimisation = self.trial, self.cursor, self.optimisation
        to_device, add, profiler = self.to_device, self._metrics.add, self.profiler
        train_batch, get_batch_length = self._train_batch, trial.get_batch_length
        epoch_length, aggregates = cursor.epoch_length, optimisation.aggregation_frequency > 1
        amp, schedulers = optimisation.amp, optimisation.lr_schedulers
        stop_line, usage, clock = self.stop_line, self._usage, time.perf_counter
        if self._trained >= stop_line.limit and stop_line.reached(self._trained):
            return self.reducers.per_slot(training=True)
        # The range first in zip(): so no batch is drawn that is not trained on.
        since = clock()
        for batch_idx, batch in zip(range(self._trained, until), self.training_data, strict=False):
            usage.data_s += clock() - since
            get_batch_length(batch)
            if to_device is not None:
                batch = to_device(batch)
            cursor.batch_idx = batch_idx
            epoch_idx, batch_in_epoch = divmod(batch_idx, epoch_length) if epoch_length else (0, batch_idx)
            if batch_in_epoch == 0:
                for epoch_start in self._epoch_starts:
                    epoch_start(epoch_idx)
            if aggregates:
                optimisation.before_batch()
            add(train_batch(batch=batch, epoch_idx=epoch_idx, batch_idx=batch_idx))
            if schedulers or amp is not None:
                optimisation.after_batch(batch_idx)
            if profiler is not None:
                profiler.step()
            self._trained = batch_idx + 1
            if batch_in_epoch + 1 == epoch_length:
                for callback in self.callbacks.values():
                    callback.on_training_epoch_end(epoch_idx)
            # Before another batch is drawn: that may draw random numbers, which the resumed run must draw itself.
            if batch_idx + 1 >= stop_line.limit and stop_line.reached(batch_idx + 1):
                return self.reducers.per_slot(training=True)
            since = clock()
        if self._trained < until:
            raise DataExhausted(
                f"the training data ended after {self._trained} batches, {until} and more are to be trained: "
                "a loader that is no pytorch.DataLoader has to repeat its data by itself (samplers.RepeatBatchSampler)"
            )
        return self.reducers.per_slot(training=True)

    def _write_batches(self, first: int, ranks: list[metrics.Values]) -> None:
        """One row of scalars for each batch, at its number as step."""
        if ranks:
            batches = zip(self._metrics.times, metrics.rows_of(ranks), strict=False)
            self._scalars.write(
                (at, batch_idx, {f"Determined/{name}": value for name, value in row.items()})
                for batch_idx, (at, row) in enumerate(batches, start=first)
                if row
            )

    def _write_scalars(self, found: Mapping[str, Any]) -> None:
        """One row of scalars, at the number of batches trained; other values than numbers are left out."""
        if self.is_chief and self._scalars.enabled:
            values = {name: metrics.as_number(metrics.to_numpy(value)) for name, value in found.items()}
            row = {f"Determined/{name}": value for name, value in values.items() if value is not None}
            if row:
                self._scalars.write([(time.time(), self._trained, row)])

    def _workload_end(self, averages: dict[str, Any]) -> None:
        batches = metrics.average_batches(self.peers.allgather(self._metrics.take_batches()))
        shown = {**self._position(), **averages}
        for callback in self.callbacks.values():
            callback.on_training_workload_end(dict(shown), batches)

    # ---------------------------------------------------------------------------------------------------- validate

    def validate(self, command: Validate) -> Seen:
        with torch.no_grad():
            if not self.full_dataset:
                for model in self.optimisation.models:
                    if isinstance(model, SpreadModel):
                        model.share_buffers()
            part, leave = self._attempt(lambda: self._evaluate(command.test_mode))
            ranks = self.peers.allgather((leave, part))
            leave = self._agree([row[0] for row in ranks])
            if leave is None:
                # Each rank combines for itself: the same result, without another exchange.
                found = self._combine([row[1] for row in ranks if row[1] is not None])
                worth, leave = self._attempt(lambda: self._validated(found))
                outcomes = self.peers.allgather((leave, worth))
                leave = self._agree([row[0] for row in outcomes])
        if leave is not None:
            return Seen(batches=self._trained, leave=True, save_on_leave=leave.save)
        worth_saving, reached = outcomes[0][1] or (False, "nothing")
        decides, enough = reached == "rung", reached == "end"
        return Seen(batches=self._trained, worth_saving=worth_saving, decides=decides, enough=enough)

    def _evaluate(self, test_mode: bool) -> ValidationPart:
        """This rank's share of a validation."""
        self.reducers.reset(training=False)
        for model in self.optimisation.models:
            model.eval()
        for callback in self.callbacks.values():
            callback.on_validation_start()
        if self.full_dataset:
            found = self._evaluate_full_dataset() if self.is_chief else {}
            return ValidationPart(metrics=found, slot=self.reducers.per_slot(training=False))
        for callback in self.callbacks.values():
            callback.on_validation_epoch_start()
        seen = metrics.ValidationMetrics()
        to_device, add = self.to_device, seen.add
        evaluate_batch, get_batch_length = self._evaluate_batch, self.trial.get_batch_length
        for batch_idx, batch in enumerate(self.validation_data):
            get_batch_length(batch)
            if to_device is not None:
                batch = to_device(batch)
            add(evaluate_batch(batch=batch, batch_idx=batch_idx))
            self._evaluated = batch_idx + 1
            if test_mode:
                break
        rows = seen.take()
        for callback in self.callbacks.values():
            callback.on_validation_epoch_end(rows)
        reducers = metrics.reducers_of(self.trial.evaluation_reducer(), list(rows[0])) if rows else {}
        return ValidationPart(
            metrics=metrics.reduce_batches(rows, reducers),
            slot=self.reducers.per_slot(training=False),
            reducers=reducers,
            batches=len(rows),
        )

    def _combine(self, parts: list[ValidationPart]) -> dict[str, Any]:
        """The metrics of all ranks' shares."""
        reduced = metrics.jsonable(
            self.reducers.cross_slot([part.slot for part in parts], training=False), source="a reducer"
        )
        if self.full_dataset:
            return {**parts[0].metrics, **reduced}
        shares = [part for part in parts if part.batches]
        if not shares:
            raise RuntimeError(
                "the validation data is empty: build_validation_data_loader() returned a loader without a batch; "
                "check its dataset, and drop_last with a dataset smaller than a batch"
            )
        if any(share.metrics.keys() != shares[0].metrics.keys() for share in shares):
            raise ValueError(
                "evaluate_batch() must return the same metrics on every rank: "
                + ", ".join(str(sorted(share.metrics)) for share in shares)
            )
        own = metrics.combine_ranks([(share.metrics, share.batches) for share in shares], shares[0].reducers)
        return {**own, **reduced}

    def _validated(self, found: dict[str, Any]) -> tuple[bool, Reached]:
        """Call the callbacks; then ask the host whether the validation is worth saving, and what it has reached."""
        shown = dict(found)
        for callback in self.callbacks.values():
            callback.on_validation_end(shown)
        # Metrics that callbacks add to the dict are reported too.
        self._validation = metrics.jsonable(shown, source="on_validation_end()")
        if self.host.metric is not None:
            _check_metric(self.host.metric, self._validation)
        self._write_scalars(
            {name if name.startswith("val") else f"val_{name}": value for name, value in self._validation.items()}
        )
        if not self.is_chief:
            return False, "nothing"
        for name, value in self._position().items():
            shown.setdefault(name, value)
        reached = self.host.reached(self._validation)
        return self.best and self.host.worth_saving(self._validation), reached

    def _evaluate_full_dataset(self) -> dict[str, Any]:
        found = self._evaluate_all(data_loader=self.validation_data)
        if not isinstance(found, dict):
            raise TypeError(
                f"evaluate_full_dataset() must return a dict of metrics, got {found!r} of type {type(found).__name__}"
            )
        return metrics.jsonable(found, source="evaluate_full_dataset()")

    # ----------------------------------------------------------------------------------------------------- publish

    def publish(self, command: Publish) -> Seen:
        report = Report(
            batches=command.at.batches,
            epochs=self._epochs(),
            training=None if self._training is None else metrics.jsonable(self._training, source="train_batch()"),
            validation=self._validation,
            decides=command.decides,
            final=command.final,
            interrupted=command.interrupted,
        )
        self._training = self._validation = None
        leave: Leave | None = None
        if command.save:
            began = time.perf_counter()
            state = checkpoint.RankState(
                rng=rng.capture(self.device),
                gradients=self.optimisation.pending_gradients(),
                drawn=self.cursor.drawn_from(command.at.batches),
            )
            parts = self.peers.gather((state, self.hears_of_checkpoints)) or []
            uuid, _ = self._on_chief("saving a checkpoint", lambda: self._save(command, report, parts))
            if uuid is not None:
                report = replace(report, checkpoint=uuid)
                _, leave = self._attempt(lambda: self._uploaded(uuid))
            self._usage.saved(time.perf_counter() - began)
        if self.is_chief:
            # Not in the report of the checkpoint, so that two identical runs have identical checkpoints.
            report = replace(report, system=self._usage.take(at_once=command.decides or command.final))
        # Published before any rank leaves: what the host does on a stop may end this process.
        mine = (self.cursor.stop_requested, leave)
        stop, ranks = self._on_chief("publishing metrics", lambda: self._publish(command, report), mine)
        if self._agree([row[1] for row in ranks]) is not None:
            # Nothing is lost: the checkpoint has just been saved.
            self._raise_pending()
            raise ShouldExit
        return Seen(batches=self._trained, stop=stop or any(row[0] for row in ranks))

    def _publish(self, command: Publish, report: Report) -> bool:
        if command.final:
            self._saver.finish()
        else:
            self._saver.check()
        return self.host.publish(report)

    def _uploaded(self, uuid: str) -> None:
        for callback in self.callbacks.values():
            callback.on_checkpoint_upload_end(uuid=uuid)

    def _save(self, command: Publish, report: Report, parts: list[tuple[checkpoint.RankState, bool]]) -> str | None:
        # First, so that memory never holds two copies of the state.
        self._saver.wait()
        state = self.optimisation.state_dict()
        state["callbacks"] = {name: callback.state_dict() for name, callback in self.callbacks.items()}
        for callback in self.callbacks.values():
            callback.on_checkpoint_save_start(state)
        contents = checkpoint.contents(
            state=state, progress=command.at, ranks=[own for own, _ in parts], description=self.description()
        )
        return self._saver.save(
            contents,
            report,
            # Where the search decides, or the trial ends, its checkpoint must be there.
            at_once=command.decides or command.final,
            written=self._written if any(hears for _, hears in parts) else None,
        )

    def _written(self, directory: Path) -> None:
        for callback in self.callbacks.values():
            callback.on_checkpoint_end(str(directory))
            callback.on_checkpoint_write_end(str(directory))

    # ---------------------------------------------------------------------------------------------------- agreement

    def _on_chief(self, doing: str, function: Callable[[], T], mine: Any = None) -> tuple[T, list[Any]]:
        """Call a function on the chief; returns, on all ranks, its result and the list of all ranks' `mine`.

        If it fails, all ranks raise. There is a single exchange, since each takes a millisecond.
        """
        if self.peers.size == 1:
            return function(), [mine]
        outcome: tuple[Any, Exception | str | None] = (None, None)
        error: BaseException | None = None
        if self.is_chief:
            try:
                outcome = (function(), None)
            except (Exception, SystemExit) as caught:
                error, outcome = caught, (None, told(caught))
        ranks = self.peers.allgather((outcome, mine))
        value, failure = ranks[0][0]
        if error is not None:
            raise error
        if failure is not None:
            raise heard(failure, f"rank 0 failed while {doing}")
        return value, [row[1] for row in ranks]

    def _attempt(self, work: Callable[[], T]) -> tuple[T | None, Leave | None]:
        """Call the user's code, and turn what it raises into a value that the other ranks can be told."""
        try:
            return work(), None
        except ShouldExit as request:
            return None, Leave(kind="exit", save=not request.skip_exit_checkpoint)
        except InvalidHP as invalid:
            self._pending = invalid
            return None, Leave(kind="invalid_hp", message=invalid.msg)
        except DataExhausted as exhausted:
            self._pending = exhausted
            return None, Leave(kind="exhausted", message=str(exhausted))
        except (Exception, SystemExit) as error:
            # SystemExit too: a program that exits in one process must not leave the others waiting.
            self._pending = error
            kind: Literal["hung_up", "failed"] = "hung_up" if is_hung_up(error) else "failed"
            return None, Leave(kind=kind, message=f"rank {self.peers.rank}: {error!r}")

    def _agree(self, leaves: list[Leave | None]) -> Leave | None:
        """The reason to leave for all ranks, the strongest of theirs; a failure is raised at once."""
        found = [leave for leave in leaves if leave is not None]
        if not found:
            return None
        leave = max(found, key=lambda leave: Leave.KINDS.index(leave.kind))
        mine = leaves[self.peers.rank]
        if mine is not None and mine.kind == "hung_up" != leave.kind:
            # This rank's error is only a consequence of another's leaving.
            self._pending = None
        match leave.kind:
            case "failed" | "hung_up":
                raise self._pending or PeerFailed(f"training failed on {leave.message}")
            case "invalid_hp":
                self._pending = self._pending or InvalidHP(leave.message)
            case "exhausted":
                self._pending = self._pending or DataExhausted(leave.message)
        return leave

    # --------------------------------------------------------------------------------------------------------------

    def _epochs(self) -> float | None:
        length = self.cursor.epoch_length
        return None if length is None else self._trained / length

    def _position(self) -> dict[str, Any]:
        return {"batches": self._trained, "epochs": self._epochs() or 0.0}


def _check_metric(metric: str, found: Mapping[str, Any]) -> None:
    if metric not in found:
        raise SearcherMetricError(
            f"searcher.metric: the search compares {metric!r}, but validation returned {sorted(found)}; "
            "return it from evaluate_batch() or evaluate_full_dataset(), or name one of these"
        )
    if metrics.as_number(found[metric]) is None:
        raise SearcherMetricError(f"searcher.metric: {metric!r} is {found[metric]!r}, not a number")


def _evaluate_batch(trial: Trial) -> Callable[..., Any]:
    """`evaluate_batch` with or without `batch_idx`, which Determined's user guide leaves out."""
    evaluate_batch: Callable[..., Any] = trial.evaluate_batch
    try:
        parameters = inspect.signature(evaluate_batch).parameters
    except (TypeError, ValueError):
        return evaluate_batch
    kinds = {parameter.kind for parameter in parameters.values()}
    if parameters and "batch_idx" not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        return lambda batch, batch_idx: evaluate_batch(batch=batch)
    return evaluate_batch


def _epoch_start(callback: Callback) -> Callable[[int], None]:
    """`on_training_epoch_start` with or without its argument, which old versions of Determined lack."""
    hook: Any = callback.on_training_epoch_start
    if inspect.signature(hook).parameters:
        return lambda epoch_idx: hook(epoch_idx)
    log.warning(
        "%s.on_training_epoch_start() without epoch_idx is deprecated: add the parameter", type(callback).__name__
    )
    return lambda epoch_idx: hook()
