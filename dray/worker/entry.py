"""Where a worker group's processes start: they report to the desk before the long imports begin."""

from __future__ import annotations

import threading
import traceback
from typing import Any

import ray

from dray.cluster.checks.node import UnfitNode, name_of_this_node
from dray.environment import set_variables

_served = threading.Event()
_error = ""


def serve_leases(work: dict[str, Any]) -> None:
    """What Ray Train runs on each worker: serve leases until the desk has no more.

    Args:
        work: ``desk`` (actor handle), ``group`` (name), ``start`` (number of the group's start), ``run`` (a name for
            this run of the experiment), ``settings`` (``dray.worker.lease.SharedSettings``), ``load_trial`` (a callable
            that returns the PyTorchTrial class or the ``Script`` to run; its ``place()`` returns the directory of the
            code, or None), ``log_format`` (of trials' logs), ``shared_by`` (how many trials share a slot), ``needs``
            (``dray.cluster.checks.node.Needs``; None if the driver has started the cluster on this machine).
    """
    global _error
    try:
        _serve_leases(work)
    except BaseException as error:
        _error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        traceback.print_exc()  # into Ray's log of this process
        raise
    finally:
        _served.set()


def ended() -> str:
    """Runs on each worker, in parallel to `serve_leases`: waits for its end, and returns its error, or "".

    The call fails as soon as the process dies, so the caller need not poll.
    """
    _served.wait()
    return _error


def _serve_leases(work: dict[str, Any]) -> None:
    if not ray.get_gpu_ids():
        # On a CPU slot Ray leaves all of the node's GPUs visible.
        set_variables({"CUDA_VISIBLE_DEVICES": ""})
    # Before torch is imported, which reads some of them.
    set_variables(work["settings"].environment)
    work["desk"].arrived.remote(work["group"], ray.get_runtime_context().get_node_id())
    if work["needs"] is not None:
        try:
            work["needs"].check_this_node(work["run"])
        except UnfitNode as unfit:
            return give_up(work, unfit)
    try:
        from dray.worker.serve import serve
    except ImportError as error:
        what = f"node {name_of_this_node()} can't import what workers run: {type(error).__name__}: {error}"
        return give_up(work, ImportError(f"{what}; install the driver's packages there"))
    serve(work)


def give_up(work: dict[str, Any], error: Exception) -> None:
    """Report an error that any other process here would have too, and wait until the driver ends the run."""
    # Without its causes: the desk may not be able to import their classes.
    error.__cause__ = error.__context__ = None
    ray.get(work["desk"].broken.remote(work["group"], error.with_traceback(None)))


class NoCollectives:
    """Replaces Ray Train's synchroniser, which serves `ray.train.report` and `ray.train.collective`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            "ray.train.report() and ray.train.collective don't work in trials of dray: report metrics and checkpoints "
            "as a PyTorchTrial does, or by dray.core; ranks exchange data by core_context.distributed"
        )
