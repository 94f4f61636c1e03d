"""`context.experimental`: mixed precision, and switches for the trainer's defaults."""

from __future__ import annotations

from typing import Any

import torch

from dray.pytorch.trial_run import TrialRun
from dray.training.parallel.sharding import unscaling_by_placement
from dray.training.precision import MixedPrecision


class PyTorchExperimentalContext:
    """Mixed precision, and switches for the trainer's defaults."""

    def __init__(self, run: TrialRun) -> None:
        self._run = run

    def use_amp(self, dtype: torch.dtype | None = None) -> None:
        """Train in mixed precision: `train_batch` and evaluation run under autocast, except for `backward` and
        `step_optimizer`.

        With float16 the loss is scaled in `context.backward`, gradients are unscaled before `clip_grads`, steps with
        infinite gradients are skipped, and the scale is updated after each batch that stepped: an optimizer may step
        several times in one. Each step waits for the device to know whether to skip, unless the optimizer is fused.
        bfloat16 needs neither scaling nor waiting.

        Args:
            dtype: torch.float16, the default, or torch.bfloat16 if the device has it. With float16 a CPU trains as
                usual, in the models' own precision; with bfloat16 it trains in mixed precision too.

        Raises:
            ValueError: another dtype.
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
        """Allow loaders other than `pytorch.DataLoader`; repeat, shard and skip the data yourself (see `samplers`)."""
        self._run.checks_loaders = False

    def disable_auto_to_device(self) -> None:
        """Don't move batches to the device in the trainer; call `context.to_device` yourself."""
        self._run.moves_batches = False

    def wrap_reducer(
        self, reducer: Any, name: str | None = None, for_training: bool = True, for_validation: bool = True
    ) -> Any:
        """`context.wrap_reducer`, under its old name."""
        return self._run.reducers.wrap_reducer(reducer, name, for_training, for_validation)
