"""Automatic mixed precision: the forward pass in half the bits where that is safe, and gradients that do not vanish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class MixedPrecision:
    """torch's autocast and its gradient scaler, each at its place in a batch.

    Args:
        device: where the models are.
        dtype: of what autocast computes.
        scaler: a `torch.amp.GradScaler`; None for a type with the exponents of float32, whose gradients need none.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, scaler: Any = None) -> None:
        self.device = device
        self.dtype = dtype
        self.scaler = scaler
        self._stepped = False

    def forward(self, function: Callable[P, T]) -> Callable[P, T]:
        """The function, under autocast. Casts of weights are kept for the time of a call."""
        return torch.autocast(self.device.type, dtype=self.dtype)(function)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """The gradients of the scaled loss; within a forward pass, too."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        # Autocast is for the forward pass alone: backward computes in the types that this has chosen.
        with torch.autocast(self.device.type, enabled=False):
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], Any] | None) -> None:
        """Unscale, clip, step; no step where a gradient is infinite or NaN."""
        if self.scaler is None:
            if clip is not None:
                clip()
            optimizer.step()
            return
        if clip is not None:
            self.scaler.unscale_(optimizer)
            clip()
        self.scaler.step(optimizer)
        self._stepped = True

    def after_batch(self) -> None:
        """Adapt the scale, once for all the optimizers that stepped in this batch."""
        if self._stepped:
            self._stepped = False
            self.scaler.update()
