"""FLOPs of training: a GPU's peak, and the model's own, as torch counts them."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch

#: FLOPs for one record, or that they are to be counted in the first batch; None: not known.
Flops: TypeAlias = float | Literal["count"] | None

_PEAK_TFLOPS: list[tuple[str, float]] = [
    ("GB300", 2500), ("B300", 2250), ("GB200", 2500), ("B200", 2250),
    ("GH200", 989), ("H200 NVL", 836), ("H200", 989), ("H100 NVL", 835), ("H100 PCIE", 756), ("H100", 989),
    ("L40S", 362), ("L40", 181), ("L4", 121), ("RTX 4090", 165), ("RTX 3090", 71),
    ("A100", 312), ("A40", 150), ("A30", 165), ("A10G", 70), ("A10", 125),
    ("V100", 125), ("T4", 65),
    ("MI355X", 2500), ("MI325X", 1307), ("MI300X", 1307), ("MI300A", 981), ("MI250X", 191.5),
]  # fmt: skip
"""Dense bfloat16 (float16 where there is none) by the vendors' data sheets, and words of the GPU's name; the first that
matches counts. torch sees each half of an MI250X as a GPU."""


def peak_flops(gpu: str) -> float | None:
    """The peak of a GPU in FLOPs per second, without sparsity, by torch's name of it; None if it is not known.

    >>> peak_flops("NVIDIA H100 80GB HBM3")
    989000000000000.0
    >>> peak_flops("NVIDIA A100-SXM4-40GB MIG 1g.5gb")  # a part of a GPU
    """
    words = set(re.split(r"\W+", gpu.upper()))
    if "MIG" in words:
        return None
    return next((tflops * 1e12 for name, tflops in _PEAK_TFLOPS if words.issuperset(name.split())), None)


def counted(function: Callable[..., Any]) -> tuple[Any, int]:
    """The result of a function, and the FLOPs of its matrix products, convolutions and attention, with their backward.

    Compiled code runs without its compiler meanwhile.
    """
    from torch.utils.flop_counter import FlopCounterMode

    # Else torch would never compile code that it meets first in this mode. Without dynamo nothing is compiled.
    has_compiler = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if has_compiler else contextlib.nullcontext()
    with eager, warnings.catch_warnings(), FlopCounterMode(display=False) as counter:
        warnings.filterwarnings("ignore", ".*when there are global hooks on modules")  # the counter's own
        result = function()
    return result, counter.get_total_flops()
