"""Where a worker group's processes start: they tell the desk before the long imports begin."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import ray
from ray.util import get_current_placement_group

from dray.cluster.environment import set_variables
from dray.cluster.node_checks import UnfitNode, name_of_this_node


def serve_leases(work: dict[str, Any]) -> None:
    """What Ray Train runs on each worker: serve leases until the desk has no more.

    Args:
        work: ``desk`` (actor handle), ``group`` (name), ``run`` (a name of this run of the experiment), ``experiment``
            (``hosts.ray_worker.Experiment``), ``load_trial`` (a callable that returns the PyTorchTrial class or the
            ``Script`` to run; its ``place()`` is the directory of the code, or None: where trials run), ``log_format``
            (of what trials log), ``shared_by`` (how many trials share a slot), ``needs``
            (``dray.cluster.node_checks.Needs``, or None on a machine of our own).
    """
    if not ray.get_gpu_ids():
        # On a CPU slot, where Ray leaves all of the node's GPUs visible.
        set_variables({"CUDA_VISIBLE_DEVICES": ""})
    # Before torch is imported: it reads some of them.
    set_variables(work["experiment"].environment)
    work["desk"].arrived.remote(work["group"], get_current_placement_group(), (os.uname().nodename, _oom_kills()))
    if work["needs"] is not None:
        try:
            work["needs"].check_this_node(work["run"])
        except UnfitNode as unfit:
            return give_up(work, unfit)
    try:
        from dray.cluster.worker import serve
    except ImportError as error:
        told = f"node {name_of_this_node()} can't import what workers run: {type(error).__name__}: {error}"
        return give_up(work, ImportError(f"{told}; install the driver's packages there"))
    serve(work)


def give_up(work: dict[str, Any], error: Exception) -> None:
    """Tell the driver of an error that any process in this one's place would have too; wait until it ends the run."""
    # Without its causes: they may be of classes that the desk does not have.
    error.__cause__ = error.__context__ = None
    ray.get(work["desk"].broken.remote(work["group"], error.with_traceback(None)))


def _oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory, in this container or on the machine."""
    for place in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = (line.split() for line in Path(place).read_text().splitlines())
            return next(int(value) for name, value in lines if name == "oom_kill")
    return 0
