"""A hint for float32 models on GPUs that have TF32: torch uses it for matrix products only if it is told to."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch

log = logging.getLogger(__name__)

_PRODUCTS = {f"{name}Backward0" for name in ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear")}


def warn_if_left_off(loss: torch.Tensor, device: torch.device) -> None:
    """Warn if most matrix products behind a loss are in float32 and nobody chose their precision, on a GPU with TF32.

    Autocast, of the trainer or the trial's own, and `fully_shard`'s mixed precision show in the dtypes of the graph.
    """
    if _is_chosen() or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return
    dtypes = _products(loss)
    if 2 * dtypes[torch.float32] > dtypes.total():
        log.warning(
            "matrix products are in float32 without TF32, at a fraction of this GPU's speed: call "
            'torch.set_float32_matmul_precision("high") in the trial\'s constructor, or train in mixed precision; '
            '"highest" keeps them as they are, without this hint'
        )


def _is_chosen() -> bool:
    try:
        return bool(torch.backends.cuda.matmul.fp32_precision != "none")
    except AttributeError:  # before torch 2.9
        return torch.get_float32_matmul_precision() != "highest"


def _products(loss: torch.Tensor) -> Counter[torch.dtype]:
    """The matrix products of a graph, by the dtype of their results."""
    found: Counter[torch.dtype] = Counter()
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() in _PRODUCTS:
            found[node._input_metadata[0].dtype] += 1
        nodes += [earlier for earlier, _ in node.next_functions]
    return found
