"""Performs the loop's commands with torch: trains, validates, publishes, and returns the outcome of each.

Every rank has an executor. Ranks may differ, for example if one was asked to stop or the chief got the host's answer.
They agree here, in one exchange per command, before the loop gets the outcome.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from typing_extensions import assert_never

from dray.training.batch_loop import BatchLoop
from dray.training.callback import Hooks
from dray.training.checkpoint.checkpointer import Checkpointer
from dray.training.checkpoint.files import Description
from dray.training.errors import ShouldExit
from dray.training.evaluation import Evaluation
from dray.training.hints import Hints
from dray.training.host import Host, Reached, Report
from dray.training.loop import Command, Outcome, Publish, Train, Validate, drive
from dray.training.metrics.checks import OtherMetrics, check_metrics
from dray.training.metrics.reducers import check_names
from dray.training.metrics.tensorboard import TensorBoard
from dray.training.metrics.training import (
    Sums,
    TrainingMetrics,
    Values,
    average_batches,
    average_sums,
    rows_of,
    sums_of,
)
from dray.training.metrics.values import jsonable, to_numpy
from dray.training.parallel.agreement import Agreement
from dray.training.parallel.ddp import DDPModel
from dray.training.parallel.exchange import Leave, Reason, on_chief
from dray.training.parallel.gradient_check import GradientCheck, Norms
from dray.training.parallel.sharding import is_sharded, sync_buffers
from dray.training.plan import Plan
from dray.training.progress import Progress, StopRequest
from dray.training.trial import Rank
from dray.training.usage import Flops, Usage, UsageShare

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingShare:
    """One rank's message to the others after training."""

    trained: int  # batches in total
    leave: Leave | None
    steps: int
    sums: Sums
    reduced: list[Any] | None
    scalars: Values | None  # each batch's metrics, if they go to TensorBoard
    usage: UsageShare
    stopped: bool  # on the chief: the search has stopped the trial at its last checkpoint
    norms: Norms


@dataclass(kw_only=True, eq=False, repr=False)
class Executor:
    """Performs the commands of one rank."""

    rank: Rank
    host: Host
    training_data: Iterator[Any]  # endless, and already at the right position
    evaluation: Evaluation
    description: Callable[[], Description]  # called at the first checkpoint
    hooks: Hooks  # of callbacks on any rank
    scalars: TensorBoard
    full_checkpoints: bool = False  # gather sharded models on the chief, and save them whole
    profiler: Any = None  # a `torch.profiler.profile`, stepped after each batch
    flops_per_record: Flops = None
    set_epoch: Callable[[int], None] | None = None  # gives the training data the number of an epoch
    data_position: Callable[[int], dict[str, Any]] | None = None  # of the training loader, by batches trained

    def __post_init__(self) -> None:
        rank, position = self.rank, self.rank.position
        self.checkpointer = Checkpointer(
            rank=rank,
            host=self.host,
            description=self.description,
            hooks=self.hooks,
            full=self.full_checkpoints,
            data_position=self.data_position,
        )
        self.agreement = Agreement(
            rank.peers,
            stop_requested=lambda: self.checkpointer.saver.stops() or self.host.stop_requested(),
            trained=lambda: position.trained,
            device=rank.device,
        )
        self._metrics = TrainingMetrics(keep_batches=self.hooks.batch_metrics)
        self._usage = Usage(rank.device, self.flops_per_record)
        self._batches = BatchLoop(
            rank=rank,
            data=self.training_data,
            agreement=self.agreement,
            metrics=self._metrics,
            usage=self._usage,
            profiler=self.profiler,
            set_epoch=self.set_epoch,
            after_step=self.checkpointer.reserve if rank.device.type == "cuda" else None,
        )
        optimisation = rank.optimisation
        if rank.peers.size > 1 and (rank.mesh.model_parallel > 1 or not optimisation.has_sharded):
            optimisation.gradient_check = GradientCheck(optimisation.models, rank.mesh)
        if rank.peers.size > 1 and not optimisation.has_sharded:
            optimisation.step_timer = self._usage.steps
        optimisation.begin()
        self._hints, self._others = Hints(rank), OtherMetrics()
        # Metrics not published yet.
        self._training: dict[str, Any] | None = None
        self._validation: dict[str, Any] | None = None
        if rank.is_chief and self.scalars.enabled and position.trained > 0:
            # A trial that was killed resumes from its last checkpoint, and writes some batches a second time. The
            # validation at that checkpoint stays.
            self.scalars.restart(position.trained + 1)

    def run(self, plan: Plan, at: Progress) -> Progress:
        """Run a plan from `at` to its end, under the profiler, and return the final progress.

        Raises:
            InvalidHP, DataExhausted: raised after the training so far has been saved.
        """
        steps = drive(plan, at)
        outcome: Outcome | None = None
        timed = self.rank.optimisation.models if self.rank.optimisation.step_timer is not None else ()
        with (
            self.agreement.listening(),
            self._watched(),
            self._usage.steps.watching(timed),
            self.profiler or contextlib.nullcontext(),
        ):
            while True:
                try:
                    command = next(steps) if outcome is None else steps.send(outcome)
                except StopIteration as end:
                    self.checkpointer.finish()
                    self.agreement.raise_error()
                    return end.value  # type: ignore[no-any-return]
                # Outside of that try, because a StopIteration from the trial's code is an error, not the plan's end.
                try:
                    outcome = self.perform(command)
                except BaseException:
                    self.checkpointer.saver.abandon()
                    raise

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Let the host poll the progress during the block."""

        def progress() -> tuple[int, int]:
            return self.rank.position.trained, self.evaluation.batches

        self.host.watch(progress)
        try:
            yield
        finally:
            # The host outlives the executor, and must not keep it or its DataLoader workers alive.
            last = progress()
            self.host.watch(lambda: last)

    def perform(self, command: Command) -> Outcome:
        began, before = time.perf_counter(), self.rank.position.trained
        match command:
            case Train():
                outcome, phase = self.train(command), "training"
            case Validate():
                with self.rank.optimisation.alone():
                    outcome, phase = self.validate(command), "validating"
            case Publish():
                with self.rank.optimisation.alone():
                    outcome, phase = self.publish(command), "waiting"
            case _:
                assert_never(command)
        self._usage.record(phase, time.perf_counter() - began, self.rank.position.trained - before)
        return outcome

    def train(self, command: Train) -> Outcome:
        rank, position, agreement, metrics = self.rank, self.rank.position, self.agreement, self._metrics
        optimisation, check = rank.optimisation, rank.optimisation.gradient_check
        rank.reducers.reset(training=True)
        metrics.keep_times = rank.is_chief and self.scalars.enabled
        metrics.reset()
        first = position.trained
        if check is not None:
            check.begin(command.until)
        reduced, leave = agreement.section(lambda: self._batches.train(command.until), training=True)
        self._usage.steps.synchronized()
        taken, late = agreement.catch(lambda: (metrics.take_values(), [] if check is None else check.norms()))
        leave = leave or late
        # After an abort the metrics are garbage or unreadable.
        values, norms = ({}, []) if taken is None or (leave is not None and leave.aborted) else taken
        stopped: bool | None = False
        if leave is None or leave.reason is not Reason.FAILED:
            stopped, late = agreement.catch(self.checkpointer.saver.answer)
            leave = leave or late
        share = TrainingShare(
            trained=position.trained,
            leave=leave,
            steps=optimisation.steps,
            sums=sums_of(values),
            reduced=reduced,
            scalars=values if self.scalars.enabled else None,
            usage=self._usage.share(),
            stopped=bool(stopped),
            norms=norms,
        )
        ranks = agreement.exchange(share, leave)
        averaged = rank.averaged(ranks)
        usages = [each.usage for each in ranks]
        self._usage.add_ranks(usages, usages[:: rank.mesh.sharing])
        scalars = [each.scalars for each in averaged if each.scalars]
        if metrics.keep_times and scalars and not ranks[0].stopped:
            self.scalars.write_batches(first, metrics.times, rows_of(scalars))
        leave = agreement.agree([each.leave for each in ranks], training=True)
        if ranks[0].stopped:
            position.trained = first
            return Outcome(stop=True)
        position.trained = min(each.trained for each in ranks)
        if leave is None:
            if check is not None:
                check.compare([each.norms for each in ranks])
            if rank.is_chief:
                self._hints.warn()
        averages: dict[str, Any] = {}
        if leave is None or not leave.aborted:
            averages.update(average_sums([each.sums for each in averaged]))
        if leave is not None or position.trained < command.until:
            self._training = averages or None
            save = leave is None or self._may_save(leave, torn=len({each.steps for each in ranks}) > 1)
            return Outcome(batches=position.trained, leave=True, save_on_leave=save, interrupted=leave is None)
        reduced_metrics = rank.reducers.cross_slot([each.reduced or [] for each in averaged], training=True)
        check_names(reduced_metrics, averages, "train_batch()")
        averages.update({name: to_numpy(value) for name, value in reduced_metrics.items()})
        self._training = averages
        if rank.is_chief:
            self.scalars.write_metrics(position.trained, reduced_metrics)
        if self.hooks.batch_metrics:
            _, leave = agreement.on_all(lambda: self._workload_end(averages))
            if leave is not None:
                return Outcome(batches=position.trained, leave=True, save_on_leave=leave.save)
        return Outcome(batches=position.trained)

    def _may_save(self, leave: Leave, *, torn: bool = False) -> bool:
        """Whether the training so far can be saved although a rank leaves. `torn`: ranks have made different numbers of
        steps, so some shards would be older than others."""
        if not leave.save or not self.rank.optimisation.has_sharded:
            return leave.save
        if lost := torn or self.rank.optimisation.has_lost_gradients:
            log.warning(
                "a rank left in the middle of %s: training since the last checkpoint is lost, because the model is "
                "sharded. To keep it, call context.set_stop_requested(True)",
                "a batch" if torn else "an aggregation of gradients",
            )
        return not lost

    def _workload_end(self, averages: dict[str, Any]) -> None:
        batches = average_batches(self.rank.averaged(self.rank.peers.allgather(self._metrics.take_batches())))
        for callback in self.rank.callbacks.values():
            callback.on_training_workload_end({**self._counts(), **averages}, batches)

    def validate(self, command: Validate) -> Outcome:
        evaluation, optimisation = self.evaluation, self.rank.optimisation
        with torch.no_grad():
            if not evaluation.full_dataset:
                for model in optimisation.models:
                    if isinstance(model, DDPModel):
                        model.sync_buffers()
                    elif is_sharded(model):
                        sync_buffers(model)
            shares, leave = self.agreement.on_all(
                lambda: evaluation.share(test_mode=command.test_mode), training=optimisation.validates_together
            )
            if leave is None:
                metrics = evaluation.combine(shares)
                answers, leave = self.agreement.on_all(lambda: self._validated(metrics, command.compare))
        if leave is not None:
            return Outcome(leave=True, save_on_leave=self._may_save(leave))
        is_best, reached = answers[0]
        return Outcome(is_best=is_best, decides=reached == "rung", length_reached=reached == "end")

    def _validated(self, metrics: dict[str, Any], compare: bool) -> tuple[bool, Reached]:
        """Call the callbacks, then ask the host whether this validation is the best, and whether it reaches a rung."""
        shown = dict(metrics)
        for callback in self.rank.callbacks.values():
            callback.on_validation_end(shown)
        # Metrics that callbacks add to the dict are reported too.
        self._validation = jsonable(shown, source="on_validation_end()")
        check_metrics(self.host.metrics, self._validation)
        if not self.rank.is_chief:
            return False, "nothing"
        self.scalars.write_metrics(self.rank.position.trained, self._validation, validation=True)
        for name, value in self._counts().items():
            shown.setdefault(name, value)
        reached = self.host.reached(self._validation)
        return compare and self.host.is_best(self._validation), reached

    def publish(self, command: Publish) -> Outcome:
        rank, position = self.rank, self.rank.position
        report = Report(
            batches=command.at.batches,
            epochs=position.epochs,
            training=None if self._training is None else jsonable(self._training, source="train_batch()"),
            validation=self._validation,
            decides=command.decides,
            final=command.final,
            interrupted=command.interrupted,
        )
        self._training = self._validation = None
        if rank.is_chief:
            self._others.warn(report.training or {}, "train_batch()")
            known = {name: value for name, value in (report.validation or {}).items() if value is not None}
            self._others.warn(known, "validation")
        leave = None
        if command.save:
            began = time.perf_counter()
            if (uuid := self.checkpointer.save(command, report)) is not None:
                report = replace(report, checkpoint=uuid)
                _, leave = self.agreement.catch(lambda: self.checkpointer.uploaded(uuid))
            self._usage.saved(time.perf_counter() - began)
        if rank.is_chief:
            # Left out of the checkpoint's report, so that two identical runs have identical checkpoints.
            report = replace(report, system=self._usage.flush(at_once=command.decides or command.final))
            self.scalars.write_system(report.batches, report.system or {})
        # Published before any rank leaves, since the host may end this process at a stop.
        own = (position.stop is StopRequest.REQUESTED, leave)
        stop, ranks = on_chief(rank.peers, "publishing metrics", lambda: self.checkpointer.saver.publish(report), own)
        if self.agreement.agree([row[1] for row in ranks]) is not None:
            # Nothing is lost: the checkpoint has just been saved.
            self.agreement.raise_error()
            raise ShouldExit
        return Outcome(stop=stop or any(row[0] for row in ranks))

    def _counts(self) -> dict[str, Any]:
        return {"batches": self.rank.position.trained, "epochs": self.rank.position.epochs or 0.0}
