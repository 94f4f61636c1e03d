"""What a person sees of a run: one status line while it goes on, the best trials at its end."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from searchers.search import Search, TrialView

if TYPE_CHECKING:
    from dray.experiment.result import Result
    from dray.experiment.run import Counts

PLAIN_EVERY_S = 10.0
"""How often a line is printed where there is no terminal to keep one up to date on."""
SHOWN_TRIALS = 10


class Display:
    """The status of a run on a console.

    Args:
        name: of the experiment.
        path: where it is stored.
        metric: that the search compares.
        smaller_is_better: of the metric.
        max_trials: of the search, None if it has no such number.
        console: standard error by default, so that output can be piped.
    """

    def __init__(
        self,
        *,
        name: str,
        path: Path,
        metric: str,
        smaller_is_better: bool,
        max_trials: int | None,
        console: Console | None = None,
    ) -> None:
        self._name, self._path, self._metric, self._sign = name, path, metric, 1 if smaller_is_better else -1
        self._max_trials = max_trials
        self._console = console or Console(stderr=True)
        self._live = (
            Live(console=self._console, refresh_per_second=4, transient=True) if self._console.is_terminal else None
        )
        self._began = time.monotonic()
        self._first_end: tuple[float, int] | None = None
        self._printed = 0.0
        self._failures = self._retired = 0

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print one line above the status."""
        # Not cut into lines: a path or a command is to be copied as it is.
        self._console.print(Text(text), soft_wrap=True)

    def update(self, search: Search, counts: Counts, groups: int, groups_wanted: int) -> None:
        """Show how the run is doing now."""
        now = time.monotonic()
        if self._live is None and now - self._printed < PLAIN_EVERY_S:
            return
        self._printed = now
        line = self.line(search, counts, groups, groups_wanted, now)
        if self._live:
            self._live.update(Text(line))
        else:
            self._console.print(Text(line), soft_wrap=True)

    def line(self, search: Search, counts: Counts, groups: int, groups_wanted: int, now: float) -> str:
        """The status line."""
        trials = list(search.trials.values())
        ended = sum(trial.ended for trial in trials)
        running, paused = (sum(trial.state == state for trial in trials) for state in ("RUNNING", "PAUSED"))
        total = self._max_trials or len(trials)
        best = self._best(trials)
        parts = [
            f"{self._name}  {ended}/{total} trials",
            f"{running} running" if groups else "starting worker groups",
            f"{paused} paused" if paused else "",
            f"{groups} of {groups_wanted} groups up" if groups < groups_wanted else "",
            f"best {self._metric} {best.best:.5g} (trial {best.id})" if best else "",
            f"{sum(counts.restarts.values())} restarts" if counts.restarts else "",
            _duration(now - self._began),
            self._remaining(ended, total, now),
        ]
        return " · ".join(part for part in parts if part)

    def _remaining(self, ended: int, total: int, now: float) -> str:
        """From the rate at which trials end, once some have: the start of the processes tells nothing about it."""
        if ended and self._first_end is None:
            self._first_end = (now, ended)
        if self._first_end is None or ended < self._first_end[1] + 4:
            return ""
        rate = (ended - self._first_end[1]) / (now - self._first_end[0])
        return f"about {_duration((total - ended) / rate)} left"

    def _best(self, trials: list[TrialView]) -> TrialView | None:
        ranked = [trial for trial in trials if trial.best is not None and trial.state != "INVALID_HP"]
        return min(ranked, key=lambda trial: self._sign * (trial.best or 0), default=None)

    def failure(self, trial: int, error: str, ended: str = "") -> None:
        """Say that a trial failed, and why: the last line of its traceback; the journal has all of it.

        ``ended``: why it is not started again.
        """
        self._failures += 1
        if self._failures <= SHOWN_TRIALS:
            told = error.strip().splitlines()[-1] if error.strip() else "no reason given"
            self.say(f"trial {trial} failed{f' for good ({ended})' if ended else ''}: {told}")

    def retired(self, group: str, trial: int, why: str) -> None:
        """Say that a worker group's processes are replaced after a trial, and why."""
        self._retired += 1
        if self._retired <= SHOWN_TRIALS:
            self.say(f"worker group {group} starts anew after trial {trial}: {why}")

    def closing(self, stopped: bool) -> None:
        """The run ends, by itself or because it was told to."""
        if stopped:
            self.say("stopping: running trials save what they have; once more to end at once")

    def interrupted(self) -> None:
        """How to go on."""
        self.say(f"stopped. Go on with: dray experiment resume {self._path}")

    def result(self, result: Result) -> None:
        """The table of the best trials, and where everything is."""
        self._console.print(best_trials(result, self._metric, self._sign))
        counts = result.trials["state"].value_counts()
        self.say(
            f"{len(result.trials)} trials ({', '.join(f'{n} {str(state).lower()}' for state, n in counts.items())}) in "
            f"{_duration(time.monotonic() - self._began)}. Results: {self._path}"
        )


def best_trials(result: Result, metric: str, sign: int) -> Table:
    """The trials with the best metric, best first."""
    table = Table(title=f"best trials by {metric}", title_justify="left")
    trials = result.trials
    # By what is shown of them: a hyperparameter can be a list, which has no hash.
    drawn = [column for column in trials.columns if column.startswith("hparams.")]
    names = [column for column in drawn if trials[column].map(_shown).nunique() > 1]
    others = _other_metrics(result, metric)
    for heading in ["trial", "state", "batches", metric, *others.columns, *(name[len("hparams.") :] for name in names)]:
        table.add_column(heading, justify="right")
    ranked = trials[trials["best_metric"].notna()]
    ranked = ranked.iloc[(sign * ranked["best_metric"]).argsort(kind="stable")[:SHOWN_TRIALS]]
    for _, row in ranked.iterrows():
        more = [others[name].get(row["trial_id"]) for name in others.columns]
        cells = [row["best_metric"], *more, *(row[name] for name in names)]
        table.add_row(
            str(row["trial_id"]), row["state"].lower(), str(row["batches"]), *(_shown(value) for value in cells)
        )
    return table


def _other_metrics(result: Result, metric: str) -> Any:
    """The other validation metrics of each trial where it was best: a column each, by trial."""
    rows = result.metrics
    rows = rows[rows["kind"] == "validation"]
    best = result.best_batches()
    at_best = rows[rows["batches"] == rows["trial_id"].map(best)]
    return at_best[at_best["name"] != metric].pivot(index="trial_id", columns="name", values="value")


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
