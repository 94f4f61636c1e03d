"""The known facts of a simulated experiment, with which all later events must be consistent.

They come from what is on the disk (the journal, once it is synced; checkpoints), and from what trials see. Decisions of
the search are compared with naive references.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from dray.config.schema import ExperimentConfig
from dray.config.search import rungs_of
from searchers.events import REPLACED, Requested
from searchers.records import number_from_json
from tests.simulation.setup import Setup

DUPLICATED = "this works only once in a process"
LATE_S = 10.0
"""How long a commit may take that was permitted while its lease was valid."""


class Facts:
    """The known facts of an experiment. What contradicts them is passed to `fail`.

    Attributes:
        created, ended, given_up: trials created, ended (with the reason), and given up after failures.
        hparams: hyperparameters with which trials started.
        reported: values reported to the search, by trial and step.
        damaged: trials whose checkpoints may be lost.
        answers: the answer to each request, by its id.
        requested: requested trials, with their records.
        repeats: the trial and the seed of each repeat.
        sources: the trial and the batches of the checkpoint from which a trial begins.
        sent: how often each alert was sent, by its id.
        kills: number of drivers that could not write all records at their end.
        done: why the search is done; "" if it is not.
    """

    def __init__(
        self,
        path: Path,
        setup: Setup,
        config: ExperimentConfig,
        fail: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._path, self._setup, self._config, self._fail, self._clock = path, setup, config, fail, clock
        self._read = 0  # bytes of the journal
        self.sent: Counter[int] = Counter()
        self.kills = 0
        self.done = ""
        self._alerts: list[Mapping[str, Any]] = []
        self._lines_failed: set[str] = set()  # of trials that were given up
        self._gains = Gains()
        self._rungs = Rungs(config, fail) if setup.has_plain_rungs else None
        self.created: set[int] = set()
        self.ended: dict[int, str] = {}
        self.hparams: dict[int, Any] = {}
        self.reported: defaultdict[int, dict[float, float | None]] = defaultdict(dict)
        self.given_up: set[int] = set()
        self.damaged: set[int] = set()
        self.answers: dict[str, str] = {}
        self.requests: dict[str, Requested] = {}
        self.requested: dict[int, Mapping[str, Any]] = {}
        self.repeats: dict[int, tuple[int, int]] = {}
        self.sources: dict[int, tuple[int, int]] = {}
        self.codes: dict[int, str] = {}
        self.committed: defaultdict[int, set[int]] = defaultdict(set)
        """Checkpoints that exist, by trial; and those that survive a power failure."""
        self.forced: set[tuple[int, int]] = set()
        self.metrics: dict[tuple[int, int], float | None] = {}
        self._resumed: set[int] = set()  # by an extension
        self._to_cancel: set[int] = set()
        self._failures: Counter[int] = Counter()
        self._own_failures: Counter[int] = Counter()
        self._leases: Counter[int] = Counter()
        self._run = ""
        self._granted: dict[int, int] = {}  # the newest lease of each trial, of this run
        self._over: dict[tuple[str, int], float] = {}  # when leases ended, by run and number

    # ------------------------------------------------------------------ the driver
    def granted(self, run: str, trial: int, lease: int) -> None:
        """Record that the desk has granted a lease."""
        if run != self._run:
            for each in self._granted.values():
                self._over.setdefault((self._run, each), self._clock())
            self._run, self._granted = run, {}
        if (before := self._granted.get(trial)) is not None and (run, before) not in self._over:
            self._fail(f"trial {trial} has lease {before}, and gets lease {lease}")
        self._granted[trial] = lease
        self._leases[trial] += 1

    def over(self, run: str, lease: int) -> None:
        """Record the end of a lease."""
        self._over.setdefault((run, lease), self._clock())

    def commits(self, run: str, trial: int, lease: int, batches: int, metric: float | None) -> None:
        """Record a commit: a process that was fenced off must not make one."""
        self.metrics[trial, batches] = metric
        ended = self._over.get((run, lease))
        if ended is not None and self._clock() > ended + LATE_S:
            late_s = self._clock() - ended
            self._fail(f"lease {lease} commits checkpoint {batches} of trial {trial} {late_s:.0f} s late")
        self.committed[trial].add(batches)
        self.forced.discard((trial, batches))

    # ------------------------------------------------------------------ records that are on the disk
    def read(self) -> None:
        """Read the records that have reached the disk since the last call."""
        with open(self._path / "journal.jsonl", "rb") as file:
            if os.fstat(file.fileno()).st_size < self._read:
                self._fail("the journal has lost records")
                return
            file.seek(self._read)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        for line in data.splitlines():
            self.written(json.loads(line))

    def written(self, record: Mapping[str, Any]) -> None:
        """Take a record that has reached the disk."""
        trial, event = record.get("trial", -1), record.get("event")
        self._gains.written(record, self.repeats)
        if self._rungs is not None:
            self._rungs.written(record)
        if event == "alert":
            self._raised(record)
        elif event == "ended":
            self.spent(record["reason"])
        elif event == "gave_up":
            self._lines_failed.add(record["where"] or record["error"])
        if event in ("requested", "rejected"):
            if (request := record["id"]) in self.answers:
                self._fail(f"{request} is {self.answers[request]} and {event}")
            self.answers[request] = event
            if event == "requested" and trial >= 0:
                self._to_cancel.add(trial)
        if event == "started":
            self._started(trial, record)
        elif event == "reported":
            step, value = record["step"], number_from_json(record["value"])
            expected = self._setup.loss(self.hparams[trial], int(step))
            if repr(value) != repr(expected):
                self._fail(f"trial {trial} reports {value} after {step} batches in place of {expected}")
            self.reported[trial][step] = value
        elif event == "exited":
            self._exited(trial, record["reason"])
        elif event in ("restarted", "gave_up"):
            self._failed(trial, record)
        for action in record.get("actions", ()):
            self._acted(record, action)

    def _started(self, trial: int, record: Mapping[str, Any]) -> None:
        if trial in self.requested and not self.expected(trial).items() <= record["hparams"].items():
            self._fail(f"trial {trial} starts with {record['hparams']}, in place of {self.expected(trial)}")
        if (of := self.repeats.get(trial)) is not None and record["hparams"] != self.hparams[of[0]]:
            self._fail(f"trial {trial}, a repeat of {of[0]}, starts with other hyperparameters")
        if self.hparams.setdefault(trial, record["hparams"]) != record["hparams"]:
            self._fail(f"trial {trial} starts with other hyperparameters than before")

    def _exited(self, trial: int, reason: str) -> None:
        if trial in self.ended:
            self._fail(f"trial {trial} ends twice: {self.ended[trial]}, {reason}")
        self.ended[trial] = reason
        if reason == "completed" and max(self.reported[trial], default=0) < (self._config.searcher.length or 0):
            self._fail(f"trial {trial} was completed, and has reported {self.reported[trial]}")
        # A report before the failure may still stop the trial.
        if (reason == "canceled") != (trial in self._to_cancel):
            self._fail(f"trial {trial} was {reason}; requests have stopped {sorted(self._to_cancel)}")
        if reason not in ("canceled", "stopped") and (reason in ("errored", "out_of_memory")) != (
            trial in self.given_up
        ):
            self._fail(f"trial {trial} was {reason}, and {'' if trial in self.given_up else 'not '}given up")

    def _failed(self, trial: int, record: Mapping[str, Any]) -> None:
        event = record["event"]
        self._failures[trial] += 1
        if DUPLICATED in record["error"]:
            self._fail(f"a failure of trial {trial} counts that is due to an earlier trial in its process")
        if trial in self.ended:
            self._fail(f"trial {trial} {event}, though it was {self.ended[trial]} before")
        if self._failures[trial] > self._leases[trial]:
            self._fail(f"trial {trial} has failed {self._failures[trial]} times in {self._leases[trial]} leases")
        if event == "gave_up" and "kept" not in record:
            self.given_up.add(trial)
        if event == "restarted" and record.get("kind") in ("error", "oom", "device"):
            self._own_failures[trial] += 1
            if self._own_failures[trial] > self._setup.max_restarts:
                self._fail(f"trial {trial} is restarted after {self._own_failures[trial]} failures of its own")

    def _acted(self, record: Mapping[str, Any], action: Mapping[str, Any]) -> None:
        kind, event = action["action"], record.get("event")
        if kind == "done":
            self.done = action.get("reason", "completed")
        trial = action.get("trial", -1)
        if kind == "create":
            if trial in self.created:
                self._fail(f"trial {trial} is created twice")
            self.created.add(trial)
            self.done = ""
            if repeat := action.get("repeat"):
                self.repeats[trial] = repeat["trial"], repeat["seed"]
                if repeat["trial"] in self.codes:
                    self.codes[trial] = self.codes[repeat["trial"]]
            if source := action.get("source"):
                self.sources[trial] = source["trial"], source["batches"]
            if code := action.get("code"):
                self.codes[trial] = code
            if event == "requested" and "trial" not in record:
                self.requested[trial] = record
        elif kind == "resume" and self.ended.pop(trial, None) is not None:
            self.given_up.discard(trial)
            self._resumed.add(trial)
            self.done = ""

    def _raised(self, alert: Mapping[str, Any]) -> None:
        if alert["kind"] in ("completed", "failed", "stopped"):
            return
        if alert["key"] in [each["key"] for each in self._alerts]:
            self._fail(f"{alert} comes twice")
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
        for alert in self._alerts:
            if not 1 <= self.sent[alert["id"]] <= 1 + self.kills:
                self._fail(f"{alert} was sent {self.sent[alert['id']]} times, with {self.kills} kills")

    def expected(self, trial: int) -> dict[str, Any]:
        """Return the hyperparameters that a requested trial must have."""
        record = self.requested[trial]
        source = {} if "source" not in record else self.hparams[record["source"]["trial"]]
        return {**source, **(record.get("hparams") or {})}

    # ------------------------------------------------------------------ trials
    @property
    def live(self) -> list[int]:
        """The trials that have not ended."""
        return sorted(self.created - self.ended.keys())

    @property
    def own(self) -> set[int]:
        """The trials that the search itself has created."""
        return self.created - self.requested.keys() - self.repeats.keys()

    def origin(self, trial: int) -> int:
        """The trial from whose code the weights of a trial come."""
        return trial if trial not in self.sources else self.origin(self.sources[trial][0])

    def begins(self, run: str, code: str | None, trial: int, batches: int, source: tuple[int, int] | None) -> None:
        """Check that a trial may go on after so many batches, here. `source`: the other trial's checkpoint from
        which it begins."""
        if code != self.codes.get(self.origin(trial)):
            self._fail(f"trial {trial} begins with code {code}")
        if trial not in self.hparams:
            self._fail(f"trial {trial} begins, but the journal does not say that it has started")
        if source is not None and source != self.sources.get(trial):
            self._fail(f"trial {trial} begins from {source}, in place of {self.sources.get(trial)}")
        if source is None and batches == 0 and trial in self.sources and trial not in self.damaged:
            self._fail(f"trial {trial} begins without the checkpoint {self.sources[trial]}")
        if batches < (last := max(self.reported[trial], default=0)) and trial not in self.damaged and run == self._run:
            self._fail(f"trial {trial} resumes after {batches} batches, but it has reported after {last}")

    def answered(self, trial: int, step: int, stops: bool) -> None:
        """Check what a trial does after its report: the decision must be on the disk."""
        if stops and trial not in self.ended:
            self._fail(f"trial {trial} stops after {step} batches, but the journal does not have its end")

    # ------------------------------------------------------------------ checkpoints
    def synced(self, trial: int, batches: int) -> None:
        self.forced.add((trial, batches))

    def deleted(self, trial: int, batches: int) -> None:
        """Check that this deletion left the trial a checkpoint to resume from."""
        self.committed[trial].discard(batches)
        self.forced.discard((trial, batches))
        for child in set(self.live) - self._resumed - self.damaged:
            has_own = any((child, each) in self.forced for each in self.committed[child])
            if self.sources.get(child) == (trial, batches) and not has_own:
                self._fail(f"checkpoint {batches} of trial {trial} was deleted, but trial {child} begins from it")
        if trial in self.ended:
            self.damaged.add(trial)  # an extension resumes it from the checkpoints that the policy keeps
        elif not any(each > batches and (trial, each) in self.forced for each in self.committed[trial]):
            self._fail(f"checkpoint {batches} of trial {trial} was deleted, but the trial may resume from it")

    def lose_power(self) -> None:
        """What is not forced to the disk may be lost."""
        for trial in self.live:
            if any((trial, each) not in self.forced for each in self.committed[trial]):
                self.damaged.add(trial)

    # ------------------------------------------------------------------ the end
    def check_end(self, waiting: Collection[str], *, is_extended: bool) -> None:
        """Check that each trial and request has ended. `waiting`: requests without an answer."""
        if left := self.live:
            self._fail(f"trials {left} have never ended")
        if self._setup.notify is not None:
            self._check_alerts(self._setup.notify[0])
        if lost := self.requests.keys() - self.answers.keys() - set(waiting):
            self._fail(f"{sorted(lost)} have no answer")
        if (repeat := self._setup.repeat) is not None:
            of_trials = defaultdict[int, set[int]](set)
            for of, seed in self.repeats.values():
                of_trials[of].add(seed)
            # After a request or an extension, other trials may be repeated in place of those that were begun.
            is_changed = self.requests or is_extended
            for seeds in of_trials.values():
                if seeds != set(range(1, (len(seeds) if is_changed else repeat[0]) + 1)):
                    self._fail(f"trials are repeated with the seeds {dict(of_trials)}")
        self._check_count()

    def check_checkpoints(self, *, is_exact: bool) -> None:
        """Check that the policy's checkpoints are on the disk, and, with `is_exact`, no others."""
        experiment_best, trial_best, trial_latest = self._setup.keeps
        there = {(trial, batches) for trial, each in self.committed.items() for batches in each}

        def best(among: Iterable[tuple[int, int]], count: int) -> list[tuple[int, int]]:
            values = {
                each: value for each in among if (value := self.metrics[each]) is not None and math.isfinite(value)
            }
            return sorted(values, key=lambda each: (values[each], each))[:count]

        kept: set[tuple[int, int]] = set()
        for trial in self.ended:
            mine = sorted(each for each in self.metrics if each[0] == trial)
            kept.update(best(mine, trial_best), mine[len(mine) - trial_latest :])
        kept.update(best(self.metrics, experiment_best))
        for reached in self._reached() if experiment_best and not self._extensions else ():
            of_each = [best((each for each in self.metrics if each[0] == trial), 1) for trial in reached]
            kept.update(best((each for found in of_each for each in found), (self._setup.repeat or (0, 1))[1]))
        for trial in self.repeats if experiment_best else ():
            kept.update(best((each for each in self.metrics if each[0] == trial), 1))
        if missing := kept - there:
            self._fail(f"checkpoints {sorted(missing)} are to be kept, and there are {sorted(there)}")
        if is_exact and there != kept:
            self._fail(f"checkpoints {sorted(there - kept)} are left, and only {sorted(kept)} are to be kept")

    def _reached(self) -> Iterable[set[int]]:
        """For each rung, and without any, the trials that have reached it and may be the best."""
        ended = {trial: reason for trial, reason in self.ended.items() if trial not in self.repeats}
        for rung in (0, *rungs_of(self._config)):
            yield {
                trial
                for trial, reason in ended.items()
                if reason == "completed"
                or (reason in ("stopped", "diverged", "canceled") and max(self.reported[trial], default=0) >= rung)
            }

    def _check_count(self) -> None:
        own, searcher = self.own, self._config.searcher
        if self._setup.is_population:
            completed = [each for each in own if self.ended[each] == "completed"]
            if len(completed) > searcher.population:
                self._fail(f"{completed} have completed, more than the population of {searcher.population}")
            return
        replaces = {"grid": (), "single": ("invalid_hp",)}.get(searcher.name, REPLACED)
        replaced = [each for each in own if self.ended.get(each) in replaces]
        budget = searcher.trial_count or self._setup.points or 1
        for extension in self._extensions:
            budget = extension.get("max_trials", budget)
        if self.done == "completed" and len(own) - len(replaced) != budget:
            self._fail(f"the method created {len(own)} trials, {len(replaced)} of them as replacements, of {budget}")

    _extensions: tuple[Mapping[str, Any], ...] = ()

    def spent(self, reason: str) -> None:
        """Called when the experiment ends because its budget is spent, or takes no trial to its next rung."""

    def extended(self, extension: Mapping[str, Any]) -> None:
        """The user has extended the experiment."""
        self._extensions = (*self._extensions, extension)
        self._rungs = None


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


class Rungs:
    """Asynchronous successive halving by its definition: at each rung, all results so far are sorted, NaN last, and a
    trial goes on if it is among the best 1/divisor."""

    def __init__(self, config: ExperimentConfig, fail: Callable[[str], None]) -> None:
        searcher = config.searcher
        self._fail, self._divisor = fail, Fraction(str(searcher.divisor))
        top = searcher.length or 0
        self._lengths = [max(math.floor(top / self._divisor**each), 1) for each in reversed(range(searcher.num_rungs))]
        self._results: list[dict[int, float]] = [{} for _ in self._lengths]
        self._next: defaultdict[int, int] = defaultdict(int)
        self._stopped: set[int] = set()

    def written(self, record: Mapping[str, Any]) -> None:
        trial, event = record.get("trial", -1), record.get("event")
        stops = any(each["action"] == "stop" and each["trial"] == trial for each in record.get("actions", ()))
        if event == "reported":
            value = number_from_json(record["value"])
            value = math.inf if value is None or not math.isfinite(value) else value
            if stops != self._stops(trial, record["step"], value):
                lengths = dict(zip(self._lengths, self._results, strict=True))
                self._fail(f"trial {trial} is {'' if stops else 'not '}stopped with {value}; by rung: {lengths}")
        elif event == "requested" and trial < 0:
            for action in record["actions"]:
                step = action.get("source", {}).get("step", 0)
                self._next[action["trial"]] = sum(length <= step for length in self._lengths)
        elif event == "exited":
            rung = self._next[trial]
            if record["reason"] in REPLACED:
                for results in self._results:
                    results.pop(trial, None)
            elif trial in self._stopped:
                pass  # it had its last rank
            elif record["reason"] in ("errored", "diverged", "canceled") and rung < len(self._lengths):
                self._results[rung][trial] = math.inf

    def _stops(self, trial: int, step: float, value: float) -> bool:
        if trial in self._stopped:
            return False
        while (rung := self._next[trial]) < len(self._lengths) and step >= self._lengths[rung]:
            self._next[trial] += 1
            results = self._results[rung]
            results[trial] = value
            best = sorted(results.values())[: max(math.floor(len(results) / self._divisor), 1)]
            if rung < len(self._lengths) - 1 and not (value < math.inf and value <= best[-1]):
                self._stopped.add(trial)
                return True
        return False
