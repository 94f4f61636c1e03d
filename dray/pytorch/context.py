"""The trial's context: the public interface to its run."""

from __future__ import annotations

import logging
import math
import numbers
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from dray.compat import lacks
from dray.pytorch.loaders import epoch_length
from dray.pytorch.trial_run import TrialRun
from dray.training.cluster_info import note_hparams_read
from dray.training.lr_scheduler import LRScheduler
from dray.training.optimisation import bare
from dray.training.parallel.ddp import check_same_parameters, checked_ddp_kwargs, data_parallel
from dray.training.parallel.device import backend_for
from dray.training.parallel.fully_shard import FullyShard, check_arguments, fully_sharded, whole
from dray.training.parallel.mesh import device_mesh
from dray.training.parallel.sharding import connect, is_sharded, unscaling_by_placement
from dray.training.plan import batches_of
from dray.training.precision import MixedPrecision, warn_if_tf32_is_off
from dray.training.pretrained import share_on_machine, unshare
from dray.training.progress import StopRequest
from dray.training.units import ENDLESS, Epoch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)

M = TypeVar("M", bound=torch.nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741 - as M and S


@lacks("determined.pytorch.PyTorchTrialContext")
class PyTorchTrialContext:
    """A trial's access to its run, made by `pytorch.init()` and passed to the trial's constructor and the `Trainer`.

    Attributes:
        models, optimizers, lr_schedulers: lists of the wrapped objects, in the order of wrapping.
        device: the device of this process's models and batches.
        distributed: this process's rank, and communication with the trial's other processes.
        experimental: see `PyTorchExperimentalContext`.
        profiler: the profiler made by `set_profiler`, or None.
    """

    def __init__(self, run: TrialRun) -> None:
        self._run, self._optimisation = run, run.optimisation
        self.distributed = run.peers
        self.device = run.device
        self.models = run.optimisation.models
        self.optimizers = run.optimisation.optimizers
        self.lr_schedulers = run.optimisation.lr_schedulers
        self.experimental = PyTorchExperimentalContext(run)
        self.profiler: torch.profiler.profile | None = None
        self._warned_of_batch_size = False
        self._checks_tf32 = run.device.type == "cuda" and run.peers.rank == 0

    def get_hparams(self) -> dict[str, Any]:
        """Return all hyperparameters.

        Raises:
            ValueError: none were passed to `pytorch.init()`.
        """
        note_hparams_read()
        return self._hparams

    @property
    def _hparams(self) -> dict[str, Any]:
        if self._run.hparams is None:
            raise ValueError("there are no hyperparameters; pass them to pytorch.init(hparams=...)")
        return self._run.hparams

    def get_hparam(self, name: str) -> Any:
        """Return one hyperparameter.

        Raises:
            ValueError: there are no hyperparameters, or none of this name.
        """
        hparams = self._hparams
        note_hparams_read(name)
        if name not in hparams:
            raise ValueError(f"there is no hyperparameter {name!r}; there are: {', '.join(sorted(map(str, hparams)))}")
        if name == "global_batch_size" and not self._warned_of_batch_size:
            self._warned_of_batch_size = True
            log.warning("global_batch_size is over all slots; use get_per_slot_batch_size() for a data loader")
        return hparams[name]

    def get_global_batch_size(self) -> int:
        """Return the number of records per batch over all slots: `hparams["global_batch_size"]`, rounded down to a
        multiple of the number of slots (with a mesh, of slots that get different data).

        Raises:
            ValueError: the hyperparameter is not set.
        """
        if self._run.global_batch_size is None:
            raise ValueError(
                "the hyperparameter 'global_batch_size' is not set; give it under hyperparameters in the experiment's "
                "config, such as global_batch_size: 64; without an experiment, in pytorch.init(hparams=...)"
            )
        return self._run.global_batch_size

    def get_per_slot_batch_size(self) -> int:
        """Return the number of records per batch on this slot: the `batch_size` for a data loader.

        Raises:
            ValueError: the hyperparameter global_batch_size is not set.
        """
        return self.get_global_batch_size() // self._run.replicas

    def get_experiment_config(self) -> dict[str, Any]:
        """Return the experiment's config.

        Raises:
            ValueError: none was passed to `pytorch.init()`.
        """
        if self._run.config is None:
            raise ValueError("there is no experiment config; pass it to pytorch.init(exp_conf=...)")
        return self._run.config

    def get_data_config(self) -> dict[str, Any]:
        """Return the `data` section of the experiment's config, with its secrets; {} if there is none.

        Raises:
            ValueError: no config was passed to `pytorch.init()`.
        """
        return self.get_experiment_config().get("data", {})  # type: ignore[no-any-return]

    def get_experiment_id(self) -> int:
        """Return the experiment's number, 0 in a local run."""
        return self._run.host.experiment_id

    def get_trial_id(self) -> int:
        """Return the trial's number, 0 in a local run."""
        return self._run.host.trial_id

    def get_trial_seed(self) -> int:
        """Return the trial's seed, which orders shuffled data, and seeds all RNGs if `init()` seeds them."""
        return self._run.seed

    def get_initial_batch(self) -> int:
        """Return the batch at which this run starts: 0 in a fresh run, the number of batches trained in a resumed one.

        In an experiment it is known in the trial's constructor; in a local run only once `Trainer.fit()` has got the
        checkpoint, which is before the data loaders are built.
        """
        return self._run.position.initial_batch

    def get_total_batches(self, training_loader: Any = None) -> int:
        """Return the total number of batches that the trial trains on each slot, including those before a resume.

        In an experiment this is the searcher's max_length, as extended; otherwise the length given to `pytorch.init()`
        or `fit()`. For a trial loaded from a checkpoint, it is the number of batches that were trained. Use it to make
        a schedule as long as the training:

        .. code-block:: python

            total = context.get_total_batches(self.build_training_data_loader)
            schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=total)
            context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)

        Args:
            training_loader: the training loader, or the function that builds it, such as
                `self.build_training_data_loader`. Needed if the length is in epochs and `fit()` has not begun.

        Raises:
            RuntimeError: the length of the training or of an epoch is not known yet, or it depends on a metric.
            ValueError: the length is in epochs, but the loader has no length; or the length is below 1.
        """
        self._run.uses_total_batches = True
        length = self._run.length
        if length is None or length == ENDLESS:
            raise RuntimeError(
                "get_total_batches(): how long the trial trains is not known; in an experiment, set "
                "searcher.max_length in batches, records or epochs; elsewhere pass max_length to pytorch.init(), not "
                "only to fit()"
            )
        return batches_of(
            length,
            name="max_length",
            epoch_length=self.get_epoch_length(training_loader) if isinstance(length, Epoch) else None,
            global_batch_size=self._run.global_batch_size,
        )

    def get_epoch_length(self, training_loader: Any = None) -> int:
        """Return the number of batches per epoch on each slot, as the trainer counts epochs.

        Args:
            training_loader: as in `get_total_batches`.

        Raises:
            RuntimeError: there is no loader yet.
            ValueError: the loader has no length, and the config has no records_per_epoch.
        """
        if self._run.position.epoch_length is not None:
            return self._run.position.epoch_length
        if training_loader is None:
            raise RuntimeError(
                "the length of an epoch is not known yet; pass the method that builds the training loader: "
                "get_epoch_length(self.build_training_data_loader); the same for get_total_batches()"
            )
        loader = training_loader() if callable(training_loader) else training_loader
        if (length := epoch_length(loader, self._run)) is None:
            raise ValueError(
                f"an epoch has no length: {type(loader).__qualname__} has no __len__, and the config no "
                "records_per_epoch; count in batches"
            )
        return length

    def get_tensorboard_path(self) -> pathlib.Path:
        """Return the directory of this trial's event files and traces, for `tensorboard --logdir`."""
        return self._run.host.tensorboard_path

    def get_tensorboard_writer(self) -> Any:
        """Return the trial's `torch.utils.tensorboard.SummaryWriter`, which writes to `get_tensorboard_path()`."""
        return self._run.tensorboard.writer()

    def get_enable_tensorboard_logging(self) -> bool:
        """Return whether the trainer writes metrics for TensorBoard, as "Determined/..." scalars."""
        return self._run.tensorboard.enabled

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:
        """Switch the trainer's metrics for TensorBoard on or off.

        Raises:
            AssertionError: the argument is not a bool.
        """
        if not isinstance(enable_tensorboard_logging, bool):
            raise AssertionError(f"enable_tensorboard_logging must be a bool, got {enable_tensorboard_logging!r}")
        self._run.tensorboard.enabled = enable_tensorboard_logging

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile the training with `torch.profiler.profile(*args, **kwargs)`, stepped after each batch.

        Args:
            args, kwargs: activities, schedule, record_shapes and so on. Without a schedule the whole training is
                recorded, in memory. Traces go to `get_tensorboard_path()` unless `on_trace_ready` is given.
        """
        from torch import profiler

        handler = profiler.tensorboard_trace_handler(str(self.get_tensorboard_path()))
        self.profiler = profiler.profile(*args, **{"on_trace_ready": handler, **kwargs})

    def set_flops_per_record(self, flops: float | Literal["count"]) -> None:
        """Set the number of FLOPs per record, forward and backward. The machine's figures then include
        `tflops_per_slot` and, on a GPU whose peak is known, `mfu_percent`.

        Args:
            flops: a number, such as 6 * parameters * tokens per record for a transformer. Or "count": torch's
                `FlopCounterMode` counts them in each run's first batch. It runs compiled code without the compiler in
                that batch, misses custom kernels, and counts recomputed activations, so that `mfu_percent` is the
                hardware's FLOPs utilization (HFU). With tensor parallelism pass a number.

        Raises:
            ValueError: the argument is neither a positive number nor "count".
        """
        given: object = flops
        if given == "count":
            self._run.flops_per_record = "count"
        elif isinstance(given, numbers.Real) and 0 < float(given) < math.inf:  # NumPy's too
            self._run.flops_per_record = float(given)
        else:
            raise ValueError(f'set_flops_per_record() takes a positive number or "count", got {flops!r}')

    def current_train_batch(self) -> int:
        """Return the number of the current batch, from 0.

        Raises:
            RuntimeError: training has not started.
        """
        if self._run.position.batch_idx is None:
            raise RuntimeError(
                "training has not started, so there is no current batch; call this in train_batch() or later"
            )
        return self._run.position.batch_idx

    def current_train_epoch(self) -> int:
        """Return the epoch of the current batch, from 0.

        Raises:
            RuntimeError: training has not started.
        """
        return self._run.position.epoch_of(self.current_train_batch())

    def is_epoch_start(self) -> bool:
        """Return whether the current batch is the first of its epoch.

        Raises:
            RuntimeError: training has not started.
        """
        return self._run.position.starts_epoch(self.current_train_batch())

    def is_epoch_end(self) -> bool:
        """Return whether the current batch is the last of its epoch.

        Raises:
            RuntimeError: training has not started.
        """
        return self._run.position.ends_epoch(self.current_train_batch())

    @property
    def _epoch_len(self) -> int | None:
        """Batches per epoch on each slot, None before the data loaders are built. Used by Determined's examples."""
        return self._run.position.epoch_length

    @property
    def _current_batch_idx(self) -> int | None:
        """`current_train_batch()`, but None before training. Used by Determined's examples."""
        return self._run.position.batch_idx

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Request a stop: training continues to the next report, validation or checkpoint, then saves and ends.

        A request on one rank is enough. It applies to the current `fit()`, or to the next one if none is running, so a
        later `fit()` trains again.

        Raises:
            AssertionError: the argument is not a bool.
        """
        if not isinstance(stop_requested, bool):
            raise AssertionError(f"stop_requested must be a bool, got {stop_requested!r}")
        self._run.position.stop = StopRequest.REQUESTED if stop_requested else StopRequest.NO

    def get_stop_requested(self) -> bool:
        """Return whether this rank has requested a stop."""
        return self._run.position.stop is not StopRequest.NO

    @property
    def device_mesh(self) -> DeviceMesh:
        """The slots as a `torch.distributed.device_mesh.DeviceMesh` with the dimensions of `resources.mesh` or
        `pytorch.init(mesh=...)`, and always `dp_replicate`, `dp_shard` and `tp`: `context.device_mesh["tp"]`.

        All ranks first access the mesh together, in the trial's constructor. See docs/large-models.md for the order of
        the dimensions, and for what dray does along each.
        """
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend_for(self.device), store=store, rank=0, world_size=1)
            self._run.at_end.callback(dist.destroy_process_group)
        return device_mesh(self._run.mesh_shape, self.device)

    def wrap_model(
        self, model: M, ddp_kwargs: dict[str, Any] | None = None, *, parallel: FullyShard | None = None
    ) -> M:
        """Move a model to the device, save it in checkpoints, and in several processes train it data-parallel.

        Call `torch.compile` before or after this: checkpoints hold the state of the bare model either way. A model that
        you have sharded yourself (`fully_shard`, `parallelize_module`) is left as it is. Shard it over dimensions of
        `context.device_mesh`, so that a rank that fails does not keep the others waiting.

        Args:
            model: a module, not wrapped in DistributedDataParallel.
            ddp_kwargs: arguments of DistributedDataParallel, such as `{"find_unused_parameters": True}`. The default of
                `gradient_as_bucket_view` is True: code that keeps a gradient beyond the next backward pass must clone
                it.
            parallel: a `pytorch.FullyShard`, to shard the model over the slots instead, in place.

        Raises:
            TypeError: the model is not a module; ddp_kwargs is not a dict, or names an argument that
                DistributedDataParallel lacks; parallel is not a FullyShard.
            ValueError: the model is wrapped already, or has other parameters on other ranks; ddp_kwargs or
                gradient_compression is used with a sharded model; a unit does not exist in the model, or shares a
                parameter with another unit; the model has DTensors, but nothing averages its gradients.

        Returns:
            The model, in DistributedDataParallel if there is more than one process; its attributes stay reachable.
        """
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"wrap_model needs a torch.nn.Module, got {model!r}")
        if any(model is known for known in self.models):
            raise ValueError("wrap_model was called twice with the same model; wrap each model once")
        ddp_kwargs = checked_ddp_kwargs(ddp_kwargs)
        unshare(each for each in model.parameters() if each.requires_grad)
        compress = self._run.section("optimizations").get("gradient_compression", False)
        # A rank may still be downloading data. Wait for it here, rather than in a collective with a timeout.
        check_same_parameters(model, self.distributed.allgather)
        model_parallel = self._run.mesh_shape.model_parallel
        if parallel is not None or is_sharded(model):
            averaging = self.distributed.size // model_parallel
            check_arguments(
                model, parallel, ddp_kwargs, compress=compress, ranks=self.distributed.size, averaging=averaging
            )
            if parallel is None:
                connect(model)
            elif not self._run.shards:
                whole(bare(model), parallel, self.device)
            else:
                if self.distributed.size == 1:
                    log.info("wrap_model: one slot has nothing to share the model with, and holds all of it")
                share_on_machine(bare(model), self.distributed)
                fully_sharded(bare(model), parallel, self.device_mesh, self.device)
            self.models.append(model)
            return model
        model = model.to(self.device)
        if self.distributed.size > 1:
            wrapped = data_parallel(
                model, self.device, ddp_kwargs, compress_gradients=compress, model_parallel=model_parallel
            )
            model = cast(M, wrapped)
        self.models.append(model)
        return model

    def wrap_optimizer(
        self,
        optimizer: O,
        backward_passes_per_step: int = 1,
        fp16_compression: bool | None = None,
        average_aggregated_gradients: bool | None = None,
    ) -> O:
        """Save an optimizer in checkpoints, and return it.

        Args:
            optimizer: an optimizer of the wrapped models' parameters.
            backward_passes_per_step: has no effect; any number of backward passes may precede a step.
            fp16_compression: deprecated, has no effect.
            average_aggregated_gradients: divide gradients summed over `aggregation_frequency` batches by that number.
                None: as the config says; its default is True.

        Raises:
            ValueError: backward_passes_per_step is below 1.
            TypeError: the argument is not an optimizer.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"wrap_optimizer needs a torch.optim.Optimizer, got {optimizer!r}")
        if backward_passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}")
        if fp16_compression is not None:
            warnings.warn("fp16_compression is deprecated and has no effect", FutureWarning, stacklevel=2)
        if average_aggregated_gradients is not None:
            self._run.optimisation.average_aggregated_gradients = average_aggregated_gradients
        unshare(each for group in optimizer.param_groups for each in group["params"] if each.requires_grad)
        self.optimizers.append(optimizer)
        return optimizer

    def wrap_lr_scheduler(self, lr_scheduler: Any, step_mode: LRScheduler.StepMode, frequency: int = 1) -> Any:
        """Save an LR scheduler in checkpoints, have the trainer step it, and return it.

        Args:
            lr_scheduler: a scheduler of `torch.optim.lr_scheduler` for a wrapped optimizer.
            step_mode: when to step, see `LRScheduler.StepMode`.
            frequency: step only after every so many batches, epochs or optimizer steps. Default: 1.

        Raises:
            ValueError: the scheduler's optimizer was not wrapped; or the scheduler is a ReduceLROnPlateau, whose step
                takes a metric, and step_mode is not MANUAL_STEP; or frequency is below 1.
            TypeError: step_mode is not a StepMode.
        """
        wrapped = LRScheduler(lr_scheduler, step_mode, frequency)
        by_metric = isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if by_metric and step_mode is not LRScheduler.StepMode.MANUAL_STEP:
            raise ValueError("ReduceLROnPlateau.step() needs a metric; wrap it with MANUAL_STEP, and step it yourself")
        if wrapped.optimizer is None or not any(wrapped.optimizer is known for known in self.optimizers):
            raise ValueError(
                "the LR scheduler's optimizer is not wrapped; call optimizer = context.wrap_optimizer(optimizer) first"
            )
        self.lr_schedulers.append(wrapped)
        return lr_scheduler

    def wrap_reducer(
        self, reducer: Any, name: str | None = None, for_training: bool = True, for_validation: bool = True
    ) -> Any:
        """Add a metric that can't be averaged over batches. See `MetricReducer`.

        Args:
            reducer: a function of a flat list of values; a `MetricReducer`; or a torchmetrics metric or collection,
                which is moved to the device, reset before each workload, and computed over the updates of all
                processes.
            name: the metric's name; None if the reducer returns a dict of several metrics.
            for_training, for_validation: in which workloads the reducer is reset and reduced.

        Returns:
            The object whose `update` you call.

        Raises:
            AssertionError: the reducer is wrapped already, or of another type.
        """
        return self._run.reducers.wrap_reducer(reducer, name, for_training, for_validation)

    def to_device(self, data: Any) -> Any:
        """Move data to `device`: tensors, numeric arrays, objects with a method `to`; and dicts, lists, tuples of them.

        Text, numbers and None stay as they are. Anything else does too, with one warning per type.
        """
        return self._run.to_device(data)

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Call `loss.backward(...)`, with loss scaling after `use_amp`.

        Args:
            loss: a tensor of shape () on `context.device`, or of any shape if `gradient` is given.
            gradient: the gradient with respect to `loss`, of the same shape; None for 1.
            retain_graph: keep the graph for another backward pass.
            create_graph: build a graph of the gradients, for higher-order derivatives.
        """
        if self._checks_tf32:
            self._checks_tf32 = False
            warn_if_tf32_is_off(loss, self.device)
        keep = retain_graph or None  # torch's default is create_graph's value
        amp = self._optimisation.amp
        if amp is None:
            loss.backward(gradient, keep, create_graph)  # type: ignore[no-untyped-call]
        else:
            amp.backward(loss, gradient=gradient, retain_graph=keep, create_graph=create_graph)
        if (timer := self._optimisation.step_timer) is not None:
            timer.end_backward()

    def step_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: Callable[[Iterator[torch.Tensor]], Any] | None = None,
        auto_zero_grads: bool = True,
        scaler: Any = None,
    ) -> None:
        """Step an optimizer. With gradient aggregation, only the last batch of an aggregation does so.

        Args:
            optimizer: a wrapped optimizer.
            clip_grads: called with the optimizer's parameters, after gradients are averaged (and unscaled, with
                `use_amp`) and before the step: `lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0)`.
            auto_zero_grads: zero gradients after the step; must be True with aggregation_frequency > 1.
            scaler: a `torch.amp.GradScaler` of your own, whose `step` is then called.

        Raises:
            ValueError: auto_zero_grads=False with aggregation_frequency > 1.
        """
        self._optimisation.step(optimizer, clip_grads, auto_zero_grads, scaler)

    def wrap_scaler(self, scaler: Any) -> Any:
        """Save a `torch.amp.GradScaler` in checkpoints, and return it. Your code still scales, unscales and updates.

        Call this before `wrap_model`. Or call `context.experimental.use_amp()`, which does all of it for you.

        Raises:
            RuntimeError: called twice, after `wrap_model`, or together with `use_amp`.
        """
        if self._run.uses_amp:
            raise RuntimeError(
                "wrap_scaler can't be combined with use_amp(), which has its own scaler; call one of the two"
            )
        if self._run.optimisation.scaler is not None:
            raise RuntimeError("wrap_scaler was called twice; a trial has one scaler")
        if self.models:
            raise RuntimeError("wrap_scaler was called after wrap_model; call it before wrap_model")
        self._run.optimisation.scaler = unscaling_by_placement(scaler)
        return scaler

    def configure_apex_amp(
        self,
        models: Any,
        optimizers: Any,
        enabled: bool = True,
        opt_level: str = "O1",
        cast_model_type: torch.dtype | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        loss_scale: float | str | None = None,
        cast_model_outputs: torch.dtype | None = None,
        num_losses: int = 1,
        verbosity: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> tuple[Any, Any]:
        """Deprecated: use `experimental.use_amp()`, which this now calls in place of NVIDIA's apex.

        Args:
            models, optimizers: returned unchanged.
            enabled: False for no effect.
            opt_level: "O0" for no effect; "O1" and "O2" are the same.
            (others): have no effect.

        Raises:
            RuntimeError: there is no CUDA device, or mixed precision is configured already.
            ValueError: opt_level is not O0, O1 or O2.
        """
        warnings.warn(
            "configure_apex_amp is deprecated; use context.experimental.use_amp()", FutureWarning, stacklevel=2
        )
        if not enabled:
            return models, optimizers
        if self.device.type != "cuda":
            raise RuntimeError(
                f"configure_apex_amp needs a CUDA device, but this trial is on {self.device}; pass enabled=False, or "
                "use context.experimental.use_amp()"
            )
        if opt_level not in ("O0", "O1", "O2"):
            raise ValueError(f"configure_apex_amp: opt_level must be 'O0', 'O1' or 'O2', got {opt_level!r}")
        if opt_level != "O0":
            self.experimental.use_amp()
        return models, optimizers


class PyTorchExperimentalContext:
    """Mixed precision, and switches for defaults of the trainer."""

    def __init__(self, run: TrialRun) -> None:
        self._run = run

    def use_amp(self, dtype: torch.dtype | None = None) -> None:
        """Train in mixed precision: `train_batch` and evaluation run under autocast, except for `backward` and
        `step_optimizer`.

        With float16, `context.backward` scales the loss, gradients are unscaled before `clip_grads`, steps with
        infinite gradients are skipped, and the scale is updated after each batch that stepped. Unless the optimizer is
        fused, each step waits for the device to know whether to skip. bfloat16 needs neither scaling nor waiting.

        Args:
            dtype: torch.float16 (the default), or torch.bfloat16 if the device supports it. On a CPU, float16 has no
                effect, and training keeps the models' own precision; bfloat16 is used there too.

        Raises:
            ValueError: the dtype is neither of these.
            RuntimeError: called twice, or after `wrap_scaler`.
        """
        if dtype not in (None, torch.float16, torch.bfloat16):
            raise ValueError(f"use_amp: dtype must be torch.float16 or torch.bfloat16, got {dtype!r}")
        if self._run.uses_amp:
            raise RuntimeError("use_amp was called twice; call it once for the whole trial")
        optimisation, device = self._run.optimisation, self._run.device
        if optimisation.scaler is not None:
            raise RuntimeError(
                "use_amp can't be combined with wrap_scaler(), because it has its own scaler; call one of the two"
            )
        self._run.uses_amp = True
        if dtype is torch.bfloat16:
            optimisation.amp = MixedPrecision(device, dtype)
        elif device.type != "cpu":
            optimisation.scaler = unscaling_by_placement(torch.amp.GradScaler(device.type))
            optimisation.amp = MixedPrecision(device, torch.float16, optimisation.scaler)

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allow loaders other than `pytorch.DataLoader`. Repeat, shard and skip the data yourself (see `samplers`)."""
        self._run.checks_loaders = False

    def disable_auto_to_device(self) -> None:
        """Keep the trainer from moving batches to the device. Call `context.to_device` yourself."""
        self._run.moves_batches = False

    def wrap_reducer(
        self, reducer: Any, name: str | None = None, for_training: bool = True, for_validation: bool = True
    ) -> Any:
        """The old name of `context.wrap_reducer`."""
        return self._run.reducers.wrap_reducer(reducer, name, for_training, for_validation)
