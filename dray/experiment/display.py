"""What a person sees of a run: how it goes, while it goes on; the best trials, at its end."""

from __future__ import annotations

import importlib
import io
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from dray.experiment.board import Board, duration
from dray.experiment.directory import results
from dray.experiment.forecast import Forecast
from dray.experiment.logs import in_short
from searchers.preview import is_simulated, preview
from searchers.search import Search

if TYPE_CHECKING:
    from dray.experiment.counts import Counts
    from dray.experiment.result import Result

DRAWN_EVERY_S = 0.25
"""How often the picture on a terminal is drawn; in a notebook, a fourth as often."""
PLAIN_EVERY_S = (10.0, 60.0)
"""How often a line is printed where there is no terminal to keep a picture up to date on: first, and after half an hour
at most."""
SHOWN_TRIALS = 10
NOTEBOOK = 100, 30
"""Columns and lines of the picture in a notebook."""


class _Screen(Protocol):
    """Where a picture is kept up to date."""

    every_s: float

    def size(self) -> tuple[int, int]: ...  # columns, lines

    def draw(self, picture: RenderableType) -> None: ...

    def close(self) -> None: ...


class _Terminal:
    """The picture is at the end of what is printed, and gone in the end."""

    every_s = DRAWN_EVERY_S

    def __init__(self, console: Console) -> None:
        self._console = console
        # Drawn when the run looks at itself: no thread of its own.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def size(self) -> tuple[int, int]:
        return self._console.size

    def draw(self, picture: RenderableType) -> None:
        self._live.update(picture, refresh=True)

    def close(self) -> None:
        self._live.stop()


class _Notebook:
    """The picture is one output of the notebook's cell, which is replaced."""

    every_s = 4 * DRAWN_EVERY_S

    def __init__(self) -> None:
        self._handle = _ipython().display(_html(Text()), display_id=True)

    def size(self) -> tuple[int, int]:
        return NOTEBOOK

    def draw(self, picture: RenderableType) -> None:
        self._handle.update(_html(picture))

    def close(self) -> None:
        """The last picture stays: a notebook is read later."""


def _ipython() -> Any:
    """What every notebook has; dray does not depend on it."""
    return importlib.import_module("IPython.display")


def _html(picture: RenderableType) -> Any:
    console = Console(file=io.StringIO(), record=True, width=NOTEBOOK[0], force_jupyter=False)
    console.print(picture)
    shown = '<pre style="line-height:normal;font-family:Menlo,Consolas,monospace">{code}</pre>'
    return _ipython().HTML(console.export_html(inline_styles=True, code_format=shown))


class Display:
    """The status of a run: on a terminal and in a notebook a picture, elsewhere a line from time to time.

    Args:
        name: of the experiment.
        path: where it is stored.
        metric: that the search compares.
        smaller_is_better: of the metric.
        unit: that the search counts lengths in.
        console: standard error by default, so that output can be piped.
    """

    def __init__(
        self,
        *,
        name: str,
        path: Path,
        metric: str,
        smaller_is_better: bool,
        unit: str = "batches",
        console: Console | None = None,
    ) -> None:
        self._path, self._metric, self._sign = path, metric, 1 if smaller_is_better else -1
        self._console = console or Console(stderr=True)
        self._board = Board(name=name, metric=metric, smaller_is_better=smaller_is_better, unit=unit)
        self._screen: _Screen | None = None
        self._began = time.monotonic()
        self._due = 0.0
        self._failures = self._retired = 0
        self._told: dict[int, list[str]] = {}
        self._search: Search | None = None
        self._looked: tuple[Search, Counts, int, int] | None = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._screen = _Terminal(self._console)
        elif self._console.is_jupyter:
            self._screen = _Notebook()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._screen is not None:
            if self._looked is not None and isinstance(self._screen, _Notebook):
                self._draw(self._screen, *self._looked)  # it stays: as it was in the end
            self._screen.close()
            self._screen = None

    def say(self, text: str) -> None:
        """Print one line above the status."""
        # Not cut into lines: a path or a command is to be copied as it is.
        self._console.print(Text(text), soft_wrap=True)

    def begin(self, search: Search, records: Sequence[Mapping[str, Any]]) -> None:
        """A run of the search begins.

        Args:
            search: as it is now.
            records: of the journal before.
        """
        self._search = search
        # One of the user's own would have to be tried out, with state that it has now.
        known = not is_simulated(search.method)
        self._board.begin(Forecast(preview(search.method)) if known else None, records)
        if any(record.get("event") == "started" for record in records):
            self.say(f"going on: {_so_far(search)}")

    def rows(self, trial: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A trial has reported these rows of metrics."""
        self._board.rows(trial, rows)

    def waits(self, what: str) -> None:
        """Say in what is shown from now on that worker groups wait, and for what; "" if they do not."""
        self._board.waits = what

    def update(self, search: Search, counts: Counts, groups: int, groups_wanted: int) -> None:
        """Show how the run is doing now; at most a few times a second, however often it is called."""
        now = time.monotonic()
        self._looked = search, counts, groups, groups_wanted
        if now < self._due:
            return
        if self._screen is not None:
            self._draw(self._screen, search, counts, groups, groups_wanted)
            # Of a search of many trials it takes longer, and changes less.
            self._due = now + max(self._screen.every_s, 20 * (time.monotonic() - now))
        else:
            self._board.look(search, groups)
            self._console.print(Text(self._board.line(search, counts, groups, groups_wanted)), soft_wrap=True)
            first, last = PLAIN_EVERY_S
            self._due = now + min(max(first, (now - self._began) / 30), last)

    def _draw(self, screen: _Screen, search: Search, counts: Counts, groups: int, groups_wanted: int) -> None:
        self._board.look(search, groups)
        width, height = screen.size()
        screen.draw(self._board.picture(search, counts, groups, groups_wanted, width=width, height=height))

    def failure(self, trial: int, error: str, ended: str = "") -> None:
        """Say that a trial failed, and why: the error, and the user's own line; the journal has the whole traceback.

        ``ended``: why it is not started again.
        """
        self._failures += 1
        if self._failures <= SHOWN_TRIALS:
            told = in_short(error)
            what, *where = ["the same again"] if self._told.get(trial) == told else told
            self._told[trial] = told
            self.say("\n".join([f"trial {trial} failed{f' for good ({ended})' if ended else ''}: {what}", *where]))
        elif self._failures == SHOWN_TRIALS + 1:
            self.say("further failures are in the journal; see: dray experiment describe")

    def retired(self, group: str, trial: int, why: str) -> None:
        """Say that a worker group's processes are replaced after a trial, and why."""
        self._retired += 1
        if self._retired <= SHOWN_TRIALS:
            self.say(f"worker group {group} starts anew after trial {trial}: {why}")

    def closing(self, stopped: bool) -> None:
        """The run ends, by itself or because it was told to."""
        if stopped:
            # Nothing moves on it any more.
            self.__exit__(None, None, None)
            self.say("stopping: running trials save what they have; once more to end at once")

    def interrupted(self) -> None:
        """How far it was, and how to go on."""
        if self._search is not None:
            self.say(f"stopped: {_so_far(self._search)}")
        self.say(f"go on with: dray experiment resume {shlex.quote(str(self._path))}")

    def ended(self) -> None:
        """There is nothing left to run, and how there would be."""
        self.say(
            f"it has ended already; for more: dray experiment extend {self._named()} --max-trials N (or --max-length)"
        )

    def result(self, result: Result) -> None:
        """The table of the best trials, and where everything is."""
        # At once: in a notebook, what is said at once is one output.
        lines = best_trials(result, self._metric, self._sign, width=self._console.width)
        counts = result.trials["state"].value_counts()
        states = ", ".join(f"{count} {str(state).lower()}" for state, count in counts.items())
        took = duration(time.monotonic() - self._began)
        named = self._named()
        lines += [
            f"{len(result.trials)} trials ({states}) in {took}. Results: {self._path}",
            f"look at them: dray report {named}",
            f"              dray trial list {named} --best",
        ]
        self.say("\n".join(lines))

    def _named(self) -> str:
        """The experiment, as a command on this machine takes it."""
        return shlex.quote(self._path.name if self._path.parent == results().resolve() else str(self._path))


def _so_far(search: Search) -> str:
    """Of a search between two runs."""
    views = search.trials.values()
    begun = sum(not view.ended and view.hparams is not None for view in views)
    ended = sum(view.ended for view in views)
    return f"{ended} trial{'s' * (ended != 1)} ended, {begun} to go on from the latest checkpoint"


def best_trials(result: Result, metric: str, sign: int, *, width: int) -> list[str]:
    """The trials with the best metric, best first, as lines: as many of their hyperparameters and of their other
    metrics as there is room for."""
    trials = result.trials
    validated = trials[trials["best_metric"].notna()]  # one that has not started has no hyperparameters yet
    # By what is shown of them: a hyperparameter can be a list, which has no hash.
    drawn = [column for column in trials.columns if column.startswith("hparams.")]
    names = [column for column in drawn if validated[column].map(_shown).nunique() > 1]
    others = _other_metrics(result, metric)
    ranked = validated.iloc[(sign * validated["best_metric"]).argsort(kind="stable")[:SHOWN_TRIALS]]
    columns = {
        "trial": [str(trial) for trial in ranked["trial_id"]],
        "state": [str(s).lower() for s in ranked["state"]],
    }
    columns |= {
        "batches": [str(batches) for batches in ranked["batches"]],
        metric: list(map(_shown, ranked["best_metric"])),
    }
    more = {name.removeprefix("hparams."): list(map(_shown, ranked[name])) for name in names}
    for name in others.columns:
        more.setdefault(name, [_shown(others[name].get(trial)) for trial in ranked["trial_id"]])
    left_out = []
    for name, cells in more.items():
        if sum(_width(each, heads) + 2 for each, heads in {**columns, name: cells}.items()) - 2 <= width:
            columns[name] = cells
        else:
            left_out.append(name)
    lines = [f"best trials by {metric}:"]
    widths = [_width(name, cells) for name, cells in columns.items()]
    for row in [tuple(columns), *zip(*columns.values(), strict=True)]:
        lines.append("  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)))
    if left_out:
        lines.append(f"(not shown: {', '.join(left_out)})")
    return lines


def _width(heading: str, cells: Sequence[str]) -> int:
    return max(map(len, [heading, *cells]))


def _other_metrics(result: Result, metric: str) -> Any:
    """The other validation metrics of each trial where it was best: a column each, by trial."""
    rows = result.metrics
    rows = rows[rows["kind"] == "validation"]
    best = result.best_batches()
    at_best = rows[rows["batches"] == rows["trial_id"].map(best)]
    return at_best[at_best["name"] != metric].pivot(index="trial_id", columns="name", values="value")


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
