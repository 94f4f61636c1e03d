"""The worker's side of a lease: what every rank of a group runs, from its start to the end of the experiment.

One rank is one process on one slot. It asks the desk for work, runs the trial that it gets in the same loop that a
laptop runs (``dray.pytorch.Trainer``), says how the trial ended, puts the process back into the state it was in, and
asks again.
"""

from __future__ import annotations

import contextlib
import os
import traceback
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed

from dray import core, pytorch
from dray.cluster.baseline import Baseline
from dray.cluster.desk import Outcome
from dray.hosts import use_host
from dray.hosts.ray_worker import Experiment, Lease, LeaseLost, RayHost
from dray.training.errors import SearcherMetricError
from dray.training.units import Batch, Records, TrainUnit


class GroupRetired(RuntimeError):
    """Ends these processes; Ray Train starts the group anew. Raised on purpose, by a rank that the desk told so."""


def serve_leases(work: dict[str, Any]) -> None:
    """Ray Train's ``train_loop_per_worker``: serve leases until the desk has no more.

    Args:
        work: ``desk`` (actor handle), ``group`` (name), ``experiment`` (``hosts.ray_worker.Experiment``),
            ``load_trial`` (a callable that returns the PyTorchTrial class, and the directory of its code or None:
            where trials run).
    """
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    desk, group = work["desk"], work["group"]
    distributed = _distributed(context)
    # Shared by the ranks that Train has started together, and by no others.
    incarnation = distributed.broadcast(uuid.uuid4().hex)
    trial_class, code = work["load_trial"]()
    baseline = Baseline()
    number = 0
    while True:
        lease = ray.get(desk.next_lease.remote(group, incarnation, rank, size, number))
        if lease is None:
            return
        if lease.get("retire"):
            raise GroupRetired(f"worker group {group} starts anew, as its ranks are no longer in step")
        number = lease["number"]
        if rank == 0:
            desk.begun.remote(number)
        with baseline.kept():
            outcome, error, fatal = _run_trial(trial_class, code, lease["lease"], work, distributed)
        ray.get(desk.leave.remote(number, rank, outcome, error, fatal))


def _run_trial(
    trial_class: type[pytorch.PyTorchTrial],
    code: Path | None,
    lease: Lease,
    work: Mapping[str, Any],
    distributed: core.DistributedContext,
) -> tuple[Outcome, str, bool]:
    """Run one lease. Returns how it ended, with the traceback of an error, and whether the error is everyone's."""
    experiment: Experiment = work["experiment"]
    host = RayHost(desk=work["desk"], lease=lease, experiment=experiment, code_dir=code)
    records = int(lease.hparams.get("global_batch_size", 1))
    try:
        if code is not None:
            os.chdir(code)
        with use_host(host):
            outcome: Outcome | None = host.go_on() if distributed.rank == 0 else None
            host.latest_checkpoint, outcome = distributed.broadcast((host.latest_checkpoint, outcome))
            if outcome is None:
                with (
                    _cluster_info(host, lease, experiment, distributed),
                    pytorch.init(
                        hparams=dict(lease.hparams), exp_conf=dict(experiment.config), distributed=distributed
                    ) as context,
                ):
                    trial = trial_class(context)
                    pytorch.Trainer(trial, context).fit(
                        max_length=experiment.max_length,
                        validation_period=_in_batches(experiment.validation_period, records),
                        checkpoint_period=_in_batches(experiment.checkpoint_period, records),
                        checkpoint_policy=experiment.checkpoint_policy,
                        latest_checkpoint=host.latest_checkpoint,
                    )
                outcome = distributed.broadcast(host.end() if distributed.rank == 0 else host.outcome)
            assert outcome is not None
        return outcome, "", False
    except LeaseLost:
        return "interrupted", "", False
    except pytorch.InvalidHP as e:
        return "invalid_hp", str(e), False
    except SearcherMetricError as e:
        return "errored", str(e), True
    except Exception:
        return "errored", traceback.format_exc(), False


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
            config=experiment.config,
        ),
        latest_checkpoint=host.latest_checkpoint,
        slot_ids=tuple(range(distributed.local_size)),
        container_addrs=tuple(dict.fromkeys(distributed.allgather(ray.util.get_node_ip_address()))),
        user_data=experiment.config.get("data") or {},
    )
    before = core.set_cluster_info(info)
    try:
        yield
    finally:
        core.set_cluster_info(before)


def _in_batches(period: TrainUnit | None, global_batch_size: int) -> TrainUnit | None:
    """Periods in records, which `fit()` does not take, in batches."""
    if isinstance(period, Records) and isinstance(period.value, int):
        return Batch(-(-period.value // global_batch_size))
    return period


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
