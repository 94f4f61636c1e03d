"""The door for programs with a loop of their own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from dray.core.checkpoint import CheckpointContext
from dray.core.preempt import PreemptContext, PreemptMode
from dray.core.searcher import SearcherContext
from dray.core.train import TensorboardMode, TrainContext
from dray.hosts import LocalHost, current_host, current_peers
from dray.hosts.local import home
from dray.storage import Location, bucket_uri, store_at
from dray.training.cluster_info import ClusterInfo, get_cluster_info
from dray.training.distributed import DistributedContext
from dray.training.host import ProgramHost

log = logging.getLogger(__name__)

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class ProfilerContext:
    """Without effect: what a trial takes of its machine is recorded with its metrics in any case."""

    def on(self, sampling_interval: float = 1, samples_per_report: int = 10) -> None:
        """Nothing changes.

        Raises:
            ValueError: an interval below 0.1 s, or no samples.
        """
        if sampling_interval < 0.1:
            raise ValueError(f"sampling_interval is at least 0.1 s, got {sampling_interval!r}")
        if samples_per_report < 1:
            raise ValueError(f"samples_per_report is an int >= 1, got {samples_per_report!r}")

    def off(self) -> None:
        """Nothing changes."""


class ExperimentalCoreContext:
    """Without effect but for the log: links between trials and checkpoints were the service of a cluster."""

    def report_task_using_checkpoint(self, checkpoint: Any) -> None:
        """Log it."""
        log.info("this trial uses the checkpoint %s", checkpoint)

    def report_task_using_model_version(self, model_version: Any) -> None:
        """Log it."""
        log.info("this trial uses the model version %s", model_version)


class Context:
    """What a program with a loop of its own uses of dray; made by `core.init()`, as a context manager.

    Attributes:
        train: reports metrics.
        checkpoint: saves and restores.
        preempt: asks whether to end.
        searcher: how long to train, for programs that ask the search.
        distributed: the trial's processes.
        profiler, experimental: without effect.
        info: where the program runs; None in a local run.
    """

    def __init__(
        self,
        *,
        host: ProgramHost,
        distributed: DistributedContext,
        preempt_mode: PreemptMode,
        tensorboard_mode: TensorboardMode,
        info: ClusterInfo | None,
        own: contextlib.ExitStack,
    ) -> None:
        self.info, self.distributed = info, distributed
        hparams = {} if info is None else info.trial.hparams
        self.train = TrainContext(host, distributed, TensorboardMode(tensorboard_mode), hparams)
        self.checkpoint = CheckpointContext(host, distributed, self.train.pulse)
        self.preempt = PreemptContext(host, distributed, self.train, preempt_mode)
        self.searcher = SearcherContext(host, distributed, self.train, None if info is None else info.trial.config)
        self.profiler = ProfilerContext()
        self.experimental = ExperimentalCoreContext()
        self._own = own

    def start(self) -> None:
        """What entering the context does."""
        self.preempt.start()

    def close(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """What leaving the context does. Twice is as good as once."""
        self.train.close()
        self._own.close()

    def __enter__(self) -> Context:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        self.close(exc_type, exc_val, exc_tb)

    def alert(
        self,
        title: str | None = None,
        description: str | None = None,
        level: Literal["warn", "info", "debug", "error"] | None = "info",
    ) -> None:
        """Write to the log; there are no webhooks."""
        log.log(_LEVELS[level or "info"], "%s", ": ".join(text for text in (title, description) if text))


def init(
    *,
    distributed: DistributedContext | None = None,
    checkpoint_storage: str | Mapping[str, Any] | None = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
    tensorboard_mode: TensorboardMode = TensorboardMode.AUTO,
) -> Context:
    """A context for a program with a loop of its own: `with core.init() as core_context`.

    In an experiment the program is its entrypoint, such as `entrypoint: python3 train.py`. By itself it is a local run:
    metrics and checkpoints go to a directory below `~/dray_results/local`, and a SIGTERM asks it to end.

    Args:
        distributed: the trial's processes, `DistributedContext.from_torch_distributed()` under torchrun. None: in an
            experiment all of the trial's, else this one alone.
        checkpoint_storage: where a local run keeps its checkpoints: a directory, a URI such as `s3://bucket/prefix`, or
            a `checkpoint_storage` section of a config. An experiment keeps them where its config says.
        preempt_mode: who asks `preempt.should_preempt()`.
        tensorboard_mode: who writes for TensorBoard.

    Raises:
        RuntimeError: torch.distributed has several processes, and `distributed` does not say so; the trial is a class.
        ValueError: there is no such checkpoint_storage.
    """
    peers = distributed or current_peers() or DistributedContext()
    _check_peers(peers)
    found = current_host()
    with contextlib.ExitStack() as stack:
        if distributed is not None:
            stack.callback(distributed.close)
        if found is None:
            found = stack.enter_context(_local_host(peers, checkpoint_storage))
            log.info("local run %s", found.directory)
        elif checkpoint_storage is not None:
            log.warning(
                "core.init(checkpoint_storage=...) is not used: the experiment's config says where checkpoints go"
            )
        if not isinstance(found, ProgramHost):
            raise RuntimeError(
                "core.init() is for programs with a loop of their own (entrypoint: python3 train.py), but this trial "
                "is a class, whose trainer reports and saves: use its context"
            )
        return Context(
            host=found,
            distributed=peers,
            preempt_mode=preempt_mode,
            tensorboard_mode=tensorboard_mode,
            info=get_cluster_info(),
            own=stack.pop_all(),
        )


def _check_peers(peers: DistributedContext) -> None:
    import torch.distributed as dist

    if peers.size == 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"torch.distributed has {dist.get_world_size()} processes, but core.init() was told of one: pass "
            "distributed=core.DistributedContext.from_torch_distributed()"
        )


def _local_host(peers: DistributedContext, storage: str | Mapping[str, Any] | None) -> LocalHost:
    where = None if storage is None else _location(storage)
    # One run, whoever of its processes is asked.
    mine = LocalHost() if where is None or not where.is_local else LocalHost(where.path / LocalHost().directory.name)
    directory = peers.broadcast(mine.directory)
    store = None if where is None or where.is_local else store_at(where.child(directory.name), directory)
    return LocalHost(directory, trial_seed=mine.trial_seed, store=store)


def _location(storage: str | Mapping[str, Any]) -> Location:
    """Where `checkpoint_storage` is.

    Raises:
        ValueError: it is nothing that can be used.
    """
    if isinstance(storage, str):
        return Location.of(storage)
    kind, prefix = storage.get("type"), storage.get("prefix")
    match kind:
        case "s3":
            secrets = tuple((name, str(storage[name])) for name in ("access_key", "secret_key") if storage.get(name))
            where = bucket_uri("s3", storage["bucket"], prefix, storage.get("endpoint_url"))
            return Location(Location.of(where).uri, secrets)
        case "gcs":
            return Location.of(bucket_uri("gs", storage["bucket"], prefix))
        case "directory":
            return Location.of(str(storage["container_path"]))
        case "shared_fs":
            return Location.of(str(Path(storage["host_path"]) / str(storage.get("storage_path") or "")))
    raise ValueError(
        f"core.init(checkpoint_storage=...): type is one of s3, gcs, directory, shared_fs, got {kind!r}; or give a "
        f"directory or a URI as text (by default {home() / 'local'})"
    )
