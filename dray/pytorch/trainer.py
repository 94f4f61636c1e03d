"""`Trainer.fit()`: builds the plan and the executor, loads a checkpoint, runs the loop."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

from dray.pytorch import loaders
from dray.pytorch.callback import PyTorchCallback
from dray.pytorch.context import PyTorchTrialContext
from dray.pytorch.description import describe
from dray.pytorch.trial import PyTorchTrial
from dray.training import rng, warm
from dray.training.checkpoint import files
from dray.training.checkpoint.checkpointer import Checkpointer
from dray.training.checkpoint.opening import open_together
from dray.training.errors import ShouldExit
from dray.training.evaluation import Evaluation
from dray.training.executor import Executor, run
from dray.training.optimisation import bare
from dray.training.parallel.exchange import all_or_none
from dray.training.plan import POLICIES, Plan, Policy, Schedule, batches_of, check_length, check_unit, schedule_of
from dray.training.progress import Progress
from dray.training.rank import Rank
from dray.training.trial import Hooks
from dray.training.units import Batch, TrainUnit

log = logging.getLogger(__name__)


class _Default(str):
    """The default of a parameter, which is not the same object as an equal argument."""


DEFAULT_POLICY = _Default("best")

CHECKPOINT_HOOKS = ("on_checkpoint_end", "on_checkpoint_write_end", "on_checkpoint_upload_end")


class Trainer:
    """Trains a trial.

    Args:
        trial: an instance of your `PyTorchTrial`.
        context: the context that it was made with.

    Raises:
        TypeError: trial is not a PyTorchTrial.
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

        Periods are `Batch(n)` or `Epoch(n)`: with an int, every n-th one (every one if n <= 0); with a container of
        ints, those, counted from 1. Training always ends with a validation and a checkpoint.

        A local run shows its progress: a line at the start, at each validation and at the end, and in a terminal or a
        notebook also a progress bar. `logging.getLogger("dray").setLevel(logging.WARNING)` turns this off. Ctrl-C ends
        a local run after the current batch, with a checkpoint; a second one ends it at once.

        Args:
            checkpoint_period: when to save. None: in an experiment, its config's min_checkpoint_period.
            validation_period: when to validate. None: in an experiment, its config's min_validation_period.
            max_length: total length in batches or epochs, including what was trained before a resume. None: as passed
                to `pytorch.init()`. In an experiment, the searcher's max_length is used instead if it has one.
            reporting_period: when to report training metrics, which is also done at each validation and checkpoint.
            checkpoint_policy: "best": save after a validation that is the experiment's best; "all": save after each
                validation; "none": save only at checkpoint_period and at the end. A local run can't tell which is best:
                it takes "best" as "all", with a warning; by default it saves at checkpoint_period if that is given,
                else after each validation.
            latest_checkpoint: the id of a checkpoint, as passed to `on_checkpoint_upload_end`, or its directory.
            step_zero_validation: validate before the first batch.
            test_mode: train on one batch, validate on one, save and return.
            profiling_enabled: has no effect.

        Raises:
            ValueError: max_length is missing, or differs from that of `pytorch.init()`; a period or length is invalid;
                no model or optimizer was wrapped; not exactly one of the evaluate methods is overridden; the checkpoint
                does not fit the trial.
            TypeError: a period or length is neither Batch nor Epoch.
            RuntimeError: a loader is not a `pytorch.DataLoader`; the training or validation data is empty.
            FileNotFoundError: there is no such checkpoint.
            KeyboardInterrupt: Ctrl-C ended a local run; on every rank.
        """
        if profiling_enabled:
            log.error("fit(profiling_enabled=True) has no effect; use context.set_profiler() or torch.profiler")
        context, trial, host = self._context, self._trial, self._context._host
        length = context._length = self._length(max_length)
        policy = self._policy(checkpoint_policy, checkpoint_period)
        periods = {
            "reporting_period": reporting_period,
            "validation_period": validation_period if validation_period is not None else host.validation_period,
            "checkpoint_period": checkpoint_period if checkpoint_period is not None else host.checkpoint_period,
        }
        for name, period in periods.items():
            # Also checked with the epoch's length; but a wrong type should not wait for the data to be built.
            check_unit(period, name)
        peers, position = context.distributed, context._position
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(setattr, position, "stop_obeyed", True)
                begins_with = host.source_checkpoint if latest_checkpoint is None else latest_checkpoint
                opened = None
                if begins_with is not None:
                    opened = open_together(peers, lambda: host.open_checkpoint(begins_with), "opening a checkpoint")
                directory, source_state = (None, opened) if latest_checkpoint is None else (opened, None)
                with all_or_none(peers, "starting training"):
                    full_dataset = self._check_trial()
                    at = self._set_position(directory)
                    callbacks = self._callbacks()
                    for callback in callbacks.values():
                        callback.on_trial_startup(at.batches, latest_checkpoint)
                        stack.callback(callback.on_trial_shutdown)
                    training_loader, division = loaders.training_loader(trial, context, directory)
                    if position.initial_batch < at.batches:
                        at = Progress(batches=position.initial_batch, saved=position.initial_batch)
                position.epoch_length, hooks = self._agree(training_loader, callbacks)
                with all_or_none(peers, "starting training"):
                    validation_loader = loaders.validation_loader(trial, context, full_dataset=full_dataset)
                    plan = self._plan(at, length, periods, policy, step_zero_validation, test_mode)
                    stack.enter_context(host.training(plan, at.batches, peers))
                    training_data = stack.enter_context(loaders.iterating(training_loader))
                    if directory is not None:
                        self._load(directory, callbacks)
                    elif source_state is not None:
                        self._load_state(source_state, callbacks)
                    for prepare in warm.before_training:
                        prepare(context.models)
                    rank = Rank(
                        trial=trial,
                        callbacks=callbacks,
                        optimisation=context._optimisation,
                        reducers=context._reducers,
                        device=context.device,
                        to_device=context._mover(),
                        peers=peers,
                    )
                    executor = Executor(
                        rank=rank,
                        host=host,
                        training_data=training_data,
                        evaluation=Evaluation(rank=rank, data=validation_loader, full_dataset=full_dataset),
                        checkpointer=Checkpointer(
                            rank=rank,
                            host=host,
                            description=cache(partial(describe, trial, context, division)),
                            hooks=hooks,
                        ),
                        hooks=hooks,
                        scalars=context._tensorboard,
                        profiler=context.profiler,
                    )
                    for callback in callbacks.values():
                        callback.on_training_start()
                run(plan, at, executor)
        except ShouldExit:
            # Raised at the start, or while saving: nothing is left to save.
            log.info("training ended early, as requested")

    # ------------------------------------------------------------------------------------------------- arguments

    def _length(self, max_length: TrainUnit | None) -> TrainUnit:
        check_length(max_length, "max_length")
        known, wanted = self._context._max_length, self._context._host.max_length
        if wanted is not None:
            for name, given in (("init", known), ("fit", max_length)):
                if given is not None and given != wanted:
                    log.warning("%s(max_length=%r) is not used: the searcher's max_length is %r", name, given, wanted)
            return wanted
        if known is not None and max_length not in (None, known):
            raise ValueError(
                f"fit(max_length={max_length!r}) differs from pytorch.init(max_length={known!r}), by which the trial "
                "may have made its schedules; leave out the one in fit()"
            )
        length = max_length if known is None else known
        if length is None:
            raise ValueError("fit() needs max_length, for example max_length=pytorch.Epoch(1)")
        return length

    def _policy(self, policy: str, checkpoint_period: TrainUnit | None) -> Policy:
        if policy not in POLICIES:
            raise ValueError(f"checkpoint_policy must be one of {', '.join(map(repr, POLICIES))}, got {policy!r}")
        if policy != "best" or self._context._host.best_supported:
            return policy
        if policy is DEFAULT_POLICY:
            return "all" if checkpoint_period is None else "none"
        log.warning("checkpoint_policy='best' works only in an experiment; this run uses 'all'")
        return "all"

    def _check_trial(self) -> bool:
        """Whether the trial validates by `evaluate_full_dataset`."""
        for kind, wrapped in (("model", self._context.models), ("optimizer", self._context.optimizers)):
            if not wrapped:
                raise ValueError(
                    f"{type(self._trial).__name__} has wrapped no {kind}; in its constructor, call "
                    f"self.{kind} = context.wrap_{kind}({kind})"
                )
        overridden = [
            name
            for name in ("evaluate_batch", "evaluate_full_dataset")
            if getattr(type(self._trial), name) is not getattr(PyTorchTrial, name) or name in vars(self._trial)
        ]
        if len(overridden) != 1:
            raise ValueError(
                f"{type(self._trial).__name__} must override exactly one of evaluate_batch() and "
                f"evaluate_full_dataset(); it overrides {'both' if overridden else 'neither'}"
            )
        return overridden == ["evaluate_full_dataset"]

    def _set_position(self, directory: Path | None) -> Progress:
        """Set the context to where training begins."""
        context, position = self._context, self._context._position
        if directory is not None and (seed := files.read_trial_seed(directory)) is not None:
            # So that the data keep their order even if this run drew a new seed.
            context._trial_seed = seed
        at = Progress() if directory is None else files.read_progress(directory)
        position.start(at.batches)
        position.stop_requested = position.stop_requested and not position.stop_obeyed
        return at

    def _plan(
        self,
        at: Progress,
        length: TrainUnit,
        periods: Mapping[str, TrainUnit | None],
        policy: Policy,
        step_zero_validation: bool,
        test_mode: bool,
    ) -> Plan:
        epoch_length = self._context._position.epoch_length
        global_batch_size = self._context._global_batch_size

        def batches(unit: TrainUnit, name: str) -> int:
            return batches_of(unit, name=name, epoch_length=epoch_length, global_batch_size=global_batch_size)

        def schedule(name: str) -> Schedule | None:
            return schedule_of(periods[name], name=name, epoch_length=epoch_length)

        total = batches(length, "max_length")
        return Plan(
            length=min(total, at.batches + 1) if test_mode else total,
            epoch_length=epoch_length,
            report=schedule("reporting_period"),
            validate=schedule("validation_period"),
            checkpoint=schedule("checkpoint_period"),
            rungs=tuple(sorted({batches(rung, "rung") for rung in self._context._host.rungs})),
            policy=policy,
            step_zero_validation=step_zero_validation,
            test_mode=test_mode,
        )

    # -------------------------------------------------------------------------------------------------- the trial

    def _callbacks(self) -> dict[str, PyTorchCallback]:
        callbacks: Any = self._trial.build_callbacks()
        if not isinstance(callbacks, dict) or not all(isinstance(c, PyTorchCallback) for c in callbacks.values()):
            raise TypeError(
                f"build_callbacks() must return a dict of pytorch.PyTorchCallback instances by name, got {callbacks!r}"
            )
        for name, callback in callbacks.items():
            if _overrides(callback, "on_checkpoint_end"):
                warnings.warn(
                    f"callback {name!r}: on_checkpoint_end is deprecated; use on_checkpoint_write_end",
                    FutureWarning,
                    stacklevel=3,
                )
        return dict(callbacks)

    def _agree(self, loader: Any, callbacks: dict[str, PyTorchCallback]) -> tuple[int | None, Hooks]:
        """Batches per epoch, and the hooks that callbacks of any rank have."""

        def has(*hooks: str) -> bool:
            return any(_overrides(callback, hook) for callback in callbacks.values() for hook in hooks)

        length = loaders.batches_per_epoch(loader, self._context)
        mine = (length, has("on_training_workload_end"), has(*CHECKPOINT_HOOKS))
        lengths, batch_metrics, checkpoints = zip(*self._context.distributed.allgather(mine), strict=True)
        if lengths[0] == 0:
            raise RuntimeError(
                "the training data is empty: build_training_data_loader() returned a loader without a batch; check its "
                "dataset, and drop_last with a dataset smaller than a batch"
            )
        # All ranks use the chief's epoch length: shards may differ by a batch.
        return lengths[0], Hooks(batch_metrics=any(batch_metrics), checkpoints=any(checkpoints))

    def _load_state(self, directory: Path, callbacks: dict[str, PyTorchCallback]) -> dict[str, Any]:
        """Load models, optimizers, schedulers and callbacks from a checkpoint; returns its state dict."""
        context = self._context
        state = files.read_state(directory, [bare(model) for model in context.models])
        for callback in callbacks.values():
            callback.on_checkpoint_load_start(state)
        context._optimisation.load_state_dict(state)
        saved = state.get("callbacks", {})
        for name, callback in callbacks.items():
            if name in saved:
                callback.load_state_dict(saved[name])
            elif _overrides(callback, "load_state_dict"):
                log.warning("callback %r has no state in the checkpoint; it starts afresh", name)
        return state

    def _load(self, directory: Path, callbacks: dict[str, PyTorchCallback]) -> None:
        """Load all that is needed to resume a run: also gradients and RNG state."""
        context, peers = self._context, self._context.distributed
        state = self._load_state(directory, callbacks)
        # Last, so that random numbers drawn while loading don't count.
        mine = files.read_rank(directory, state, peers.rank, peers.size)
        if mine is not None and mine.gradients is not None:
            context._optimisation.restore_gradients(mine.gradients)
        if mine is not None and mine.rng:
            rng.restore(mine.rng, context.device)
        else:
            # The RNG as the constructor left it would repeat the random numbers of the first batches.
            log.info("the checkpoint has no RNG state of rank %d; its RNGs are seeded again", peers.rank)
            rng.seed_all(
                Random(f"{context.get_trial_seed()}:{peers.rank}:{context.get_initial_batch()}").getrandbits(31)
            )


def _overrides(callback: PyTorchCallback, hook: str) -> bool:
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(PyTorchCallback, hook)
