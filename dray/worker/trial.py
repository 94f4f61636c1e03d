"""Runs a leased trial on one rank, in the same loop as on a laptop (``dray.pytorch.Trainer``)."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TypeAlias

import torch
from torch.distributed import DistNetworkError

from dray import core, pytorch
from dray.hosts import use_host
from dray.leases.failure import LOG_TAIL, Failure, failure_of, may_be_gpus_fault, users_line, with_users_line
from dray.leases.messages import Departure, LeaseOutcome
from dray.pytorch.trainer import train_class
from dray.rpc.connection import Connection
from dray.script import Script, ScriptFailed, users_traceback
from dray.storage.remote import PATIENCE_S
from dray.text import counted, one_line
from dray.training import rng
from dray.training.cluster_info import use_cluster_info
from dray.training.errors import SearcherMetricError, TrialEnded
from dray.training.parallel.exchange import on_failure
from dray.training.profiling import dump_memory
from dray.training.units import ENDLESS
from dray.worker.behind import Behind, Left
from dray.worker.exits import ProgramExits
from dray.worker.hang import RECORD, dump_collectives, exit_if_hung
from dray.worker.host import RayHost, RayProgramHost
from dray.worker.isolation.handlers import redirect_handlers
from dray.worker.lease import DriverLost, LeaseLost, TrialLease
from dray.worker.log.trial_log import TrialLog, appending, log_to_stderr, redirect_output, reset_logging
from dray.worker.ranks import Place
from dray.worker.spec import ExperimentSpec

log = logging.getLogger(__name__)

Program: TypeAlias = type[pytorch.PyTorchTrial] | Script


def log_path(lease: TrialLease, rank: int) -> Path:
    """The file with a rank's output."""
    return lease.trial_dir / "logs" / f"rank_{rank}.log"


def run_trial(
    program: Program,
    code: Path | None,
    lease: TrialLease,
    driver: Connection,
    desk: Connection,
    experiment: ExperimentSpec,
    distributed: core.DistributedContext,
    place: Place,
    *,
    is_reused: bool = False,
    behind: Behind | None = None,
) -> Departure:
    """Run one lease. Exceptions of the trial become part of the departure.

    Args:
        program: the trial class, or the program to run.
        code: the directory of the user's code, if there is one.
        driver, desk: the connections to the trial's driver, and to the desk that lends the worker group.
        distributed: the group's ranks.
        place: where this process runs.
        is_reused: whether this process has run other trials, or had other code.
        behind: takes the trial's end if another trial waits for its group; None: no other follows in this process.
    """
    with redirect_output(log_path(lease, distributed.rank), experiment.settings.secrets) as log:
        given = program, code, lease, driver, desk, experiment, distributed, place
        return run_logged(*given, log, is_reused=is_reused, behind=behind)


def run_logged(
    program: Program,
    code: Path | None,
    lease: TrialLease,
    driver: Connection,
    desk: Connection,
    experiment: ExperimentSpec,
    distributed: core.DistributedContext,
    place: Place,
    log: TrialLog,
    *,
    is_reused: bool = False,
    behind: Behind | None = None,
) -> Departure:
    """`run_trial` in a process whose output goes to a trial's log already."""
    kind, settings = RayProgramHost if isinstance(program, Script) else RayHost, experiment.settings
    if behind is not None and (isinstance(program, Script) or not settings.reuse_workers):
        behind.wait()
        behind = None
    host = kind(driver=driver, desk=desk, lease=lease, settings=settings, code_dir=code, behind=behind)
    # torch dumps its record here when a collective times out; it appends the rank.
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(log.path.with_name(RECORD))
    failed: list[tuple[BaseException, Departure]] = []

    def depart(error: BaseException) -> Departure:
        departure = _departure(error, host, code, log, place, sys.stderr)
        return replace(departure, reused=is_reused and not host.has_progressed)

    def fail(error: BaseException) -> None:
        """Print the error and tell the desk at once: this process may end before the other ranks answer."""
        departure = depart(error)
        failed.append((error, departure))
        # A program may handle the error, unless its GPU has failed.
        if not isinstance(program, Script) or (departure.failure and departure.failure.kind == "device"):
            desk.tell("leave", lease.number, distributed.rank, departure.masked(settings.secrets))

    try:
        watched = _exit_if_hung(host, desk, distributed.rank, log)
        beating = host.beating() if distributed.rank == 0 else contextlib.nullcontext()
        with watched, beating, use_host(host, distributed), redirect_handlers(), on_failure(fail):
            departure = _run(program, code, host, experiment.log_format, distributed, place)
    except BaseException as error:  # including SystemExit: sys.exit() in a class would end the process
        departures = [departure for known, departure in failed if known is error]
        departure = departures[0] if departures else depart(error)
    left, is_chief = None if behind is None else behind.left, distributed.rank == 0
    if left is not None and departure.outcome == "writing":
        host.late = []
        left.complete = partial(_complete, left, host, code, log, place, is_chief=is_chief)
        if is_chief:
            return departure
        # Now: when another rank sees that all is committed, the trial may have a new lease on this machine.
    elif left is not None:
        with contextlib.suppress(Exception):  # the error that is known comes first
            left.finish()
    host.close()
    return departure


def _complete(
    left: Left, host: RayHost, code: Path | None, log: TrialLog, place: Place, *, is_chief: bool
) -> Departure:
    """Finish a trial that was left behind, while another one has the output of this process."""
    secrets, departure, late = host.settings.secrets, Departure(outcome="writing"), host.late
    assert late is not None
    with appending(log.path, secrets) as out:
        try:
            try:
                left.finish()
                if is_chief:
                    outcome = host.reports.complete(goes_on=left.goes_on)
                    departure = Departure(outcome=outcome, error=host.reports.why_diverged)
                    late.append(_ended(host, outcome))
            finally:
                out.writelines(f"{line}\n" for line in late)
        except BaseException as error:
            # When rank 0, which serves the ranks' store, has ended, it or Ray has told how the trial ended.
            if is_chief or not isinstance(error, DistNetworkError):
                departure = _departure(error, host, code, log, place, out)
        if is_chief:
            host.close()
    return departure.masked(secrets)


def _ended(host: RayHost, outcome: LeaseOutcome) -> str:
    how = "leaves its group, and its checkpoint is written meanwhile," if outcome == "writing" else outcome
    return f"trial {host.trial_id} {how} after {counted(host.batches, 'batch', ',')}"


def _run(
    program: Program,
    code: Path | None,
    host: RayHost,
    log_format: str,
    distributed: core.DistributedContext,
    place: Place,
) -> Departure:
    """Resume the trial, run its code, and agree with the other ranks on its end."""
    is_chief = distributed.rank == 0
    ended = host.resume() if is_chief else None
    host.latest_checkpoint, ended = distributed.broadcast((host.latest_checkpoint, ended))
    if ended is not None:
        return Departure(outcome=ended, error=host.reports.why_diverged)
    with _cluster_info(host, distributed, place):
        if isinstance(program, Script):
            assert isinstance(host, RayProgramHost)
            if departure := _run_program(program, code, host, distributed):
                return departure
        else:
            log_to_stderr(log_format)
            _run_class(program, code, host, is_chief=is_chief)
    # Only the chief's host has reports.
    has_result = is_chief and (host.has_reported or not isinstance(program, Script))
    outcome: LeaseOutcome | None = distributed.broadcast(host.end() if has_result else None)
    if outcome is None:
        assert isinstance(program, Script), "a trial that is a class is one fit()"
        return Departure(outcome="errored", error=program.never_trained(distributed.rank), fatal=True)
    if is_chief and not isinstance(program, Script):
        log.info(_ended(host, outcome))
    return Departure(outcome=outcome, error=host.reports.why_diverged)


def _run_class(trial_class: type[pytorch.PyTorchTrial], code: Path | None, host: RayHost, *, is_chief: bool) -> None:
    """Run a trial class with one ``fit()``, as configured by the experiment."""
    if code is not None:
        os.chdir(code)
    if is_chief:
        since = "" if host.latest_checkpoint is None else f", from {host.latest_checkpoint}"
        log.info("trial %d starts%s: %s", host.trial_id, since, dict(host.lease.hparams))
    train_class(
        trial_class,
        host.settings.config,
        # If a metric measures the length, only the search ends the trial.
        max_length=ENDLESS if host.max_length is None else None,
        latest_checkpoint=host.latest_checkpoint,
    )


def _run_program(
    program: Script, code: Path | None, host: RayProgramHost, distributed: core.DistributedContext
) -> Departure | None:
    """Run a program as a trial. Returns a departure if it failed without an exception."""
    assert code is not None, "a program lies in a directory"
    reset_logging()
    # pytorch.init() seeds again, but code before that call should be reproducible too.
    rng.seed_all(host.trial_seed)
    exits = ProgramExits(distributed.side_store(), host.lease.number, distributed.rank, distributed.size)
    with exits.watch(code), _errors_allowed_once_asked_to_stop(host):
        program.run(code)
    if not (host.has_trained or host.has_reported):  # the others may train, and wait for this rank
        return Departure(outcome="errored", error=program.never_trained(distributed.rank), fatal=True)
    if error := exits.wait():
        failure = Failure(kind="error", where=one_line(error), batches=host.batches)
        return Departure(outcome="errored", error=error, failure=failure)
    return None


@contextlib.contextmanager
def _errors_allowed_once_asked_to_stop(host: RayProgramHost) -> Iterator[None]:
    """Accept exceptions of a program that has acknowledged a request to stop: some programs raise one after they have
    saved, which is no failure in Determined either. Accept also a StopIteration of a program that is restarted after
    its last operation and calls `next()` for another: Determined would not have restarted it."""
    try:
        yield
    except (TrialEnded, LeaseLost, pytorch.InvalidHP, SearcherMetricError):
        raise
    except Exception as error:
        if not (host.acknowledged or (host.was_complete and isinstance(error, StopIteration))):
            raise
        what = "the program was asked to stop, and ended with this error:"
        print(what, traceback.format_exc(), sep="\n", file=sys.stderr)


def _departure(
    error: BaseException, host: RayHost, code: Path | None, log: TrialLog, place: Place, out: IO[str]
) -> Departure:
    """Print the error of a trial, and return its departure."""
    match error:
        case TrialEnded():
            print(error, file=out)
            return Departure(outcome=host.end(), error=host.reports.why_diverged, alone=True)
        case DriverLost():
            return lost_driver(error, host.batches)
        case LeaseLost():
            return Departure(outcome="interrupted")
        case pytorch.InvalidHP():
            return Departure(outcome="invalid_hp", error=str(error))
        case SearcherMetricError():
            return Departure(outcome="errored", error=str(error), fatal=True)
        case ScriptFailed():
            text = "\n".join([str(error), *users_line(error, code), "", f"{LOG_TAIL} ({log.path}):", log.tail()])
        case _:
            is_program = isinstance(host, RayProgramHost)
            trace = (
                users_traceback(error, code)
                if is_program and code is not None
                else "".join(traceback.format_exception(error))
            )
            text = with_users_line(error, trace, code)
            print(text, end="", file=out)
    failure = failure_of(error, host.batches)
    if failure.kind == "oom" and (snapshot := _memory_snapshot(log.path)):
        print(snapshot, file=out)
        text += f"\n{snapshot}"
    if may_be_gpus_fault(error):
        failure = replace(failure, node=place.node)
    return Departure(outcome="errored", error=text, failure=failure)


def _memory_snapshot(log_path: Path) -> str:
    """Write a snapshot of the GPU's memory beside a rank's log, in place of an earlier one. Returns a line about it, or
    "" if there is none."""
    path = log_path.with_suffix(".memory.pickle")
    try:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return ""
        dump_memory(path)
    except Exception as error:  # it must not hide the trial's own
        return f"no snapshot of the GPU's memory: {type(error).__name__}: {one_line(error)}"
    return f"the GPU's memory then: {path} on {socket.gethostname()}; https://pytorch.org/memory_viz shows it"


def lost_driver(error: Exception, batches: int = -1) -> Departure:
    """The departure of a trial that can't reach its driver. If the driver still exists, it restarts the trial."""
    return Departure(outcome="errored", error=str(error), failure=Failure(kind="node", batches=batches))


def _exit_if_hung(host: RayHost, desk: Connection, rank: int, log: TrialLog) -> contextlib.AbstractContextManager[None]:
    """End the process if the trial hangs."""

    def report(what: str) -> None:
        failure = Failure(kind="hung", batches=host.batches)
        error = f"{what}; the stacks of all threads are in {log.path}"
        desk.leave(host.lease.number, rank, Departure(outcome="errored", error=error, failure=failure)).result()
        with contextlib.suppress(OSError):  # in a sandbox, the directory can't be written to
            dump_collectives(log.path, rank)

    timeout_s = host.settings.hang_timeout_s
    # The chief may wait for an object store, and the others wait for the chief without knowing why.
    grace_s = PATIENCE_S if rank > 0 and host.is_remote else 0.0
    return exit_if_hung(timeout_s, pulse=host.pulse, log=log.descriptor, report=report, grace_s=grace_s)


@contextlib.contextmanager
def _cluster_info(host: RayHost, distributed: core.DistributedContext, place: Place) -> Iterator[None]:
    """Set the value of `dray.get_cluster_info()` for the trial's code."""
    lease, latest = host.lease, host.latest_checkpoint
    slots = Counter(distributed.allgather(place.ip))
    config = host.settings.config_for_code()
    info = core.ClusterInfo(
        trial=core.TrialInfo(
            trial_id=lease.trial_id,
            experiment_id=host.experiment_id,
            trial_seed=lease.trial_seed,
            hparams=copy.deepcopy(dict(lease.hparams)),  # a copy, because programs may pop values
            config=config,
            steps_completed=0 if latest is None else lease.store.batches_of(latest),
        ),
        latest_checkpoint=latest,
        slot_ids=list(range(distributed.local_size)),
        container_addrs=list(slots),
        container_slot_counts=list(slots.values()),
        container_rank=distributed.cross_rank,
        user_data=config["data"],
    )
    with use_cluster_info(info):
        yield
