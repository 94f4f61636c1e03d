"""The worker's side of a lease: what every rank of a group runs, from its start to the end of the experiment.

One rank is one process on one slot. It asks the desk for work, runs the trial that it gets in the same loop that a
laptop runs (``dray.pytorch.Trainer``), says how the trial ended, puts the process back into the state it was in, and
asks again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import ray
import ray.train
import torch
import torch.distributed

from dray import core, pytorch
from dray.cluster.baseline import Baseline
from dray.cluster.entry import give_up
from dray.cluster.failure import PRINTED, Failure, failure_of, told_first, users_line
from dray.cluster.handlers import handlers_of_a_trial
from dray.cluster.hang import ended_if_it_hangs
from dray.cluster.messages import Outcome
from dray.cluster.process_group import joined
from dray.cluster.startup_hook import run_startup_hook_once
from dray.cluster.trial_log import (
    TrialLog,
    log_as_python_starts,
    log_as_the_command_line,
    print_as_python_does,
    printed_to,
)
from dray.compat import told_of_real
from dray.hosts import use_host
from dray.hosts.ray_program import RayProgramHost
from dray.hosts.ray_worker import Experiment, Lease, LeaseLost, RayHost
from dray.masking import hidden_text
from dray.pytorch.class_entrypoint import train
from dray.script import Script, ScriptFailed, users_traceback
from dray.storage.checkpoints import RemoteStore
from dray.storage.location import Location
from dray.storage.printed import LogCopies
from dray.storage.remote import PATIENCE_S
from dray.training import rng
from dray.training.errors import PeerFailed, SearcherMetricError, TrialEnded
from dray.training.units import ENDLESS

ENDED_POLL_S = 0.1

Program: TypeAlias = type[pytorch.PyTorchTrial] | Script


class GroupRetired(RuntimeError):
    """Ends these processes; Ray Train starts the group anew. Raised on purpose, by a rank that the desk told so."""


def serve(work: dict[str, Any]) -> None:
    """Serve leases until the desk has no more; ``work`` as in ``dray.cluster.entry.serve_leases``."""
    context = ray.train.get_context()
    print_as_python_does()
    load = work["load_trial"]
    try:
        code = load.place()
        if code is not None:
            run_startup_hook_once(code, work["run"])
    except Exception as error:
        return give_up(work, error)
    with joined(context):
        try:
            program = load()
        except Exception as error:
            return give_up(work, error)
        _serve(work, program, code, _distributed(context))


def _serve(work: dict[str, Any], program: Program, code: Path | None, distributed: core.DistributedContext) -> None:
    rank, size = distributed.rank, distributed.size
    distributed.side_store()  # together, and at once: later each rank asks for it when it comes to it
    desk, group = work["desk"], work["group"]
    # Shared by the ranks that Train has started together, and by no others.
    incarnation = distributed.broadcast(uuid.uuid4().hex)
    baseline = Baseline()
    number = 0
    with contextlib.closing(LogCopies()) as copies:
        while True:
            lease = ray.get(desk.next_lease.remote(group, incarnation, rank, size, number))
            if lease is None:
                return
            if lease.get("retire"):
                raise GroupRetired(f"worker group {group} starts anew: {lease['retire']}")
            number = lease["number"]
            if rank == 0:
                desk.begun.remote(number)
            trial: Lease = lease["lease"]
            if isinstance(trial.store, RemoteStore) and not _is_the_drivers(trial.trial_dir):
                copies.begin(_log(trial, rank), trial.store.root)
            left, stale = baseline.run(functools.partial(_run_trial, program, code, trial, work, distributed))
            copies.end(_log(trial, rank))
            left = left.without(work["experiment"].secrets)
            if left.failure is not None and left.failure.kind in _SPOILT:
                stale.insert(0, _SPOILT[left.failure.kind])
            if not work["experiment"].config["resources"]["reuse_workers"]:
                stale.append("resources.reuse_workers is false")
            told: dict[str, Any] = {"failure": left.failure, "second_hand": left.second_hand, "alone": left.alone}
            told |= {"stale": "; ".join(stale)}
            ray.get(desk.leave.remote(number, rank, left.outcome, left.error, left.fatal, **told))


def _is_the_drivers(trial_dir: Path) -> bool:
    """Whether the driver sees this directory, too: it then copies what trials print to an object store."""
    return (trial_dir.parent / "journal.jsonl").exists()


def _log(lease: Lease, rank: int) -> Path:
    return lease.trial_dir / "logs" / f"rank_{rank}.log"


# Kinds of failures after which a process is no longer what it was.
_SPOILT = {"oom": "out of memory", "device": "an error of a GPU", "collective": "an error of a collective"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """How a trial ended on this rank.

    Attributes:
        error: a traceback, or a message for the user.
        fatal: the error is that of all trials.
        failure: what the error is, if the trial may be started again after it.
        second_hand: the error is another rank's.
        alone: this rank was made to leave, and the others train on.
    """

    outcome: Outcome
    error: str = ""
    fatal: bool = False
    failure: Failure | None = None
    second_hand: bool = False
    alone: bool = False

    def without(self, secrets: Sequence[str]) -> _Left:
        """The same in words that may be written down."""
        failure = self.failure and replace(self.failure, where=hidden_text(self.failure.where, secrets))
        return replace(self, error=hidden_text(self.error, secrets), failure=failure)


def _run_trial(
    program: Program,
    code: Path | None,
    lease: Lease,
    work: Mapping[str, Any],
    distributed: core.DistributedContext,
) -> _Left:
    """Run one lease."""
    experiment: Experiment = work["experiment"]
    script = isinstance(program, Script)
    kind = RayProgramHost if script else RayHost
    host = kind(desk=work["desk"], lease=lease, experiment=experiment, code_dir=code)
    with printed_to(_log(lease, distributed.rank), experiment.secrets) as log:
        try:
            with _watched(host, lease, work, distributed.rank, log), use_host(host, distributed), handlers_of_a_trial():
                outcome: Outcome | None = host.go_on() if distributed.rank == 0 else None
                host.latest_checkpoint, outcome = distributed.broadcast((host.latest_checkpoint, outcome))
                if outcome is None:
                    with _cluster_info(host, lease, experiment, distributed):
                        if isinstance(program, Script):
                            assert code is not None, "a program lies in a directory"
                            log_as_python_starts()
                            # pytorch.init() does it again; what comes before that should be the same each time, too.
                            rng.seed_all(lease.trial_seed)
                            program.run(code)
                        else:
                            log_as_the_command_line(work["log_format"])
                            _train(program, code, experiment, host)
                    if script:
                        if not (host.watched or host.trained):  # the others may train, and wait for this rank
                            told = _never_trained(program, distributed.rank)
                            return _Left(outcome="errored", error=told, fatal=True)
                        _await_others(lease, distributed)
                    # Only the chief's host knows of reports.
                    ended = distributed.rank == 0 and (host.trained or not script)
                    outcome = distributed.broadcast(host.end() if ended else None)
            if outcome is None:
                return _Left(outcome="errored", error=_never_trained(program, distributed.rank), fatal=True)
            return _Left(outcome=outcome)
        except TrialEnded as e:
            print(e, file=sys.stderr)
            return _Left(outcome=host.end(), alone=True)
        except LeaseLost:
            return _Left(outcome="interrupted")
        except pytorch.InvalidHP as e:
            return _Left(outcome="invalid_hp", error=str(e))
        except SearcherMetricError as e:
            return _Left(outcome="errored", error=str(e), fatal=True)
        except ScriptFailed as e:
            told = "\n".join([str(e), *users_line(e, code), "", f"{PRINTED} ({log.path}):", log.end()])
            return _Left(outcome="errored", error=told, failure=failure_of(e, host.batches))
        except BaseException as e:  # a class may end itself by sys.exit(), of which the process would end
            trace = users_traceback(e, code) if script and code is not None else traceback.format_exc()
            told = told_first(e, trace, code)
            print(told, end="", file=sys.stderr)
            failure = failure_of(e, host.batches)
            return _Left(outcome="errored", error=told, failure=failure, second_hand=isinstance(e, PeerFailed))
        finally:
            host.flush()


def _await_others(lease: Lease, distributed: core.DistributedContext) -> None:
    """Wait until the trial's code has ended on all ranks.

    Not by a collective, which has its time: what one rank of a program does in the end, alone, may take longer.
    """
    if (store := distributed.side_store()) is not None:
        store.set(f"ended/{lease.number}/{distributed.rank}", b"1")
        keys = [f"ended/{lease.number}/{rank}" for rank in range(distributed.size)]
        pause_s = 0.001
        while not store.check(keys):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, ENDED_POLL_S)


def _watched(
    host: RayHost, lease: Lease, work: Mapping[str, Any], rank: int, log: TrialLog
) -> contextlib.AbstractContextManager[None]:
    """The trial is ended if it hangs."""

    def tell(told: str) -> None:
        failure = Failure(kind="hung", batches=host.batches)
        error = f"{told}; the stacks of all threads are in {log.path}"
        ray.get(work["desk"].leave.remote(lease.number, rank, "errored", error, failure=failure))

    within_s = work["experiment"].config.get("hang_timeout_s")
    # The chief may wait for an object store, and the others for the chief, which can't tell them why.
    grace_s = PATIENCE_S if rank > 0 and host.is_remote else 0.0
    return ended_if_it_hangs(within_s, pulse=host.pulse, log=log.descriptor, tell=tell, grace_s=grace_s)


def _train(trial_class: type[pytorch.PyTorchTrial], code: Path | None, experiment: Experiment, host: RayHost) -> None:
    """What a trial that is a class is: one ``fit()``, as the experiment's config has it."""
    if code is not None:
        os.chdir(code)
    train(
        trial_class,
        experiment.config,
        # Where the search counts by a metric it says when to end, and nothing else does.
        max_length=ENDLESS if host.max_length is None else None,
        latest_checkpoint=host.latest_checkpoint,
    )


@contextlib.contextmanager
def _cluster_info(
    host: RayHost, lease: Lease, experiment: Experiment, distributed: core.DistributedContext
) -> Iterator[None]:
    """What `dray.get_cluster_info()` says to the trial's code."""
    info = core.ClusterInfo(
        trial=core.TrialInfo(
            trial_id=lease.trial_id,
            experiment_id=experiment.experiment_id,
            trial_seed=lease.trial_seed,
            hparams=lease.hparams,
            config=experiment.for_code(),
            steps_completed=_steps(host.latest_checkpoint),
        ),
        latest_checkpoint=host.latest_checkpoint,
        slot_ids=tuple(range(distributed.local_size)),
        container_addrs=tuple(dict.fromkeys(distributed.allgather(ray.util.get_node_ip_address()))),
        container_rank=distributed.cross_rank,
        user_data=experiment.data,
    )
    before = core.set_cluster_info(info)
    try:
        yield
    finally:
        core.set_cluster_info(before)


def _steps(checkpoint: str | None) -> int:
    """By the id of a checkpoint of the trial, which ends with its batches."""
    return 0 if checkpoint is None else int(Location.of(checkpoint).name.rpartition("_")[2])


def _never_trained(program: Program, rank: int) -> str:
    assert isinstance(program, Script), "a trial that is a class is one fit()"
    if real := told_of_real():
        return f"entrypoint: {program.command} has trained without dray: {real}"
    where = f" on rank {rank}" if rank else ""
    return (
        f"entrypoint: {program.command} has ended{where} without a call of Trainer.fit(), or with one that was left at "
        "once, so that the search has nothing to compare; when it runs as __main__, make a trainer with pytorch.init() "
        "and call its fit(), or report validation metrics with core.init()"
    )


def _distributed(context: ray.train.TrainContext) -> core.DistributedContext:
    """Where this rank is among its peers, as Ray Train has placed it."""
    nodes: list[str] = [""] * context.get_world_size()
    address = ray.util.get_node_ip_address()
    if context.get_world_size() > 1:
        torch.distributed.all_gather_object(nodes, address)
    return core.DistributedContext(
        rank=context.get_world_rank(),
        size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        local_size=context.get_local_world_size(),
        cross_rank=context.get_node_rank(),
        cross_size=context.get_world_size() // context.get_local_world_size(),
        chief_ip=nodes[0] or address,
    )
