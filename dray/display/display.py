"""Shows a run to the user: its status while it runs, and the best trials at its end."""

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

from dray.display.board import Board
from dray.display.forecast import Forecast
from dray.display.terminal import stderr
from dray.display.text import duration
from dray.records.directory import results_root
from dray.records.logs import short_error
from dray.records.outcomes import FAILED, divergence_summary, failure_summary, no_best_reason, ranked
from searchers.preview import is_simulated, preview
from searchers.search import Search

if TYPE_CHECKING:
    from dray.display.counts import Counts
    from dray.records.result import Result

DRAWN_EVERY_S = 0.25
"""How often the picture on a terminal is drawn; in a notebook a quarter as often."""
PLAIN_EVERY_S = (10.0, 60.0)
"""How often a line is printed without a terminal: at first, and from half an hour on."""
SHOWN_TRIALS = 10
NOTEBOOK = 100, 30
"""Columns and lines of the picture in a notebook."""


class _Screen(Protocol):
    """Something that shows a picture and updates it."""

    every_s: float

    def size(self) -> tuple[int, int]: ...  # columns, lines

    def draw(self, picture: RenderableType) -> None: ...

    def close(self) -> None: ...


class _Terminal:
    """The picture is below all printed lines, and is removed at the end."""

    every_s = DRAWN_EVERY_S

    def __init__(self, console: Console) -> None:
        self._console = console
        # Drawn by the driver's own loop, without a thread.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def size(self) -> tuple[int, int]:
        return self._console.size

    def draw(self, picture: RenderableType) -> None:
        self._live.update(picture, refresh=True)

    def close(self) -> None:
        self._live.stop()


class _Notebook:
    """The picture is one output of the notebook's cell, and is replaced."""

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
    """IPython's display module, which every notebook has; dray does not depend on it."""
    return importlib.import_module("IPython.display")


def _html(picture: RenderableType) -> Any:
    console = Console(file=io.StringIO(), record=True, width=NOTEBOOK[0], force_jupyter=False)
    console.print(picture)
    shown = '<pre style="line-height:normal;font-family:Menlo,Consolas,monospace">{code}</pre>'
    return _ipython().HTML(console.export_html(inline_styles=True, code_format=shown))


class Display:
    """The status of a run: a picture on a terminal and in a notebook, elsewhere a line from time to time.

    Args:
        name: name of the experiment.
        path: where it is stored.
        metric: the searcher's metric.
        smaller_is_better: whether the metric is minimised.
        unit: the search's unit of length.
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
        self._console = console or Console(file=stderr())
        self._board = Board(name=name, metric=metric, smaller_is_better=smaller_is_better, unit=unit)
        self._screen: _Screen | None = None
        self._began = time.monotonic()
        self._due = 0.0
        self._failures = self._retired = 0
        self._shown_errors: dict[int, list[str]] = {}
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
                self._draw(self._screen, *self._looked)  # it stays, so draw the final state
            self._screen.close()
            self._screen = None

    def say(self, text: str) -> None:
        """Print one line above the status."""
        # Not wrapped, so that paths and commands can be copied.
        self._console.print(Text(text), soft_wrap=True)

    def starting(self, what: str) -> None:
        """Show what the run waits for before it begins; only with a picture, which replaces it."""
        if self._screen is not None:
            self._screen.draw(Text(f"{what} ...", "dim"))

    def begin(self, search: Search, records: Sequence[Mapping[str, Any]]) -> None:
        """A run of the search begins.

        Args:
            search: in its current state.
            records: the journal so far.
        """
        self._search = search
        # A user's own method could only be simulated, which would change its state.
        known = not is_simulated(search.method)
        self._board.begin(Forecast(preview(search.method)) if known else None, records)
        if any(record.get("event") == "started" for record in records):
            self.say(f"resuming: {_so_far(search)}")

    def rows(self, trial: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A trial has reported these rows of metrics."""
        self._board.rows(trial, rows)

    def waits(self, what: str) -> None:
        """Show from now on what worker groups wait for; "" if they do not wait."""
        self._board.waits = what

    def shares(self, share: str) -> None:
        """Show what each trial has of a slot that it shares with others; "" if trials share none."""
        self._board.share = share

    def update(self, search: Search, counts: Counts, groups: int, groups_wanted: int) -> None:
        """Show the run's current status; at most a few times a second, however often it is called."""
        now = time.monotonic()
        self._looked = search, counts, groups, groups_wanted
        if now < self._due:
            return
        if self._screen is not None:
            self._draw(self._screen, search, counts, groups, groups_wanted)
            # With many trials drawing takes longer, and the picture changes less.
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

    def failure(self, trial: int, error: str, ended: str = "", kept: str = "") -> None:
        """Say that a trial failed: the error, and the line of the user's code. The journal has the whole traceback.

        ``ended``: why it is not started again; "" if it is. ``kept``: how the trial had ended before its extension, if
        it was the extension that failed for good.
        """
        self._failures += 1
        if self._failures <= SHOWN_TRIALS:
            short = short_error(error)
            what, *where = ["the same error again"] if self._shown_errors.get(trial) == short else short
            self._shown_errors[trial] = short
            who = f"the extension of trial {trial}" if kept else f"trial {trial}"
            self.say("\n".join([f"{who} failed{f' for good ({ended})' if ended else ''}: {what}", *where]))
            if kept:
                self.say(f"trial {trial} is still {kept}, with the result and the checkpoint that it had")
        elif self._failures == SHOWN_TRIALS + 1:
            self.say("further failures are not shown here; see: dray experiment describe")

    def retired(self, group: str, trial: int, why: str) -> None:
        """Say that a worker group's processes are replaced after a trial, and why."""
        self._retired += 1
        if self._retired <= SHOWN_TRIALS:
            self.say(f"worker group {group} is restarted after trial {trial}: {why}")

    def closing(self, stopped: bool) -> None:
        """The run ends, by itself or because it was stopped."""
        if stopped:
            # The picture would not change any more.
            self.__exit__(None, None, None)
            # With the command already here: where a signal goes to Ray's processes too, Ray may end this one.
            self.say(f"stopping: running trials save a checkpoint; interrupt again to stop at once, {self._resume}")

    def interrupted(self) -> None:
        """Say how far an interrupted run was, and how to resume it."""
        if self._search is not None:
            self.say(f"stopped: {_so_far(self._search)}")
        self.say(self._resume)

    @property
    def last_words(self) -> str:
        """What to print if the run ends without another word."""
        return f"stopped at once; {self._resume}\n"

    def ended(self) -> None:
        """Say that nothing is left to run, and how to extend the search."""
        self.say(
            f"already ended; extend with: dray experiment extend {self._named()} --max-trials N (or --max-length N)"
        )

    def result(self, result: Result) -> None:
        """Print what failed, the table of the best trials, and where everything is stored."""
        # All at once, so that it is one output in a notebook.
        trials = result.trials
        best = best_trials(result, self._metric, self._sign, width=self._console.width)
        counts = trials["state"].value_counts()
        states = ", ".join(f"{count} {str(state).lower()}" for state, count in counts.items())
        took = duration(time.monotonic() - self._began)
        named = self._named()
        failed = failure_summary(trials["state"])
        hints = [f"inspect failures with: dray experiment describe {named}"] if failed else []
        if best:
            hints += [f"inspect with: dray report {named}", f"              dray trial list {named} --best"]
        elif not failed:
            hints.append(f"inspect with: dray experiment describe {named}")
        shown = Text()
        for line, style in (
            (failed, "bold red"),
            (divergence_summary(trials), "bold red"),
            (no_best_reason(ranked(trials, self._sign), self._metric), ""),
        ):
            shown.append(f"{line}\n" if line else "", style)
        summary = f"{len(trials)} trial{'s' * (len(trials) != 1)} ({states}) in {took}. Results: {self._path}"
        shown.append("\n".join([*best, summary, *hints]))
        self._console.print(shown, soft_wrap=True)

    @property
    def _resume(self) -> str:
        return f"resume with: dray experiment resume {self._named()}"

    def _named(self) -> str:
        """The experiment's name in commands on this machine."""
        is_found = (results_root() / self._path.name).resolve() == self._path
        return shlex.quote(self._path.name if is_found else str(self._path))


def _so_far(search: Search) -> str:
    """The state of a search between two runs."""
    views = search.trials.values()
    begun = sum(not view.ended and view.hparams is not None for view in views)
    ended = sum(view.ended for view in views)
    return f"{ended} trial{'s' * (ended != 1)} ended, {begun} to continue from the latest checkpoint"


def best_trials(result: Result, metric: str, sign: int, *, width: int) -> list[str]:
    """The best trials, best first, as lines of a table, with as many hyperparameters and other metrics as fit. Trials
    that failed are left out. No lines if no other has validated."""
    trials = result.trials
    there = ranked(trials, sign)  # trials that have not started have no hyperparameters yet
    validated = there[there["state"] != FAILED]
    if validated.empty:
        return []
    # Compared as text: a hyperparameter can be a list, which has no hash.
    drawn = [column for column in trials.columns if column.startswith("hparams.")]
    names = [column for column in drawn if there[column].map(_shown).nunique() > 1]
    others = _other_metrics(result, metric)
    top, at_best = validated.head(SHOWN_TRIALS), result.best_batches()
    columns = {
        "trial": [str(trial) for trial in top["trial_id"]],
        "state": [str(s).lower() for s in top["state"]],
        "batches": [str(at_best[trial]) for trial in top["trial_id"]],
        metric: list(map(_shown, top["best_metric"])),
    }
    if top["nan_since"].notna().any():
        columns["NaN since"] = top["nan_since"].astype("string").fillna("").tolist()
    more = {name.removeprefix("hparams."): list(map(_shown, top[name])) for name in names}
    for name in others.columns:
        more.setdefault(name, [_shown(others[name].get(trial)) for trial in top["trial_id"]])
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
    """The other validation metrics at each trial's best validation: a column for each metric, by trial."""
    rows = result.metrics
    rows = rows[rows["kind"] == "validation"]
    best = result.best_batches()
    at_best = rows[rows["batches"] == rows["trial_id"].map(best)]
    return at_best[at_best["name"] != metric].pivot(index="trial_id", columns="name", values="value")


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
