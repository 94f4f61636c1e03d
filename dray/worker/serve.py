"""The worker's side of a lease: what every rank of a group runs, from its start to the end of the experiment.

One rank is one process on one slot. It asks the desk for work, runs the trial that it gets in the same loop as on a
laptop (``dray.pytorch.Trainer``), tells how the trial ended, restores the state of the process, and asks again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import ray
import ray.train

from dray import core, pytorch
from dray.code.startup_hook import run_startup_hook_once
from dray.desk.failure import LOG_TAIL, Failure, failure_of, users_line, with_users_line
from dray.desk.messages import Outcome
from dray.hosts import use_host
from dray.masking import hidden_text
from dray.pytorch.class_entrypoint import train
from dray.script import Script, ScriptFailed, users_traceback
from dray.storage.checkpoints import RemoteStore
from dray.storage.logs import LogUploader
from dray.storage.remote import PATIENCE_S
from dray.training import rng
from dray.training.determinism import deterministic
from dray.training.errors import SearcherMetricError, TrialEnded
from dray.training.parallel import ddp
from dray.training.parallel.device import NoGpuOfItsOwn
from dray.training.units import ENDLESS
from dray.worker.entry import give_up
from dray.worker.exits import Ends
from dray.worker.gpu_share import limit_gpu_memory
from dray.worker.hang import ended_if_it_hangs
from dray.worker.host import Experiment, Lease, LeaseLost, RayHost
from dray.worker.isolation.handlers import redirect_handlers
from dray.worker.isolation.snapshot import ProcessSnapshot
from dray.worker.log.trial_log import (
    TrialLog,
    log_to_stderr,
    redirect_output,
    reset_logging,
)
from dray.worker.process_group import joined
from dray.worker.program_host import RayProgramHost

Program: TypeAlias = type[pytorch.PyTorchTrial] | Script


def serve(work: dict[str, Any]) -> None:
    """Serve leases until the desk has no more; ``work`` as in ``dray.worker.entry.serve_leases``."""
    context = ray.train.get_context()
    # As workers of Ray Train have it: what trials write to where they are stays apart.
    place = Path(context.get_storage().local_working_directory)
    place.mkdir(parents=True, exist_ok=True)
    os.chdir(place)
    load = work["load_trial"]
    try:
        code = load.place()
        if code is not None:
            run_startup_hook_once(code, work["run"])
    except Exception as error:
        return give_up(work, error)

    def meet(mine: tuple[str, int] | None) -> tuple[str, int]:
        return tuple(ray.get(work["desk"].address.remote(work["start"], mine)))

    try:
        with deterministic(work["experiment"].config["reproducibility"]["deterministic"]), joined(context, meet):
            # Before the user's code is loaded, which may change the environment.
            distributed = core.DistributedContext.from_torch_distributed(os.environ["MASTER_ADDR"])
            try:
                program = load()
            except Exception as error:
                return give_up(work, error)
            _serve(work, program, code, distributed)
    except NoGpuOfItsOwn as error:
        give_up(work, error)


def _serve(work: dict[str, Any], program: Program, code: Path | None, distributed: core.DistributedContext) -> None:
    rank, size = distributed.rank, distributed.size
    distributed.side_store()  # now, on all ranks together: later each asks for it at another time
    desk, group, start = work["desk"], work["group"], work["start"]
    snapshot = ProcessSnapshot()
    number = 0
    with contextlib.closing(LogUploader()) as uploader:
        while True:
            lease = ray.get(desk.next_lease.remote(group, start, rank, size, number))
            if lease is None:
                return
            number = lease["number"]
            if rank == 0:
                desk.begun.remote(number)
            trial: Lease = lease["lease"]
            if isinstance(trial.store, RemoteStore) and not _is_the_drivers(trial.trial_dir):
                uploader.begin(_log(trial, rank), trial.store.root)
            if work["shared_by"] > 1 and ray.get_gpu_ids():
                limit_gpu_memory(work["shared_by"])
            left, stale = snapshot.run(functools.partial(_run_trial, program, code, trial, work, distributed))
            uploader.end(_log(trial, rank))
            left = left.without(work["experiment"].secrets)
            if left.failure is not None and left.failure.kind in _SPOILT:
                stale.insert(0, _SPOILT[left.failure.kind])
            if ddp.is_aborted():
                stale.append("its collectives were aborted")
            if not work["experiment"].config["resources"]["reuse_workers"]:
                stale.append("resources.reuse_workers is false")
            told: dict[str, Any] = {"failure": left.failure, "alone": left.alone}
            told |= {"stale": "; ".join(stale)}
            ray.get(desk.leave.remote(number, rank, left.outcome, left.error, left.fatal, **told))


def _is_the_drivers(trial_dir: Path) -> bool:
    """Whether the driver sees this directory too: it then uploader what trials print to the object store."""
    return (trial_dir.parent / "journal.jsonl").exists()


def _log(lease: Lease, rank: int) -> Path:
    return lease.trial_dir / "logs" / f"rank_{rank}.log"


# Kinds of failures after which a process must not be reused.
_SPOILT = {"oom": "out of memory", "device": "a GPU error", "collective": "an error in a collective operation"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """How a trial ended on this rank.

    Attributes:
        error: a traceback, or a message for the user; of "diverged": which loss is NaN.
        fatal: all trials would have the error.
        failure: the error's kind and place, if the trial may be restarted after it.
        alone: this rank was made to leave, while the others train on.
    """

    outcome: Outcome
    error: str = ""
    fatal: bool = False
    failure: Failure | None = None
    alone: bool = False

    def without(self, secrets: Sequence[str]) -> _Left:
        """The same with the secrets hidden."""
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
    ends = Ends(distributed.side_store(), lease.number, distributed.rank, distributed.size)
    with redirect_output(_log(lease, distributed.rank), experiment.secrets) as log:
        try:
            with _watched(host, lease, work, distributed.rank, log), use_host(host, distributed), redirect_handlers():
                outcome: Outcome | None = host.go_on() if distributed.rank == 0 else None
                host.latest_checkpoint, outcome = distributed.broadcast((host.latest_checkpoint, outcome))
                if outcome is None:
                    with _cluster_info(host, lease, experiment, distributed):
                        if isinstance(program, Script):
                            assert code is not None, "a program lies in a directory"
                            reset_logging()
                            # pytorch.init() does it again; code before that call should be reproducible too.
                            rng.seed_all(lease.trial_seed)
                            with ends.of_others_seen(code), _free_to_end(host):
                                program.run(code)
                        else:
                            log_to_stderr(work["log_format"])
                            _train(program, code, experiment, host)
                    if isinstance(program, Script):
                        if not (host.watched or host.trained):  # the others may train, and wait for this rank
                            told = program.never_trained(distributed.rank)
                            return _Left(outcome="errored", error=told, fatal=True)
                        if told := ends.awaited():
                            failure = Failure(kind="error", where=" ".join(told.split()), batches=host.batches)
                            return _Left(outcome="errored", error=told, failure=failure)
                    # Only the chief's host knows of reports.
                    ended = distributed.rank == 0 and (host.trained or not script)
                    outcome = distributed.broadcast(host.end() if ended else None)
            if outcome is None:
                assert isinstance(program, Script), "a trial that is a class is one fit()"
                return _Left(outcome="errored", error=program.never_trained(distributed.rank), fatal=True)
            return _Left(outcome=outcome, error=host.why)
        except TrialEnded as e:
            print(e, file=sys.stderr)
            return _Left(outcome=host.end(), error=host.why, alone=True)
        except LeaseLost:
            return _Left(outcome="interrupted")
        except pytorch.InvalidHP as e:
            return _Left(outcome="invalid_hp", error=str(e))
        except SearcherMetricError as e:
            return _Left(outcome="errored", error=str(e), fatal=True)
        except ScriptFailed as e:
            told = "\n".join([str(e), *users_line(e, code), "", f"{LOG_TAIL} ({log.path}):", log.tail()])
            return _Left(outcome="errored", error=told, failure=failure_of(e, host.batches))
        except BaseException as e:  # also SystemExit: a class may call sys.exit(), which would end the process
            trace = users_traceback(e, code) if script and code is not None else traceback.format_exc()
            told = with_users_line(e, trace, code)
            print(told, end="", file=sys.stderr)
            return _Left(outcome="errored", error=told, failure=failure_of(e, host.batches))
        finally:
            host.flush()


@contextlib.contextmanager
def _free_to_end(host: RayHost) -> Iterator[None]:
    """A program that knows that it is asked to end may end as it likes: some raise an exception once they have saved,
    which is no failure in Determined either. Nor is it one if a program that is started again after its last operation
    asks for another by `next()`: Determined would not have started it."""
    try:
        yield
    except (TrialEnded, LeaseLost, pytorch.InvalidHP, SearcherMetricError):
        raise
    except Exception as error:
        if not (host.heard or (host.closed and isinstance(error, StopIteration))):
            raise
        print("the program was to end, and ended with this error:", traceback.format_exc(), sep="\n", file=sys.stderr)


def _watched(
    host: RayHost, lease: Lease, work: Mapping[str, Any], rank: int, log: TrialLog
) -> contextlib.AbstractContextManager[None]:
    """End the trial if it hangs."""

    def tell(told: str) -> None:
        failure = Failure(kind="hung", batches=host.batches)
        error = f"{told}; the stacks of all threads are in {log.path}"
        ray.get(work["desk"].leave.remote(lease.number, rank, "errored", error, failure=failure))

    within_s = work["experiment"].config.get("hang_timeout_s")
    # The chief may wait for an object store, and the others for the chief, without knowing why.
    grace_s = PATIENCE_S if rank > 0 and host.is_remote else 0.0
    return ended_if_it_hangs(within_s, pulse=host.pulse, log=log.descriptor, tell=tell, grace_s=grace_s)


def _train(trial_class: type[pytorch.PyTorchTrial], code: Path | None, experiment: Experiment, host: RayHost) -> None:
    """Run a trial that is a class: one ``fit()``, as the experiment's config says."""
    if code is not None:
        os.chdir(code)
    train(
        trial_class,
        experiment.config,
        # If the search counts length by a metric, it alone decides when the trial ends.
        max_length=ENDLESS if host.max_length is None else None,
        latest_checkpoint=host.latest_checkpoint,
    )


@contextlib.contextmanager
def _cluster_info(
    host: RayHost, lease: Lease, experiment: Experiment, distributed: core.DistributedContext
) -> Iterator[None]:
    """Set what `dray.get_cluster_info()` returns to the trial's code."""
    latest = host.latest_checkpoint
    slots = Counter(distributed.allgather(ray.util.get_node_ip_address()))
    config = experiment.for_code()
    info = core.ClusterInfo(
        trial=core.TrialInfo(
            trial_id=lease.trial_id,
            experiment_id=experiment.experiment_id,
            trial_seed=lease.trial_seed,
            hparams=copy.deepcopy(dict(lease.hparams)),  # the trial's own copy: programs pop what they have read
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
    before = core.set_cluster_info(info)
    try:
        yield
    finally:
        core.set_cluster_info(before)
