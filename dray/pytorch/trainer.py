"""`Trainer.fit()`: builds the plan and the executor, loads a checkpoint, runs the loop."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.utils.data

from dray.hosts import LocalHost
from dray.masking import masked, texts
from dray.pytorch.batches import drawn_seed
from dray.pytorch.callback import PyTorchCallback
from dray.pytorch.context import PyTorchTrialContext
from dray.pytorch.data import DataLoader
from dray.pytorch.trial import PyTorchTrial
from dray.training import checkpoint, legacy, rng, source
from dray.training.agreement import all_or_none
from dray.training.division import Division
from dray.training.errors import ShouldExit
from dray.training.evaluation import Evaluation
from dray.training.executor import Executor, run
from dray.training.optimisation import bare
from dray.training.plan import POLICIES, Plan, Policy, batches_of, schedule_of
from dray.training.progress import Progress
from dray.training.units import Batch, Epoch, TrainUnit

log = logging.getLogger(__name__)

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
            raise TypeError(f"Trainer takes an instance of a pytorch.PyTorchTrial, got {trial!r}")
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
            log.error("configure_profiler() has no effect: use context.set_profiler() or torch.profiler")

    def fit(
        self,
        checkpoint_period: TrainUnit | None = None,
        validation_period: TrainUnit | None = None,
        max_length: TrainUnit | None = None,
        reporting_period: TrainUnit = Batch(100),  # noqa: B008 - immutable in effect, and shown as the default
        checkpoint_policy: str = "best",
        latest_checkpoint: str | None = None,
        step_zero_validation: bool = False,
        test_mode: bool = False,
        profiling_enabled: bool | None = None,
    ) -> None:
        """Train up to `max_length`, from `latest_checkpoint` or from the beginning.

        Periods are `Batch(n)` or `Epoch(n)`: with an int, every n-th one (every one if n <= 0); with a container of
        ints, those, counted from 1. Training always ends with a validation and a checkpoint.

        Args:
            checkpoint_period: when to save. None: in an experiment, its config's min_checkpoint_period.
            validation_period: when to validate. None: in an experiment, its config's min_validation_period.
            max_length: total length in batches or epochs, including what was trained before a resume. In an experiment,
                the searcher's max_length is used instead if it has one.
            reporting_period: when to report training metrics, which is also done at each validation and checkpoint.
            checkpoint_policy: "best": save after a validation that is the experiment's best (a local run takes this as
                "all"); "all": save after each validation; "none": save only at checkpoint_period and at the end.
            latest_checkpoint: the id of a checkpoint, as passed to `on_checkpoint_upload_end`, or its directory.
            step_zero_validation: validate before the first batch.
            test_mode: train on one batch, validate on one, save and return.
            profiling_enabled: has no effect.

        Raises:
            ValueError: max_length is missing; a period or length is invalid; no model or optimizer was wrapped; not
                exactly one of the evaluate methods is overridden; the checkpoint does not fit the trial.
            TypeError: a period or length is neither Batch nor Epoch.
            RuntimeError: a loader is not a `pytorch.DataLoader`; the training or validation data is empty.
            FileNotFoundError: there is no such checkpoint.
        """
        if profiling_enabled:
            log.error("fit(profiling_enabled=True) has no effect: use context.set_profiler() or torch.profiler")
        context, trial, host = self._context, self._trial, self._context._host
        checkpoint_period = checkpoint_period if checkpoint_period is not None else host.checkpoint_period
        validation_period = validation_period if validation_period is not None else host.validation_period
        length = self._length(max_length)
        policy = self._policy(checkpoint_policy)
        for name, unit in (
            ("checkpoint_period", checkpoint_period),
            ("validation_period", validation_period),
            ("reporting_period", reporting_period),
        ):
            # _plan() checks again, with the epoch's length; but a wrong type should not wait for the data to be built.
            if unit is not None and not isinstance(unit, (Batch, Epoch)):
                schedule_of(unit, name=name, epoch_length=None)
        peers, cursor = context.distributed, context._cursor
        try:
            with contextlib.ExitStack() as stack:
                with all_or_none(peers, "starting training"):
                    full_dataset = self._check_trial()
                    directory = None if latest_checkpoint is None else host.open_checkpoint(latest_checkpoint)
                    source_state = None
                    if directory is None and host.source_checkpoint is not None:
                        source_state = host.open_checkpoint(host.source_checkpoint)
                    at = self._position(directory)
                    cursor.batch_idx, cursor.initial_batch, cursor.stop_requested = None, at.batches, False
                    cursor.drawn = None if directory is None else checkpoint.read_drawn(directory)
                    callbacks = self._callbacks()
                    for callback in callbacks.values():
                        callback.on_trial_startup(at.batches, latest_checkpoint)
                        stack.callback(callback.on_trial_shutdown)
                    training_loader, division = self._training_loader(at.batches, directory)
                # All ranks use the chief's epoch length: shards may differ by a batch.
                cursor.epoch_length, listens_to_batches = self._agree_on_data(training_loader, callbacks)
                with all_or_none(peers, "starting training"):
                    validation_loader = self._validation_loader(full_dataset)
                    if directory is not None:
                        self._know_order(directory, training_loader)
                    training_data = stack.enter_context(_iterating(training_loader))
                    if directory is not None:
                        self._load(directory, callbacks)
                        self._draw_order(directory, training_loader)
                    elif source_state is not None:
                        self._load_state(source_state, callbacks)
                    plan = self._plan(
                        length=length,
                        at=at,
                        epoch_length=cursor.epoch_length,
                        validate=validation_period,
                        save=checkpoint_period,
                        report=reporting_period,
                        policy=policy,
                        step_zero_validation=step_zero_validation,
                        test_mode=test_mode,
                    )
                    to_device = context._mover()
                    evaluation = Evaluation(
                        trial=trial,
                        callbacks=callbacks,
                        optimisation=context._optimisation,
                        reducers=context._reducers,
                        to_device=to_device,
                        data=validation_loader,
                        full_dataset=full_dataset,
                        is_chief=peers.rank == 0,
                    )
                    executor = Executor(
                        trial=trial,
                        callbacks=callbacks,
                        optimisation=context._optimisation,
                        reducers=context._reducers,
                        cursor=cursor,
                        device=context.device,
                        to_device=to_device,
                        peers=peers,
                        host=host,
                        training_data=training_data,
                        evaluation=evaluation,
                        description=_Description(self._trial, context, division),
                        listens_to_batches=listens_to_batches,
                        hears_of_checkpoints=any(
                            _overrides(callback, hook) for callback in callbacks.values() for hook in CHECKPOINT_HOOKS
                        ),
                        scalars=context._tensorboard,
                        profiler=context.profiler,
                        best=policy == "best",
                    )
                    for callback in callbacks.values():
                        callback.on_training_start()
                run(plan, at, executor)
        except ShouldExit:
            # Raised at the start, or while saving: nothing is left to save.
            log.info("left training, as it was asked to")

    # ------------------------------------------------------------------------------------------------- arguments

    def _length(self, max_length: TrainUnit | None) -> TrainUnit:
        if max_length is not None and not isinstance(max_length, (Batch, Epoch)):
            raise TypeError(
                f"max_length must be a pytorch.Batch or a pytorch.Epoch, got {max_length!r} of type "
                f"{type(max_length).__name__}"
            )
        if max_length is not None and not isinstance(max_length.value, int):
            raise TypeError(f"max_length must hold an int, such as pytorch.Epoch(1), got {max_length!r}")
        wanted = self._context._host.max_length
        if wanted is None:
            if max_length is None:
                raise ValueError(
                    "fit() needs max_length, such as max_length=pytorch.Epoch(1): nothing else says when to end"
                )
            return max_length
        if max_length is not None and max_length != wanted:
            log.warning("fit(max_length=%r) is not used: the searcher's max_length is %r", max_length, wanted)
        return wanted

    def _policy(self, policy: str) -> Policy:
        if policy not in POLICIES:
            raise ValueError(f"checkpoint_policy must be one of {', '.join(map(repr, POLICIES))}, got {policy!r}")
        if policy == "best" and not self._context._host.best_supported:
            log.warning(
                "checkpoint_policy='best' needs an experiment to know the best; this run acts as if it were 'all'"
            )
            return "all"
        return policy

    def _check_trial(self) -> bool:
        """Whether the trial validates by `evaluate_full_dataset`."""
        for kind, wrapped in (("model", self._context.models), ("optimizer", self._context.optimizers)):
            if not wrapped:
                raise ValueError(
                    f"{type(self._trial).__name__} has wrapped no {kind}: in its constructor, call "
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

    def _position(self, directory: Path | None) -> Progress:
        """Where training begins."""
        if directory is None:
            return Progress()
        if (seed := checkpoint.read_trial_seed(directory)) is not None:
            # So that the data keep their order even if this run drew a new seed.
            self._context._trial_seed = seed
        return checkpoint.read_progress(directory)

    def _plan(
        self,
        *,
        length: TrainUnit,
        at: Progress,
        epoch_length: int | None,
        validate: TrainUnit | None,
        save: TrainUnit | None,
        report: TrainUnit,
        policy: Policy,
        step_zero_validation: bool,
        test_mode: bool,
    ) -> Plan:
        global_batch_size = None if self._context._global_batch_size is None else self._context.get_global_batch_size()

        def batches(unit: TrainUnit, name: str) -> int:
            return batches_of(unit, name=name, epoch_length=epoch_length, global_batch_size=global_batch_size)

        total = batches(length, "max_length")
        return Plan(
            length=min(total, at.batches + 1) if test_mode else total,
            epoch_length=epoch_length,
            report=schedule_of(report, name="reporting_period", epoch_length=epoch_length),
            validate=schedule_of(validate, name="validation_period", epoch_length=epoch_length),
            checkpoint=schedule_of(save, name="checkpoint_period", epoch_length=epoch_length),
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
                f"build_callbacks() must return a dict from names to pytorch.PyTorchCallback instances, got "
                f"{callbacks!r}"
            )
        for name, callback in callbacks.items():
            if _overrides(callback, "on_checkpoint_end"):
                import warnings

                warnings.warn(
                    f"callback {name!r}: on_checkpoint_end is deprecated, use on_checkpoint_write_end",
                    FutureWarning,
                    stacklevel=3,
                )
        return dict(callbacks)

    def _training_loader(self, skip: int, directory: Path | None) -> tuple[Any, Division | None]:
        """The training data from batch `skip` on, and how the trial divided it among processes when it began."""
        loader: Any = self._trial.build_training_data_loader()
        if not isinstance(loader, DataLoader):
            self._check_loader(loader, "build_training_data_loader")
            return loader, None
        loader.seed = self._context.get_trial_seed()
        loader.drawn = self._context._cursor.drawn
        peers = self._context.distributed
        now = Division(replicas=peers.size, batch_size=loader.batch_size)
        before = None if directory is None else checkpoint.read_division(directory)
        is_determineds = directory is not None and legacy.is_legacy(directory)
        if is_determineds and before is not None and before.replicas == now.replicas:
            before = now  # Determined's checkpoint has the number of slots only: take the batch size as unchanged
        if before is None and self._context._elastic and loader.batch_size is not None:
            # However many processes it starts with, its batches are those of a single process.
            before = Division(replicas=1, batch_size=peers.size * loader.batch_size)
        if before is not None and before != now:
            if before.like(now):
                anew = loader._divided_anew(before, skip=skip, num_replicas=peers.size, rank=peers.rank)
                return anew, before
            log.warning(
                "the checkpoint was written with %s, this run has %s: steps no longer train on the same records",
                before,
                now,
            )
        return loader.get_data_loader(repeat=True, skip=skip, num_replicas=peers.size, rank=peers.rank), now

    def _validation_loader(self, full_dataset: bool) -> Any:
        peers = self._context.distributed
        loader: Any = self._trial.build_validation_data_loader()
        if isinstance(loader, DataLoader):
            loader.seed = self._context.get_trial_seed()
            loader.drawn = None if self._context._cursor.drawn is None else {}
            if full_dataset:
                return loader.get_data_loader() if peers.rank == 0 else None
            return loader.get_data_loader(num_replicas=peers.size, rank=peers.rank)
        self._check_loader(loader, "build_validation_data_loader")
        return loader

    def _check_loader(self, loader: Any, method: str) -> None:
        if self._context.experimental._reproducibility_checks:
            raise RuntimeError(
                f"{method}() must return a pytorch.DataLoader, which can shard the data and resume within it; got "
                f"{type(loader).__module__}.{type(loader).__qualname__}. If that is meant, call "
                "context.experimental.disable_dataset_reproducibility_checks() in the trial's constructor, and repeat, "
                "shard and skip by yourself (see pytorch.samplers)"
            )

    def _agree_on_data(self, loader: Any, callbacks: dict[str, PyTorchCallback]) -> tuple[int | None, bool]:
        """(the chief's batches per epoch, whether any rank's callbacks want each batch's metrics)."""
        wanted = any(_overrides(callback, "on_training_workload_end") for callback in callbacks.values())
        ranks = self._context.distributed.allgather((_length_of(loader), wanted))
        length = self._records_per_epoch() if ranks[0][0] is None else ranks[0][0]
        if length == 0:
            raise RuntimeError(
                "the training data is empty: build_training_data_loader() returned a loader without a batch; check its "
                "dataset, and drop_last with a dataset smaller than a batch"
            )
        return length, any(row[1] for row in ranks)

    def _records_per_epoch(self) -> int | None:
        """Batches per epoch by the config's records_per_epoch, for a loader without a length."""
        records, context = (self._context._exp_conf or {}).get("records_per_epoch"), self._context
        if not records or context._global_batch_size is None:
            return None
        # As in Determined, the remainder makes no batch.
        return max(1, int(records) // context.get_global_batch_size())

    def _load_state(self, directory: Path, callbacks: dict[str, PyTorchCallback]) -> dict[str, Any]:
        """Load models, optimizers, schedulers and callbacks from a checkpoint; returns its state dict."""
        context = self._context
        state = checkpoint.read_state(directory, [bare(model) for model in context.models])
        for callback in callbacks.values():
            callback.on_checkpoint_load_start(state)
        context._optimisation.load_state_dict(state)
        saved = state.get("callbacks", {})
        for name, callback in callbacks.items():
            if name in saved:
                callback.load_state_dict(saved[name])
            elif _overrides(callback, "load_state_dict"):
                log.warning("callback %r has no state in the checkpoint, and starts afresh", name)
        return state

    def _load(self, directory: Path, callbacks: dict[str, PyTorchCallback]) -> None:
        """Load all that is needed to resume a run: also gradients and RNG state."""
        context, peers = self._context, self._context.distributed
        state = self._load_state(directory, callbacks)
        # Last, so that random numbers drawn while loading don't count.
        mine = checkpoint.read_rank(directory, state, peers.rank, peers.size)
        if mine is not None and mine.gradients is not None:
            context._optimisation.restore_gradients(mine.gradients)
        if mine is not None and mine.rng:
            rng.restore(mine.rng, context.device)
        else:
            # The RNG as the constructor left it would repeat the random numbers of the first batches.
            log.info("the checkpoint has no random numbers of rank %d: they are seeded anew", peers.rank)
            rng.seed_all(
                Random(f"{context.get_trial_seed()}:{peers.rank}:{context.get_initial_batch()}").getrandbits(31)
            )

    def _know_order(self, directory: Path, loader: Any) -> None:
        """Read the seeds of the epochs that a Determined run had begun, before the loader begins one of them."""
        cursor = self._context._cursor
        if cursor.drawn is None or cursor.epoch_length is None:
            return
        now, ahead = cursor.epoch_of(cursor.initial_batch), _ahead(loader)
        begun = {epoch: epoch * cursor.epoch_length - ahead for epoch in (now, now + 1)}
        cursor.drawn.update(checkpoint.read_order_seeds(directory, begun))

    def _draw_order(self, directory: Path, loader: Any) -> None:
        """Draw the seed of an epoch that several processes are about to begin, while all would draw the same one."""
        cursor = self._context._cursor
        epoch = cursor.epoch_of(cursor.initial_batch)
        if cursor.drawn is None or epoch in cursor.drawn or not legacy.is_legacy(directory):
            return
        if self._context.distributed.size > 1 and cursor.starts_epoch(cursor.initial_batch) and _ahead(loader) == 0:
            cursor.drawn[epoch] = drawn_seed()


@contextlib.contextmanager
def _iterating(loader: Any) -> Iterator[Iterator[Any]]:
    """An iterator over a loader, whose worker processes end with the block, also after an error."""
    iterator = iter(loader)
    try:
        yield iterator
    finally:
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


def _ahead(loader: Any) -> int:
    """How many batches a loader requests from its worker processes ahead of the current one."""
    workers = getattr(loader, "num_workers", 0)
    return workers * (getattr(loader, "prefetch_factor", None) or 2) if workers else 0


def _overrides(callback: PyTorchCallback, hook: str) -> bool:
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(PyTorchCallback, hook)


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


class _Description:
    """What checkpoints say about the trial; gathered at the first one, and then reused."""

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext, division: Division | None) -> None:
        self._trial = trial
        self._context = context
        self._division = division
        self._made: checkpoint.Description | None = None

    def __call__(self) -> checkpoint.Description:
        if self._made is None:
            host, context = self._context._host, self._context
            leave_out = host.directory.parent if isinstance(host, LocalHost) else None
            config = None if context._exp_conf is None else masked(context._exp_conf)
            secrets = [*host.secrets, *texts(context._exp_conf or {})]
            self._made = checkpoint.Description(
                metadata={
                    "framework": f"torch-{torch.__version__}",
                    "format": "dray",
                    "trial_type": "PyTorchTrial",
                    "trial_cls_spec": _class_spec(type(self._trial), host.code_dir),
                    "experiment_id": host.experiment_id,
                    "trial_id": host.trial_id,
                    "trial_seed": context.get_trial_seed(),
                    "hparams": context._hparams,
                    "experiment_config": config,
                },
                hparams=context._hparams,
                experiment=config,
                code={}
                if host.code_dir is None
                else source.collect(host.code_dir, leave_out=leave_out, secrets=secrets),
                division=self._division,
                epoch_length=context._cursor.epoch_length,
            )
        return self._made


def _class_spec(cls: type, code_dir: Path | None) -> str:
    """module:Class, importable from the checkpoint's code/."""
    module = cls.__module__
    if module == "__main__" and (file := getattr(sys.modules["__main__"], "__file__", None)):
        path = Path(file).resolve()
        if code_dir is not None and path.is_relative_to(code_dir.resolve()):
            path = path.relative_to(code_dir.resolve())
            module = ".".join(path.with_suffix("").parts)
        else:
            module = path.stem
    return f"{module}:{cls.__qualname__}"
