"""The reader of an experiment's journal and metrics: incremental, also while a driver writes.

All views of an experiment use it, so that they show the same numbers: the list, the commands, `dray.Result`, the
report, the server's page, notifications, and the study for Optuna's tools.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import TypedDict

from dray.errors import NoExperiment
from dray.records.forecast import TimeLeft, of_budget, rounded
from dray.records.growing import GrowingMetrics
from dray.records.journal import GrowingJournal, lost_records
from dray.records.metrics import SYSTEM, numpy_of
from dray.records.overview import ExperimentState, Heading, Overview, drawn_by
from dray.records.ranking import RankedTrials, no_collections
from dray.records.spending import Spending, Spent, totals_of
from dray.records.trial_record import SLOWEST_RANK, EndedBy, TrialRecord, unread_line
from dray.storage import Location
from dray.text import counted
from dray.training.metrics.checks import is_loss
from searchers.errors import DamagedFile
from searchers.events import Repeat
from searchers.journal import Journal
from searchers.records import hparams_from_json
from searchers.rows import damaged_line
from searchers.views import NEVER_BEST

if TYPE_CHECKING:
    import pyarrow as pa

    from dray.records.directory import ExperimentDirectory


def _rungs_in(record: Mapping[str, Any]) -> tuple[float, ...] | None:
    """The rungs after a record. Journals of earlier versions have none: then the config is parsed, which takes long."""
    return None if record.get("rungs") is None else tuple(map(float, record["rungs"]))


class Alert(TypedDict):
    """What people were told."""

    id: int  # unique in the experiment
    time: float | None
    event: Literal["completed", "failed", "stopped", "trial_failed", "no_gain", "budget"]
    text: str
    error: str | None  # why it could not be sent


class ExperimentReader(RankedTrials):
    """An experiment, read by `refresh`. Other threads take ``lock`` to read its attributes.

    Args:
        directory: its directory, or a copy of it.
        where: its path or URI, by default the directory's path.
        number: its number in the results directory, or None.
        is_running: returns whether a driver runs it, or None if unknown; by default, whether a process has the journal
            open.

    Attributes:
        is_running: whether a driver was running at the last refresh.
        version: increases with each change.
        records: number of journal records read.
        trials: the trials by number.
        failures: the journal's records of failures; each led to a restart or to giving the trial up.
        alerts: what people were told, see ``notify`` in the config.
        is_end_told: whether the last thing that happened is the alert of the experiment's end.
        metrics: kinds and names of the reported metrics.
        last: the last value of each of them, by trial.
        objectives: the metrics that rank trials; `metric` is the first.
        sign: 1 if smaller is better, else -1.
        has_epochs: whether all validations have their epochs.
        derived: values that views have cached.

    Raises:
        DamagedFile: experiment.yaml can't be read.
    """

    def __init__(
        self,
        directory: ExperimentDirectory,
        *,
        where: str = "",
        number: int | None = None,
        is_running: Callable[[], bool | None] | None = None,
    ) -> None:
        self.directory, self._where, self.number = directory, where or str(directory.path), number
        self._has_driver = is_running or (lambda: Journal.writer(directory.journal) is not None)
        self.is_running: bool | None = False
        self.lock = threading.RLock()
        self.version = 0
        self._heading = Heading.of(directory.config_file)
        super().__init__(self._heading.repeat)
        self.objectives = self._heading.objectives
        self._names = frozenset(self.objectives.names)
        self.is_pareto = bool(self._heading.searcher.get("metrics"))
        self.metric, self.sign = self.objectives.first.name, 1 if self.objectives.first.smaller_is_better else -1
        self.derived: dict[str, Any] = {}
        self._metrics = GrowingMetrics(directory.metrics)
        self._read_at = -math.inf
        self._begin()

    def _begin(self, journal: GrowingJournal | None = None) -> None:
        self._journal = journal or GrowingJournal(self.directory.journal)
        self.records = 0
        self._begin_trials()
        self.failures: list[Mapping[str, Any]] = []
        self.alerts: list[Alert] = []
        self.new_processes: list[str] = []  # which trials get new processes, and why, as lines for users
        self.is_end_told = False
        self.metrics: set[tuple[str, str]] = set()
        self.last = LastValues()
        self.has_epochs = True
        self._measured: dict[int, TrialRecord] = {}  # includes trials that are not in the journal yet
        self._done = self._why = self._ended = self._unread = ""
        self._budget, self._spending = self._heading.budget, Spending(self._heading.prices)
        self._time_left, self._best_so_far = TimeLeft(), BestSoFar()
        self._failure: tuple[int, str] = (0, "")
        self._max_trials: int | None = self._heading.searcher.get("max_trials")
        self._points: int | None = None  # of the space, if a search ends when it has tried all
        self._requested = 0
        self._ran_s, self._opened, self._time = 0.0, 0.0, 0.0
        self._began: float | None = None
        self._last: float | None = None
        self._versions: Mapping[str, str] = {}
        self._metrics.close()
        self.version += 1

    def refresh(self, *, max_age_s: float = 0.0) -> None:
        """Read new records, unless the last refresh is at most this old. Raises `DamagedFile` if a file
        can't be read, or the journal has a damaged line; those of the metrics are left out."""
        with self.lock:
            if time.monotonic() - self._read_at < max_age_s:
                return
            with no_collections():
                try:
                    self._refresh()
                except DamagedFile:
                    self._begin()  # the file may belong to another experiment now
                    self._refresh()
            self._read_at = time.monotonic()

    def trial(self, named: str | int | None) -> TrialRecord:
        """The trial of this number, or "best"; None: the only trial. Raises `NoExperiment` if there is none."""
        if named is None:
            if len(self.trials) == 1:
                [only] = self.trials.values()
                return only
            raise NoExperiment(
                f"{self.name} has {counted(len(self.trials), 'trial')}; give a trial's number, or 'best'"
            )
        named = str(named).removeprefix("trial_")
        if named == "best":
            if (best := self.best()) is not None:
                return best
            if why := self.no_best_reason():
                raise NoExperiment(f"{self.name} has {why}; give its number to use it anyway")
            raise NoExperiment(f"no trial of {self.name} has validated yet, so there is no best trial")
        if not named.isdecimal() or int(named) not in self.trials:
            known = f"it has {len(self.trials)}, numbered from 0" if self.trials else "it has none yet"
            raise NoExperiment(f"{self.name} has no trial {named}; {known}; give a trial's number, or 'best'")
        return self.trials[int(named)]

    def close(self) -> None:
        """Close the files. Another `refresh` reads all metrics anew."""
        with self.lock:
            self._metrics.close()

    def _refresh(self) -> None:
        was_running = self.is_running
        self.is_running = self._has_driver()  # before the journal: the last record of a driver that ends is read too
        records, is_another = self._journal.new_records()
        if is_another:
            self._begin(self._journal)
        for record in records:
            self.records += 1
            try:
                self._happened(record)
            except (
                LookupError,
                TypeError,
                AttributeError,
                ValueError,
                ArithmeticError,
            ):  # such as a trial that was never created
                sentence = damaged_line(self.directory.journal, self.records, f"it does not fit those before: {record}")
                self._begin()
                raise DamagedFile(sentence) from None
        parts, rows = self._metrics.new_rows()
        if parts is not None:
            self._load(parts)
        for row in rows:
            self._reported(row)
        if was_running != self.is_running or (records and not self.is_running):
            self._note_interrupted()
        self.version += bool(records or rows or parts is not None)

    def _note_interrupted(self) -> None:
        """Note whether trials that were running when the driver ended are interrupted."""
        ended_by: EndedBy | None = "interruption" if self.is_running is False else None
        for trial in self.trials.values():
            if trial.state == "RUNNING" and trial.ended_by != ended_by:
                trial.ended_by = ended_by
                trial.derived.clear()

    def lost_records(self) -> str:
        """What the journal has lost, and what to do; "" if nothing, or while a driver writes it."""
        return "" if self.is_running is not False else lost_records(self.directory, self.records)

    # ------------------------------------------------------------------ the journal
    def _happened(self, record: Mapping[str, Any]) -> None:
        event, at = record.get("event"), record.get("time")
        if at is not None:
            self._time_left.now(at, opened=event == "opened")
            if self._began is None:
                self._opened = self._time = at
            self._began = at if self._began is None else min(at, self._began)
            self._last = at if self._last is None else max(at, self._last)
        if event == "opened":
            self._versions = record.get("versions") or {"dray": record.get("version", "")}
            self._ran_s += self._time - self._opened
            self._opened, self._why = self._time if at is None else at, ""
        self._time = self._time if at is None else at
        if event not in ("opened", "told"):
            self.is_end_told = event == "alert" and bool(self._done or self._ended)
        match event:
            case "start":
                self._points, self._rungs = record.get("points"), _rungs_in(record)
            case "started":
                trial = self.trials[record["trial"]]
                if trial.drawn is None:
                    self._started.append(trial)
                trial.start(hparams_from_json(record.get("hparams")), at)  # type: ignore[arg-type]
                self._time_left.started(trial)
                trial.versions = self._versions
            case "reported":
                trial = self.trials[record["trial"]]
                trial.last_step = max(trial.last_step, record["step"])
            case "exited":
                trial = self.trials[record["trial"]]
                trial.exit(record["reason"], at)
                self._best_so_far.exited(trial)
                self._time_left.exited(trial)
            case "restarted" | "gave_up":
                self.failures.append(record)
                self.trials[record["trial"]].restarts += event == "restarted"
                self.trials[record["trial"]].derived.clear()
            case "new_processes":
                self.new_processes.append(record["text"])
            case "alert":
                what = Alert(id=record["id"], time=at, event=record["kind"], text=record["text"], error=None)
                self.alerts.append(what)
            case "told":
                for alert in self.alerts:
                    alert["error"] = record.get("error") if alert["id"] == record["id"] else alert["error"]
            case "unread":
                self._unread = unread_line(record["unread"], record["read"])
            case "failed":
                self._why = str(record.get("error"))
            case "ended":
                self._ended = record["reason"]
            case "limits":
                self._ended, self._config, self._budget = "", None, totals_of(record.get("budget"))
                self._spending.prices = record.get("prices") or {}
                self._extended.append(record)
            case "requested":
                self._done = self._ended = ""
                self._requested += record.get("trial") is None  # else a trial was to stop
            case "extended":
                self._done, self._ended, self._config, self._rungs = "", "", None, _rungs_in(record)
                self._time_left.reset()
                self._extended.append(record)
                self._max_trials = record.get("max_trials") or self._max_trials
                if record.get("max_length") is not None:
                    self._repeats = {}
        for action in record.get("actions", ()):
            match action["action"]:
                case "create":
                    trial = self.trials[action["trial"]] = self._record(action["trial"])
                    if source := action.get("source"):
                        trial.source_trial, trial.source_batches = source["trial"], source.get("batches")
                        trial.begin = source["step"]
                        trial.code = self.trials[source["trial"]].code
                    trial.is_requested = record["event"] == "requested" and not action.get("repeat")
                    if repeat := action.get("repeat"):
                        trial.repeat = Repeat(trial=repeat["trial"], seed=repeat["seed"])
                        trial.code = self.trials[repeat["trial"]].code
                        self._note_repeat(trial)
                    trial.code = action.get("code", trial.code)
                case "done":
                    self._done = action["reason"]
                case decision:
                    self._time_left.decided(self.trials[action["trial"]], decision)
                    self.trials[action["trial"]].decided(decision)
                    if decision == "resume":
                        self._note_repeat(self.trials[action["trial"]])

    def _record(self, trial: int) -> TrialRecord:
        if trial not in self._measured:
            self._measured[trial] = TrialRecord(trial, self.objectives)
        return self._measured[trial]

    # ------------------------------------------------------------------ metrics
    def _load(self, parts: pa.Table) -> None:
        """Load all metrics from Parquet. Only the objectives, and the losses of trials that may have diverged, become
        Python objects."""
        import numpy as np

        self._best_so_far.reset()
        for trial in self._measured.values():
            trial.forget_metrics()
        columns = [numpy_of(parts[name]) for name in ("trial_id", "batches", "epochs", "value", "time")]
        trials, batches, epochs, values, _ = columns
        kinds, names = (parts[name].combine_chunks() for name in ("kind", "name"))
        every = [(kind, name) for kind in kinds.dictionary.to_pylist() for name in names.dictionary.to_pylist()]
        series = numpy_of(kinds.indices) * len(names.dictionary) + numpy_of(names.indices)
        self.metrics = {every[code] for code in set(series.tolist())} - {each for each in every if each[0] == SYSTEM}

        def among(wanted: Callable[[str, str], bool]) -> Any:
            return np.array([wanted(*each) for each in every], bool)[series]

        reported = among(lambda kind, _: kind != SYSTEM)
        last = np.zeros(1 + trials.max(initial=-1), np.int64)
        np.maximum.at(last, trials, batches)
        for number in set(trials.tolist()):
            self._record(number).batches = int(last[number])
        slowest = among(lambda kind, name: kind == SYSTEM and name.startswith(SLOWEST_RANK))
        for number, value, code in zip(*(each[slowest].tolist() for each in (trials, values, series)), strict=True):
            self._measured[number].slowest_rank(every[code][1], value)
        self.last.load(every, series, trials, batches, values)
        compared = among(self._is_compared)
        self.has_epochs = not np.isnan(epochs[compared]).any()
        rows = [*(column[compared].tolist() for column in columns), series[compared].tolist()]
        for number, at, epoch, value, now, code in zip(*rows, strict=True):
            self._measured[number].validated(every[code][1], at, epoch, value, now)
        bad = reported & ~np.isfinite(values)
        if bad.any():
            theirs = among(lambda kind, name: is_loss(kind, name, self.metric)) & np.isin(trials, trials[bad])
            for number, at, value, code in zip(
                *(each[theirs].tolist() for each in (trials, batches, values, series)), strict=True
            ):
                if self._measured[number].nan or not math.isfinite(value):
                    self._measured[number].loss(every[code], at, value)

    def _is_compared(self, kind: str, name: str) -> bool:
        return kind == "validation" and name in self._names

    def _reported(self, row: Mapping[str, Any]) -> None:
        trial, kind, name = self._record(row["trial_id"]), row["kind"], row["name"]
        trial.batches = max(row["batches"], trial.batches)
        if kind == SYSTEM:
            if name.startswith(SLOWEST_RANK):
                trial.slowest_rank(name, row["value"] or 0.0)
            return
        value = math.nan if row["value"] is None else row["value"]
        self.metrics.add((kind, name))
        self.last.report((kind, name), trial.id, row["batches"], value)
        if self._is_compared(kind, name):
            self.has_epochs &= row["epochs"] is not None
            trial.validated(name, row["batches"], row["epochs"], value, row["time"])
            self._best_so_far.validated(trial)
        if (trial.nan or not math.isfinite(value)) and is_loss(kind, name, self.metric):
            trial.loss((kind, name), row["batches"], value)
        trial.derived.clear()

    # ------------------------------------------------------------------ the experiment
    @property
    def name(self) -> str:
        """The name of its directory."""
        return Location.of(self._where).name

    def overview(self) -> Overview:
        best, failed, budget = self.best(), self.num_failed, self._budget_now()
        lowest = self.lowest()
        live = [trial for trial in self.trials.values() if not trial.has_ended]
        lost = self.lost_records()
        done = self._done or self._why or ("completed" if self._ended else "")
        state: ExperimentState = "UNKNOWN" if self.is_running is None else "STOPPED"
        if self.is_running:
            state = "RUNNING"
        elif done:
            state = "ERROR" if done != "completed" else "PARTLY_FAILED" if failed else "COMPLETED"
        return Overview(
            name=self.name,
            path=self._where,
            number=self.number,
            title=self._heading.title,
            state=state,
            why=None if self.is_running else lost or self._why or None,
            trials=len(self.trials),
            ended=len(self.trials) - len(live),
            failed=failed,
            max_trials=self._most_trials,
            requested=self._requested,
            num_repeats=0 if done else self._num_repeats,
            method=self._heading.searcher.get("name") or None,
            sampler=drawn_by(self._heading.searcher),
            labels=self._heading.labels,
            metric=self.metric,
            smaller_is_better=self.sign == 1,
            curve=self._best_so_far.curve(self.trials.values(), self.sign, self._last),
            best_metric=None if best is None else self.value_of(best),
            best_trial=None if best is None else best.id,
            best_by=None if best is None else self.valued_by(best),
            lowest_metric=None if lowest is None else lowest.best_metric,
            lowest_trial=None if lowest is None else lowest.id,
            front=self.front() or None,
            began=self._began,
            last=self._last,
            ran_s=self._ran_s + self._time - self._opened,
            reason=None if self.is_running else self._exhausted if self._done else self._ended or None,
            left_s=self._left_s(live, budget) if self.is_running else None,
            unread=self._unread or None,
            failure=(self.main_failure() or None) if failed or state == "ERROR" else None,
            budget=budget,
        )

    @property
    def _exhausted(self) -> str | None:
        """Why a search is done before `max_trials`, if its space has fewer points."""
        if self._points is None or self._points >= (self._max_trials or math.inf):
            return None
        return f"all {counted(self._points, 'point')} of the space were tried"

    @property
    def _most_trials(self) -> int | None:
        """The number of trials that the search creates by itself, if it is known."""
        known = [each for each in (self._max_trials, self._points) if each is not None]
        return min(known, default=None)

    def _left_s(self, live: list[TrialRecord], budget: Mapping[str, Spent] | None) -> float | None:
        from dray.errors import ConfigError

        left = of_budget(budget, self._spending.usage.per_s)
        try:
            search = self._time_left.seconds(self.config, self.trials, live, self._requested)
        except (ConfigError, DamagedFile):  # its config names classes that are not importable here
            search = None
        return rounded(left if search is None else min(left, search))

    def main_failure(self) -> str:
        """The most frequent error of the failures, and the line of the user's code; "" without one."""
        if self._failure[0] != len(self.failures):
            from dray.records.logs import grouped_failures, short_error, where

            failure = grouped_failures(self.failures)[0][-1]
            line = where(failure)
            text = short_error(failure.get("error"))[0] + (f" ({line})" if line else "")
            self._failure = len(self.failures), text
        return self._failure[1]

    @property
    def _num_repeats(self) -> int:
        """The number of repeats that a search with a known number of trials ends with."""
        if self._repeat is None or self._most_trials is None:
            return 0
        return int(self._repeat["seeds"]) * min(int(self._repeat["for"].split()[-1]), self._most_trials)

    def _budget_now(self) -> dict[str, Spent] | None:
        if self._budget:
            self._spending.read(self.directory.metrics)
        spent = self._spending.usage.spent
        return {name: {"spent": spent[name], "total": total} for name, total in self._budget.items()} or None


def nan_since_text(since: int | None) -> str:
    """ "NaN since batch 40" for a trial's ``nan_since``; "" if it has not diverged."""
    return "" if since is None else f"NaN since batch {since}"


Metric = tuple[str, str]  # kind and name


class LastValues:
    """Filled by `ExperimentReader`; a trial that trained some batches again has the value of the most batches."""

    def __init__(self) -> None:
        self._loaded: dict[Metric, tuple[Any, Any, Any]] = {}  # arrays: trials, batches, values
        self._last: dict[Metric, tuple[dict[int, int], dict[int, float]]] = {}  # batches and values by trial

    def load(self, every: Sequence[Metric], series: Any, trials: Any, batches: Any, values: Any) -> None:
        """Take the values from arrays of all rows, in place of those known before; ``series`` are indices in
        ``every``."""
        import numpy as np

        key = trials * len(every) + series
        final = np.zeros(1 + key.max(initial=-1), np.int64)
        np.maximum.at(final, key, batches)
        ends = np.flatnonzero(batches == final[key])
        self._last, self._loaded = {}, {}
        for code, metric in enumerate(every):
            mine = ends[series[ends] == code]
            self._loaded[metric] = trials[mine], batches[mine], values[mine]

    def report(self, metric: Metric, trial: int, batches: int, value: float) -> None:
        at, last = self._of(metric)
        if batches >= at.get(trial, 0):
            at[trial], last[trial] = batches, value

    def of(self, metric: Metric) -> Mapping[int, float]:
        """The last value of a metric, which may be NaN, by trial."""
        return self._of(metric)[1]

    def _of(self, metric: Metric) -> tuple[dict[int, int], dict[int, float]]:
        if metric in self._loaded:  # Python objects are made of a metric when it is first asked for
            trials, batches, values = (column.tolist() for column in self._loaded.pop(metric))
            self._last[metric] = dict(zip(trials, batches, strict=True)), dict(zip(trials, values, strict=True))
        return self._last.setdefault(metric, ({}, {}))


POINTS = 24


class BestSoFar:
    """The improvements of a search's best value: found in all trials at the first look, and then added as they come."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float, int]] | None = None  # time, loss (smaller is better), trial
        self._trials: dict[int, float] = {}  # those that have improved it, and how far

    def reset(self) -> None:
        """The next look goes through all trials."""
        self._found = None

    def validated(self, trial: TrialRecord) -> None:
        """Take a trial's newest validation."""
        if self._found is None or not trial.is_eligible or trial.rank is None:
            return
        if trial.rank[1] > self._trials.get(trial.id, math.inf):  # it has restarted, and trained worse this time
            self.reset()
        elif not self._found or trial.rank[1] < self._found[-1][1]:
            at = trial.times[trial.at.index(trial.rank[2])]
            self._add(max(at, self._found[-1][0] if self._found else at), trial.rank[1], trial.id)

    def exited(self, trial: TrialRecord) -> None:
        """A trial that has failed is never the best, also in retrospect."""
        if trial.id in self._trials and trial.state in NEVER_BEST:
            self.reset()

    def _add(self, at: float, loss: float, trial: int) -> None:
        assert self._found is not None
        self._found.append((at, loss, trial))
        self._trials[trial] = loss

    def curve(self, trials: Iterable[TrialRecord], sign: int, last: float | None) -> list[float]:
        """The best value at up to `POINTS` equal steps of time, from the first validation to `last`."""
        if self._found is None:
            self._find(trials, sign)
        assert self._found is not None
        if not self._found:
            return []
        times, losses = [each[0] for each in self._found], [each[1] for each in self._found]
        begin, end = times[0], max(last or 0.0, times[-1])
        if begin == end:
            shown = losses[-POINTS:]
        else:
            steps = (begin + (end - begin) * step / (POINTS - 1) for step in range(POINTS))
            shown = [losses[bisect_right(times, at) - 1] for at in steps]
            shown[-1] = losses[-1]
        return [float(f"{sign * loss:.4g}") for loss in shown]

    def _find(self, trials: Iterable[TrialRecord], sign: int) -> None:
        points: list[tuple[float, float, int]] = []
        for trial in trials:
            if not trial.is_eligible or trial.rank is None:
                continue
            if len(trial.measured) == 1:
                losses = ((at, sign * value) for at, value in zip(trial.times, trial.values, strict=True))
                points += [(at, loss, trial.id) for at, loss in losses if math.isfinite(loss)]
            else:  # constraints: only its best validation
                points.append((trial.times[trial.at.index(trial.rank[2])], trial.rank[1], trial.id))
        self._found, self._trials, best = [], {}, math.inf
        for at, loss, number in sorted(points):
            if loss < best:
                self._add(at, loss, number)
                best = loss
