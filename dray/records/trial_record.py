"""One trial, as read from an experiment's files."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from typing_extensions import TypedDict

from dray.text import some
from searchers.events import Losses, Repeat
from searchers.objectives import Objectives
from searchers.views import END_STATES, NEVER_BEST, State

Number: TypeAlias = float | str | None
"""A number of an experiment's data: one that is not finite is "nan", "inf" or "-inf" in JSON."""
EndedBy = Literal["search", "request", "divergence", "interruption"]
"""What ended a trial early: the search, which pruned it; a person or a program who asked for its end; its loss, which
was NaN; or the end of its experiment's driver, while it ran: it is still RUNNING, and is the first to be resumed."""
_EARLY: dict[str, EndedBy] = {"stopped": "search", "diverged": "divergence", "canceled": "request"}
_WORDS: dict[State, str] = {
    "PENDING": "waiting",
    "CANCELED": "stopped",
    "ERRORED": "failed",
    "OUT_OF_MEMORY": "out of memory",
    "INVALID_HP": "invalid",
}
SLOWEST_RANK = "slowest_rank_percent/"
"""A figure of the machine, NODE/RANK follows: by how much this rank's steps exceed the median of the other ranks."""
STRAGGLER_PERCENT = 20


@dataclass(slots=True, eq=False)
class TrialRecord:
    """A trial, updated with its events and metrics.

    Its best validation has the least violation of the constraints, then the best first objective, then the fewest
    batches.

    Attributes:
        objectives: the metrics that rank trials.
        state: see `searchers.views.TrialView`.
        ended_by: what ended it early; None if it has not ended, or ended in another way.
        source_trial, source_batches: the checkpoint of another trial that it began from; None if it did not.
        begin: the step of that checkpoint, in the searcher's unit.
        repeat: the trial that it runs again, and which seed it has; None if it is not a repeat.
        code: the variant of the code that it runs; None: the experiment's own.
        drawn: the sampled hyperparameters; None before it started.
        versions: those of its driver when it last started, by name: python, dray, ray, torch, cuda.
        started, ended: Unix time in s; None: not yet, or it runs again.
        restarts: number of restarts.
        last_step: the greatest step reported to the search, in the searcher's unit; 0 before the first.
        batches: batches trained, from its last metrics.
        at, epochs, times: batches, epochs and times of its validations, in the order of batches.
        measured: the values of each objective at these validations; NaN if missing.
        best_batches, losses: its best validation, and the losses that the search compares; None without one.
        rank: the sort key of the best validation: violation of the constraints, first objective's loss, batches.
        nan: for each loss (kind, name) that is NaN or infinite, the batch since which it is.
        straggler: the rank that the others wait for, with its node; "" if none is slow, as of the last figures.
        derived: values that views have cached; cleared with each change.
    """

    id: int
    objectives: Objectives
    state: State = "PENDING"
    ended_by: EndedBy | None = None
    source_trial: int | None = None
    source_batches: int | None = None
    begin: float = 0.0
    repeat: Repeat | None = None
    is_requested: bool = False
    code: str | None = None
    drawn: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    started: float | None = None
    ended: float | None = None
    restarts: int = 0
    last_step: float = 0
    batches: int = 0
    at: list[int] = field(default_factory=list)
    epochs: list[float | None] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    measured: dict[str, list[float]] = field(default_factory=dict)
    best_batches: int | None = None
    losses: Losses | None = None
    rank: tuple[float, float, int] | None = None
    nan: dict[tuple[str, str], int] = field(default_factory=dict)
    straggler: str = ""
    derived: dict[str, Any] = field(default_factory=dict)
    _hparams: dict[str, Any] | None = None

    # ------------------------------------------------------------------ events
    def start(self, drawn: Mapping[str, Any] | None, time: float | None) -> None:
        if self.drawn is None:
            self.drawn, self.started = drawn, time
        self.ended_by = None
        if self.state != "PAUSED":  # else its restart crossed the pause
            self.state = "RUNNING"
        self.derived.clear()

    def exit(self, reason: str, time: float | None) -> None:
        self.state, self.ended = END_STATES[reason], time
        self.ended_by = _EARLY.get(reason)
        self.derived.clear()

    def decided(self, action: str) -> None:
        if action == "pause":
            self.state, self.ended_by = "PAUSED", None
        elif action == "resume":
            self.state, self.ended, self.ended_by = "PENDING", None, None
        self.derived.clear()

    # ------------------------------------------------------------------ metrics
    def forget_metrics(self) -> None:
        self.batches, self.at, self.epochs, self.times, self.measured = 0, [], [], [], {}
        self.best_batches, self.losses, self.rank, self.nan, self.straggler = None, None, None, {}, ""
        self.derived.clear()

    def validated(self, name: str, batches: int, epochs: float | None, value: float, time: float) -> None:
        """Add the value of an objective at a validation, in place of an earlier value at the same batch."""
        place = bisect_left(self.at, batches) if self.at and batches <= self.at[-1] else len(self.at)
        if not self.measured:
            self.measured = {each: [] for each in self.objectives.names}
        if place == len(self.at) or self.at[place] != batches:
            for column in self.measured.values():
                column.insert(place, math.nan)
            self.at.insert(place, batches)
            self.epochs.insert(place, epochs)
            self.times.insert(place, time)
        self.measured[name][place] = value
        self.epochs[place], self.times[place] = epochs, time
        if batches == self.best_batches:
            self.best_batches = self.losses = self.rank = None
            for each in range(len(self.at)):
                self._compare(each)
        else:
            self._compare(place)

    def _compare(self, place: int) -> None:
        """Make a validation the best one if it is better."""
        losses = self._losses(place)
        if losses is not None:
            rank = (losses.violation, losses.values[0], self.at[place])
            if self.rank is None or rank < self.rank:
                self.best_batches, self.losses, self.rank = self.at[place], losses, rank

    def _losses(self, place: int) -> Losses | None:
        return self.objectives.normalised(tuple([self.measured[name][place] for name in self.objectives.names]))

    def loss(self, series: tuple[str, str], batches: int, value: float) -> None:
        if not math.isfinite(value):
            self.nan[series] = min(batches, self.nan.get(series, batches))
        elif batches >= self.nan.get(series, batches + 1):
            del self.nan[series]

    def slowest_rank(self, figure: str, percent: float) -> None:
        self.straggler = straggler(figure, percent)

    # ------------------------------------------------------------------ what is derived
    @property
    def has_ended(self) -> bool:
        return self.state not in ("PENDING", "RUNNING", "PAUSED")

    @property
    def word(self) -> str:
        """Its state as people call it: "stopped" if somebody has ended it, "diverged" if its loss was NaN."""
        words = {"divergence": "diverged", "interruption": "interrupted"}
        return words.get(self.ended_by or "", _WORDS.get(self.state, self.state.lower()))

    @property
    def is_eligible(self) -> bool:
        """Whether it can be the best trial: it is no repeat, has validated, keeps every limit, and did not fail."""
        is_valid = self.rank is not None and not self.rank[0] and self.state not in NEVER_BEST
        return is_valid and self.repeat is None

    @property
    def hparams(self) -> dict[str, Any]:
        """The hyperparameters by dotted name; {} before it started."""
        if self._hparams is None:
            if self.drawn is None:
                return {}
            self._hparams = flatten(self.drawn)
        return self._hparams

    @property
    def values(self) -> list[float]:
        """The searcher's metric, or the first objective, at each validation."""
        return self.measured.get(self.objectives.first.name, [])

    @property
    def metric(self) -> float | None:
        """The last value, which may be NaN."""
        return self.values[-1] if self.at else None

    @property
    def best_metrics(self) -> dict[str, float]:
        """The objectives at its best validation; {} without one."""
        if self.best_batches is None:
            return {}
        place = bisect_left(self.at, self.best_batches)
        return {name: column[place] for name, column in self.measured.items()}

    @property
    def best_metric(self) -> float | None:
        """The searcher's metric, or the first objective, at its best validation."""
        if self.losses is None:
            return None
        return self.losses.values[0] if self.objectives.first.smaller_is_better else -self.losses.values[0]

    @property
    def forked_from(self) -> str:
        """ "trial 7 at batch 253"; "" if it did not begin from another trial's checkpoint."""
        return "" if self.source_trial is None else f"trial {self.source_trial} at batch {self.source_batches}"

    @property
    def repeat_of(self) -> str:
        """ "trial 7, seed 2"; "" if it is not a repeat."""
        return "" if self.repeat is None else f"trial {self.repeat.trial}, seed {self.repeat.seed}"

    @property
    def nan_since(self) -> int | None:
        """The batch at which a loss was first reported as NaN or infinite, if it has stayed so."""
        return min(self.nan.values(), default=None)

    def to_json(self) -> TrialRow:
        """What the commands and the API give."""
        return {
            "trial": self.id,
            "state": self.state,
            "ended_by": self.ended_by,
            "batches": self.batches,
            "metric": self.metric,
            "best_metric": self.best_metric,
            "best_batches": self.best_batches,
            "best_by": None if self.losses is None else "one seed",
            "nan_since": self.nan_since,
            "restarts": self.restarts,
            "source_trial": self.source_trial,
            "source_batches": self.source_batches,
            "repeat_of": None if self.repeat is None else self.repeat.trial,
            "repeat": None if self.repeat is None else self.repeat.seed,
            "code": self.code,
            "started": self.started,
            "ended": self.ended,
            "hparams": self.hparams,
        }


def straggler(figure: str, percent: float) -> str:
    """The slowest rank, in a sentence; "" if it is not slow. `figure`: `SLOWEST_RANK` with its node and its number.

    >>> straggler("slowest_rank_percent/gpu-7/3", 38.4)
    'rank 3 on gpu-7 takes 38% longer per step than the median of the others'
    """
    node, _, rank = figure.removeprefix(SLOWEST_RANK).rpartition("/")
    slow = f"rank {rank} on {node} takes {percent:.0f}% longer per step than the median of the others"
    return slow if percent >= STRAGGLER_PERCENT else ""


class TrialRow(TypedDict):
    """A trial."""

    trial: int
    state: State
    # what ended it early: the search (PRUNED), a person or a program (CANCELED), its loss, which was NaN (PRUNED), or
    # the end of its experiment, while it was RUNNING; else null
    ended_by: EndedBy | None
    batches: int
    metric: Number  # at its last validation
    best_metric: Number
    best_batches: int | None
    best_by: Literal["one seed"] | None  # what best_metric is: the trial's own run, whose repeats are other trials
    nan_since: int | None  # the batch of the first loss that is not finite
    restarts: int
    source_trial: int | None  # the trial from whose checkpoint this one began
    source_batches: int | None  # the batch of that checkpoint
    repeat_of: int | None  # the trial that this one is another run of
    repeat: int | None  # which of the seeds it has, from 1
    code: str | None  # the variant of the code that it runs; null: the experiment's own
    started: float | None
    ended: float | None
    hparams: dict[str, Any]  # values by dotted name


_SHOWN_RELATIVES = 12


class _Trial(TypedDict):
    trial: int


class Relative(_Trial, total=False):
    """A trial, by its number."""

    batches: int | None  # of the checkpoint
    seed: int  # of a repeat


class Lineage(TypedDict):
    """The relatives of a trial."""

    ancestors: list[Relative]  # those whose checkpoints it began from, the nearest first
    children: list[Relative]  # those that began from its own checkpoints
    repeats: list[Relative]  # those that run it again


def lineage(trials: Mapping[int, TrialRecord], trial: int) -> Lineage:
    """The relatives of a trial."""
    ancestors, one = list[Relative](), trials[trial]
    while one.source_trial is not None:
        ancestors.append({"trial": one.source_trial, "batches": one.source_batches})
        if one.source_trial not in trials:
            break
        one = trials[one.source_trial]
    children = [each for each in trials.values() if each.source_trial == trial]
    repeats = [each for each in trials.values() if each.repeat is not None and each.repeat.trial == trial]
    return {
        "ancestors": ancestors,
        "children": [{"trial": each.id, "batches": each.source_batches} for each in children],
        "repeats": [{"trial": each.id, "seed": each.repeat.seed} for each in repeats if each.repeat is not None],
    }


def relatives(found: list[Relative]) -> str:
    """ "trial 5 at batch 10, trial 7 at batch 20"; "" for no relatives."""
    texts = [
        f"trial {each['trial']} " + (f"at batch {each['batches']}" if "batches" in each else f"(seed {each['seed']})")
        for each in found
    ]
    return some(texts, _SHOWN_RELATIVES)


class ByTrial:
    """An integer for each trial, in eight bytes; -1 by default. Trials are numbered from 0, without gaps.

    >>> batches = ByTrial()
    >>> batches[2] = 7
    >>> batches[2], batches[0], batches[1000]
    (7, -1, -1)
    """

    def __init__(self) -> None:
        self._numbers = array("q")

    def __getitem__(self, trial: int) -> int:
        return self._numbers[trial] if trial < len(self._numbers) else -1

    def __setitem__(self, trial: int, number: int) -> None:
        self._numbers.extend([-1] * (trial + 1 - len(self._numbers)))
        self._numbers[trial] = number


def unread_line(unread: Sequence[str], read: Sequence[str]) -> str:
    """A line about hyperparameters that are searched in vain; "" if there are none.

    >>> unread_line(["dropuot"], ["lr", "hidden"])
    'dropuot is searched, but no trial has read it; read: lr, hidden'
    """
    if not unread:
        return ""
    verb, them = ("is", "it") if len(unread) == 1 else ("are", "them")
    return f"{', '.join(unread)} {verb} searched, but no trial has read {them}; read: {', '.join(read) or 'none'}"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested hyperparameters to dotted names.

    >>> flatten({"optimizer": {"name": "sgd", "lr": 0.1}, "hidden": 64})
    {'optimizer.name': 'sgd', 'optimizer.lr': 0.1, 'hidden': 64}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def in_order(names: Iterable[str], written: Iterable[str]) -> list[str]:
    """Sort dotted names by the order of their first parts in a config; names that it does not have come last.

    >>> in_order(["hidden", "lr", "optimizer.name"], ["lr", "optimizer", "hidden"])
    ['lr', 'optimizer.name', 'hidden']
    """
    places = {name: place for place, name in enumerate(written)}
    return sorted(names, key=lambda name: places.get(name.partition(".")[0], len(places)))
