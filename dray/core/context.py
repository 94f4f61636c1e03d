"""`core.init()`, for programs with their own training loop, and the requests that such a program save and return."""

from __future__ import annotations

import contextlib
import enum
import logging
import sys
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from dray.core.checkpoint import CheckpointContext
from dray.core.searcher import SearcherContext
from dray.core.train import Program, TensorboardMode, TrainContext
from dray.hosts import LocalHost, current_host, current_peers
from dray.hosts.local import new_directory
from dray.hosts.progress import say
from dray.storage import Location, store_at
from dray.training.cluster_info import get_cluster_info
from dray.training.host import ProgramHost
from dray.training.parallel.device import own_device
from dray.training.parallel.distributed import DistributedContext, check_peers
from dray.training.parallel.launcher import launched

log = logging.getLogger(__name__)


class PreemptMode(enum.Enum):
    """Selects the ranks that call `should_preempt()`.

    Attributes:
        WorkersAskChief: all ranks together, and all get the chief's answer.
        ChiefOnly: only the chief, and the program passes the answer on.
        WorkersAskMaster: each rank at any time. All ranks get a positive answer at about the same time.
    """

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    ChiefOnly = "CHIEF_ONLY"
    WorkersAskMaster = "WORKERS_ASK_MASTER"


class PreemptContext:
    """Tells a program when to stop: when the search stops or pauses the trial, when its workers are needed elsewhere,
    or when the experiment is interrupted; in a local run, after a SIGTERM."""

    def __init__(self, program: Program, mode: PreemptMode) -> None:
        self._program, self._mode = program, PreemptMode(mode)
        self._store: Any = None
        self._key = ""

    def start(self) -> PreemptContext:
        """Prepare for `should_preempt()`. `core.Context` calls this on all ranks."""
        if self._mode is PreemptMode.WorkersAskMaster and self._store is None:
            self._store = self._program.peers.side_store()
            # Unique, since the processes may have run another trial before.
            self._key = self._program.peers.broadcast(f"preempt/{uuid.uuid4().hex}")
        return self

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Return whether the program should save its state and return. A paused or interrupted trial is resumed later.

        Args:
            auto_ack: acknowledge a True answer at once. With False, call `acknowledge_preemption_signal()` when the
                program returns because of it.

        Raises:
            RuntimeError: called on a rank other than the chief, with `PreemptMode.ChiefOnly`.
        """
        program = self._program
        program.pulse()
        if self._mode is PreemptMode.ChiefOnly:
            program.check_chief("should_preempt", "with PreemptMode.ChiefOnly, ")
        asks = program.is_chief or self._mode is not PreemptMode.WorkersAskChief
        stop = asks and (program.stop_requested or program.host.stop_requested())
        if self._mode is PreemptMode.WorkersAskChief:
            stop = program.peers.broadcast(stop)
        elif self._store is not None:
            try:
                if stop:
                    self._store.set(self._key, b"1")
                # Checked even after the set, which does not wait for the store: True once every rank would see it.
                stop = bool(self._store.check([self._key]))
            except RuntimeError as error:
                # The chief serves the store. It has returned, so a stop was requested.
                log.info("rank %d returns, since the chief has: %s", program.peers.rank, error)
                stop = True
        if stop and auto_ack:
            self.acknowledge_preemption_signal()
        return stop

    def acknowledge_preemption_signal(self) -> None:
        """Confirm that the program returns early because it was preempted, so that the trial is resumed later."""
        self._program.host.interrupted()


log = logging.getLogger(__name__)

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class ProfilerContext:
    """Has no effect: a trial's machine usage is always recorded with its metrics."""

    def on(self, sampling_interval: float = 1, samples_per_report: int = 10) -> None:
        """Has no effect."""

    def off(self) -> None:
        """Has no effect."""


class ExperimentalCoreContext:
    """Logs the checkpoints and models that a trial uses; Determined's cluster recorded them."""

    def report_task_using_checkpoint(self, checkpoint: Any) -> None:
        """Log a checkpoint that the trial uses."""
        log.info("this trial uses the checkpoint %s", checkpoint)

    def report_task_using_model_version(self, model_version: Any) -> None:
        """Log a model version that the trial uses."""
        log.info("this trial uses the model version %s", model_version)


class Context:
    """The core API of one process; a context manager, made by `core.init()`.

    Attributes:
        train: reports metrics.
        checkpoint: saves and restores checkpoints.
        preempt: tells the program when to stop.
        searcher: yields the lengths to train to, for programs that let the search decide.
        distributed: this process's rank, and communication with the trial's other processes.
        profiler, experimental: have no effect.
        info: the trial and its cluster; None in a local run.
    """

    def __init__(
        self,
        program: Program,
        preempt_mode: PreemptMode,
        tensorboard_mode: TensorboardMode,
        cleanup: contextlib.ExitStack,
    ) -> None:
        self.info, self.distributed = get_cluster_info(), program.peers
        hparams = {} if self.info is None else self.info.trial.hparams
        config = None if self.info is None else self.info.trial.config
        device = own_device(self.distributed.local_rank, config)
        self.train = TrainContext(program, TensorboardMode(tensorboard_mode), hparams, device)
        self.checkpoint = CheckpointContext(program)
        self.preempt = PreemptContext(program, preempt_mode)
        self.searcher = SearcherContext(program, config)
        self.profiler = ProfilerContext()
        self.experimental = ExperimentalCoreContext()
        self._cleanup = cleanup

    def start(self) -> None:
        """Same as entering the context."""
        self.preempt.start()

    def close(self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None) -> None:
        """Same as leaving the context. May be called twice."""
        self.train.close()
        # Without arguments, as in a `finally`, the error is the one that is being handled.
        self._cleanup.__exit__(*((exc_type, exc_val, exc_tb) if exc_val is not None else sys.exc_info()))

    def __enter__(self) -> Context:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close(*error)

    def alert(
        self,
        title: str | None = None,
        description: str | None = None,
        level: Literal["warn", "info", "debug", "error"] | None = "info",
    ) -> None:
        """Log a message at the given level. It is sent to nobody, unlike the alerts of `notify` in the config."""
        log.log(_LEVELS[level or "info"], "%s", ": ".join(text for text in (title, description) if text))


def init(
    *,
    distributed: DistributedContext | None = None,
    checkpoint_storage: str | Mapping[str, Any] | None = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
    tensorboard_mode: TensorboardMode = TensorboardMode.AUTO,
) -> Context:
    """Set up the core API for a program with its own training loop: `with core.init() as core_context`.

    In an experiment the program is the entrypoint, such as `entrypoint: python3 train.py`. Run by itself, it is a local
    run: metrics and checkpoints go to a directory in `~/dray_results/local`, and SIGTERM requests a stop.

    Args:
        distributed: the trial's processes. Default: in an experiment, all of the trial's; under torchrun, all that it
            started; otherwise this process alone. torch.distributed is left to the program.
        checkpoint_storage: where a local run stores its checkpoints: a directory, a URI such as `s3://bucket/prefix`,
            or a `checkpoint_storage` section of a config. Default: the run's directory. Has no effect in an experiment,
            whose config sets the storage.
        preempt_mode: which ranks call `preempt.should_preempt()`.
        tensorboard_mode: whether reported metrics are written for TensorBoard.

    Raises:
        RuntimeError: torch.distributed has several processes, but `distributed` is not given; or the trial is a class.
        ValueError: checkpoint_storage is invalid.
    """
    if distributed is None and current_host() is None and launched():
        distributed = DistributedContext.from_torch_distributed()
    peers = distributed or current_peers() or DistributedContext()
    check_peers(peers, "core.init()")
    host = current_host()
    with contextlib.ExitStack() as stack:
        if distributed is not None:
            stack.callback(distributed.close)
        if host is None:
            host = stack.enter_context(_local_host(peers, checkpoint_storage))
            if peers.rank == 0:
                say(f"local run: metrics and checkpoints go to {host.directory}")
        elif checkpoint_storage is not None:
            log.warning("core.init(checkpoint_storage=...) has no effect in an experiment, whose config sets it")
        if not isinstance(host, ProgramHost):
            raise RuntimeError(
                "core.init() is for programs with their own training loop (entrypoint: python3 train.py), but this "
                "trial is a class, whose trainer reports and saves; use the trial's context instead"
            )
        host.opened()
        return Context(Program(host, peers), preempt_mode, tensorboard_mode, stack.pop_all())


def _local_host(peers: DistributedContext, storage: str | Mapping[str, Any] | None) -> LocalHost:
    location = Location.of(storage) if isinstance(storage, str) else None
    if isinstance(storage, Mapping):
        # Imported only here, because it needs pydantic. The section is checked like that of an experiment's config.
        from dray.config.load import load_storage

        location = load_storage(storage)
    directory = new_directory()
    if location is not None and location.is_local:
        directory = location.path / directory.name
    directory = peers.broadcast(directory.absolute())
    store = None if location is None or location.is_local else store_at(location.child(directory.name), directory)
    return LocalHost(directory, store=store, is_chief=peers.rank == 0)
