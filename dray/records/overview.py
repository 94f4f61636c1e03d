"""An overview of an experiment, which grows with its journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from dray.storage import Location
from dray.text import one_line
from searchers.errors import FieldError
from searchers.objectives import Losses, Objectives, is_better, of_names
from searchers.pareto import ordered
from searchers.records import number_from_json
from searchers.views import END_STATES, NEVER_BEST

State = Literal["RUNNING", "COMPLETED", "PARTLY_FAILED", "STOPPED", "ERROR", "UNKNOWN", "DAMAGED"]
COMPLETED: tuple[State, ...] = ("COMPLETED", "PARTLY_FAILED")
"""States in which the search has completed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """An overview of an experiment, from its config and its journal alone.

    Attributes:
        name: name of its directory.
        number: its number in the results directory; None if it has none, see `numbering`.
        path: its directory, or its URI in an object store.
        title: the config's ``name``.
        state: RUNNING: a driver runs it. COMPLETED: it has ended. PARTLY_FAILED: it has ended, and some of
            its trials failed. ERROR: it has ended, and no trial completed; or it can't run, ``why`` says why. STOPPED:
            it has not ended, and no driver runs it; it can be resumed. UNKNOWN: it has not ended, and is in an object
            store, where its driver has fallen silent; or it is a local run whose end was not recorded. DAMAGED: its
            files can't be read. On a server also those of `dray.serve.control.State`.
        why: it is DAMAGED, or in ERROR, or does not run though it should; "" if that is not known.
        trials, ended: how many trials there are so far, and how many of them have ended.
        max_trials: how many there will be; None if that is not known in advance.
        metric: the searcher's metric; of several the first objective.
        failed: how many trials have failed.
        best, best_trial: the best validation of a trial that did not fail, and its trial; None if there is none. With
            several metrics one that keeps the constraints.
        front: with several metrics, the trials of the Pareto front.
        began, last: times of its creation and of its last event; Unix time in s. None before it began.
        ran_s: for how many seconds drivers have run it.
    """

    name: str
    path: str
    number: int | None = None
    title: str = ""
    state: State = "DAMAGED"
    trials: int = 0
    ended: int = 0
    failed: int = 0
    max_trials: int | None = None
    metric: str = ""
    best: float | None = None
    best_trial: int | None = None
    front: tuple[int, ...] = ()
    began: float | None = None
    last: float | None = None
    ran_s: float = 0.0
    why: str = ""

    def on_server(self, state: str, error: str) -> Overview:
        """The same of an experiment that was submitted to a server, which knows more of it: the command and the page,
        the list and the description all show this.

        Args:
            state, error: see `dray.serve.control.Submitted`.
        """
        if state == "COMPLETED" and self.state in (*COMPLETED, "DAMAGED"):
            return self
        return replace(self, state=cast("State", state), why=self.why or error)

    @property
    def label(self) -> str:
        """Its number, if it has one, and its name."""
        return self.name if self.number is None else f"{self.number}: {self.name}"


class Glance:
    """An overview that grows with its journal.

    Args:
        where: its directory, or its URI in an object store.
        config: the content of its experiment.yaml.

    Raises:
        ValueError: the config can't be read.
    """

    def __init__(self, where: str, config: bytes) -> None:
        # Not `load_config`, which imports what the config names, such as Optuna, to check it.
        import yaml

        try:
            raw = yaml.load(config, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            searcher = raw["searcher"]
            self._objectives = objectives_in(searcher)
            self._metric, self._sign = first_metric(searcher)
            self._title, self._max_trials = str(raw["name"]), searcher.get("max_trials")
        except (yaml.YAMLError, KeyError, TypeError, AttributeError, FieldError) as error:
            raise ValueError(f"its experiment.yaml can't be read: {one_line(error)}") from None
        self._where = where
        self._ended: dict[int, str] = {}
        self._failed: set[int] = set()
        self._best: dict[int, float] = {}
        self._losses: dict[int, Losses] = {}
        self._leader: int | None = None
        self._done, self._why, self._trials = "", "", 0
        self._ran_s, self._begin, self._time = 0.0, 0.0, 0.0
        self._began: float | None = None
        self._last: float | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """The next record of the journal."""
        if "time" in record:
            time = record["time"]
            if self._began is None:
                self._begin = self._time = time
            self._began = time if self._began is None else min(time, self._began)
            self._last = time if self._last is None else max(time, self._last)
        if record.get("event") == "opened":
            self._ran_s, self._begin = self._ran_s + self._time - self._begin, record.get("time", self._time)
            self._why = ""
        elif record.get("event") == "failed":
            self._why = str(record.get("error"))
        self._time = record.get("time", self._time)
        event, trial = record.get("event"), cast("int", record.get("trial"))
        if event in ("reported", "validated") and self._objectives is not None:
            self._add_losses(trial, record, self._objectives)
        elif event in ("reported", "validated", "saved"):  # what is saved has a value only if it keeps the constraints
            value, worst = record.get("value"), self._sign * float("inf")
            if isinstance(value, int | float) and self._sign * value < self._sign * self._best.get(trial, worst):
                self._set_best(trial, value)
        elif event == "exited":
            self._ended[trial] = END_STATES.get(record.get("reason", ""), "")
            if self._ended[trial] == "ERRORED":
                self._failed.add(trial)
            if self._ended[trial] in NEVER_BEST and trial == self._leader:
                self._lead()
        elif event == "extended":
            self._done, self._max_trials = "", record.get("max_trials") or self._max_trials
        for action in record.get("actions", ()):
            match action["action"]:
                case "create":
                    self._trials += 1
                case "resume":
                    if self._ended.pop(action["trial"], None) in NEVER_BEST:
                        self._failed.discard(action["trial"])
                        self._lead()
                case "done":
                    self._done = action["reason"]

    def _add_losses(self, trial: int, record: Mapping[str, Any], objectives: Objectives) -> None:
        """A report with several metrics."""
        measured = tuple(map(number_from_json, record.get("metrics", ())))
        losses = objectives.normalised(measured) if measured else None
        if losses is not None and (trial not in self._losses or is_better(losses, self._losses[trial])):
            self._losses[trial] = losses
            value, worst = self._sign * losses.values[0], self._sign * float("inf")
            if not losses.violation and losses.values[0] < self._sign * self._best.get(trial, worst):
                self._set_best(trial, value)

    def _set_best(self, trial: int, value: float) -> None:
        self._best[trial] = value
        is_sound = self._ended.get(trial) not in NEVER_BEST
        if is_sound and (self._leader is None or self._is_better(trial)):
            self._leader = trial

    def overview(self, is_running: bool | None) -> Overview:
        """The overview so far, without a number.

        Args:
            is_running: whether a driver has the journal open; None if that can't be known.
        """
        leader = self._leader
        return Overview(
            name=Location.of(self._where).name,
            path=self._where,
            title=self._title,
            state=_state(self._done or self._why, is_running, some_failed=bool(self._failed)),
            why="" if is_running else self._why,
            trials=self._trials,
            ended=len(self._ended),
            failed=len(self._failed),
            max_trials=self._max_trials,
            metric=self._metric,
            best=None if leader is None else self._best[leader],
            best_trial=leader,
            front=self._front(),
            began=self._began,
            last=self._last,
            ran_s=self._ran_s + self._time - self._begin,
        )

    def _front(self) -> tuple[int, ...]:
        sound = {trial: its for trial, its in self._losses.items() if self._ended.get(trial) not in NEVER_BEST}
        return tuple(sorted(ordered(sound).front, key=lambda trial: sound[trial].values[0]))

    def _is_better(self, trial: int) -> bool:
        assert self._leader is not None
        return self._sign * self._best[trial] < self._sign * self._best[self._leader]

    def _lead(self) -> None:
        sound = [each for each in self._best if self._ended.get(each) not in NEVER_BEST]
        self._leader = min(sound, key=lambda trial: self._sign * self._best[trial], default=None)


def objectives_in(searcher: Mapping[str, Any]) -> Objectives | None:
    """The objectives of a searcher section, as it is in a file; None if it has one metric."""
    return of_names(searcher["metrics"]) if searcher.get("metrics") else None


def first_metric(searcher: Mapping[str, Any]) -> tuple[str, int]:
    """The metric of a searcher section, of several the first objective; and 1 if smaller is better, else -1."""
    if (objectives := objectives_in(searcher)) is not None:
        return objectives.first.name, 1 if objectives.first.smaller_is_better else -1
    return str(searcher["metric"]), 1 if searcher.get("smaller_is_better", True) else -1


def _state(done: str, is_running: bool | None, *, some_failed: bool) -> State:
    if is_running:
        return "RUNNING"
    if done == "completed":
        return "PARTLY_FAILED" if some_failed else "COMPLETED"
    if done:
        return "ERROR"
    return "UNKNOWN" if is_running is None else "STOPPED"
