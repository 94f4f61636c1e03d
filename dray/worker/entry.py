"""Where a worker group's processes start: they report to the desk before the long imports begin."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import ray

from dray.cluster.checks.node import UnfitNode, name_of_this_node
from dray.cluster.view import GPU_TYPE
from dray.desk.connection import Connection, DeskUnreachable
from dray.environment import set_variables
from dray.text import one_line
from dray.worker.ranks import Place, Ranks
from dray.worker.spec import WorkerSpec
from dray.worker.unfit import give_up

NCCL = {
    # A collective that fails or times out ends the process: whatever is computed after it is garbage. Without cleaning
    # up, since aborting its communicator may hang. It is torch's default; another would train on.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    # What each rank was doing then is dumped, to a file that each trial sets anew.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_DUMP_DYNAMIC_FILE_NAME": "1",
}
"""How torch handles errors of NCCL, unless the node's environment or the config says otherwise."""

_served = threading.Event()
_error = ""


def own_place() -> Place:
    """Where this process runs."""
    node = ray.get_runtime_context().get_node_id()
    return Place(node, ray.util.get_node_ip_address(), tuple(map(str, ray.get_gpu_ids())))


def start_thread(function: Callable[[Ranks], None], ranks: Ranks) -> None:
    """Run a function in a thread of this process."""
    threading.Thread(target=function, args=(ranks,), name="dray-worker", daemon=True).start()


def serve_leases(worker: WorkerSpec, ranks: Ranks) -> None:
    """What each worker runs in its thread: serve leases until the desk has no more."""
    global _error
    try:
        _serve_leases(worker, ranks)
    except BaseException as error:
        _error = f"{type(error).__name__}: {one_line(error)}"
        traceback.print_exc()  # into Ray's log of this process
    finally:
        _served.set()


def ended() -> str:
    """Runs on each worker, in parallel to `serve_leases`: waits for its end, and returns its error, or "".

    The call fails as soon as the process dies, so the caller need not poll.
    """
    _served.wait()
    return _error


def skip_rays_exit_handlers() -> None:
    """Have this process end before the exit handlers of C and C++ that are registered by now: those of Ray.

    In Ray 2.60 they can wait for themselves forever: `~CoreWorkerProcessImpl` holds the mutex of a scheduler while it
    destroys a handler that posts to it. What matters has happened before, by Python's exit handlers. The handlers of
    libraries that are loaded later run earlier, also those of C.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.on_exit(libc["_exit"], None)  # with the exit status
        libc["__cxa_atexit"](libc.fflush, None, None)  # before that


def _serve_leases(worker: WorkerSpec, ranks: Ranks) -> None:
    skip_rays_exit_handlers()
    # "" on a CPU slot, where Ray leaves all of the node's GPUs visible.
    set_variables({"CUDA_VISIBLE_DEVICES": ",".join(ranks.gpus)})
    # Before torch is imported, which reads some of them.
    for name, value in NCCL.items():
        os.environ.setdefault(name, value)
    set_variables(worker.environment)
    here = ray.get_runtime_context()
    gpu_type = here.get_node_labels().get(GPU_TYPE, "")
    try:
        desk = Connection(worker.desk)
    except DeskUnreachable as error:
        raise DeskUnreachable(f"node {name_of_this_node()} {error}") from None
    with contextlib.closing(desk):
        desk.tell("arrived", worker.owner, worker.group, worker.start, here.get_node_id(), gpu_type)
        try:
            if worker.experiment is not None:
                worker.experiment.check_node()
        except UnfitNode as unfit:
            return give_up(desk, worker.owner, worker.group, unfit)
        gc.disable()  # until all is imported: collections would take a fifth of that time
        try:
            from dray.worker.serve import serve
        except ImportError as error:
            what = f"node {name_of_this_node()} can't import what workers run: {type(error).__name__}: {error}"
            unfit_node = ImportError(f"{what}; install the driver's packages there")
            return give_up(desk, worker.owner, worker.group, unfit_node)
        serve(worker, ranks, desk)


class NoTrainRun:
    """Replaces the controller, synchroniser and storage of a run of Ray Train, which serve `ray.train.report` and
    `ray.train.collective`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            "ray.train.report() and ray.train.collective don't work in trials of dray: report metrics and checkpoints "
            "as a PyTorchTrial does, or with dray.core; ranks exchange data through core_context.distributed"
        )
