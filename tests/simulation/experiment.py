"""The parts of a simulated experiment that outlive its processes: its config, its journal's disk, its checkpoints, and
the known events, with which all later events must be consistent."""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dray.config.load import load_config
from dray.config.schema import ExperimentConfig
from dray.desk.failure import Failure, FailureKind
from dray.desk.messages import DeskReport
from dray.training.plan import Plan, Policy, Schedule
from dray.training.progress import Progress
from searchers.records import number_from_json
from tests.simulation.world import Disk, Failed, Process, World


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialError:
    """An exception that a trial's code raises after some batches, on one rank; `times` is 1 if a restart cures it."""

    trial: int
    batch: int
    rank: int
    kind: FailureKind
    times: int

    @property
    def failure(self) -> Failure:
        return Failure(kind=self.kind, where=f"ValueError in trial {self.trial}", batches=self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A user's experiment.

    Attributes:
        searcher: of the config; `points`: of a grid.
        ranks: of each trial.
        policy, report, validate, checkpoint: of the training loop's `Plan`.
        keeps: `save_experiment_best`, `save_trial_best`, `save_trial_latest`.
        invalid, diverging: shares of trials with invalid hyperparameters, and with a loss that becomes NaN.
        extensions: extensions of the experiment, each applied when it is opened again.
        priority, weight, max_slots: its share of the slots.
    """

    searcher: tuple[tuple[str, Any], ...]
    points: int
    ranks: int
    policy: Policy
    report: int | None
    validate: int | None
    checkpoint: int | None
    keeps: tuple[int, int, int]
    invalid: float
    diverging: float
    stops_on_nan: bool
    max_restarts: int
    reuse_workers: bool
    errors: tuple[TrialError, ...]
    extensions: tuple[tuple[tuple[str, int], ...], ...]
    priority: int
    weight: float
    max_slots: int | None
    batch_s: float

    def smaller(self) -> Iterator[Setup]:
        """Yield experiments that are simpler by one step."""
        searcher = dict(self.searcher)
        for number in range(len(self.errors)):
            yield replace(self, errors=self.errors[:number] + self.errors[number + 1 :])
        if self.extensions:
            yield replace(self, extensions=self.extensions[1:])
        before = searcher.get("max_trials", self.points)
        for trials in (before // 2, before - 1):
            if trials > 0 and self.points:
                yield replace(self, points=trials)
            elif trials > 0:
                yield replace(self, searcher=tuple({**searcher, "max_trials": trials}.items()))

    def config(self) -> ExperimentConfig:
        """Checking one takes as long as several trials, so equal ones are checked only once."""
        config, names = _config(self.searcher, self.points), ("experiment_best", "trial_best", "trial_latest")
        storage = {f"save_{name}": keep for name, keep in zip(names, self.keeps, strict=True)}
        return config.model_copy(
            update={
                "checkpoint_storage": config.checkpoint_storage.model_copy(update=storage),
                "max_restarts": self.max_restarts,
                "stop_on_nan": self.stops_on_nan,
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
        trained: batches counted by the trial.
        at, carried, decides, metric: the loop's progress, and the fields that `dray.worker.host` adds.
        is_forced: whether it survives a power failure.
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
        self.trials: defaultdict[int, dict[int, Checkpoint]] = defaultdict(dict)
        self.away_until = 0.0

    @property
    def is_away(self) -> bool:
        return self._world.now < self.away_until

    def latest_first(self, trial: int) -> list[Checkpoint]:
        return [each for _, each in sorted(self.trials[trial].items(), reverse=True)]

    def commit(self, checkpoint: Checkpoint) -> None:
        if self._world.lines is not None:
            self._world.note(f"   {checkpoint.id} is committed")
        self.trials[checkpoint.trial][checkpoint.batches] = checkpoint

    def delete(self, trial: int, batches: int) -> None:
        if (deleted := self.trials[trial].pop(batches, None)) is not None and self._world.lines is not None:
            self._world.note(f"   {deleted.id} is deleted")
        self._facts.deleted(trial, batches, self.trials[trial])

    def lose_power(self) -> None:
        """Damage recent commits that were not forced to the disk."""
        for each in [each for checkpoints in self.trials.values() for each in checkpoints.values()]:
            if not each.is_forced and self._world.random.random() < 0.3:
                each.is_valid = False
                self._facts.damaged.add(each.trial)


class Facts:
    """The known events of an experiment.

    Attributes:
        count: number of the journal's records that are on the disk.
        created, ended, given_up: trials created, ended (with the reason), and given up after failures.
        hparams: hyperparameters with which trials started.
        reported: values reported to the search, by trial and step.
        damaged: trials whose checkpoints may be lost.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self.count = 0
        self.created: set[int] = set()
        self.ended: dict[int, str] = {}
        self.hparams: dict[int, Any] = {}
        self.reported: defaultdict[int, dict[float, float | None]] = defaultdict(dict)
        self.given_up: set[int] = set()
        self.damaged: set[int] = set()
        self._leases: Counter[int] = Counter()
        self._failures: Counter[int] = Counter()
        self.opened()

    def opened(self) -> None:
        """Reset the leases for a new driver."""
        self._granted: dict[int, int] = {}
        self._trial_of: dict[int, int] = {}
        self._newest: dict[int, int] = {}

    def _fail(self, what: str) -> None:
        raise Failed(f"{self._experiment.name}: {what}")

    def trials(self, without: set[int]) -> str:
        """Return each other trial's hyperparameters, reports and end; NaN is equal to itself here."""
        return repr(
            {
                trial: (self.hparams.get(trial), sorted(self.reported[trial].items()), self.ended.get(trial))
                for trial in sorted(self.created - without)
            }
        )

    # ------------------------------------------------------------------ the driver
    def granted(self, trial: int, lease: int) -> None:
        """Record that the desk has granted a lease."""
        self._granted[trial], self._trial_of[lease] = lease, trial
        self._leases[trial] += 1

    def permits(self, lease: int) -> None:
        """Record that the driver lets a lease commit a checkpoint."""
        if self._granted.get(trial := self._trial_of.get(lease, -1)) != lease:
            self._fail(f"lease {lease} of trial {trial} may commit, though lease {self._granted.get(trial)} is newer")

    # ------------------------------------------------------------------ records that are on the disk
    def written(self, record: Mapping[str, Any]) -> None:
        """Record that this record is on the disk, which nothing can undo."""
        self.count += 1
        trial, event = record.get("trial", -1), record.get("event")
        if event == "started":
            if self.hparams.setdefault(trial, record["hparams"]) != record["hparams"]:
                self._fail(f"trial {trial} starts with other hyperparameters than before")
        elif event == "reported":
            step, value = record["step"], number_from_json(record["value"])
            expected = self._experiment.loss(self.hparams[trial], int(step))
            if repr(value) != repr(expected):
                self._fail(f"trial {trial} reports {value} after {step} batches in place of {expected}")
            self.reported[trial][step] = value
        elif event == "exited":
            if trial in self.ended:
                self._fail(f"trial {trial} ends twice: {self.ended[trial]}, {record['reason']}")
            self.ended[trial] = reason = record["reason"]
            # A report before the failure may still stop the trial.
            if (reason == "errored") != (trial in self.given_up) and reason != "stopped":
                self._fail(f"trial {trial} was {reason}, and {'' if trial in self.given_up else 'not '}given up")
        elif event in ("restarted", "gave_up"):
            self._failures[trial] += 1
            if trial in self.ended:
                self._fail(f"trial {trial} {event}, though it was {self.ended[trial]} before")
            if self._failures[trial] > self._leases[trial]:
                self._fail(f"trial {trial} has failed {self._failures[trial]} times in {self._leases[trial]} leases")
            if event == "gave_up" and "kept" not in record:
                self.given_up.add(trial)
        for action in record.get("actions", ()):
            if action["action"] == "create":
                if action["trial"] in self.created:
                    self._fail(f"trial {action['trial']} is created twice")
                self.created.add(action["trial"])
            elif action["action"] == "resume" and self.ended.pop(action["trial"], None) is not None:
                self.given_up.discard(action["trial"])

    # ------------------------------------------------------------------ ranks
    def begins(self, run: int, lease: int, trial: int) -> None:
        """Check that a rank 0 may start this lease."""
        if run != self._experiment.runs:
            return  # its driver is gone
        if trial not in self.hparams:
            self._fail(f"trial {trial} begins, but the journal does not say that it has started")
        if self._newest.get(trial, 0) >= lease:
            self._fail(f"lease {lease} of trial {trial} begins after lease {self._newest[trial]}")
        self._newest[trial] = lease

    def answered(self, trial: int, step: float, reply: str) -> None:
        """Check the search's decision that a rank 0 receives for its report."""
        is_known = step in self.reported[trial] or trial in self.ended
        if reply in ("continue", "stop", "pause") and not is_known:
            self._fail(f"trial {trial} is to {reply} after {step} batches, but the journal does not have its report")
        if reply == "stop" and trial not in self.ended:
            self._fail(f"trial {trial} is to stop after {step} batches, but the journal does not have its end")

    def resumed(self, trial: int, batches: int) -> None:
        """Check that a trial may continue after this many batches."""
        if batches < (last := max(self.reported[trial], default=0)) and trial not in self.damaged:
            self._fail(f"trial {trial} resumes after {batches} batches, but it has reported after {last}")

    def deleted(self, trial: int, batches: int, left: Mapping[int, Checkpoint]) -> None:
        """Check that this deletion left the trial a checkpoint to resume from."""
        if trial in self.ended:
            self.damaged.add(trial)  # an extension resumes it from the checkpoints that the policy keeps
        elif not any(each.batches > batches and each.is_forced for each in left.values()):
            self._fail(f"checkpoint {batches} of trial {trial} was deleted, but the trial may resume from it")

    def check_end(self) -> None:
        """Check that each trial has ended."""
        if left := self.created - self.ended.keys():
            self._fail(f"trials {sorted(left)} have never ended")


class Experiment:
    """An experiment, independent of the process that drives it.

    Attributes:
        runs, process: number of processes that have driven it, and the last of them.
        extensions, extension: the user's remaining extensions, and the one with which it is opened next.
    """

    def __init__(self, world: World, name: str, setup: Setup) -> None:
        self.world, self.name, self.setup, self.config = world, name, setup, setup.config()
        self.disk = Disk(world)
        self.facts = Facts(self)
        self.store = Store(world, self.facts)
        self.runs = 0
        self.process: Process | None = None
        self.extensions = list(setup.extensions)
        self.extension: dict[str, int] = {}
        self._left = {each: each.times for each in setup.errors}

    def plan_to(self, length: int, rungs: tuple[float, ...]) -> None:
        """Plan trials of this length, compared at these rungs."""
        setup = self.setup
        report, validate, checkpoint = (
            None if each is None else Schedule(period=each) for each in (setup.report, setup.validate, setup.checkpoint)
        )
        self.plan = Plan(
            length=length,
            rungs=tuple(map(int, rungs)),
            policy=setup.policy,
            report=report,
            validate=validate,
            checkpoint=checkpoint,
        )

    def loss(self, hparams: Mapping[str, Any], batches: int) -> float:
        """Return a trial's metric after this many batches."""
        quality = hparams["lr"] * 1e6 % 1
        if quality < self.setup.diverging and batches > 2:
            return math.nan
        return (math.log10(hparams["lr"]) + 2.5) ** 2 + 3 * quality / (1 + batches)

    def is_invalid(self, hparams: Mapping[str, Any]) -> bool:
        return hparams["lr"] * 1e7 % 1 < self.setup.invalid

    def next_error(self, trial: int, begin: int, until: int) -> TrialError | None:
        """Return the first error between `begin` and `until` batches."""
        due = (each for each, left in self._left.items() if left and each.trial == trial)
        return min((each for each in due if begin < each.batch <= until), key=lambda each: each.batch, default=None)

    def raised(self, error: TrialError) -> None:
        self._left[error] -= 1
