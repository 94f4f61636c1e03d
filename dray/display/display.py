"""The display of a run: its status while it runs, and the best trials at its end."""

from __future__ import annotations

import contextlib
import errno
import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, TYPE_CHECKING, Any, TypeAlias, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from dray.display.best_trials import best_trials
from dray.display.board import Board
from dray.hosts.bottom_line import NotebookLine
from dray.records.logs import TRACEBACK_HEAD, users_error
from dray.records.numbering import typed
from dray.text import counted, duration
from searchers.search import Search

if TYPE_CHECKING:
    from dray.display.counts import Counts
    from dray.records.reader import ExperimentReader
    from dray.records.trial_record import TrialRecord


NOTEBOOK = 100, 30
"""Size of the picture in a notebook, in columns and lines."""


class TerminalScreen:
    """Draws the picture below all printed lines, and removes it at the end."""

    every_s = 0.25

    def __init__(self, console: Console) -> None:
        self._console = console
        # The driver's own loop draws it, without a thread.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        return self._console.size

    def draw(self, picture: RenderableType) -> None:
        self._live.update(picture, refresh=True)

    def close(self) -> None:
        self._live.stop()


class NotebookScreen(NotebookLine):
    """Draws the picture as one output of the notebook's cell, replacing the previous one."""

    def __init__(self) -> None:
        super().__init__()
        self.__enter__()

    def size(self) -> tuple[int, int]:
        return NOTEBOOK

    def close(self) -> None:
        """No-op: the last picture stays in the notebook."""

    def as_html(self, picture: RenderableType) -> str:
        console = Console(file=io.StringIO(), record=True, width=NOTEBOOK[0], force_jupyter=False)
        console.print(picture)
        code = '<pre style="line-height:normal;font-family:Menlo,Consolas,monospace">{code}</pre>'
        return console.export_html(inline_styles=True, code_format=code)


Screen: TypeAlias = TerminalScreen | NotebookScreen
"""Shows a picture, and replaces it with the next one."""


def screen_of(console: Console) -> Screen | None:
    """A new screen; None if the console can't replace what it shows."""
    if console.is_terminal:
        return TerminalScreen(console)
    return NotebookScreen() if console.is_jupyter else None


def stderr() -> IO[str]:
    """``sys.stderr``, but output to a closed terminal is dropped, so that the run continues."""
    return cast("IO[str]", _Stderr())


class _Stderr:
    def __init__(self) -> None:
        # Looked up once: while rich draws a picture, sys.stderr is rich's own wrapper of this file.
        self._file = sys.stderr

    def write(self, text: str) -> int:
        with _closed_terminal_ignored():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with _closed_terminal_ignored():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def _closed_terminal_ignored() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


PLAIN_EVERY_S = (10.0, 60.0)
"""Seconds between the lines printed without a terminal: at first, and from half an hour on."""
MAX_MESSAGES = 10
"""Most failures, and most restarts of worker groups, to show."""


class Display:
    """The status of a run: a picture on a terminal and in a notebook, elsewhere a line from time to time.

    Args:
        name: name of the experiment.
        path: the experiment's directory.
        metric: the searcher's metric.
        smaller_is_better: whether the metric is minimised.
        unit: the searcher's unit of length.
        console: standard error by default, so that output can be piped.
    """

    def __init__(
        self,
        *,
        name: str,
        path: Path,
        metric: str,
        smaller_is_better: bool,
        unit: str,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._clock = path, clock
        self._console = console or Console(file=stderr())
        self._board = Board(name=name, metric=metric, smaller_is_better=smaller_is_better, unit=unit, clock=clock)
        self._screen: Screen | None = None
        self._began = self._clock()
        self._due = 0.0
        self._failures = self._retired = 0
        self._shown_errors: dict[int, str] = {}
        self._search: Search | None = None
        self._before: Mapping[int, TrialRecord] | None = None
        self._shown: tuple[Counts, int, int] | None = None

    def __enter__(self) -> Display:
        self._screen = screen_of(self._console)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close_screen()

    def _close_screen(self) -> None:
        if self._screen is not None:
            if self._shown is not None and self._console.is_jupyter:
                self._draw(self._screen, *self._shown)  # the final state stays in the notebook
            self._screen.close()
            self._screen = None

    def say(self, text: str) -> None:
        """Print one line above the status."""
        # Unwrapped, so that paths and commands can be copied.
        self._console.print(Text(text), soft_wrap=True)

    def starting(self, what: str) -> None:
        """Show the step that the run is at before it begins; only on a terminal or in a notebook."""
        if self._screen is not None:
            self._screen.draw(Text(f"{what} ...", "dim"))

    def begin(self, search: Search, trials: Mapping[int, TrialRecord] = MappingProxyType({})) -> None:
        """See `Board.begin`."""
        self._search, self._before = search, trials
        self._board.begin(search, trials)
        if any(view.hparams is not None for view in search.trials.values()):
            self.say(f"resuming: {_so_far(search)}")

    def rows(self, trial: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._board.rows(trial, rows)

    def share_done(self) -> float | None:
        """The share of the search that is done; None if it is not known."""
        return self._board.share_done(0 if self._shown is None else self._shown[1])

    def waits(self, what: str) -> None:
        """Set the reason why worker groups wait; "" if they do not."""
        self._board.waits = what

    def budget(self, usage: str, share: float) -> None:
        """Set what is spent of the budget, as text ("" without one) and as a share."""
        self._board.usage, self._board.budget_share = usage, share

    def shares(self, share: str) -> None:
        """Set each trial's share of a slot, as text; "" if trials share no slots."""
        self._board.share = share

    def update(self, counts: Counts, groups: int, groups_wanted: int) -> None:
        """Show the run's current status. Calls more frequent than a few times a second are ignored."""
        now = self._clock()
        self._shown = counts, groups, groups_wanted
        if now < self._due:
            return
        if self._screen is not None:
            self._draw(self._screen, counts, groups, groups_wanted)
            # Drawing many trials takes longer, so it happens less often.
            self._due = now + max(self._screen.every_s, 20 * (self._clock() - now))
        else:
            self._board.update(groups)
            self._console.print(Text(self._board.line(counts, groups, groups_wanted)), soft_wrap=True)
            first, last = PLAIN_EVERY_S
            self._due = now + min(max(first, (now - self._began) / 30), last)

    def _draw(self, screen: Screen, counts: Counts, groups: int, groups_wanted: int) -> None:
        self._board.update(groups)
        width, height = screen.size()
        screen.draw(self._board.picture(counts, groups, groups_wanted, width=width, height=height))

    def failure(self, trial: int, error: str, ended: str = "", kept: str = "") -> None:
        """Print a trial's failure: the frames of the user's code, and the error. The journal has the whole traceback.

        Args:
            ended: the reason why the trial is not restarted; "" if it is.
            kept: the trial's state before its extension, if the extension failed for good.
        """
        self._failures += 1
        if self._failures <= MAX_MESSAGES:
            text = users_error(error, self._path / "code")
            told = "the same error again" if self._shown_errors.get(trial) == text else text
            self._shown_errors[trial] = text
            who = f"the extension of trial {trial}" if kept else f"trial {trial}"
            separator = "\n" if told.startswith(TRACEBACK_HEAD) else " "
            self.say(f"{who} failed{f' for good ({ended})' if ended else ''}:{separator}{told}")
            if kept:
                self.say(f"trial {trial} is still {kept}, with its earlier result and checkpoint")
        elif self._failures == MAX_MESSAGES + 1:
            self.say("further failures are not shown here; see: dray experiment describe")

    def retired(self, group: str, trial: int, why: str) -> None:
        """Print the reason why a worker group's processes are replaced after a trial."""
        self._retired += 1
        if self._retired <= MAX_MESSAGES:
            self.say(f"worker group {group} is restarted after trial {trial}: {why}")

    def closing(self, stopped: bool) -> None:
        """Begin the end of a run; `stopped`: by a signal."""
        if stopped:
            # The picture would not change any more.
            self._close_screen()
            # The command is printed already, because Ray may end this process if it gets the signal too.
            self.say(f"stopping: running trials save a checkpoint; interrupt again to stop at once, {self._resume}")

    def interrupted(self) -> None:
        if self._search is not None:
            self.say(f"stopped: {_so_far(self._search)}")
        self.say(self._resume)

    @property
    def stopped_at_once(self) -> str:
        """The message if a second signal ends the process at once."""
        return f"stopped at once; {self._resume}\n"

    def ended(self) -> None:
        self.say(
            f"already ended; extend with: dray experiment extend {typed(self._path)} --max-trials N (or --max-length N)"
        )

    def result(self, reader: ExperimentReader) -> None:
        """Print the failures, the table of the best trials and of those that were requested, and the experiment's
        directory."""
        # In one call, so that it is one output in a notebook.
        known = reader.trials if self._before is None else self._before
        new = [each.id for each in reader.trials.values() if each.is_requested and each.id not in known]
        best = best_trials(reader, width=self._console.width, also=new)
        took = duration(reader.overview().ran_s)
        named = typed(self._path)
        failed = reader.failure_summary()
        hints = [f"inspect failures with: dray experiment describe {named}"] if failed else []
        if best:
            hints += [f"inspect with: dray report {named}", f"              dray trial list {named} --best"]
        elif not failed:
            hints.append(f"inspect with: dray experiment describe {named}")
        text = Text()
        reason, then = reader.overview().reason, reader.next_summary()
        for line, style in (
            (f"ended: {reason}" if reason else "", ""),
            (f"next: {then}" if reason and then else "", ""),
            (failed, "bold red"),
            (reader.divergence_summary(), "bold red"),
            (reader.no_best_reason(), ""),
        ):
            text.append(f"{line}\n" if line else "", style)
        summary = f"{counted(len(reader.trials), 'trial')} ({reader.state_summary()}) in {took}. Results: {self._path}"
        text.append("\n".join([*best, summary, *hints]))
        self._console.print(text, soft_wrap=True)

    @property
    def _resume(self) -> str:
        return f"resume with: dray experiment resume {typed(self._path)}"


def _so_far(search: Search) -> str:
    views = search.trials.values()
    begun = sum(not view.ended and view.hparams is not None for view in views)
    ended = sum(view.ended for view in views)
    return f"{counted(ended, 'trial')} ended, {begun} to continue from the latest checkpoint"
