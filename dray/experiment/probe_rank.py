"""One rank of a batch size that is probed: trains some batches, writes the outcome to a file, and ends."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from dray import core
from dray.code.load import load_trial_class
from dray.config.entrypoint import ClassName
from dray.hosts import LocalHost, use_host
from dray.leases.failure import failure_of, with_users_line
from dray.pytorch.trainer import train_class
from dray.training import usage
from dray.training.cluster_info import use_cluster_info
from dray.training.host import Report
from dray.training.parallel.device import backend_for, own_device
from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.exchange import on_failure
from dray.training.plan import Plan
from dray.training.rng import deterministic
from dray.training.units import Batch
from dray.worker.gpu_share import limit_gpu_memory, wait_for_gpu_memory

JOB = "job.yaml"  # in the directory that the ranks share


def outcome_file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.json"


def write_outcome(directory: Path, rank: int, **outcome: object) -> None:
    """Write the outcome of a rank. `kind`: "trained", or that of a failure with its `error`."""
    written = directory / f"rank_{rank}.json.new"
    written.write_text(json.dumps(outcome))
    written.rename(outcome_file(directory, rank))


class ProbeHost(LocalHost):
    """The host of a trial that only trains; at the last report, the process ends."""

    def __init__(self, directory: Path, job: Mapping[str, Any]) -> None:
        super().__init__(directory, trial_seed=job["trial_seed"], code_dir=Path(job["model_dir"]))
        self._end, self._batch_size = job["reports"][-1], job["hparams"]["global_batch_size"]
        self._batches, self._records = 0, 0.0
        self.max_length = Batch(self._end + 1)  # never reached, as it would validate and save

    @contextlib.contextmanager
    def training(self, plan: Plan, begin: int, peers: DistributedContext) -> Iterator[None]:
        yield

    def publish(self, report: Report) -> bool:
        assert report.system is not None
        rate = report.system["records_per_second"]
        self._records += rate / report.system["batches_per_second"] * (report.batches - self._batches)
        self._batches = report.batches
        if report.batches < self._end:
            return False
        has_all_data = report.epochs is not None and report.epochs >= report.batches
        mean = self._records / self._batches
        # Even if every other batch is the last of an epoch, and small, the mean is above half of a full batch.
        if not has_all_data and mean <= self._batch_size / 2:
            error = (
                f"batches have {mean:.4g} records with global_batch_size {self._batch_size}: the training loader must "
                "take its batch size from context.get_per_slot_batch_size(), and get_batch_length() must count records"
            )
            write_outcome(self.directory, 0, kind="error", error=error)
        else:
            write_outcome(self.directory, 0, kind="trained", records_per_second=rate, has_all_data=has_all_data)
        os._exit(0)


def run_rank(directory: Path) -> None:
    """Train one rank of a job, and write its outcome."""
    job, rank = yaml.safe_load((directory / JOB).read_text()), int(os.environ["RANK"])
    code = Path(job["model_dir"])

    def fail(error: BaseException) -> None:
        text = with_users_line(error, "".join(traceback.format_exception(error)), code)
        kind = failure_of(error, -1).kind
        write_outcome(directory, rank, kind="oom" if kind == "host_oom" else kind, error=text)

    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel kills this process first, not the user's
    usage.REPORT_EVERY_S = 0.0  # each report has figures
    try:
        with on_failure(fail):
            _run_rank(directory, job, rank)
        ended = f"training ended before batch {job['reports'][-1]}, the last that a probe trains"
        write_outcome(directory, rank, kind="error", error=ended)
    except BaseException as error:
        fail(error)
    os._exit(1)  # other ranks may be waiting for this one


def _run_rank(directory: Path, job: Mapping[str, Any], rank: int) -> None:
    code = Path(job["model_dir"])
    config = {
        **job["config"],
        "optimizations": {**job["config"]["optimizations"], "aggregation_frequency": job["aggregation_frequency"]},
        "checkpoint_policy": "none",
        "perform_initial_validation": False,
        "profiling": {},
    }
    own = own_device(rank, config)
    if own.type == "cuda":
        torch.cuda.set_device(own)
        wait_for_gpu_memory(own, job["trials_per_slot"])
        if job["trials_per_slot"] > 1:
            limit_gpu_memory(job["trials_per_slot"])
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend_for(own), init_method=f"file://{directory}/store", rank=rank, world_size=size)
    peers = DistributedContext.from_torch_distributed()
    os.chdir(code)
    trial = load_trial_class(ClassName(*job["entrypoint"]), code)
    host = ProbeHost(directory, job)
    info = core.TrialInfo(
        trial_id=0, experiment_id=0, trial_seed=host.trial_seed, hparams=job["hparams"], config=config
    )
    reproducible = deterministic(config["reproducibility"]["deterministic"])
    cluster = use_cluster_info(core.ClusterInfo(trial=info, user_data=config["data"]))
    with reproducible, use_host(host, peers), cluster:
        train_class(trial, {**config, "scheduling_unit": job["reports"]})


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
