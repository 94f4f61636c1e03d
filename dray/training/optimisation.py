"""Optimizer steps, with gradient aggregation, clipping, zeroing and LR schedulers; and their state for checkpoints."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dray.text import one_line
from dray.training.lr_scheduler import LRScheduler
from dray.training.parallel import ddp, sharding
from dray.training.parallel.gradient_check import GradientCheck
from dray.training.precision import MixedPrecision
from dray.training.pretrained import with_shared, without_shared
from dray.training.progress import Position
from dray.training.step_timer import StepTimer
from dray.training.units import is_int

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Optimisation:
    """The models, optimizers and LR schedulers of a trial.

    Gradients are summed over `aggregation_frequency` batches before an optimizer steps, and divided by that number with
    `average_aggregated_gradients`. `shares_records`: other ranks have the same records as this one.

    Raises:
        ValueError: aggregation_frequency is below 1.
    """

    def __init__(
        self,
        position: Position,
        aggregation_frequency: int = 1,
        average_aggregated_gradients: bool = True,
        shares_records: bool = False,
    ) -> None:
        if not is_int(aggregation_frequency) or aggregation_frequency < 1:
            raise ValueError(f"aggregation_frequency must be an int >= 1, got {aggregation_frequency!r}")
        self.position = position
        self.aggregation_frequency = aggregation_frequency
        self.average_aggregated_gradients = average_aggregated_gradients
        self._shares_records = shares_records
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_schedulers: list[LRScheduler] = []
        self.scaler: Any = None  # of the trial or of `amp`; saved and restored
        self.amp: MixedPrecision | None = None
        self.steps = 0  # optimizer steps on this rank since its training began
        self.stepped: set[int] = set()  # ids of optimizers for which `step` was called, aggregating or not
        self.has_trained = False  # a step has used a gradient of a wrapped model
        self.gradient_check: GradientCheck | None = None
        self.step_timer: StepTimer | None = None  # if ranks average gradients
        self._modes: list[tuple[torch.nn.Module, bool]] = []  # of each module before a validation; empty in training
        self._synchronising = True

    @cached_property
    def has_sharded(self) -> bool:
        """Whether a model is sharded, so that forward passes are collectives, in training and in validation. First used
        after all models are wrapped."""
        return any(map(sharding.is_sharded, self.models))

    @property
    def validates_together(self) -> bool:
        """Whether forward passes may be collectives in validation too: of a sharded model, or of the trial's code."""
        return self.has_sharded or self._shares_records

    @cached_property
    def _fsdp_modules(self) -> list[FSDPModule]:
        """The FSDP modules of all models; first used after all models are wrapped."""
        return [module for model in self.models for module in sharding.fsdp_modules(model)]

    def reshard(self) -> None:
        """Free parameters that models have gathered for a forward pass without a backward pass. The next forward pass
        would otherwise reuse them, although the optimizer has stepped."""
        for module in self._fsdp_modules:
            module.reshard()

    @property
    def steps_now(self) -> bool:
        """Whether the current batch is the last of its aggregation; always true outside training."""
        batch_idx = self.position.batch_idx
        return batch_idx is None or (batch_idx + 1) % self.aggregation_frequency == 0

    def forward(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of the trial that runs models: with `amp`, it runs under autocast."""
        return method if self.amp is None else self.amp.forward(method)

    def begin(self) -> None:
        """Let modules that define their own `train()` prepare for training. Modes stay as the trial has set them, for
        example for a teacher, or for batch norm with frozen statistics."""
        modules = [module for model in self.models for module in bare(model).modules()]
        in_eval = [module for module in modules if not module.training]
        for module in modules:
            if module.training and type(module).train is not torch.nn.Module.train:
                module.train()
        for module in in_eval:
            if module.training:
                module.eval()

    def training_mode(self) -> None:
        """Restore each module's mode from before the validations since the last batch."""
        # A module comes before its children, whose modes it sets too.
        for module, mode in self._modes:
            if module.training is not mode:
                module.train(mode)
        self._modes = []

    def eval_mode(self) -> None:
        self._modes = self._modes or [(each, each.training) for model in self.models for each in model.modules()]
        for model in self.models:
            model.eval()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block, data-parallel models exchange nothing with other ranks, even with gradients enabled."""
        models = [model for model in self.models if isinstance(model, ddp.DDPModel)]
        for model in models:
            model.runs_alone = True
        try:
            yield
        finally:
            for model in models:
                model.runs_alone = False

    def before_batch(self) -> None:
        """While gradients are aggregated, exchange them only in batches in which the optimizer steps."""
        if self.steps_now is not self._synchronising:
            self._synchronising = self.steps_now
            for model in self.models:
                if isinstance(model, DistributedDataParallel):
                    # Set directly, because `no_sync()` as a context manager can't enclose the user's code.
                    model.require_backward_grad_sync = self._synchronising
            for module in self._fsdp_modules:
                sharding.set_gradient_sync(module, self._synchronising)

    def after_batch(self, batch_idx: int) -> None:
        """Update the gradients' scale, and step the LR schedulers that are due."""
        if self.amp is not None:
            self.amp.after_batch()
        for scheduler in self.lr_schedulers:
            scheduler.after_batch(
                batch_idx,
                epoch_length=self.position.epoch_length,
                aggregation_frequency=self.aggregation_frequency,
            )

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: Callable[[Any], Any] | None = None,
        auto_zero_grads: bool = True,
        scaler: Any = None,
    ) -> None:
        """Average, clip, step and zero. No-op in a batch before the last of its aggregation."""
        self.stepped.add(id(optimizer))
        if self.aggregation_frequency > 1 and not self._ends_aggregation(optimizer, auto_zero_grads):
            return
        self.steps += 1
        if not self.has_trained:
            wrapped = {id(parameter) for model in self.models for parameter in model.parameters()}
            self.has_trained = any(each.grad is not None and id(each) in wrapped for each in parameters_of(optimizer))
        if self.gradient_check is not None:
            self.gradient_check.before_step(optimizer, self.position.batch_idx)
        if self.amp is not None or self.has_sharded:
            self._step(optimizer, clip_grads, scaler)
        else:
            if clip_grads is not None:
                clip_grads(parameters_of(optimizer))
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if auto_zero_grads:
            optimizer.zero_grad()
        if self._fsdp_modules:
            self.reshard()

    def _ends_aggregation(self, optimizer: torch.optim.Optimizer, auto_zero_grads: bool) -> bool:
        """Return whether the optimizer steps in this batch, after averaging its gradients."""
        frequency = self.aggregation_frequency
        if not auto_zero_grads:
            raise ValueError(
                f"step_optimizer(auto_zero_grads=False) can't be combined with aggregation_frequency={frequency}, "
                "where gradients must be zeroed after each optimizer step; leave auto_zero_grads at True"
            )
        if self.steps_now and self.average_aggregated_gradients:
            _divide([parameter.grad for parameter in parameters_of(optimizer)], frequency)
        return self.steps_now

    def _step(self, optimizer: torch.optim.Optimizer, clip_grads: Callable[[Any], Any] | None, scaler: Any) -> None:
        amp, plain = self.amp, contextlib.nullcontext()

        def clip() -> None:
            if clip_grads is not None:
                parameters = parameters_of(optimizer)
                with sharding.gradients_on_one_mesh(parameters) if self.has_sharded else plain:
                    clip_grads(parameters)

        with (
            plain if amp is None else amp.updating(),
            sharding.groups_placed_alike(optimizer) if self.has_sharded else plain,
        ):
            if amp is not None and scaler is None:
                amp.step(optimizer, None if clip_grads is None else clip)
            else:
                clip()
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The state of models, optimizers, LR schedulers and the scaler, if any, for a checkpoint."""
        models = [without_shared(bare(model)) for model in self.models]
        state: dict[str, Any] = {
            "models_state_dict": [saved for saved, _ in models],
            "optimizers_state_dict": [optimizer.state_dict() for optimizer in self.optimizers],
            "lr_schedulers_state_dict": [scheduler.state_dict() for scheduler in self.lr_schedulers],
        }
        if any(left_out for _, left_out in models):
            state["pretrained_sha256"] = [left_out for _, left_out in models]
        if self.scaler is not None:
            state["scaler_state_dict"] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`.

        Raises:
            ValueError: the numbers of models, optimizers or schedulers differ, or names or shapes of parameters.
        """
        self.load_models(state)
        for index, (optimizer, saved) in enumerate(
            zip(self.optimizers, state.get("optimizers_state_dict", ()), strict=False)
        ):
            if (groups := len(saved["param_groups"])) > (here := len(optimizer.param_groups)):
                raise ValueError(
                    f"optimizer {index} has {groups} parameter groups in the checkpoint, but {here} here. If training "
                    "added the others, add them again before the state is loaded: call optimizer.add_param_group() in "
                    "a callback's on_checkpoint_load_start()"
                )
        _load_all(self.optimizers, state, "optimizers_state_dict", "optimizer")
        _load_all(self.lr_schedulers, state, "lr_schedulers_state_dict", "LR scheduler")
        # A disabled scaler (on a CPU) has saved {}, which an enabled one would refuse.
        if self.scaler is not None and state.get("scaler_state_dict"):
            self.scaler.load_state_dict(state["scaler_state_dict"])

    def load_models(self, state: dict[str, Any]) -> None:
        """Restore only the models. Raises the errors of `load_state_dict`."""
        left_out = state.get("pretrained_sha256") or [{}] * len(self.models)
        models = [bare(model) for model in self.models]
        _load_all(models, state, "models_state_dict", "model", lambda n, own: with_shared(models[n], own, left_out[n]))

    @property
    def has_lost_gradients(self) -> bool:
        """Whether the sum of an unfinished aggregation is lost: each rank has a part of a sharded model's sum, and the
        process group of the gradients, which would add them up, is closed."""
        unfinished = self.position.trained % self.aggregation_frequency != 0
        return unfinished and not all(map(ddp.is_connected, filter(sharding.is_sharded, self.models)))

    def pending_gradients(self) -> list[list[torch.Tensor | None]] | None:
        """This rank's gradients by model and parameter, to which the next batch adds; None if all are zeroed.

        They come from the middle of an aggregation, or from a trial that keeps gradients. Only gradients in buckets of
        DistributedDataParallel are copied. The gradients of a sharded model are first summed over the ranks, so all
        ranks call this together.
        """
        self.reshard()
        for model in self.models:
            if ddp.is_connected(model) and sharding.is_sharded(model):
                sharding.sum_kept_gradients(model)
        gradients = [[parameter.grad for parameter in model.parameters()] for model in self.models]
        if all(gradient is None for row in gradients for gradient in row):
            return None
        return [[None if gradient is None else _apart(gradient.detach()) for gradient in row] for row in gradients]

    def restore_gradients(self, gradients: list[list[torch.Tensor | None]]) -> None:
        for model, row in zip(self.models, gradients, strict=True):
            for parameter, gradient in zip(model.parameters(), row, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)


def _load_all(
    targets: Sequence[Any],
    state: dict[str, Any],
    key: str,
    kind: str,
    completed: Callable[[int, Any], Any] = lambda _, saved: saved,
) -> None:
    saved = state.get(key)
    if saved is None or len(saved) != len(targets):
        raise ValueError(
            f"the checkpoint has {'no' if saved is None else len(saved)} {kind} state(s) under {key!r}, but the trial "
            f"has wrapped {len(targets)} {kind}(s); load it into the trial class that wrote it"
        )
    for index, (target, part) in enumerate(zip(targets, saved, strict=True)):
        try:
            target.load_state_dict(completed(index, part))
        except (RuntimeError, ValueError, KeyError) as error:
            raise ValueError(
                f"{kind} {index} of the checkpoint does not fit the trial's: {one_line(error)}; load it into the trial "
                "class that wrote it, with the same hyperparameters"
            ) from error


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module, without the wrappers of DDP and torch.compile, which add prefixes to its state."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _apart(gradient: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient that lies in a bucket, since the whole bucket would be pickled with it."""
    if sharding.is_dtensor(gradient) or gradient.layout is not torch.strided:
        return gradient
    return gradient.clone() if gradient.untyped_storage().nbytes() > gradient.nbytes else gradient


def _divide(gradients: Sequence[torch.Tensor | None], divisor: int) -> None:
    alike: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        if gradient is not None:
            part = sharding.local(gradient)
            alike[type(part), part.device, part.dtype, part.layout].append(part)
    for gradients_alike in alike.values():
        torch._foreach_div_(gradients_alike, divisor)
