"""The status of a run: as a picture for a terminal or a notebook, and as one line for a file."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dray.display.text import sparkline
from dray.records.forecast import Forecast
from dray.records.ranking import ENOUGH, deciding_rung
from dray.records.trial_record import TrialRecord, flatten
from dray.text import counted, duration, rough, rough_time, shown
from dray.training.metrics.checks import is_loss
from dray.training.units import amount
from searchers.domains import searched
from searchers.events import Losses
from searchers.method import MAX_TRIALS
from searchers.objectives import Metric, Objectives
from searchers.pareto import pareto_order
from searchers.previews import is_simulated, preview
from searchers.search import Search
from searchers.views import NEVER_BEST, TrialView

if TYPE_CHECKING:
    from dray.display.counts import Counts

CURVE_WIDTHS = (10, 24)
"""Widths of the sparkline in columns, on terminals below and from `WIDE` columns."""
WIDE = 120
NARROW = 12
"""The longest heading where there is no room for whole ones."""
_HEAD = 7
"""Lines of the picture besides trials: four above the table, its heading, one for omitted trials, the last."""


class _Best(NamedTuple):
    """A trial's best validation."""

    score: float  # smaller is better
    trial: int
    value: float
    step: float | None  # length of training in the searcher's unit; None if unknown


class Board:
    """The status of a search, updated from reports and drawn as a picture or a line.

    Args:
        name: name of the experiment.
        metric: the searcher's metric.
        smaller_is_better: whether the metric is minimised.
        unit: the searcher's unit of length: "epochs", "batches", "records", or a metric's name.
    """

    def __init__(
        self, *, name: str, metric: str, smaller_is_better: bool, unit: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._metric, self._sign, self._unit = name, metric, 1 if smaller_is_better else -1, unit
        self._objective = Objectives((Metric(name=metric, smaller_is_better=smaller_is_better),))
        self._search: Search
        #: Trials that have not ended. The search itself sees only the validations at rungs.
        self._trained: dict[int, TrialRecord] = {}
        self._epochs: dict[int, float] = {}
        self._speeds: dict[int, float] = {}
        self._created = 0  # number of trials at the last update
        self._open: set[int] = set()  # trials that had never ended then
        #: By the number of rungs that they had reached: the trials that have ended, and the best of them.
        self._ended: dict[int, tuple[set[int], _Best]] = {}
        self._of = ""  # " of one seed" once the best trials are trained again
        self._diverged: set[int] = set()
        self._compared: dict[int, Losses] = {}
        self._front_size = 0
        self._clock, self._began = clock, clock()
        self._forecast: Forecast | None = None
        self.waits = ""
        """The reason why worker groups wait; "" if they do not."""
        self.share = ""
        """Each trial's share of a slot, such as "1/4 GPU"; "" if trials share no slots."""
        self.usage = ""
        """What is spent of the budget, such as "1.2 of 2 h"; "" without one."""
        self.budget_share = 0.0

    def begin(self, search: Search, trials: Mapping[int, TrialRecord]) -> None:
        """Begin a run of the search. `trials` were reported by its earlier runs."""
        self._search, self._trained = search, dict(trials)
        self._diverged = {each.id for each in trials.values() if each.nan}
        # Simulating a user's own method would change its state.
        is_endless = getattr(search.method, "max_trials", 0) == MAX_TRIALS
        self._forecast = None if is_endless or is_simulated(search.method) else Forecast(preview(search.method))

    def rows(self, trial: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if trial not in self._trained:
            self._trained[trial] = TrialRecord(trial, self._objective)
        trained = self._trained[trial]
        for row in rows:
            kind, name, value = row["kind"], row["name"], row["value"]
            trained.batches = max(trained.batches, row["batches"])
            self._epochs[trial] = max(self._epochs.get(trial, 0.0), row["epochs"] or 0.0)
            if is_loss(kind, name, self._metric):
                trained.loss((kind, name), row["batches"], value)
            if (kind, name) == ("validation", self._metric):
                trained.validated(name, row["batches"], row["epochs"], value, row["time"])
            elif (kind, name) == ("system", "batches_per_second"):
                self._speeds[trial] = value
        (self._diverged.add if trained.nan else self._diverged.discard)(trial)

    def update(self, groups: int) -> None:
        """Update from the search's progress; called at most a few times a second."""
        trials = self._search.trials
        # Before the live trials: Tune's thread may create trials meanwhile.
        began, self._created = self._created, len(trials)
        if any(self._search.repeat(trial) is not None for trial in range(began, self._created)):
            self._of = " of one seed"  # until the repeats have ended, nobody knows which trial is
        live = dict(self._search.live)
        opened = self._open.union(range(began, self._created))
        self._open = opened & live.keys()
        ended = [trials[trial] for trial in opened - live.keys()]
        late = [trials[trial] for trial in self._trained if trial not in live]
        for view in (*ended, *late):
            if self._search.can_be_best(view.id) and (best := self._best_of(view)) is not None:
                reached = self._reached(view)
                there, other = self._ended.get(reached, (set[int](), best))
                there.add(view.id)
                self._ended[reached] = there, min(best, other, key=_rank)
            for by_trial in (self._trained, self._epochs, self._speeds):
                by_trial.pop(view.id, None)
        if self._forecast is not None:
            views = [live[trial] for trial in self._open]
            running = {view.id: self._step(view) for view in views if view.state == "RUNNING"}
            requested = self._search.requested
            self._forecast.update(views, running, groups, self._clock(), ended=ended, requested=requested)

    def share_done(self, groups: int) -> float | None:
        """The share of the search that is done; None if it is not known."""
        self.update(groups)
        return None if self._forecast is None else self._forecast.share

    def line(self, counts: Counts, groups: int, groups_wanted: int) -> str:
        best = self._best()
        share = f"{self._share:.0%}" if self._share else ""
        parts = [
            f"{self._name}  {share}",
            *self._numbers(counts, groups, groups_wanted),
            f"best {self._metric}{self._of} {best.value:.5g} (trial {best.trial})" if best else "",
            self._front(),
            *self._times(),
        ]
        return " · ".join(part.strip() for part in parts if part)

    def picture(self, counts: Counts, groups: int, groups_wanted: int, *, width: int, height: int) -> RenderableType:
        """The overall progress, the best trial, and a table of as many running trials as fit."""
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True, max_width=width // 3)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        share = self._share
        bar = ProgressBar(total=1.0, completed=share or 0.0) if share is not None else ""
        percent = [] if share is None else [f"{math.floor(100 * share)}%"]
        head.add_row(Text(self._name, "bold"), bar, Text(" · ".join([*percent, *self._times()])))
        lines: list[RenderableType] = [
            "",
            head,
            self._cut(" · ".join(self._numbers(counts, groups, groups_wanted))),
        ]
        best = self._best()
        if best is not None:
            at = "" if best.step is None else f" at {amount(shown(best.step), self._unit)}"
            line = Text.assemble(
                f"best {self._metric}{self._of} ", (shown(best.value), "bold green"), f", trial {best.trial}{at}"
            )
            lines.append(self._cut(line.append(f": {self._drawn(self._search.trials[best.trial])}", "dim")))
            if front := self._front():
                lines.append(self._cut(front))
        running = sorted(
            (view for view in list(self._search.live.values()) if view.state == "RUNNING"), key=lambda view: view.id
        )
        if running and groups:  # without groups, the trials have yet to resume
            lines.append(
                self._table(running, counts, width, room=max(height - _HEAD - (self._search.objectives is not None), 1))
            )
        return Group(*lines)

    def _table(self, running: list[TrialView], counts: Counts, width: int, room: int) -> RenderableType:
        drawn, wide = running, width >= WIDE
        if len(running) > room:
            # The best trials, in the order of their numbers.
            ranked = sorted(running, key=lambda view: best.score if (best := self._best_of(view)) else math.inf)
            drawn = sorted(ranked[:room], key=lambda view: view.id)
        rungs = self._forecast if self._forecast is not None and not self._forecast.in_trials else None
        steps, curve = [self._step(view) for view in drawn], CURVE_WIDTHS[wide]
        values = [self._trained[view.id].values if view.id in self._trained else [] for view in drawn]
        columns = [("trial", [str(view.id) for view in drawn])]
        reached = [shown(round(step, 1)) for step in steps]
        if rungs is not None:
            places = [rungs.rung(step) for step in steps]
            reached = [f"{step} of {shown(end)}" for step, (_, end) in zip(reached, places, strict=True)]
            if rungs.rungs > 1:
                columns.append(("rung", [f"{place}/{rungs.rungs}" for place, _ in places]))
        last = [shown(of[-1] if of else view.last) for view, of in zip(drawn, values, strict=True)]
        columns += [(self._unit, reached), (self._metric, last)]
        if wide:
            bests = [self._best_of(view) for view in drawn]
            columns.append(("best", ["" if best is None else shown(best.value) for best in bests]))
        columns.append(("", [sparkline(of[-curve:]) for of in values]))
        columns.append(
            (
                "batches/s" if wide else "batch/s",
                [rough(self._speeds[view.id]) if view.id in self._speeds else "" for view in drawn],
            )
        )
        if any(counts.restarts[view.id] for view in drawn):
            columns.append(("restarts", [str(counts.restarts[view.id] or "") for view in drawn]))

        def size_of(heading: str, cells: list[str]) -> int:
            return max(map(len, [heading, *cells])) if heading else curve

        table, rest = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim"), width
        is_room = sum(size_of(*column) + 2 for column in columns) <= width
        for name, cells in columns:
            heading = name if is_room or len(name) <= NARROW else f"{name[: NARROW - 1]}…"
            size = size_of(heading, cells)
            rest -= size + 2
            side, style = ("right", "") if name else ("left", "cyan")
            table.add_column(heading, justify=side, no_wrap=True, width=size, style=style)  # type: ignore[arg-type]
        table.add_column("", no_wrap=True, style="dim")
        for view, *row in zip(drawn, *(cells for _, cells in columns), strict=True):
            hparams = Text(self._drawn(view))
            hparams.truncate(max(rest, 0), overflow="ellipsis")
            table.add_row(*row, hparams)
        if len(running) == len(drawn):
            return table
        return Group(table, self._cut(f"and {len(running) - len(drawn)} more"))

    def _numbers(self, counts: Counts, groups: int, groups_wanted: int) -> list[str]:
        """The number of trials in each state, and of groups."""
        states = self._search.states
        ended = len(self._search.trials) - len(self._search.live)
        of = ""
        total: float = ended
        if self._forecast is not None:
            of = f"{ended} of "
            total = max(self._forecast.trials + self._search.requested, len(self._search.trials))
        restarts = sum(counts.restarts.values())
        parts = [
            f"{of}{counted(total, 'trial')} ended",
            f"{states['RUNNING']} running{self.share and f' on {self.share} each'}" if groups else "",
            f"{states['PAUSED']} paused" if states["PAUSED"] else "",
            f"{states['ERRORED']} failed" if states["ERRORED"] else "",
            f"{states['OUT_OF_MEMORY']} out of memory" if states["OUT_OF_MEMORY"] else "",
            f"{len(self._diverged)} diverged (NaN)" if self._diverged else "",
            self.waits or (_starting(groups, groups_wanted) if self._search.done is None else ""),
            counted(restarts, "restart") if restarts else "",
        ]
        return [part for part in parts if part]

    @property
    def _share(self) -> float | None:
        """The share of the search or, if larger, of its budget that is done; None if it is not known."""
        shares = [] if self._forecast is None else [self._forecast.share]
        return max([*shares, min(self.budget_share, 1.0)] if self.usage else shares, default=None)

    def _times(self) -> list[str]:
        now = duration(self._clock() - self._began)
        left = None if self._forecast is None else self._forecast.left_s
        spent = [f"budget {self.usage}"] if self.usage else []
        return [now, *spent] if left is None else [now, *spent, f"about {rough_time(left)} left"]

    def _step(self, view: TrialView) -> float:
        trained = self._trained.get(view.id)
        batches = 0 if trained is None else trained.batches
        size = (view.hparams or {}).get("global_batch_size")
        reached = {
            "epochs": self._epochs.get(view.id, 0.0),
            "batches": batches,
            "records": batches * size if isinstance(size, int) else 0,
        }
        return max(float(view.last_step or 0), reached.get(self._unit, 0))

    def _best_of(self, view: TrialView) -> _Best | None:
        found = [] if view.best is None else [_Best(self._sign * view.best, view.id, view.best, view.best_step)]
        trained = self._trained.get(view.id)
        # With several objectives, the best may exceed a limit.
        if trained is not None and trained.rank is not None and self._search.objectives is None:
            score, batches = trained.rank[1:]
            step = {"epochs": trained.epochs[trained.at.index(batches)], "batches": batches}.get(self._unit)
            found.append(_Best(score, view.id, self._sign * score, step))
        return min(found, key=_rank, default=None)

    def _best(self) -> _Best | None:
        live = [view for view in list(self._search.live.values()) if self._search.can_be_best(view.id)]
        found = [(rung, len(there), best) for rung, (there, best) in self._ended.items()]
        found += [(self._reached(view), 1, best) for view in live if (best := self._best_of(view)) is not None]
        at = deciding_rung(rung for rung, count, _ in found for _ in range(min(count, ENOUGH)))
        return min((best for rung, _, best in found if rung >= at), key=_rank, default=None)

    def _reached(self, view: TrialView) -> int:
        """The number of rungs that a trial has reached; 0 with several objectives, of which the longest is not best."""
        return 0 if self._search.objectives is not None else self._search.num_reached(view.id)

    def _front(self) -> str:
        """The size of the Pareto front, as text; "" with one metric."""
        if self._search.objectives is None:
            return ""
        views = list(self._search.trials.values())
        there = {view.id: view.losses for view in views if view.losses is not None and view.state not in NEVER_BEST}
        if there != self._compared:  # the search has made decisions since
            self._compared, self._front_size = there, len(pareto_order(there).front)
        return f"{counted(self._front_size, 'trial')} on the Pareto front" if there else ""

    def _drawn(self, view: TrialView) -> str:
        found = flatten(dict(searched(self._search.space.root, view.hparams or {})))
        repeat = self._search.repeat(view.id)
        texts = [] if repeat is None else [f"repeat of {repeat.trial}, seed {repeat.seed}"]
        return "  ".join([*texts, *(f"{name}={shown(value)}" for name, value in found.items())])

    def _cut(self, text: str | Text) -> Text:
        """One line, cut at the terminal's width."""
        line = Text(text) if isinstance(text, str) else text
        line.no_wrap, line.overflow = True, "ellipsis"
        return line


def _rank(best: _Best) -> tuple[float, int]:
    return best.score, best.trial


def _starting(groups: int, wanted: int) -> str:
    if not groups:
        return "starting the first worker group"
    return f"starting {wanted - groups} of {wanted} worker groups" if groups < wanted else ""
