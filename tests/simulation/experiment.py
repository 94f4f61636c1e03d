"""What outlives the processes of a simulated experiment: its config, its journal's disk, its checkpoints; and what is
known to have happened to it, with which everything that happens later must agree."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dray.config.load import load_config
from dray.config.schema import ExperimentConfig
from dray.desk.failure import Failure, FailureKind
from dray.desk.messages import DeskReport
from dray.training.plan import Plan, Schedule
from dray.training.progress import Progress
from searchers.records import number_from_json
from tests.simulation.world import Disk, Failed, Process, World


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialError:
    """An exception that a trial's code raises.

    Attributes:
        batch: after so many batches.
        rank: on which it is raised.
        times: how often: 1 if a restart cures it.
    """

    trial: int
    batch: int
    rank: int
    kind: FailureKind = "error"
    times: int = 1

    @property
    def failure(self) -> Failure:
        return Failure(kind=self.kind, where=f"ValueError in trial {self.trial}", batches=self.batch)

    @property
    def stale(self) -> str:
        return self.kind if self.kind in ("oom", "device") else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """An experiment as its user wants it.

    Attributes:
        searcher: of the config.
        points: of a grid.
        ranks: of each trial.
        policy, report, validate, checkpoint: of the training loop: its `Plan`.
        keeps: `save_experiment_best`, `save_trial_best`, `save_trial_latest`.
        invalid: the share of hyperparameters that are invalid.
        diverging: the share of trials whose loss becomes NaN.
        errors: of the trials.
        extensions: to extend it to, one after another, each when it is opened again.
        priority, weight, max_slots: on a server.
    """

    searcher: tuple[tuple[str, Any], ...]
    points: int = 0
    ranks: int = 1
    policy: str = "best"
    report: int | None = None
    validate: int | None = None
    checkpoint: int | None = None
    keeps: tuple[int, int, int] = (0, 1, 1)
    invalid: float = 0.0
    diverging: float = 0.0
    stops_on_nan: bool = False
    max_restarts: int = 5
    reuse_workers: bool = True
    errors: tuple[TrialError, ...] = ()
    extensions: tuple[tuple[tuple[str, int], ...], ...] = ()
    priority: int = 42
    weight: float = 1.0
    max_slots: int | None = None
    batch_s: float = 0.3

    def smaller(self) -> Iterator[Setup]:
        """Those with one thing less."""
        searcher = dict(self.searcher)
        for number in range(len(self.errors)):
            yield replace(self, errors=self.errors[:number] + self.errors[number + 1 :])
        if self.extensions:
            yield replace(self, extensions=self.extensions[1:])
        for trials in (searcher.get("max_trials", self.points) // 2, searcher.get("max_trials", self.points) - 1):
            if trials > 0 and self.points:
                yield replace(self, points=trials)
            elif trials > 0:
                yield replace(self, searcher=tuple({**searcher, "max_trials": trials}.items()))
        for change in ({"ranks": 1}, {"report": None}, {"validate": None}, {"checkpoint": None}, {"invalid": 0.0}):
            if any(getattr(self, name) != value for name, value in change.items()):
                yield replace(self, **change)


def config_of(setup: Setup) -> ExperimentConfig:
    """Its config: to check one costs as much as some trials, so equal ones are checked once."""
    best, trial_best, latest = setup.keeps
    storage = {"save_experiment_best": best, "save_trial_best": trial_best, "save_trial_latest": latest}
    config = _config(setup.searcher, setup.points)
    return config.model_copy(
        update={
            "checkpoint_storage": config.checkpoint_storage.model_copy(update=storage),
            "max_restarts": setup.max_restarts,
            "stop_on_nan": setup.stops_on_nan,
        }
    )


@functools.cache
def _config(searcher: tuple[tuple[str, Any], ...], points: int) -> ExperimentConfig:
    lr = {"type": "log", "base": 10, "minval": -4, "maxval": -1, **({"count": points} if points else {})}
    return load_config(
        {
            "name": "simulated",
            "entrypoint": "model:Trial",
            "hyperparameters": {"global_batch_size": 1, "lr": lr},
            "searcher": {"metric": "loss", **dict(searcher), "max_length": {"batches": dict(searcher)["max_length"]}},
            "reproducibility": {"experiment_seed": 7},
        }
    )


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint of a trial.

    Attributes:
        trained: batches, as the trial has counted them.
        at, carried, decides, metric: the loop's progress, and what `dray.worker.host` writes beside it.
        is_forced: it survives a power failure.
    """

    trial: int
    batches: int
    trained: int
    at: Progress
    carried: DeskReport
    decides: bool
    metric: float | None
    is_valid: bool = True
    is_forced: bool = False

    @property
    def id(self) -> str:
        return f"trial_{self.trial}/checkpoint_{self.batches}"


class Store:
    """The checkpoints of an experiment. A commit is atomic."""

    def __init__(self, world: World, facts: Facts) -> None:
        self._world, self._facts = world, facts
        self.trials: dict[int, dict[int, Checkpoint]] = {}
        self.away_until = 0.0

    @property
    def is_away(self) -> bool:
        return self._world.now < self.away_until

    def latest_first(self, trial: int) -> list[Checkpoint]:
        return [each for _, each in sorted(self.trials.get(trial, {}).items(), reverse=True)]

    def commit(self, checkpoint: Checkpoint) -> Checkpoint:
        if self._world.lines is not None:
            self._world.note(f"   {checkpoint.id} is committed")
        self.trials.setdefault(checkpoint.trial, {})[checkpoint.batches] = checkpoint
        return checkpoint

    def delete(self, trial: int, batches: int) -> None:
        mine = self.trials.get(trial, {})
        mine.pop(batches, None)
        if self._world.lines is not None:
            self._world.note(f"   trial_{trial}/checkpoint_{batches} is deleted")
        self._facts.deleted(trial, batches, mine)

    def lose_power(self) -> None:
        """What was committed lately, and not forced to the disk, may be damaged."""
        for mine in self.trials.values():
            for each in mine.values():
                if not each.is_forced and self._world.random.random() < 0.3:
                    each.is_valid = False
                    self._facts.damaged(each.trial)


@dataclass(slots=True)
class Facts:
    """What is known to have happened to an experiment.

    Attributes:
        count: of the journal's records that are on the disk.
        created: trials.
        ended: and why.
        hparams: that trials started with.
        reported: values that the search was told, by trial and step.
        restarts, given_up: of trials.
        newest: the newest lease of each trial that a worker group has taken up.
        opened: the run of the experiment that leases are of.
    """

    experiment: Experiment
    count: int = 0
    created: set[int] = field(default_factory=set)
    ended: dict[int, str] = field(default_factory=dict)
    hparams: dict[int, Any] = field(default_factory=dict)
    reported: dict[int, dict[float, float | None]] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    newest: dict[int, int] = field(default_factory=dict)
    _damaged: set[int] = field(default_factory=set)
    _leases: Counter[int] = field(default_factory=Counter)
    _failures: Counter[int] = field(default_factory=Counter)
    _granted: dict[int, int] = field(default_factory=dict)
    _trial_of: dict[int, int] = field(default_factory=dict)

    def fail(self, what: str) -> None:
        raise Failed(f"{self.experiment.name}: {what}")

    def trials(self, without: Container[int]) -> dict[int, Any]:
        """Each trial's hyperparameters, reports and end, but for those."""
        return {
            trial: (self.hparams.get(trial), sorted(self.reported.get(trial, {}).items()), self.ended.get(trial))
            for trial in sorted(self.created)
            if trial not in without
        }

    def opened(self) -> None:
        """A new process drives it."""
        self.newest.clear()
        self._granted.clear()
        self._trial_of.clear()

    # ------------------------------------------------------------------ what the driver does
    def granted(self, trial: int, lease: int) -> None:
        """The desk has granted a lease."""
        self._granted[trial] = lease
        self._leases[trial] += 1
        self._trial_of[lease] = trial

    def permits(self, lease: int, permission: bool) -> None:
        """The driver says whether a lease may commit a checkpoint."""
        if permission and self._granted.get(trial := self._trial_of.get(lease, -1)) != lease:
            self.fail(f"lease {lease} of trial {trial} may commit, though lease {self._granted.get(trial)} is newer")

    # ------------------------------------------------------------------ records that are on the disk
    def written(self, record: Mapping[str, Any]) -> None:
        """This record is on the disk: nothing can undo it."""
        self.count += 1
        trial, event = record.get("trial"), record.get("event")
        if event == "started":
            if self.hparams.setdefault(trial, record["hparams"]) != record["hparams"]:
                self.fail(f"trial {trial} starts with other hyperparameters than before")
        elif event == "reported":
            step, value = record["step"], number_from_json(record["value"])
            expected = self.experiment.loss(trial, self.hparams[trial], int(step))
            if not _equal(value, expected):
                self.fail(f"trial {trial} reports {value} after {step} batches in place of {expected}")
            self.reported.setdefault(trial, {})[step] = value
        elif event == "exited":
            if trial in self.ended:
                self.fail(f"trial {trial} ends twice: {self.ended[trial]}, {record['reason']}")
            self.ended[trial] = reason = record["reason"]
            # A report before the failure may still have it stopped.
            if (reason == "errored") != (trial in self.given_up) and reason != "stopped":
                self.fail(f"trial {trial} was {reason}, and {'' if trial in self.given_up else 'not '}given up")
        elif event in ("restarted", "gave_up"):
            self._failures[trial] += 1
            if trial in self.ended:
                self.fail(f"trial {trial} {event}, though it was {self.ended[trial]} before")
            if self._failures[trial] > self._leases[trial]:
                self.fail(f"trial {trial} has failed {self._failures[trial]} times in {self._leases[trial]} leases")
            if event == "gave_up" and "kept" not in record:
                self.given_up.add(trial)
        for action in record.get("actions", ()):
            if action["action"] == "create":
                if action["trial"] in self.created:
                    self.fail(f"trial {action['trial']} is created twice")
                self.created.add(action["trial"])
            elif action["action"] == "resume" and self.ended.pop(action["trial"], None) is not None:
                self.given_up.discard(action["trial"])

    # ------------------------------------------------------------------ what the ranks see and do
    def begins(self, run: int, lease: int, trial: int) -> None:
        """A rank 0 has taken up a lease."""
        if run != self.experiment.runs:
            return  # its driver is gone
        if trial not in self.hparams:
            self.fail(f"trial {trial} begins, but the journal does not say that it has started")
        if self.newest.get(trial, 0) >= lease:
            self.fail(f"lease {lease} of trial {trial} begins after lease {self.newest[trial]}")
        self.newest[trial] = lease

    def answered(self, trial: int, step: float, reply: str) -> None:
        """A rank 0 knows what the search decided on its report."""
        is_known = step in self.reported.get(trial, ()) or trial in self.ended
        if reply in ("continue", "stop", "pause") and not is_known:
            self.fail(f"trial {trial} is to {reply} after {step} batches, but the journal does not have its report")
        if reply == "stop" and trial not in self.ended:
            self.fail(f"trial {trial} is to stop after {step} batches, but the journal does not have its end")

    def resumed(self, trial: int, batches: int) -> None:
        """A trial continues after so many batches."""
        if batches < (last := max(self.reported.get(trial, {0: 0}))) and trial not in self._damaged:
            self.fail(f"trial {trial} resumes after {batches} batches, but it has reported after {last}")

    def damaged(self, trial: int) -> None:
        """A power failure has damaged a checkpoint of a trial."""
        self._damaged.add(trial)

    def deleted(self, trial: int, batches: int, left: Mapping[int, Checkpoint]) -> None:
        """A checkpoint was deleted; what is left of the trial's."""
        if trial in self.ended:
            self._damaged.add(trial)  # if an extension resumes it, it has what the policy keeps
            return
        if not any(each.batches > batches and each.is_forced for each in left.values()):
            self.fail(f"checkpoint {batches} of trial {trial} was deleted, but the trial may resume from it")


def _equal(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))


class Experiment:
    """An experiment, whatever process drives it.

    Attributes:
        facts: what has happened to it.
    """

    def __init__(self, world: World, name: str, setup: Setup) -> None:
        self.world, self.name, self.setup = world, name, setup
        self.config = config_of(setup)
        self.disk = Disk(world)
        self.facts = Facts(self)
        self.store = Store(world, self.facts)
        self.runs = 0
        self.process: Process | None = None
        """Drives it, or was the last to."""
        self.batch_s = setup.batch_s
        self.stops_on_nan = setup.stops_on_nan
        self.extensions = list(setup.extensions)
        self.extension: dict[str, int] = {}
        self._left = {each: each.times for each in setup.errors}

    def plan_to(self, length: int, rungs: tuple[float, ...]) -> None:
        """Trials train to this length, and are compared at these."""
        setup = self.setup
        periods = [
            None if each is None else Schedule(period=each) for each in (setup.report, setup.validate, setup.checkpoint)
        ]
        report, validate, checkpoint = periods
        self.plan = Plan(
            length=length,
            rungs=tuple(int(each) for each in rungs),
            policy=setup.policy,  # type: ignore[arg-type]
            report=report,
            validate=validate,
            checkpoint=checkpoint,
        )

    def loss(self, trial: int, hparams: Mapping[str, Any], batches: int) -> float:
        """What a trial measures after so many batches."""
        mine = hparams["lr"] * 1e6 % 1
        if mine < self.setup.diverging and batches > 2:
            return math.nan
        return (math.log10(hparams["lr"]) + 2.5) ** 2 + 3 * mine / (1 + batches)

    def is_invalid(self, hparams: Mapping[str, Any]) -> bool:
        return hparams["lr"] * 1e7 % 1 < self.setup.invalid

    def next_error(self, trial: int, begin: int, until: int) -> TrialError | None:
        """The first error on the way from `begin` to `until` batches."""
        due = [
            each for each, left in self._left.items() if left and each.trial == trial and begin < each.batch <= until
        ]
        return min(due, key=lambda each: each.batch, default=None)

    def raised(self, error: TrialError) -> None:
        self._left[error] -= 1
