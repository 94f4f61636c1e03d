"""Two GPUs: data-parallel training over NCCL, and a rank that raises, asserts on its device, or is killed."""

from __future__ import annotations

from _measure import stamp
from gloo import meet_faults
from part import ON_GPU, several


def main(tiny: bool) -> None:
    """As the part `gloo`, each rank with a GPU of its own."""
    if not ON_GPU:
        stamp("left_out", why="on a CPU it is the part gloo")
    elif several():
        meet_faults()
