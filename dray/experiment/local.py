"""Runs one trial of an experiment in the caller's own process, without Ray: for a debugger, or a first test."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dray import core, pytorch
from dray.code.load import check_entrypoint, load_entrypoint
from dray.code.startup_hook import run_startup_hook
from dray.config.custom import Custom
from dray.config.schema import ExperimentConfig
from dray.config.search import build_search
from dray.environment import device, variables_set, visible_gpus
from dray.experiment.checkpoint_source import with_source
from dray.experiment.isolation_check import reject_sandbox
from dray.experiment.unread import UnreadHparams
from dray.hosts import LocalHost, use_host
from dray.hosts.local import new_directory
from dray.pytorch.trainer import train_class
from dray.records.secrets import check_secrets
from dray.records.trial_record import unread_line
from dray.script import Script, ScriptFailed
from dray.training import cluster_info
from dray.training.cluster_info import use_cluster_info
from dray.training.host import Reached, Report
from dray.training.metrics.checks import MetricChecks, crossed, time_of
from dray.training.rng import deterministic
from dray.training.units import ENDLESS, in_batches
from dray.worker.lease import SharedSettings

log = logging.getLogger(__name__)


class OneTrialHost(LocalHost):
    """A local host with the search's length, rungs and metric, so that the trial trains as in the search.

    Args:
        directory: for metrics and checkpoints. An existing run in it is resumed.
        command: the command that repeats this run, without its directory.
    """

    # This trial is the whole experiment, so the experiment's best is known.
    best_supported = True

    def __init__(
        self,
        settings: SharedSettings,
        *,
        trial_seed: int,
        batch_size: int,
        code_dir: Path,
        directory: Path,
        command: str,
    ) -> None:
        super().__init__(directory, trial_seed=trial_seed, code_dir=code_dir)
        self.settings, self._command = settings, command
        self.latest_checkpoint = latest = self._store.latest()
        self.steps_completed = 0 if latest is None else self._store.batches_of(latest)
        self._checks = MetricChecks(settings.compared, is_single=settings.is_single, stops_on_nan=settings.stops_on_nan)
        self.metrics: Sequence[str] = self._checks.metrics
        self.secrets = settings.secrets
        self.source_checkpoint = settings.source_checkpoint
        self.max_length, self.rungs, self.lengths = settings.max_length, settings.rungs, settings.lengths
        self.validation_period = in_batches(settings.validation_period, batch_size)
        self.checkpoint_period = in_batches(settings.checkpoint_period, batch_size)
        self._time: float | None = None
        self._best = math.inf
        self._is_known = self._own_loop = self._has_diverged = False
        self.trained = self.latest_checkpoint is not None  # whether the search got a report, as on Ray's workers

    def opened(self) -> None:
        # A program need not report if no trials are compared: it may only evaluate a model.
        self.trained |= self._checks.is_single

    def reached(self, validation: Mapping[str, object]) -> Reached:
        if self.settings.time_metric is None:
            return "nothing"
        before, self._time = self._time, time_of(self.settings.time_metric, validation)
        return crossed(self.settings.time_rungs, before, self._time)

    def report(self, report: Report) -> bool:
        self._own_loop = True
        self._checks.check_program(report, known=self._is_known)
        self._is_known |= report.validation is not None and report.compared
        self.is_best(report.validation or {})
        return super().report(report)

    def publish(self, report: Report) -> bool:
        self.trained = True
        if report.decides:
            self.is_best(report.validation or {})
        stops = super().publish(report)
        self._has_diverged = self._has_diverged or bool(self._checks.diverged(report))
        return stops or self._has_diverged

    def last_checkpoint(self) -> str | None:
        return self.latest_checkpoint

    def how_to_resume(self, checkpoint: str, *, completed: bool) -> str:
        return "" if completed else f"resume with: {self._command} --path {shlex.quote(str(self.directory))}"

    def ended(self) -> None:
        """Check, after the program's end, that it has reported the searcher's metric; else `SearcherMetricError`."""
        if self._own_loop and not (self._has_diverged or self.stop_requested()):
            self._checks.check_program(None, known=self._is_known)

    def best_validation(self) -> float | None:
        if not math.isfinite(self._best):
            return None
        return self._best if self.settings.smaller_is_better else -self._best

    def is_best(self, validation: Mapping[str, object]) -> bool:
        score = self.settings.score(self.settings.metric_of(validation))
        if score >= self._best:
            return False
        self._best = score
        return True


def run_local(
    config: ExperimentConfig,
    model_dir: str | os.PathLike[str],
    *,
    path: str | os.PathLike[str] | None = None,
    command: str = "dray experiment create CONFIG MODEL_DIR --local",
) -> Path:
    """Train trial 0 of an experiment, with the hyperparameters and the seed that the search would give it.

    Args:
        config: any experiment. There is one process, so of ``resources`` only ``slot: cpu`` matters.
        model_dir: the directory of the model's code; its ``startup-hook.sh`` runs first.
        path: the directory for metrics and checkpoints; by default a new one in ``~/dray_results/local``. Training
            resumes from its latest checkpoint, if any.
        command: the user's command, shown with the directory as the way to resume.

    Returns:
        The directory with metrics and checkpoints.

    Raises:
        ConfigError: a secret is masked, or the source checkpoint or the entrypoint does not exist.
        ScriptFailed: the program exited with a code other than 0, or never trained; or the class called sys.exit().
            Errors of the trial itself are not caught, so that a debugger sees them.
    """
    with process_for(config) as gpu:
        return _run(config, Path(model_dir), new_directory(config.name) if path is None else Path(path), command, gpu)


@contextlib.contextmanager
def process_for(config: ExperimentConfig) -> Iterator[bool]:
    """Make this process one for an experiment's trials within the block. Yields whether they use a GPU."""
    check_secrets(config)
    reject_sandbox(config, "a run in this process (--local)")
    for_cpus = config.resources.slot == "cpu"
    gpu = not for_cpus and torch.cuda.is_available()
    # As on a cluster, for code that chooses a device itself. It has no effect if this process has used CUDA already.
    hidden = visible_gpus([]) if for_cpus else {}
    with (
        variables_set({**hidden, **config.environment.variables(device(gpu=gpu))}),
        deterministic(config.reproducibility.deterministic),
    ):
        yield gpu


def _run(config: ExperimentConfig, model_dir: Path, path: Path, command: str, gpu: bool) -> Path:
    program = load(config, model_dir)
    config = with_source(config)
    search = build_search(config, lambda record: None, custom=Custom(directory=model_dir))
    search.start()
    hparams = dict(search.params(0))
    settings = SharedSettings.of(config, search.method.rungs, device(gpu=gpu))
    host = OneTrialHost(
        settings,
        trial_seed=search.seed_of(0),
        batch_size=int(search.params(0).get("global_batch_size", 1)),  # type: ignore[call-overload]
        code_dir=model_dir.resolve(),
        directory=path,
        command=command,
    )
    log.info("trial 0 of %s, in this process: %s", config.name, hparams)
    train(program, config, model_dir, host, hparams)
    return host.directory


def load(config: ExperimentConfig, model_dir: Path) -> type[pytorch.PyTorchTrial] | Script:
    check_entrypoint(config.entrypoint, model_dir)
    run_startup_hook(model_dir)
    return load_entrypoint(config.entrypoint, model_dir)


def train(
    program: type[pytorch.PyTorchTrial] | Script,
    config: ExperimentConfig,
    model_dir: Path,
    host: OneTrialHost,
    hparams: dict[str, Any],
) -> None:
    """Train a trial in this process."""
    info = core.ClusterInfo(
        trial=core.TrialInfo(
            trial_id=0,
            experiment_id=0,
            trial_seed=host.trial_seed,
            hparams=hparams,
            config=host.settings.config_for_code(),
            steps_completed=host.steps_completed,
        ),
        latest_checkpoint=host.latest_checkpoint,
        user_data=config.data,
    )
    with host, use_host(host), use_cluster_info(info):
        if isinstance(program, Script):
            with variables_set(_launched_alone()):
                program.run(model_dir.resolve())
            if not host.trained:
                raise ScriptFailed(program.never_trained())
            host.ended()
        else:
            _train(program, config, host.latest_checkpoint)
            read = cluster_info.hparams_read
            found = None if read is None else UnreadHparams(()).add(config.space.root, hparams, tuple(read))
            if found is not None:
                log.warning(unread_line(found["unread"], found["read"]))


def _launched_alone() -> dict[str, str]:
    """A launcher's environment variables for a single process, as in workers; {} if they are set already."""
    if "RANK" in os.environ:
        return {}
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    single = {"RANK": 0, "LOCAL_RANK": 0, "NODE_RANK": 0, "GROUP_RANK": 0}
    single |= {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 1, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in single.items()}}


def _train(trial: type[pytorch.PyTorchTrial], config: ExperimentConfig, latest_checkpoint: str | None) -> None:
    max_length = None if config.searcher.counted_length is not None else ENDLESS
    try:
        train_class(trial, config.to_dict(), max_length=max_length, latest_checkpoint=latest_checkpoint)
    except SystemExit as end:  # it would end the whole process without a message
        what = (
            f"{trial.__name__} called sys.exit({end.code!r}) during training; to end training early, call "
            "context.set_stop_requested(True)"
        )
        raise ScriptFailed(what).with_traceback(end.__traceback__) from None
