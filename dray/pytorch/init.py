"""`pytorch.init()`: finds the host and the peers, seeds the RNGs, makes a context."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dray.core import DistributedContext
from dray.hosts import LocalHost, current_host, current_peers
from dray.hosts.local import new_directory
from dray.pytorch.cached import drop_if_low
from dray.pytorch.context import PyTorchTrialContext
from dray.pytorch.trial_run import TrialRun
from dray.training import rng
from dray.training.checkpoint import files
from dray.training.cluster_info import current_cluster_info
from dray.training.parallel.device import check_gpus, own_device
from dray.training.parallel.distributed import check_peers
from dray.training.parallel.launcher import process_group
from dray.training.plan import check_length
from dray.training.rng import deterministic
from dray.training.units import TrainUnit, is_int

log = logging.getLogger(__name__)


@contextlib.contextmanager
def init(
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    distributed: DistributedContext | None = None,
    aggregation_frequency: int = 1,
    enable_tensorboard_logging: bool = True,
    max_length: TrainUnit | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Iterator[PyTorchTrialContext]:
    """Make a trial's context, for a `with` block in which the trial is constructed and trained.

    Seeds Python's, NumPy's and torch's RNGs with the trial's seed, which an experiment gives each trial; in a local run
    it is `exp_conf["reproducibility"]["experiment_seed"]`. If that is not set, the RNGs keep their states, and the
    trial's seed, the chief's `torch.initial_seed()`, only orders shuffled data. On all ranks, models begin with the
    chief's weights.

    Args:
        hparams: the trial's hyperparameters. Default: in an experiment, those that the search chose.
        exp_conf: an experiment config, for `context.get_experiment_config()`. Default: the experiment's, if any. With
            `resources.slot: cpu` the trial trains on the CPU even if there is a GPU; with
            `reproducibility.deterministic: true` torch uses only deterministic algorithms.
        distributed: the trial's processes. Default: in an experiment, all of the trial's; otherwise those of the
            program's own process group, or those that torchrun started, for which a process group is initialised until
            the end of the block; otherwise this process alone.
        aggregation_frequency: the number of batches over which gradients are summed before the optimizer steps.
        enable_tensorboard_logging: write metrics for TensorBoard to `context.get_tensorboard_path()`.
        max_length: the length of the training as in `Trainer.fit()`, needed here if the trial's constructor calls
            `context.get_total_batches()`. In an experiment, a max_length of the searcher takes precedence.
        mesh: sizes of the dimensions of `context.device_mesh`, such as `{"tp": 2}`. Default: the config's
            `resources.mesh`. Without `dp` and `dp_shard`, `dp_shard` is the number of slots divided by the other sizes.
            Ranks that differ along `dp`, `dp_shard` or `dp_replicate` get different batches, and gradients are averaged
            over these dimensions and `cp`. The others are the trial's own.

    Raises:
        ValueError: global_batch_size is not an int, or is below the number of slots; aggregation_frequency is below 1;
            mesh does not divide the slots, or has a name that is no identifier.
        TypeError: max_length is neither Batch nor Epoch.
        RuntimeError: `distributed` has several processes, but torch.distributed is not initialised for them; or two of
            them would train on the same GPU.
    """
    check_length(max_length, "max_length")
    drop_if_low()
    with contextlib.ExitStack() as stack:
        host = current_host()
        if host is None:
            seeds = _reproducibility(exp_conf)[0] is not None
            host, peers, device = stack.enter_context(_local_run(distributed, exp_conf))
        else:
            seeds = True
            peers = distributed or current_peers() or DistributedContext()
            _check_peers(peers)
            if (info := current_cluster_info()) is not None:
                hparams = dict(info.trial.hparams) if hparams is None else hparams
                exp_conf = dict(info.trial.config) if exp_conf is None else exp_conf
            device = _device(peers, exp_conf)
        if seeds:
            rng.seed_all(host.trial_seed)
        run = TrialRun(
            host=host,
            peers=peers,
            device=device,
            hparams=hparams,
            config=exp_conf,
            aggregation_frequency=aggregation_frequency,
            max_length=max_length,
            enable_tensorboard_logging=enable_tensorboard_logging,
            mesh=mesh,
        )
        stack.enter_context(run.at_end)
        stack.callback(run.tensorboard.close)
        if host.latest_checkpoint is not None and (saved := Path(host.latest_checkpoint)).is_dir():
            # The trial's constructor may already ask where fit() will resume.
            run.position.start(files.read_progress(saved).batches)
        if distributed is not None:
            stack.callback(distributed.close)
        yield PyTorchTrialContext(run)


@contextlib.contextmanager
def _local_run(
    distributed: DistributedContext | None, exp_conf: dict[str, Any] | None
) -> Iterator[tuple[LocalHost, DistributedContext, torch.device]]:
    """Set up a local run as a worker sets up a trial."""
    seed, enabled = _reproducibility(exp_conf)
    with contextlib.ExitStack() as stack:
        stack.enter_context(deterministic(enabled))  # before CUDA is used
        peers = distributed or stack.enter_context(process_group(exp_conf))
        _check_peers(peers)
        device = _device(peers, exp_conf)
        check_gpus(device, peers.allgather)
        # Drawing a seed would change the program's own random numbers. 31 bits as in an experiment: NumPy takes 32.
        seed = torch.initial_seed() % 2**31 if seed is None else seed
        # The same directory and seed in all processes.
        directory, seed = peers.broadcast((new_directory((exp_conf or {}).get("name")), seed))
        host = stack.enter_context(LocalHost(directory, trial_seed=seed, is_chief=peers.rank == 0))
        if peers.rank > 0:  # the chief logs for all ranks
            logger = logging.getLogger("dray")
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(max(logger.level, logging.ERROR))
        log.info("local run %s, seed %d", host.directory, host.trial_seed)
        yield host, peers, device


def _reproducibility(exp_conf: dict[str, Any] | None) -> tuple[int | None, bool]:
    """The seed or None, and whether to be deterministic; checked here, since nothing else checks a program's config."""
    section = (exp_conf or {}).get("reproducibility") or {}
    seed, enabled = section.get("experiment_seed"), section.get("deterministic", False)
    if seed is not None and (not is_int(seed) or seed < 0):
        raise ValueError(f"exp_conf['reproducibility']['experiment_seed'] must be an int >= 0, got {seed!r}")
    if not isinstance(enabled, bool):
        raise ValueError(f"exp_conf['reproducibility']['deterministic'] must be true or false, got {enabled!r}")
    return seed, enabled


def _check_peers(peers: DistributedContext) -> None:
    check_peers(peers, "pytorch.init()")
    import torch.distributed as dist

    initialised = dist.is_available() and dist.is_initialized()
    needed = peers.size > 1 or os.environ.get("USE_TORCH_DISTRIBUTED", "").lower() in ("true", "1")
    if needed and not initialised:
        raise RuntimeError(
            f"training in {peers.size} process(es) needs torch.distributed: call "
            "torch.distributed.init_process_group('gloo' or 'nccl') before pytorch.init(); or leave out distributed= "
            "and start with torchrun"
        )


def _device(peers: DistributedContext, exp_conf: dict[str, Any] | None) -> torch.device:
    device = own_device(peers.local_rank, exp_conf)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
