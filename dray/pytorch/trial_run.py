"""One run of a trial in this process: the state behind the trial's context and the trainer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dray.core import DistributedContext
from dray.pytorch.batch_functions import SideStream, ToDevice
from dray.training.host import Host
from dray.training.metrics.reducers import ReducerRegistry
from dray.training.metrics.tensorboard import TensorBoard
from dray.training.optimisation import Optimisation
from dray.training.parallel.mesh import global_batch_size
from dray.training.parallel.mesh_shape import mesh_shape
from dray.training.plan import POLICIES, Plan, Policy, Schedule, batches_of, check_length, check_unit, schedule_of
from dray.training.progress import Position, Progress
from dray.training.units import ENDLESS, TrainUnit
from dray.training.usage import Flops

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class TrialRun:
    """One rank's run of a trial.

    Args:
        config: the experiment's config.
        hparams, aggregation_frequency, max_length, enable_tensorboard_logging, mesh: as in `pytorch.init()`.
        shards: False in a process that only loads a trial, whose models stay whole.

    Attributes:
        seed: the trial's seed; in a resumed run, the checkpoint's.
        replicas, replica: the number of shares into which the data are divided, and the number of this rank's share.
        length: the length of the training, as far as known.
        optimisation: the wrapped models, optimizers and LR schedulers, and the position in training.
        global_batch_size: records per batch over all slots, None if no hyperparameter sets it.
        uses_total_batches: the trial has called `get_total_batches()`.
        uses_amp: `use_amp()` was called, though on a CPU it may have no effect.
        checks_loaders: only a `pytorch.DataLoader` is allowed.

    Raises:
        ValueError: as in `pytorch.init`.
    """

    host: Host
    peers: DistributedContext
    device: torch.device
    hparams: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    aggregation_frequency: int = 1
    max_length: TrainUnit | None = None
    enable_tensorboard_logging: bool = True
    mesh: Mapping[str, int] | None = None
    shards: bool = True

    def __post_init__(self) -> None:
        self.seed = self.host.trial_seed
        self.length = self.max_length if self.host.max_length is None else self.host.max_length
        sizes = (self.section("resources").get("mesh") if self.mesh is None else self.mesh) or {}
        self.mesh_shape = mesh_shape(sizes if self.shards else dict.fromkeys(sizes, 1), self.peers.size)
        self.replicas, self.replica = self.mesh_shape.replicas, self.mesh_shape.replica(self.peers.rank)
        self.global_batch_size = global_batch_size(self.hparams, self.replicas)
        given = (self.hparams or {}).get("global_batch_size")
        if given != self.global_batch_size and self.peers.rank == 0:
            log.warning("global_batch_size changed from %d to %d, to divide it equally among %d slots",
                        given, self.global_batch_size, self.replicas)  # fmt: skip
        self.tensorboard = TensorBoard(self.host.tensorboard_path, self.enable_tensorboard_logging, self.hparams)
        averages = self.section("optimizations").get("average_aggregated_gradients", True)
        shares = self.mesh_shape.sharing > 1
        self.optimisation = Optimisation(Position(), self.aggregation_frequency, averages, shares)
        self.reducers = ReducerRegistry(self.device)
        self.to_device = ToDevice(self.device)
        self.at_end = contextlib.ExitStack()  # closed at the end of `pytorch.init()`
        self.uses_total_batches = False
        self.flops_per_record: Flops = None
        self.uses_amp = False
        self.moves_batches = True
        self.checks_loaders = True

    @property
    def position(self) -> Position:
        return self.optimisation.position

    @property
    def total_batches(self) -> int | None:
        """The total number of batches to train; None if it is unknown or depends on a metric."""
        if self.length is None or self.length == ENDLESS:
            return None
        return batches_of(
            self.length,
            name="max_length",
            epoch_length=self.position.epoch_length,
            global_batch_size=self.global_batch_size,
        )

    def section(self, name: str) -> dict[str, Any]:
        """A section of the config, {} if there is none.

        Raises:
            ValueError: the section is not a dict; nothing else checks a program's config.
        """
        section = (self.config or {}).get(name) or {}
        if not isinstance(section, dict):
            raise ValueError(f"exp_conf[{name!r}] must be a dict, got {section!r}")
        return section

    def batch_mover(self) -> Callable[[Any], Any] | None:
        """The function that moves batches to the device; None if the trial moves them itself."""
        if not self.moves_batches:
            return None
        return SideStream(self.to_device, self.device) if self.device.type == "cuda" else self.to_device


class _Default(str):
    """A default that can be told from an equal argument by identity."""


DEFAULT_POLICY = _Default("best")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitArguments:
    """The arguments of `Trainer.fit`, in the user's units.

    `plan` converts them to batches once the training data exist, which determine the length of an epoch.
    """

    length: TrainUnit
    reporting_period: TrainUnit | None
    validation_period: TrainUnit | None
    checkpoint_period: TrainUnit | None
    policy: Policy
    step_zero_validation: bool
    test_mode: bool

    def __post_init__(self) -> None:
        # Checked here, so that a wrong type is reported before the data are loaded.
        for name in ("reporting_period", "validation_period", "checkpoint_period"):
            check_unit(getattr(self, name), name)

    def plan(self, at: Progress, run: TrialRun) -> Plan:
        """The plan for a run that begins at `at`."""
        epoch_length = run.position.epoch_length

        def batches(unit: TrainUnit, name: str) -> int:
            return batches_of(unit, name=name, epoch_length=epoch_length, global_batch_size=run.global_batch_size)

        def schedule(name: str) -> Schedule | None:
            return schedule_of(getattr(self, name), name=name, epoch_length=epoch_length)

        total = batches(self.length, "max_length")
        return Plan(
            length=min(total, at.batches + 1) if self.test_mode else total,
            epoch_length=epoch_length,
            report=schedule("reporting_period"),
            validate=schedule("validation_period"),
            checkpoint=schedule("checkpoint_period"),
            rungs=tuple(sorted({batches(rung, "rung") for rung in run.host.rungs})),
            policy=self.policy,
            step_zero_validation=self.step_zero_validation,
            test_mode=self.test_mode,
        )


def length_of(max_length: TrainUnit | None, run: TrialRun) -> TrainUnit:
    """The length to train to: the searcher's, else that of `pytorch.init()`, else that of `fit()`."""
    check_length(max_length, "max_length")
    initial, searched = run.max_length, run.host.max_length
    if searched is not None:
        for name, given in (("init", initial), ("fit", max_length)):
            if given is not None and given != searched:
                log.warning("%s(max_length=%r) is not used: the searcher's max_length is %r", name, given, searched)
        return searched
    if initial is not None and max_length not in (None, initial):
        raise ValueError(
            f"fit(max_length={max_length!r}) differs from pytorch.init(max_length={initial!r}), for which the trial "
            "may have made its schedules; leave out the one in fit()"
        )
    length = max_length if initial is None else initial
    if length is None:
        raise ValueError("fit() needs max_length, for example max_length=pytorch.Epoch(1)")
    return length


def policy_of(policy: str, checkpoint_period: TrainUnit | None, run: TrialRun) -> Policy:
    """The effective checkpoint policy: "best" only if the experiment's best validation is known."""
    if policy not in POLICIES:
        raise ValueError(f"checkpoint_policy must be one of {', '.join(map(repr, POLICIES))}, got {policy!r}")
    if policy != "best" or run.host.best_supported:
        return policy
    if policy is DEFAULT_POLICY:
        return "all" if checkpoint_period is None else "none"
    log.warning("checkpoint_policy='best' works only in an experiment; this run uses 'all'")
    return "all"
