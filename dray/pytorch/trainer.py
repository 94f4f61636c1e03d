"""`Trainer.fit()`: builds the plan and the executor, loads a checkpoint, runs the loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch

from dray.pytorch import loaders
from dray.pytorch.batch_functions import data_length
from dray.pytorch.context import PyTorchTrialContext
from dray.pytorch.description import describe
from dray.pytorch.early_stopping import EarlyStopping
from dray.pytorch.init import init
from dray.pytorch.restore import open_checkpoint, restore, start_at
from dray.pytorch.streams import Stream
from dray.pytorch.trial import PyTorchTrial, overrides
from dray.pytorch.trial_run import DEFAULT_POLICY, FitArguments, length_of, policy_of
from dray.training import pretrained
from dray.training.callback import Hooks, PyTorchCallback, checked_callbacks, hooks_of
from dray.training.errors import ShouldExit
from dray.training.evaluation import Evaluation
from dray.training.executor import Executor
from dray.training.parallel.exchange import all_or_none, on_chief
from dray.training.parallel.fully_shard import is_replaced
from dray.training.profiling import Window
from dray.training.progress import Progress
from dray.training.trial import Rank, before_training
from dray.training.units import Batch, TrainUnit

log = logging.getLogger(__name__)


class Trainer:
    """Trains a trial.

    Args:
        trial: an instance of your `PyTorchTrial`.
        context: the context that was passed to its constructor.

    Raises:
        TypeError: the trial is not an instance of a `PyTorchTrial`.
    """

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        if not isinstance(trial, PyTorchTrial):
            raise TypeError(f"Trainer needs an instance of a pytorch.PyTorchTrial, got {trial!r}")
        self._trial = trial
        self._context = context

    def configure_profiler(
        self,
        sync_timings: bool = True,
        enabled: bool = False,
        begin_on_batch: int = 0,
        end_after_batch: int | None = None,
    ) -> None:
        """Has no effect: Determined's profiler was a service of its cluster."""
        if enabled:
            log.error("configure_profiler() has no effect; use context.set_profiler() or torch.profiler")

    def fit(
        self,
        checkpoint_period: TrainUnit | None = None,
        validation_period: TrainUnit | None = None,
        max_length: TrainUnit | None = None,
        reporting_period: TrainUnit = Batch(100),  # noqa: B008 - immutable in effect, and shown as the default
        checkpoint_policy: str = DEFAULT_POLICY,
        latest_checkpoint: str | None = None,
        step_zero_validation: bool = False,
        test_mode: bool = False,
        profiling_enabled: bool | None = None,
    ) -> None:
        """Train up to `max_length`, from `latest_checkpoint` or from the beginning.

        Periods are `Batch(n)` or `Epoch(n)`. An int means every n-th one (every one if n <= 0); a container of ints
        means those, counted from 1. Training always ends with a validation and a checkpoint.

        A local run shows its progress, unless `logging.getLogger("dray").setLevel(logging.WARNING)` turns this off.
        Ctrl-C ends the run after the current batch, with a checkpoint; a second Ctrl-C ends it at once.

        Args:
            checkpoint_period: when to save. None: in an experiment, its config's min_checkpoint_period.
            validation_period: when to validate. None: in an experiment, its config's min_validation_period.
            max_length: the total length in batches or epochs, including the part before a resume. None: the length
                passed to `pytorch.init()`. In an experiment, a max_length of the searcher takes precedence.
            reporting_period: when to report training metrics, besides at each validation and checkpoint.
            checkpoint_policy: "best": save after a validation that is the experiment's best; "all": save after each
                validation; "none": save only at checkpoint_period and at the end. A local run treats "best" as "all",
                with a warning. Its default is "none" if checkpoint_period is given, and "all" otherwise.
            latest_checkpoint: a checkpoint's id, as passed to `on_checkpoint_upload_end`, or its directory. "last": in
                a local run, the latest valid checkpoint of the newest run with the same name (`exp_conf["name"]`, or
                the script's) that has one, completed or not; in an experiment, the trial's own latest checkpoint. None,
                or "last" without any checkpoint: train from the beginning.
            step_zero_validation: validate before the first batch.
            test_mode: train on one batch, validate on one, save and return.
            profiling_enabled: has no effect.

        Raises:
            ValueError: max_length is missing, or differs from that of `pytorch.init()`; a period or length is invalid;
                no model or no optimizer was wrapped; an optimizer was created before its model was sharded; both or
                neither of the evaluate methods are overridden; the checkpoint does not fit the trial; in several
                processes, a loader's sampler divides the data a second time.
            TypeError: a period or length is neither Batch nor Epoch.
            RuntimeError: a loader is not a `pytorch.DataLoader`; the training or validation data is empty; ranks
                have loaded different pretrained weights.
            FileNotFoundError: there is no such checkpoint.
            KeyboardInterrupt: Ctrl-C ended a local run; raised on every rank.
        """
        if profiling_enabled:
            log.error("fit(profiling_enabled=True) has no effect; use context.set_profiler() or torch.profiler")
        run, trial = self._context._run, self._trial
        arguments = FitArguments(
            length=length_of(max_length, run),
            policy=policy_of(checkpoint_policy, checkpoint_period, run),
            reporting_period=reporting_period,
            validation_period=run.host.validation_period if validation_period is None else validation_period,
            checkpoint_period=run.host.checkpoint_period if checkpoint_period is None else checkpoint_period,
            step_zero_validation=step_zero_validation,
            test_mode=test_mode,
        )
        run.length = arguments.length
        with _ending_early(), contextlib.ExitStack() as stack:
            stack.callback(run.position.end)
            if latest_checkpoint == "last":
                latest_checkpoint, _ = on_chief(run.peers, "looking for the last checkpoint", run.host.last_checkpoint)
            resumed = open_checkpoint(run, latest_checkpoint)
            source = open_checkpoint(run, run.host.source_checkpoint) if resumed is None else None

            # Build. A rank that fails makes the others fail too, instead of waiting for it.
            with all_or_none(run.peers, "starting training"):
                full_dataset = _check_trial(trial, self._context)
                at = start_at(run, resumed)
                callbacks = self._start_callbacks(at.batches, latest_checkpoint, stack)
                data = loaders.training_data(trial.build_training_data_loader(), run, resumed)
                if data.begin < at.batches:
                    at = Progress(batches=data.begin, saved=data.begin)
                    run.position.start(data.begin)
            run.position.epoch_length, hooks = self._agree(data.batches, callbacks)

            with all_or_none(run.peers, "starting training"):
                validation_loader = trial.build_validation_data_loader()
                validation_data, spare = loaders.validation_data(validation_loader, run, full_dataset=full_dataset)
                plan = arguments.plan(at, run)
                stack.enter_context(run.host.training(plan, at.batches, run.peers))
                stream = data.batches if isinstance(data.batches, Stream) else None
                restore(run, resumed, source, callbacks, stream)
                for prepare in before_training:
                    prepare(run.optimisation.models)
                for each in callbacks.values():
                    each.on_training_start()
                rank = self._rank(callbacks)
                executor = Executor(
                    rank=rank,
                    host=run.host,
                    # After the hooks, because worker processes get copies of the data set.
                    training_data=stack.enter_context(loaders.iterating(data.batches, run.seed)),
                    evaluation=Evaluation(rank=rank, data=validation_data, full_dataset=full_dataset, spare=spare),
                    description=cache(partial(describe, trial, run, data.division)),
                    full_checkpoints=(run.config or {}).get("checkpoint_format") == "full",
                    hooks=hooks,
                    scalars=run.tensorboard,
                    profiler=self._profiler(at.batches),
                    flops_per_record=run.flops_per_record,
                    set_epoch=data.set_epoch,
                    data_position=None if stream is None else stream.state_dict,
                )
            executor.run(plan, at)

    def _start_callbacks(
        self, first: int, checkpoint: str | None, stack: contextlib.ExitStack
    ) -> dict[str, PyTorchCallback]:
        callbacks = checked_callbacks(self._trial.build_callbacks())
        for each in callbacks.values():
            if isinstance(each, EarlyStopping):
                each.context = self._context
            each.on_trial_startup(first, checkpoint)
            stack.callback(each.on_trial_shutdown)
        return callbacks

    def _rank(self, callbacks: Mapping[str, PyTorchCallback]) -> Rank:
        run, trial = self._context._run, self._trial
        return Rank(
            trial=trial,
            callbacks=callbacks,
            optimisation=run.optimisation,
            reducers=run.reducers,
            device=run.device,
            to_device=run.batch_mover(),
            peers=run.peers,
            # Called for each batch, so without the method's frame if the trial does not override it.
            batch_length=trial.get_batch_length if overrides(trial, "get_batch_length") else data_length,
            batch_tokens=trial.get_batch_tokens if overrides(trial, "get_batch_tokens") else None,
            mesh=run.mesh_shape,
        )

    def _profiler(self, first: int) -> torch.profiler.profile | None:
        """The trial's own profiler, or the config's, for a run that begins at the batch `first`."""
        run, own = self._context._run, self._context.profiler
        section = run.section("profiling")
        if not section.get("enabled"):
            return own
        if own is not None:
            log.info("profiling has no effect: %s calls set_profiler() itself", type(self._trial).__name__)
            return own
        names = ("begin_on_batch", "end_after_batch")
        window = {name: section[name] for name in names if section.get(name) is not None}
        return Window(
            first=first, rank=run.peers.rank, directory=run.host.tensorboard_path, device=run.device, **window
        )

    def _agree(self, batches: Any, callbacks: Mapping[str, PyTorchCallback]) -> tuple[int | None, Hooks]:
        """The epoch length, and the hooks that callbacks of any rank have, agreed on by all ranks."""
        run, models = self._context._run, self._context.models
        pretrained.hash_on_chiefs(models, run.peers)
        if isinstance(batches, Stream):
            batches.agree()
        own = loaders.batches_per_epoch(batches, run), hooks_of(callbacks), pretrained.digest_of(models)
        ranks = run.peers.allgather(own)
        pretrained.check_same([digest for *_, digest in ranks])
        # All ranks use the chief's epoch length: shards may differ by a batch.
        epoch_length = ranks[0][0]
        if epoch_length == 0:
            raise RuntimeError(
                "the training data is empty: build_training_data_loader() returned a loader without a batch; check its "
                "dataset, and drop_last with a dataset smaller than a batch"
            )
        return epoch_length, Hooks(
            batch_metrics=any(hooks.batch_metrics for _, hooks, _ in ranks),
            checkpoints=any(hooks.checkpoints for _, hooks, _ in ranks),
        )


def train_class(
    trial_class: type[PyTorchTrial],
    config: Mapping[str, Any],
    *,
    max_length: TrainUnit | None = None,
    latest_checkpoint: str | None = None,
) -> None:
    """Train a trial of an experiment whose entrypoint is a class.

    The config, with all defaults, has the arguments that a program would pass to `fit()`. `max_length` is used if the
    search sets none.
    """
    optimizations = config["optimizations"]
    with init(aggregation_frequency=optimizations["aggregation_frequency"]) as context:
        trial = trial_class(context)
        if (precision := optimizations["mixed_precision"]) != "O0":
            if context._run.uses_amp or context._run.optimisation.scaler is not None:
                log.info(
                    "optimizations.mixed_precision has no effect: %s sets up mixed precision itself",
                    trial_class.__name__,
                )
            else:
                context.experimental.use_amp(torch.bfloat16 if precision == "bfloat16" else torch.float16)
        Trainer(trial, context).fit(
            max_length=max_length,
            reporting_period=Batch(config["scheduling_unit"]),
            checkpoint_policy=config["checkpoint_policy"],
            latest_checkpoint=latest_checkpoint,
            step_zero_validation=config["perform_initial_validation"],
        )


@contextlib.contextmanager
def _ending_early() -> Iterator[None]:
    try:
        yield
    except ShouldExit:
        # Raised at the start or while saving, so nothing is left to save.
        log.info("training ended early, as requested")


def _check_trial(trial: PyTorchTrial, context: PyTorchTrialContext) -> bool:
    """Check the trial, and return whether it validates by `evaluate_full_dataset`."""
    for kind, wrapped in (("model", context.models), ("optimizer", context.optimizers)):
        if not wrapped:
            raise ValueError(
                f"{type(trial).__name__} has wrapped no {kind}; in its constructor, call "
                f"self.{kind} = context.wrap_{kind}({kind})"
            )
    for number, optimizer in enumerate(context.optimizers):
        if any(is_replaced(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                f"optimizer {number} has parameters that wrap_model(parallel=FullyShard(...)) has replaced by "
                "shards, and would train nothing; create it from the parameters of the wrapped model"
            )
    overridden = [name for name in ("evaluate_batch", "evaluate_full_dataset") if overrides(trial, name)]
    if len(overridden) != 1:
        raise ValueError(
            f"{type(trial).__name__} must override exactly one of evaluate_batch() and "
            f"evaluate_full_dataset(); it overrides {'both' if overridden else 'neither'}"
        )
    return overridden == ["evaluate_full_dataset"]
