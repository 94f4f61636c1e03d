"""What the parts of bench/gpu.py share, in their own processes. Needs torch, and nothing else that is not dray's."""

from __future__ import annotations

import time

import torch
from _measure import stamp

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def figure(what: str, value: str, *, goal: str = "", reached: bool | None = None) -> None:
    """Note a figure. Noted again, the later value counts: a part that is cut off has what it measured until then."""
    stamp("figure", what=what, value=value, goal=goal, reached=reached)


def note(text: str) -> None:
    """Add a line below the figures."""
    stamp("note", text=text)


def doing(what: str) -> None:
    """Note what begins now, to be named if the part is cut off in it."""
    stamp("doing", what=what)


def clock() -> float:
    """The time in seconds, once the GPU has nothing left to do."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def allocated() -> int:
    """Bytes of tensors on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
