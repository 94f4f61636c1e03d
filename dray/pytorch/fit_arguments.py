"""The arguments of `Trainer.fit()`, checked, and the plan that follows from them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dray.pytorch.trial_run import TrialRun
from dray.training.plan import POLICIES, Plan, Policy, Schedule, batches_of, check_length, check_unit, schedule_of
from dray.training.progress import Progress
from dray.training.units import TrainUnit

log = logging.getLogger(__name__)


class _Default(str):
    """A default that is not identical to an equal argument."""


DEFAULT_POLICY = _Default("best")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitArguments:
    """What a run is to do, in the user's units: see `Trainer.fit`.

    `plan` converts it to batches, once the training data exist: they determine the length of an epoch.
    """

    length: TrainUnit
    reporting_period: TrainUnit | None
    validation_period: TrainUnit | None
    checkpoint_period: TrainUnit | None
    policy: Policy
    step_zero_validation: bool
    test_mode: bool

    def __post_init__(self) -> None:
        # Checked again by `plan`, but a wrong type should not wait for the data.
        for name in ("reporting_period", "validation_period", "checkpoint_period"):
            check_unit(getattr(self, name), name)

    def plan(self, at: Progress, run: TrialRun) -> Plan:
        """The plan of a run that begins at `at`."""
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
    known, wanted = run.max_length, run.host.max_length
    if wanted is not None:
        for name, given in (("init", known), ("fit", max_length)):
            if given is not None and given != wanted:
                log.warning("%s(max_length=%r) is not used: the searcher's max_length is %r", name, given, wanted)
        return wanted
    if known is not None and max_length not in (None, known):
        raise ValueError(
            f"fit(max_length={max_length!r}) differs from pytorch.init(max_length={known!r}), by which the trial "
            "may have made its schedules; leave out the one in fit()"
        )
    length = max_length if known is None else known
    if length is None:
        raise ValueError("fit() needs max_length, for example max_length=pytorch.Epoch(1)")
    return length


def policy_of(policy: str, checkpoint_period: TrainUnit | None, run: TrialRun) -> Policy:
    """The policy to save by: "best" only where the experiment's best validation is known."""
    if policy not in POLICIES:
        raise ValueError(f"checkpoint_policy must be one of {', '.join(map(repr, POLICIES))}, got {policy!r}")
    if policy != "best" or run.host.best_supported:
        return policy
    if policy is DEFAULT_POLICY:
        return "all" if checkpoint_period is None else "none"
    log.warning("checkpoint_policy='best' works only in an experiment; this run uses 'all'")
    return "all"
