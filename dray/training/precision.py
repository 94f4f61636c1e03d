"""Mixed precision (autocast in the forward pass, gradient scaling), and a hint for GPUs with TF32."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.amp.grad_scaler import OptState

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class MixedPrecision:
    """torch's autocast and gradient scaler. A dtype with the exponent range of float32 needs no scaler."""

    def __init__(self, device: torch.device, dtype: torch.dtype, scaler: Any = None) -> None:
        self.device = device
        self.dtype = dtype
        self.scaler = scaler
        self._stepped = False

    def forward(self, function: Callable[P, T]) -> Callable[P, T]:
        """Wrap a function to run under autocast, which caches casts of weights during a call."""
        return torch.autocast(self.device.type, dtype=self.dtype)(function)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward from the scaled loss, also when called inside the forward function."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        # Autocast is for the forward pass only; backward uses the dtypes chosen there.
        with torch.autocast(self.device.type, enabled=False):
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """A block that updates weights. It runs without autocast, since some optimizers multiply matrices. At its end
        cached casts are dropped, since another forward pass of the same batch needs the new weights."""
        with torch.autocast(self.device.type, enabled=False):
            yield
        torch.clear_autocast_cache()

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], Any] | None) -> None:
        """Unscale, clip and step, but don't step if a gradient is infinite or NaN."""
        if self.scaler is None:
            if clip is not None:
                clip()
            optimizer.step()
            return
        states = self.scaler._per_optimizer_states
        if states[id(optimizer)]["stage"] is OptState.STEPPED:
            # A scaler lets an optimizer step once between updates. Updating now would change the scale of gradients
            # with which other optimizers have yet to step. So start over, but keep the first step's findings for the
            # update.
            states[object()] = states.pop(id(optimizer))
        if clip is not None:
            self.scaler.unscale_(optimizer)
            clip()
        self.scaler.step(optimizer)
        self._stepped = True

    def after_batch(self) -> None:
        """Update the scale, once for all optimizers that stepped in this batch."""
        if self._stepped:
            self._stepped = False
            self.scaler.update()


_PRODUCTS = {f"{name}Backward0" for name in ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear")}


def warn_if_tf32_is_off(loss: torch.Tensor, device: torch.device) -> None:
    """On a GPU with TF32, warn if most matrix products behind a loss are in float32 and nobody chose their precision.

    The dtypes in the graph reflect autocast, the trainer's or the trial's own, and `fully_shard`'s mixed precision.
    """
    try:
        is_chosen = torch.backends.cuda.matmul.fp32_precision != "none"
    except AttributeError:  # before torch 2.9
        is_chosen = torch.get_float32_matmul_precision() != "highest"
    if is_chosen or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return
    dtypes = _products(loss)
    if 2 * dtypes[torch.float32] > dtypes.total():
        log.warning(
            "matrix products are in float32 without TF32, at a fraction of this GPU's speed: call "
            'torch.set_float32_matmul_precision("high") in the trial\'s constructor, or train in mixed precision; '
            '"highest" keeps full float32 and silences this hint'
        )


def _products(loss: torch.Tensor) -> Counter[torch.dtype]:
    products: Counter[torch.dtype] = Counter()
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() in _PRODUCTS:
            products[node._input_metadata[0].dtype] += 1
        nodes += [earlier for earlier, _ in node.next_functions]
    return products
