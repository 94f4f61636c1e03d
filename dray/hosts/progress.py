"""Shows a local run's progress: a line at the start, at each validation and at the end; in a terminal or a notebook,
also a progress bar below them.

The lines are messages of the logger `dray` at level INFO, and are turned off with it. If logging is configured to show
them they go through it, otherwise to standard error.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

from dray.hosts.bottom_line import NotebookLine, TerminalLine
from dray.text import counted, duration
from dray.training.host import Report
from dray.training.plan import Plan
from dray.training.units import ENDLESS

WINDOW_S = 30.0  # speed is measured over the last half of the time, and over at least this long


class Pace:
    """Recent work, and the time that it took."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, float]] = deque()
        self._began = 0.0

    def begin(self) -> None:
        """Forget earlier work."""
        self._seen.clear()

    def note(self, now: float, done: float, busy_s: float) -> None:
        """Note the total work `done` in `busy_s` seconds of working on it; `now` is a monotonic clock's time."""
        self._began = self._began if self._seen else now
        self._seen.append((now, done, busy_s))
        while len(self._seen) > 2 and now - self._seen[1][0] >= max(WINDOW_S, (now - self._began) / 2):
            self._seen.popleft()

    def recent(self) -> tuple[float, float, float]:
        """(seconds, work done in them, seconds spent working); zeros before the second note."""
        if not self._seen:
            return 0.0, 0.0, 0.0
        first, last = self._seen[0], self._seen[-1]
        return last[0] - first[0], last[1] - first[1], last[2] - first[2]


log = logging.getLogger("dray")

POLL_S = 0.25
BAR = 24  # width of the bar in columns


def is_wanted() -> bool:
    """Whether to show progress: not if logging or the logger `dray` is disabled, or its level is above INFO.

    The root logger's default level, WARNING, does not turn progress off, since nobody chose it.
    """
    if log.disabled or log.manager.disable >= logging.INFO:
        return False
    return log.level <= logging.INFO if log.level else logging.root.level <= logging.WARNING


def say(text: str, file: TextIO | None = None) -> None:
    """Log a line, or print it if logging is not configured to show it; by default, to standard error."""
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info("%s", text)
    elif is_wanted():
        print(text, file=file or sys.stderr, flush=True)


class ProgressDisplay:
    """Displays the progress of one `fit()` from batch `begin` on. A context manager; its exit removes the bar."""

    def __init__(
        self,
        plan: Plan,
        begin: int,
        *,
        line: TerminalLine | NotebookLine | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._length = None if plan.length == ENDLESS.value else plan.length
        self._epoch_length, self._begin = plan.epoch_length, begin
        self._line, self._clock = line, clock
        self._progress: Callable[[], tuple[int, int]] = lambda: (begin, 0)
        self._seen = begin, 0
        self._polled_at = self._opened = clock()
        self._trained_s = 0.0
        self._pace = Pace()
        self._validating = False
        self._training: dict[str, float] = {}
        self._validation: dict[str, float] = {}
        self._system: Mapping[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dray-progress", daemon=True)

    def __enter__(self) -> ProgressDisplay:
        if self._line is not None:
            self._line.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            if self._line is not None:
                self._line.__exit__()

    def watch(self, progress: Callable[[], tuple[int, int]]) -> None:
        """Poll this function, which returns (batches trained, batches of the latest validation)."""
        self._progress = progress

    # ------------------------------------------------------------------------------------------------------- lines
    def say(self, text: str) -> None:
        """Print a line above the bar."""
        say(text, sys.stdout if isinstance(self._line, NotebookLine) else None)

    def started(self, where: str) -> None:
        """Announce the length of the training, and the directory of its results."""
        length = (
            "" if self._length is None else f" {counted(self._length, 'batch', ',')}{self._in_epochs(self._length)}"
        )
        first = f", from batch {self._begin:,} on" if self._begin else ""
        self.say(f"training{length}{first}; metrics and checkpoints go to {where}")

    def reported(self, report: Report) -> None:
        """Show a report's metrics in the bar; print the metrics of a validation."""
        self._training = _numbers(report.training) or self._training
        self._system = report.system or self._system
        if report.validation is None:
            return
        self._validation = _numbers(report.validation)
        figures = [self._speed(report.batches), *self._throughput()] if report.batches > self._begin else []
        if figures and self._length is not None and report.batches < self._length:
            figures.append(self._time_left(self._length, report.batches))
        position = f"batch {self._of_length(report.batches)}{self._in_epochs(report.batches)}"
        self.say(f"{', '.join([position, *figures])}: {', '.join(self._metrics())}")

    def ended(self, batches: int, why: str) -> None:
        """Remove the bar, and print how far training got. `why`: "stopped by Ctrl-C", or "" if it ran to its end."""
        self.__exit__(None, None, None)
        if why:
            self.say(f"{why} after {self._of_length(batches)} batches{self._in_epochs(batches)}")
        else:
            spent = duration(round(self._clock() - self._opened))
            so_far = f", from batch {self._begin:,} on," if self._begin else ""
            self.say(f"trained {counted(batches, 'batch', ',')}{self._in_epochs(batches)}{so_far} in {spent}")

    def _of_length(self, batches: int) -> str:
        return f"{batches:,}" if self._length is None else f"{batches:,} of {self._length:,}"

    def _in_epochs(self, batches: int) -> str:
        if not self._epoch_length:
            return ""
        epochs = batches / self._epoch_length
        return f" ({counted(epochs, 'epoch', '.4g')})"

    # --------------------------------------------------------------------------------------------------------- bar
    def _watch(self) -> None:
        shown: object = None
        drawn = -math.inf
        while not self._over.wait(POLL_S):
            self.poll()
            picture = self._seen, self._training, self._validation
            # While nothing changes, nothing is drawn: the user may be at a debugger's prompt.
            if self._line is not None and picture != shown and self._clock() >= drawn + self._line.every_s:
                shown, drawn = picture, self._clock()
                self._line.draw(self.render(self._line.width()))

    def poll(self) -> None:
        """Poll the progress, which costs the training nothing."""
        now, seen = self._clock(), self._progress()
        if seen[0] != self._seen[0]:
            self._validating = False
        elif seen[1] != self._seen[1]:
            self._validating = True
        self._trained_s += 0.0 if self._validating else now - self._polled_at
        if seen[0] > self._begin and seen[0] != self._seen[0]:
            # The first batch is left out: it may compile the model or start the loader's workers.
            self._pace.note(now, seen[0], self._trained_s)
        self._polled_at, self._seen = now, seen

    def render(self, columns: int) -> str:
        """The bar with speed, time left and metrics, in at most this many columns."""
        trained, validated = self._seen
        parts = []
        if self._validating:
            parts.append(f"validating, {counted(validated, 'batch', ',')}")
        elif self._pace.recent()[1]:
            parts += [self._speed(trained), *self._throughput()]
        if self._length is not None and self._pace.recent()[1]:
            parts.append(self._time_left(self._length, trained))
        parts += self._metrics()
        head, done = "", ""
        if self._epoch_length and self._length is not None:
            epochs = math.ceil(self._length / self._epoch_length)
            head = f"epoch {min(trained // self._epoch_length + 1, epochs)}/{epochs} "
        if self._length is not None:
            filled = round(BAR * min(1.0, trained / self._length))
            done = f"{'━' * filled}{'╌' * (BAR - filled)} "
        text = f"{head}{done}{trained:,}{'' if self._length is None else f'/{self._length:,}'} batches"
        text = "  ".join([text, *parts])
        return text if len(text) <= columns else f"{text[: columns - 1]}…"

    def _metrics(self) -> list[str]:
        """The latest metrics by the names that a config uses: `searcher.metric` is a name in a validation."""
        training, validation = (
            [f"{name} {value:.4g}" for name, value in metrics.items()] for metrics in (self._training, self._validation)
        )
        if not all(name.startswith("val") for name in self._validation):
            validation[0] = f"validation: {validation[0]}"
        return [*training, *validation]

    def _recent(self, batches: int) -> tuple[float, float, float]:
        """`Pace.recent`, or until it is known the average since the start."""
        spent = self._clock() - self._opened
        return self._pace.recent() if self._pace.recent()[1] else (spent, batches - self._begin, spent)

    def _speed(self, batches: int) -> str:
        """The speed of training, validations not counted."""
        _, done, trained_s = self._recent(batches)
        speed = done / trained_s if trained_s else math.inf
        return f"{speed:,.0f} batches/s" if speed >= 100 else f"{speed:.3g} batches/s"

    def _throughput(self) -> list[str]:
        tokens, mfu = self._system.get("tokens_per_second"), self._system.get("mfu_percent")
        return [*([f"{tokens:,.0f} tokens/s"] if tokens else []), *([f"MFU {mfu:.1f}%"] if mfu else [])]

    def _time_left(self, length: int, batches: int) -> str:
        """The time left, if validations and checkpoints keep their share of it."""
        seconds, done, _ = self._recent(batches)
        return f"{duration(round(seconds / done * (length - batches)))} left"


def _numbers(metrics: Mapping[str, object] | None) -> dict[str, float]:
    return {name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)}
