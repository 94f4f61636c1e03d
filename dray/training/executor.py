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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from typing_extensions import assert_never

from dray.training import rng
from dray.training.checkpoint import files
from dray.training.checkpoint.saver import Saver
from dray.training.checkpoint.snapshot import on_cpu
from dray.training.errors import DataExhausted, ShouldExit
from dray.training.evaluation import Evaluation
from dray.training.host import Host, Reached, Report
from dray.training.loop import Command, Publish, Seen, Train, Validate, drive
from dray.training.metrics import accumulator
from dray.training.metrics.reducers import ReducerRegistry
from dray.training.metrics.searcher_metric import check_metric
from dray.training.metrics.tensorboard import TensorBoard
from dray.training.optimisation import Optimisation
from dray.training.parallel.agreement import Agreement, on_chief
from dray.training.parallel.ddp import SpreadModel
from dray.training.parallel.distributed import DistributedContext
from dray.training.plan import Plan
from dray.training.position import Cursor
from dray.training.progress import Progress
from dray.training.trial import Callback, Trial
from dray.training.usage import Usage

log = logging.getLogger(__name__)


def run(plan: Plan, at: Progress, executor: Executor) -> Progress:
    """Run a plan to its end, under the executor's profiler.

    Raises:
        InvalidHP, DataExhausted: raised after what was trained has been saved.
    """
    steps = drive(plan, at)
    seen: Seen | None = None
    with executor.agreement.listening(), _watched(executor), executor.profiler or contextlib.nullcontext():
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


@dataclass(kw_only=True, eq=False, repr=False)
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
        evaluation: validates.
        description: returns what every checkpoint says about the trial; called at the first one.
        listens_to_batches: whether any rank has a callback with `on_training_workload_end`, which gets each batch's
            metrics.
        hears_of_checkpoints: whether any rank has a callback with a hook for written checkpoints: then training waits
            for the write, on all ranks.
        scalars: where the chief writes metrics for TensorBoard.
        profiler: a `torch.profiler.profile`, stepped after each batch.
        best: whether to ask the host which validations are worth saving.
    """

    trial: Trial
    callbacks: Mapping[str, Callback]
    optimisation: Optimisation
    reducers: ReducerRegistry
    cursor: Cursor
    device: torch.device
    to_device: Callable[[Any], Any] | None
    peers: DistributedContext
    host: Host
    training_data: Iterator[Any]
    evaluation: Evaluation
    description: Callable[[], files.Description]
    listens_to_batches: bool
    hears_of_checkpoints: bool
    scalars: TensorBoard
    profiler: Any = None
    best: bool = False

    def __post_init__(self) -> None:
        self.is_chief = self.peers.rank == 0
        self.agreement = Agreement(
            self.peers,
            asked=self.host.asked_to_stop,
            trained=lambda: self._trained,
            device=self.device,
        )
        self._metrics = accumulator.TrainingMetrics(keep_batches=self.listens_to_batches)
        self._train_batch = self.optimisation.forward(self.trial.train_batch)
        self._epoch_starts = [_epoch_start(callback) for callback in self.callbacks.values()]
        self._saver = Saver(self.host)
        self._usage = Usage(self.device)
        self._trained = self.cursor.initial_batch
        self._training: dict[str, Any] | None = None
        self._validation: dict[str, Any] | None = None
        if self.is_chief and self.scalars.enabled and self._trained > 0:
            # A trial that was killed resumes from its last checkpoint, and writes some batches again. The validation at
            # that checkpoint stays.
            self.scalars.restart(self._trained + 1)

    def progress(self) -> tuple[int, int]:
        """As `Host.watch` needs it: (batches trained, batches of the latest validation)."""
        return self._trained, self.evaluation.batches

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
        on_chief(self.peers, "saving the last checkpoint", self._saver.finish)
        self.agreement.raise_error()

    def abandon(self) -> None:
        """After an error: wait for the checkpoint that is being saved."""
        self._saver.abandon()

    # ------------------------------------------------------------------------------------------------------- train

    def train(self, command: Train) -> Seen:
        self.reducers.reset(training=True)
        self._metrics.keep_times = self.is_chief and self.scalars.enabled
        self._metrics.reset()
        first = self._trained
        for model in self.optimisation.models:
            if not model.training or self._trained == self.cursor.initial_batch:
                model.train()
        slot, leave = self.agreement.stretch(lambda: self._train_until(command.until), training=True)
        # Where collectives were aborted, these are garbage, or can't be read at all.
        values, late = self.agreement.attempt(self._metrics.take_values)
        leave = leave or late
        sound = values is not None and (leave is None or not leave.aborted)
        values = values if values is not None and sound else {}
        scalars = values if self.scalars.enabled and sound else None
        mine = (self._trained, leave, accumulator.sums_of(values), slot, scalars, self._usage.machine())
        trained, leaves, sums, slots, rows, machines = zip(*self.agreement.exchange(mine, leave), strict=True)
        self._usage.hear(machines)
        if self._metrics.keep_times:
            self._write_batches(first, [row for row in rows if row is not None])
        leave = self.agreement.agree(leaves, training=True)
        self._trained = min(trained)
        averages: dict[str, Any] = {} if leave is not None and leave.aborted else dict(accumulator.average_sums(sums))
        if leave is not None or self._trained < command.until:
            self._training = averages or None
            save = leave is None or leave.save
            return Seen(batches=self._trained, leave=True, save_on_leave=save, interrupted=leave is None)
        reduced = self.reducers.cross_slot(slots, training=True)
        averages.update({name: accumulator.to_numpy(value) for name, value in reduced.items()})
        self._training = averages
        self._write_scalars(reduced)
        if self._metrics.keep_batches:
            _, leave = self.agreement.together(lambda: self._workload_end(averages))
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
        agreement, usage, clock = self.agreement, self._usage, time.perf_counter
        if self._trained >= agreement.limit and agreement.reached(self._trained):
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
            if batch_idx + 1 >= agreement.limit and agreement.reached(batch_idx + 1):
                return self.reducers.per_slot(training=True)
            since = clock()
        if self._trained < until:
            raise DataExhausted(
                f"the training data ended after {self._trained} batches, but training goes on to {until} or more; "
                "return a pytorch.DataLoader, or repeat the data yourself (see samplers.RepeatBatchSampler)"
            )
        return self.reducers.per_slot(training=True)

    def _write_batches(self, first: int, ranks: list[accumulator.Values]) -> None:
        """One row of scalars for each batch, at its number as step."""
        if ranks:
            batches = zip(self._metrics.times, accumulator.rows_of(ranks), strict=False)
            self.scalars.write(
                (at, batch_idx, {f"Determined/{name}": value for name, value in row.items()})
                for batch_idx, (at, row) in enumerate(batches, start=first)
                if row
            )

    def _write_scalars(self, found: Mapping[str, Any]) -> None:
        """One row of scalars, at the number of batches trained; other values than numbers are left out."""
        if self.is_chief and self.scalars.enabled:
            values = {name: accumulator.as_number(accumulator.to_numpy(value)) for name, value in found.items()}
            row = {f"Determined/{name}": value for name, value in values.items() if value is not None}
            if row:
                self.scalars.write([(time.time(), self._trained, row)])

    def _workload_end(self, averages: dict[str, Any]) -> None:
        batches = accumulator.average_batches(self.peers.allgather(self._metrics.take_batches()))
        shown = {**self._position(), **averages}
        for callback in self.callbacks.values():
            callback.on_training_workload_end(dict(shown), batches)

    # ---------------------------------------------------------------------------------------------------- validate

    def validate(self, command: Validate) -> Seen:
        with torch.no_grad():
            if not self.evaluation.full_dataset:
                for model in self.optimisation.models:
                    if isinstance(model, SpreadModel):
                        model.share_buffers()
            shares, leave = self.agreement.together(lambda: self.evaluation.share(test_mode=command.test_mode))
            if leave is None:
                found = self.evaluation.combine(shares)
                answers, leave = self.agreement.together(lambda: self._validated(found, command.saved))
        if leave is not None:
            return Seen(batches=self._trained, leave=True, save_on_leave=leave.save)
        worth_saving, reached = answers[0]
        decides, enough = reached == "rung", reached == "end"
        return Seen(batches=self._trained, worth_saving=worth_saving, decides=decides, enough=enough)

    def _validated(self, found: dict[str, Any], saved: bool) -> tuple[bool, Reached]:
        """Call the callbacks; then ask the host whether the validation is worth saving, and what it has reached."""
        shown = dict(found)
        for callback in self.callbacks.values():
            callback.on_validation_end(shown)
        # Metrics that callbacks add to the dict are reported too.
        self._validation = accumulator.jsonable(shown, source="on_validation_end()")
        if self.host.metric is not None:
            check_metric(self.host.metric, self._validation)
        self._write_scalars(
            {name if name.startswith("val") else f"val_{name}": value for name, value in self._validation.items()}
        )
        if not self.is_chief:
            return False, "nothing"
        for name, value in self._position().items():
            shown.setdefault(name, value)
        reached = self.host.reached(self._validation)
        return self.best and not saved and self.host.worth_saving(self._validation), reached

    # ----------------------------------------------------------------------------------------------------- publish

    def publish(self, command: Publish) -> Seen:
        report = Report(
            batches=command.at.batches,
            epochs=self._epochs(),
            training=None if self._training is None else accumulator.jsonable(self._training, source="train_batch()"),
            validation=self._validation,
            decides=command.decides,
            final=command.final,
            interrupted=command.interrupted,
        )
        self._training = self._validation = None
        leave = None
        if command.save:
            began = time.perf_counter()
            begun = self.cursor.batch_idx
            # Of a batch that was begun, but does not count, because a rank has left in it: it will be trained again.
            spoilt = begun is not None and begun >= self._trained
            gradients = None if spoilt else self.optimisation.pending_gradients()
            state = files.RankState(
                rng=rng.capture(self.device),
                gradients=gradients if self.peers.size == 1 else on_cpu(gradients),
            )
            states = self.peers.gather(state) or []
            uuid, _ = on_chief(self.peers, "saving a checkpoint", lambda: self._save(command, report, states))
            if uuid is not None:
                report = replace(report, checkpoint=uuid)
                _, leave = self.agreement.attempt(lambda: self._uploaded(uuid))
            self._usage.saved(time.perf_counter() - began)
        if self.is_chief:
            # Not in the report of the checkpoint, so that two identical runs have identical checkpoints.
            report = replace(report, system=self._usage.take(at_once=command.decides or command.final))
        # Published before any rank leaves: what the host does on a stop may end this process.
        mine = (self.cursor.stop_requested, leave)
        stop, ranks = on_chief(self.peers, "publishing metrics", lambda: self._publish(command, report), mine)
        if self.agreement.agree([row[1] for row in ranks]) is not None:
            # Nothing is lost: the checkpoint has just been saved.
            self.agreement.raise_error()
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

    def _save(self, command: Publish, report: Report, states: list[files.RankState]) -> str | None:
        # First, so that memory never holds two copies of the state.
        self._saver.wait()
        state = self.optimisation.state_dict()
        state["callbacks"] = {name: callback.state_dict() for name, callback in self.callbacks.items()}
        for callback in self.callbacks.values():
            callback.on_checkpoint_save_start(state)
        contents = files.contents(state=state, progress=command.at, ranks=states, description=self.description())
        return self._saver.save(
            contents,
            report,
            # Where the search decides, or the trial ends, its checkpoint must be there.
            at_once=command.decides or command.final,
            written=self._written if self.hears_of_checkpoints else None,
        )

    def _written(self, directory: Path) -> None:
        for callback in self.callbacks.values():
            callback.on_checkpoint_end(str(directory))
            callback.on_checkpoint_write_end(str(directory))

    def _epochs(self) -> float | None:
        length = self.cursor.epoch_length
        return None if length is None else self._trained / length

    def _position(self) -> dict[str, Any]:
        return {"batches": self._trained, "epochs": self._epochs() or 0.0}


def _epoch_start(callback: Callback) -> Callable[[int], None]:
    """`on_training_epoch_start` with or without its argument, which old versions of Determined lack."""
    hook: Any = callback.on_training_epoch_start
    if inspect.signature(hook).parameters:
        return lambda epoch_idx: hook(epoch_idx)
    log.warning(
        "%s.on_training_epoch_start() without epoch_idx is deprecated; add the parameter", type(callback).__name__
    )
    return lambda epoch_idx: hook()
