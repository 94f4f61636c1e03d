"""The loop of every rank of a worker group, from its start to the end of the experiment: lease after lease.

One rank is one process on one slot. It asks the desk for a lease, runs the trial (`dray.worker.trial`), reports its
outcome, restores the state of the process, and asks again.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import ray

from dray import core
from dray.cluster.bubblewrap import why_impossible
from dray.cluster.node_check import Trouble, UnfitNode, name_of_this_node
from dray.code.startup_hook import run_startup_hook_once
from dray.leases.messages import Departure
from dray.rpc.calls import PeerUnreachable
from dray.rpc.connection import Connection
from dray.storage.checkpoints import RemoteStore
from dray.storage.logs import LogUploader
from dray.training.parallel import ddp
from dray.training.parallel.device import GpuConflict
from dray.training.rng import deterministic
from dray.worker import unfit
from dray.worker.behind import Behind
from dray.worker.gpu_share import limit_gpu_memory, wait_for_gpu_memory
from dray.worker.isolation.snapshot import ProcessSnapshot, settings_now
from dray.worker.lease import SharedSettings, TrialLease
from dray.worker.process_group import gpu_of_worker, joined
from dray.worker.ranks import Place, Ranks
from dray.worker.sandbox import run_in_sandbox
from dray.worker.spec import ExperimentSpec, WorkerSpec
from dray.worker.trial import Program, log_path, lost_driver, run_trial


@dataclass(frozen=True, slots=True)
class Loaded:
    """An experiment whose code is loaded: its program, and the code's directory, if it has one. The program is None if
    only sandboxes load it."""

    spec: ExperimentSpec
    program: Program | None
    code: Path | None


def serve(worker: WorkerSpec, ranks: Ranks, place: Place, desk: Connection) -> None:
    """Join the group's ranks, load the trial's code, and serve leases until the desk has no more."""
    os.chdir(_working_directory(worker))
    experiment = worker.experiment

    def meet(mine: tuple[str, int] | None) -> tuple[str, int]:
        host, port = desk.address(worker.start, mine).result()
        return host, port

    def give_up(error: Exception) -> None:
        unfit.give_up(desk, worker.owner, worker.group, error)

    try:
        code = None if experiment is None else _place(experiment)
    except Exception as error:
        return give_up(error)
    try:
        if place.gpus:
            wait_for_gpu_memory(gpu_of_worker(ranks.local_rank, place), worker.shared_by)
        with deterministic(worker.deterministic), joined(ranks, place, meet):
            # Before the user's code is loaded, because that may change the environment.
            distributed = core.DistributedContext.from_torch_distributed(os.environ["MASTER_ADDR"])
            before_code = settings_now()
            try:
                loaded = None if experiment is None else _loaded(experiment, code)
            except Exception as error:
                return give_up(error)
            distributed.side_store()  # now, on all ranks together: later, ranks would ask for it at different times
            gc.enable()
            snapshot = ProcessSnapshot(owns_gpu=worker.shared_by == 1, before_code=before_code)
            serve_joined(worker, desk, loaded, distributed, place, snapshot)
    except GpuConflict as error:
        give_up(error)


def _working_directory(worker: WorkerSpec) -> Path:
    """A directory of the group on this node, as Ray Train's workers have: files that trials of different groups write
    stay apart."""
    here = ray.get_runtime_context()
    # Until Ray 2.56 there is no public way to Ray's own directory.
    parent = getattr(here, "get_temp_dir", tempfile.gettempdir)()
    directory = Path(parent, here.get_session_name(), "artifacts", f"{worker.owner}-{worker.group}")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _place(experiment: ExperimentSpec) -> Path | None:
    """Unpack the experiment's code on this node, and run its startup hook, once per node."""
    code = experiment.load_trial.place()
    if code is not None and not experiment.settings.is_sandboxed:
        run_startup_hook_once(code, experiment.run)
    return code


def _load(experiment: ExperimentSpec) -> Loaded:
    return _loaded(experiment, _place(experiment))


def _loaded(experiment: ExperimentSpec, code: Path | None) -> Loaded:
    if not experiment.settings.is_sandboxed:
        return Loaded(experiment, experiment.load_trial(), code)
    if why := why_impossible():
        raise UnfitNode(name_of_this_node(), Trouble("sandbox", why))
    return Loaded(experiment, None, code)


def serve_joined(
    worker: WorkerSpec,
    desk: Connection,
    loaded: Loaded | None,
    distributed: core.DistributedContext,
    place: Place,
    snapshot: ProcessSnapshot,
    run_trial: Callable[..., Departure] = run_trial,
) -> None:
    """Serve leases until the desk has no more, on a rank that has joined its process group.

    Args:
        loaded: the experiment that the group was started for; None if it serves any experiment.
        snapshot: of this process after that, in which each trial runs.
        run_trial: runs a trial.
    """
    rank = distributed.rank
    number = 0
    has_code, is_reused = loaded is not None, False
    driver, driver_at = desk, None  # the connection to the current trial's driver; None: it is in the desk's process
    closing = contextlib.closing
    with closing(LogUploader()) as uploader, contextlib.ExitStack() as connected, closing(Behind(desk)) as behind:
        while True:
            granted = desk.next_lease(
                worker.owner, worker.group, worker.start, rank, distributed.size, number, worker.shape
            ).result()
            if granted is None:
                return
            client, endpoint, parameters = granted
            lease: TrialLease = pickle.loads(parameters)
            number = lease.number
            behind.begin(number, rank)
            if rank == 0:
                # Before the code is loaded: if loading ends the process, it counts as the trial's failure.
                desk.tell("begun", number)
            try:
                if endpoint != driver_at:
                    behind.call_after(connected.pop_all().close)
                    driver, driver_at = desk, None
                    if endpoint is not None:
                        driver = connected.enter_context(closing(Connection(endpoint)))
                        driver_at = endpoint
                if loaded is None or (loaded.spec.run, loaded.spec.code) != (client, lease.code):
                    spec = pickle.loads(driver.spec(lease.code).result())
                    spec.check_node()
                    loaded, is_reused, has_code = None, is_reused or has_code, True
                    loaded = snapshot.load(functools.partial(_load, spec))
            except Exception as error:
                if isinstance(error, PeerUnreachable):
                    departure = lost_driver(error)
                else:
                    departure = unfit.unloaded(desk, worker.group, lease, error, is_reused=is_reused)
                desk.tell("leave", number, rank, departure)
                continue
            spec, settings = loaded.spec, loaded.spec.settings
            if loaded.program is None:
                departure = run_in_sandbox(worker.group, loaded.code, lease, driver, desk, spec, place)
                desk.tell("leave", number, rank, departure.masked(settings.secrets))
                continue
            if distributed.size > 1:  # for each lease, because a program may have changed it
                ddp.set_timeout(timedelta(seconds=settings.collective_timeout_s))
                ddp.number_groups(number << 20)
            log = log_path(lease, rank)
            if isinstance(lease.store, RemoteStore) and not _is_shared_with_driver(lease):
                uploader.begin(log, lease.store.root)
            if worker.shared_by > 1 and place.gpus:
                limit_gpu_memory(worker.shared_by)
            given = loaded.program, loaded.code, lease, driver, desk, spec, distributed, place
            run = functools.partial(run_trial, *given, is_reused=is_reused, behind=behind)
            departure, leaks = snapshot.run(run, lambda ended: ended.outcome == "errored", lambda: behind.nbytes)
            is_reused = True
            stale = "; ".join([*_reasons_to_replace(departure, settings), *leaks])
            departure = replace(departure.masked(settings.secrets), stale=stale)
            desk.tell("leave", number, rank, departure)
            behind.start(functools.partial(uploader.end, log))


def _is_shared_with_driver(lease: TrialLease) -> bool:
    """Whether the driver sees the trial's directory. If so, it uploads the trial's logs to the object store itself."""
    return (lease.trial_dir.parent / "journal.jsonl").exists()


_BREAKS_PROCESS = {
    "oom": "out of memory",
    "host_oom": "out of memory",
    "device": "a GPU error",
    "collective": "an error in a collective",
}
"""Kinds of failures after which a process must not be reused."""


def _reasons_to_replace(departure: Departure, settings: SharedSettings) -> list[str]:
    """The reasons why this process should not serve another trial, except for leaks; [] if it can."""
    reasons = []
    if departure.failure is not None and departure.failure.kind in _BREAKS_PROCESS:
        reasons.append(_BREAKS_PROCESS[departure.failure.kind])
    if ddp.is_aborted():
        reasons.append("its collectives were aborted")
    if not settings.reuse_workers:
        reasons.append("resources.reuse_workers is false")
    return reasons
