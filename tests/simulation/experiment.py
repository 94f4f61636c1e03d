"""The parts of a simulated experiment that outlive its processes: its config, its journal's disk, its checkpoints, and
the known events, with which all later events must be consistent."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from dray.desk.messages import DeskReport
from dray.training.plan import Plan, Schedule
from dray.training.progress import Progress
from searchers.errors import IllegalEvent
from searchers.events import REPLACED, Requested, Source
from searchers.records import number_from_json
from tests.simulation.budget import Account
from tests.simulation.setup import Setup, TrialError
from tests.simulation.world import Disk, Failed, World


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint of a trial.

    Attributes:
        trained: batches counted by the trial.
        at, carried, decides, metric: the loop's progress, and the fields that `dray.worker.host` adds.
        lineage: the checkpoints of other trials, by trial and batches, from which the weights come.
        is_forced: whether it survives a power failure.
    """

    trial: int
    batches: int
    trained: int
    at: Progress
    carried: DeskReport
    decides: bool
    metric: float | None
    lineage: tuple[tuple[int, int], ...] = ()
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
                self._facts.lost.append(each.id)


class Requests:
    """A person's requests, like `dray.experiment.request_files.RequestFiles`."""

    def __init__(self, world: World, store: Store) -> None:
        self._world, self._store = world, store
        self.sent: dict[str, Requested] = {}
        self._files: dict[str, Requested] = {}
        self._removed: dict[str, Requested] = {}

    def place(self, **fields: Any) -> None:
        """Send a request."""
        request = Requested(id=f"request-{len(self.sent):02d}", **fields)
        self.sent[request.id] = self._files[request.id] = request
        if self._world.lines is not None:
            self._world.note(f"   a person requests {request}")

    def place_random(self, live: Collection[int], which: float) -> None:
        """Request the end of a trial, mostly of a live one, a fork at a checkpoint, or a new trial."""
        random = Random(f"request:{which}")
        checkpoints = [each for mine in self._store.trials.values() for each in mine.values()]
        hparams = {"lr": 10 ** random.uniform(-4, -1)} if random.random() < 0.7 else None
        kind = random.choice(("stop", "fork", "fork", "add"))
        if kind == "stop":
            self.place(trial=random.choice(list(live)) if live and random.random() < 0.9 else 0)
        elif kind == "fork" and checkpoints:
            checkpoint = random.choice(checkpoints)
            trial, batches = checkpoint.trial, checkpoint.batches
            self.place(source=Source(trial=trial, step=batches, batches=batches), hparams=hparams)
        else:
            code = Random(f"code:{which}").choice((None, None, "a", "b"))
            self.place(hparams=hparams, code=code)

    def waiting(self) -> list[Requested]:
        return [request for _, request in sorted(self._files.items())]

    def check(self, request: Requested) -> None:
        if (source := request.source) is not None:
            if self._store.is_away:
                raise OSError("the store is away")
            if source.batches not in self._store.trials[source.trial]:
                raise IllegalEvent(f"there is no {source}")

    def remove(self, request_id: str) -> None:
        if (request := self._files.pop(request_id, None)) is not None:
            self._removed[request_id] = request

    def lose_power(self) -> None:
        """Undo some of the removals."""
        self._files |= {each: found for each, found in self._removed.items() if self._world.random.random() < 0.3}
        self._removed.clear()


class Facts:
    """The known events of an experiment.

    Attributes:
        count: number of the journal's records that are on the disk.
        created, ended, given_up: trials created, ended (with the reason), and given up after failures.
        hparams: hyperparameters with which trials started.
        reported: values reported to the search, by trial and step.
        damaged: trials whose checkpoints may be lost.
        lost: checkpoints that a power failure has damaged.
        answers: the answer to each request, by its id.
        requested: requested trials, with their records.
        repeats: the trial and the seed of each repeat.
        sources: the trial and the batches of the checkpoint from which a trial begins.
        codes: the code of requested trials with their own.
        sent: how often each alert was sent, by its id.
        kills: number of drivers that could not write all records at their end.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self.sent: Counter[int] = Counter()
        self.kills = 0
        self._alerts: list[Mapping[str, Any]] = []
        self._lines_failed: set[str] = set()  # of trials that were given up
        self._gains = Gains()
        self.count = 0
        self.created: set[int] = set()
        self.ended: dict[int, str] = {}
        self.hparams: dict[int, Any] = {}
        self.reported: defaultdict[int, dict[float, float | None]] = defaultdict(dict)
        self.given_up: set[int] = set()
        self.damaged: set[int] = set()
        self.lost: list[str] = []
        self.answers: dict[str, str] = {}
        self.requested: dict[int, Mapping[str, Any]] = {}
        self.repeats: dict[int, tuple[int, int]] = {}
        self.sources: dict[int, tuple[int, int]] = {}
        self.codes: dict[int, str] = {}
        self._resumed: set[int] = set()  # by an extension
        self._to_cancel: set[int] = set()
        self._canceled: dict[int, int] = {}  # the newest lease at that time
        self._leases: Counter[int] = Counter()
        self._failures: Counter[int] = Counter()
        self.opened()

    def opened(self) -> None:
        """Reset the leases for a new driver."""
        self._granted: dict[int, int] = {}
        self._trial_of: dict[int, int] = {}
        self._newest: dict[int, int] = {}
        self._canceled = dict.fromkeys(self._canceled, 0)

    def _fail(self, what: str) -> None:
        raise Failed(f"{self._experiment.name}: {what}")

    @property
    def live(self) -> list[int]:
        """The trials that have not ended."""
        return sorted(self.created - self.ended.keys())

    @property
    def own(self) -> set[int]:
        """The trials that the search itself has created."""
        return self.created - self.requested.keys() - self.repeats.keys()

    @property
    def trials(self) -> dict[int, str]:
        """The hyperparameters, reports and end of each trial that the method has created, in this order, except those
        that were given up or canceled; NaN is equal to itself here."""
        return {
            number: repr((self.hparams.get(trial), sorted(self.reported[trial].items()), self.ended.get(trial)))
            for number, trial in enumerate(sorted(self.own))
            if trial not in self.given_up and self.ended.get(trial) != "canceled"
        }

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
        self._gains.written(record, self.repeats)
        if event == "alert":
            self._raised(record)
        elif event == "gave_up":
            self._lines_failed.add(record["where"] or record["error"])
        if event in ("requested", "rejected"):
            if (request := record["id"]) in self.answers:
                self._fail(f"{request} is {self.answers[request]} and {event}")
            self.answers[request] = event
            if event == "requested" and trial >= 0:
                self._to_cancel.add(trial)
        if event == "started":
            if trial in self.requested and not self.expected(trial).items() <= record["hparams"].items():
                self._fail(f"trial {trial} starts with {record['hparams']}, in place of {self.expected(trial)}")
            if (of := self.repeats.get(trial)) is not None and record["hparams"] != self.hparams[of[0]]:
                self._fail(f"trial {trial}, a repeat of {of[0]}, starts with other hyperparameters")
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
            if (reason == "canceled") != (trial in self._to_cancel):
                self._fail(f"trial {trial} was {reason}; requests have stopped {sorted(self._to_cancel)}")
            if reason == "canceled":
                self._canceled[trial] = self._granted.get(trial, 0)
            elif (reason in ("errored", "out_of_memory")) != (trial in self.given_up) and reason != "stopped":
                self._fail(f"trial {trial} was {reason}, and {'' if trial in self.given_up else 'not '}given up")
        elif event in ("restarted", "gave_up"):
            if record["error"] == "duplicated":
                self._fail(
                    f"a failure of trial {record['trial']} counts that is due to an earlier trial in its process"
                )
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
                if repeat := action.get("repeat"):
                    self.repeats[action["trial"]] = repeat["trial"], repeat["seed"]
                    if repeat["trial"] in self.codes:
                        self.codes[action["trial"]] = self.codes[repeat["trial"]]
                if source := action.get("source"):
                    self.sources[action["trial"]] = source["trial"], source["batches"]
                if code := action.get("code"):
                    self.codes[action["trial"]] = code
                if event == "requested" and "trial" not in record:
                    self.requested[action["trial"]] = record
            elif action["action"] == "resume" and self.ended.pop(action["trial"], None) is not None:
                self.given_up.discard(action["trial"])
                self._resumed.add(action["trial"])

    def _raised(self, alert: Mapping[str, Any]) -> None:
        """Check an alert by an account of its own."""
        if alert["id"] != len(self._alerts) or alert["key"] in [each["key"] for each in self._alerts]:
            self._fail(f"{alert} comes twice, or has another's number")
        self._alerts.append(alert)
        if alert["kind"] == "no_gain" and self._gains.longest < alert["level"]:
            self._fail(f"{alert} comes after {self._gains.longest} trials without a gain")
        if alert["kind"] == "trial_failed" and json.loads(alert["key"])[2] not in self._lines_failed:
            self._fail(f"{alert} comes though no trial has failed there")

    def _check_alerts(self, no_gain: int) -> None:
        """Check that all was told: once, or again if the driver was killed while it was sending."""
        keys = [json.loads(each["key"]) for each in self._alerts]
        if lost := self._lines_failed - {key[2] for key in keys if key[0] == "trial_failed"}:
            self._fail(f"nobody was told of trials that fail with {lost}")
        if self._gains.without >= no_gain and ["no_gain", no_gain] != next(
            (key[:2] for key in reversed(keys) if key[0] == "no_gain" and key[2] == self._gains.best), None
        ):
            self._fail(f"nobody was told of {self._gains.without} trials without a gain")
        for number in range(len(self._alerts)):
            if not 1 <= self.sent[number] <= 1 + self.kills:
                self._fail(f"{self._alerts[number]} was sent {self.sent[number]} times, with {self.kills} kills")

    def expected(self, trial: int) -> dict[str, Any]:
        """Return the hyperparameters that a requested trial must have."""
        record = self.requested[trial]
        source = {} if "source" not in record else self.hparams[record["source"]["trial"]]
        return {**source, **(record.get("hparams") or {})}

    def lineage(self, trial: int) -> tuple[tuple[int, int], ...]:
        """Return the checkpoints of other trials from which a trial's weights come."""
        if (source := self.sources.get(trial)) is None:
            return ()
        return (*self.lineage(source[0]), source)

    # ------------------------------------------------------------------ ranks
    def begins(self, run: int, lease: int, trial: int, code: str | None) -> None:
        """Check that a rank 0 may start this lease, with this code."""
        if code != self.codes.get(self.lineage(trial)[0][0] if trial in self.sources else trial):
            self._fail(f"trial {trial} begins with code {code}")
        if run != self._experiment.runs:
            return  # its driver is gone
        if trial not in self.hparams:
            self._fail(f"trial {trial} begins, but the journal does not say that it has started")
        if self._newest.get(trial, 0) >= lease:
            self._fail(f"lease {lease} of trial {trial} begins after lease {self._newest[trial]}")
        if lease > self._canceled.get(trial, lease):
            self._fail(f"lease {lease} of trial {trial} begins after the trial was canceled")
        self._newest[trial] = lease

    def answered(self, trial: int, step: float, reply: str) -> None:
        """Check the search's decision that a rank 0 receives for its report."""
        is_known = step in self.reported[trial] or trial in self.ended
        if reply in ("continue", "stop", "pause") and not is_known:
            self._fail(f"trial {trial} is to {reply} after {step} batches, but the journal does not have its report")
        if reply == "stop" and trial not in self.ended:
            self._fail(f"trial {trial} is to stop after {step} batches, but the journal does not have its end")

    def resumed(self, trial: int, batches: int, lineage: tuple[tuple[int, int], ...]) -> None:
        """Check that a trial may continue after this many batches, with weights of this lineage."""
        if lineage != self.lineage(trial):
            self._fail(f"the weights of trial {trial} come from {lineage}, in place of {self.lineage(trial)}")
        if batches < (last := max(self.reported[trial], default=0)) and trial not in self.damaged:
            self._fail(f"trial {trial} resumes after {batches} batches, but it has reported after {last}")

    def needs_source(self, trial: int) -> bool:
        """Whether the checkpoint from which this trial begins must exist.

        Not if the trial was canceled meanwhile, lost its own checkpoints, or was resumed by an extension, from those
        that the policy has kept.
        """
        return trial in set(self.live) - self._resumed - self.damaged

    def deleted(self, trial: int, batches: int, left: Mapping[int, Checkpoint]) -> None:
        """Check that this deletion left the trial a checkpoint to resume from."""
        for child in filter(self.needs_source, self.live):
            own = self._experiment.store.trials[child].values()
            if (trial, batches) in self.lineage(child)[-1:] and not any(each.is_forced for each in own):
                self._fail(f"checkpoint {batches} of trial {trial} was deleted, but trial {child} begins from it")
        if trial in self.ended:
            self.damaged.add(trial)  # an extension resumes it from the checkpoints that the policy keeps
        elif not any(each.batches > batches and each.is_forced for each in left.values()):
            self._fail(f"checkpoint {batches} of trial {trial} was deleted, but the trial may resume from it")

    def check_end(self) -> None:
        """Check that each trial has ended."""
        if left := self.live:
            self._fail(f"trials {left} have never ended")
        if self._experiment.setup.notify is not None:
            self._check_alerts(self._experiment.setup.notify[0])
        requests = self._experiment.requests
        waiting = {request.id for request in requests.waiting()}
        if lost := requests.sent.keys() - self.answers.keys() - waiting:
            self._fail(f"{sorted(lost)} have no answer")
        searcher = self._experiment.config.searcher
        if (repeat := self._experiment.setup.repeat) is not None:
            of_trials = defaultdict[int, set[int]](set)
            for of, seed in self.repeats.values():
                of_trials[of].add(seed)
            # After a request or an extension, other trials may be repeated in place of those that were begun.
            is_changed = requests.sent or self._experiment.setup.extensions
            for seeds in of_trials.values():
                if seeds != set(range(1, (len(seeds) if is_changed else repeat[0]) + 1)):
                    self._fail(f"trials are repeated with the seeds {dict(of_trials)}")
        own = self.own
        if self._experiment.setup.is_population:
            completed = [each for each in own if self.ended[each] == "completed"]
            if len(completed) > searcher.population:
                self._fail(f"{completed} have completed, more than the population of {searcher.population}")
            return
        replaces = {"grid": (), "single": ("invalid_hp",)}.get(searcher.name, REPLACED)
        replaced = [each for each in own if self.ended[each] in replaces]
        if len(own) - len(replaced) != self._experiment.budget:
            self._fail(f"the method created {len(own)} trials, {len(replaced)} of them as replacements")


class Gains:
    """The gains of an experiment, counted naively from its journal.

    Attributes:
        best: the best trial and its value.
        without, longest: number of trials that have ended since, and the most before any gain.
    """

    def __init__(self) -> None:
        self.best: list[Any] | None = None
        self.without = self.longest = 0

    def written(self, record: Mapping[str, Any], repeats: Collection[int]) -> None:
        if record.get("event") == "reported":
            value = number_from_json(record["value"])
            if value is not None and math.isfinite(value) and (self.best is None or value < self.best[1]):
                self.best, self.without = [record["trial"], value], 0
            return
        is_end = record.get("event") == "exited" and record["reason"] in ("completed", "stopped")
        if is_end and record["trial"] not in repeats and (self.best is None or record["trial"] != self.best[0]):
            self.without += 1
            self.longest = max(self.longest, self.without)


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
        self.requests = Requests(world, self.store)
        self.budget = 0
        self.runs = 0
        self.process: Any = None
        self.extensions = list(setup.extensions)
        self.extension: dict[str, Any] = {}
        self.account = Account(world, dict(setup.budget))
        self._left = {each: each.times for each in setup.errors}

    def plan_to(self, length: int, rungs: tuple[float, ...], budget: int) -> None:
        """Plan this many trials of this length, compared at these rungs."""
        self.budget = budget
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
