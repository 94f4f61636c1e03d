"""The entry point of a worker group's processes, which report to the desk before the long imports begin."""

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

from dray.cluster.node_check import UnfitNode, name_of_this_node
from dray.cluster.view import GPU_TYPE, slot_type
from dray.environment import set_variables, visible_gpus
from dray.private import withhold_writing
from dray.rpc.calls import PeerUnreachable
from dray.rpc.connection import Connection
from dray.text import one_line
from dray.worker.ranks import Place, Ranks
from dray.worker.spec import WorkerSpec
from dray.worker.unfit import give_up

NCCL = {
    # A collective that fails or times out ends the process, because later results would be garbage. There is no
    # clean-up, since aborting its communicator may hang. This is torch's default; other values would train on.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    # The activity of each rank is dumped then, to a file that each trial sets anew.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_DUMP_DYNAMIC_FILE_NAME": "1",
}
"""Settings for torch's handling of NCCL errors, unless the node's environment or the config sets them."""

_served = threading.Event()
_error = ""


def own_place() -> Place:
    """The place of this process: its node and GPUs."""
    node = ray.get_runtime_context().get_node_id()
    return Place(node, ray.util.get_node_ip_address(), tuple(map(str, ray.get_gpu_ids())))


def start_thread(function: Callable[[Ranks], None], ranks: Ranks) -> None:
    """Run a function in a thread of this process."""
    threading.Thread(target=function, args=(ranks,), name="dray-worker", daemon=True).start()


def serve_leases(worker: WorkerSpec, ranks: Ranks) -> None:
    """Serve leases until the desk has no more. Runs in a thread of each worker."""
    global _error
    try:
        _serve_leases(worker, ranks)
    except BaseException as error:
        _error = f"{type(error).__name__}: {one_line(error)}"
        traceback.print_exc()  # goes to Ray's log of this process
    finally:
        _served.set()


def ended() -> str:
    """Wait for the end of `serve_leases`, and return its error, or "". Runs on each worker in parallel to it.

    The call fails as soon as the process dies, so the caller need not poll.
    """
    _served.wait()
    return _error


def skip_rays_exit_handlers() -> None:
    """Let this process exit before the C and C++ exit handlers that are registered so far, which are Ray's.

    In Ray 2.60 they can deadlock: `~CoreWorkerProcessImpl` holds the mutex of a scheduler while it destroys a handler
    that posts to it. Python's exit handlers run before. So do the exit handlers of libraries that are loaded later.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.on_exit(libc["_exit"], None)  # with the exit status
        libc["__cxa_atexit"](libc.fflush, None, None)  # before that


def _serve_leases(worker: WorkerSpec, ranks: Ranks) -> None:
    skip_rays_exit_handlers()
    withhold_writing()
    # "" on a CPU slot, where Ray leaves all GPUs of the node visible.
    set_variables(visible_gpus(ranks.gpus))
    # Set before torch is imported, because torch reads some of them.
    for name, value in NCCL.items():
        os.environ.setdefault(name, value)
    set_variables(worker.environment)
    here = ray.get_runtime_context()
    labels = here.get_node_labels()
    types = labels.get(GPU_TYPE, ""), slot_type(labels, gpu=bool(ranks.gpus))
    try:
        desk = Connection(worker.desk)
    except PeerUnreachable as error:
        raise PeerUnreachable(f"node {name_of_this_node()} {error}") from None
    with contextlib.closing(desk):
        desk.tell("arrived", worker.owner, worker.group, worker.start, here.get_node_id(), *types)
        try:
            if worker.experiment is not None:
                worker.experiment.check_node()
        except UnfitNode as unfit:
            return give_up(desk, worker.owner, worker.group, unfit)
        gc.disable()  # during the imports, of whose time collections would take a fifth
        try:
            from dray.worker.lease_loop import serve
        except ImportError as error:
            what = f"node {name_of_this_node()} can't import what workers run: {type(error).__name__}: {error}"
            unfit_node = ImportError(f"{what}; install the driver's packages there")
            return give_up(desk, worker.owner, worker.group, unfit_node)
        serve(worker, ranks, own_place(), desk)


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
