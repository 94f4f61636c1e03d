"""Overviews of experiments, as lists show them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from dray.config import yaml_file
from dray.records.spending import Spent, spent_of, totals_of
from searchers import rows
from searchers.objectives import Metric, Objectives, of_names

ExperimentState = Literal["RUNNING", "COMPLETED", "PARTLY_FAILED", "STOPPED", "ERROR", "UNKNOWN", "DAMAGED"]
COMPLETED: tuple[ExperimentState, ...] = ("COMPLETED", "PARTLY_FAILED")
"""States in which the search has completed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """An overview of an experiment: what lists show.

    Attributes:
        name: its directory's name.
        path: its directory, or its URI in an object store.
        number: its number in the results directory, see `numbering`; None if it has none.
        title: the config's ``name``, or that of its directory if it can't be read.
        state: see docs/cli.md; on a server also the states of `dray.serve.control.ExperimentState`.
        why: the reason for the states DAMAGED and ERROR, or why an experiment does not run that should, or can't be
            resumed.
        trials, ended, failed: numbers of trials so far, of those that have ended, and of those that have failed.
        max_trials: the number of trials that the search creates by itself; None if it is not known in advance.
        requested: the number of trials that were created on request, see `searchers.Requested`.
        num_repeats: the number of repeats that the search will end with; 0 if that is unknown, or it has ended.
        method: the name of the search method.
        sampler: the name of what draws its hyperparameters; None if it needs none.
        labels: the config's ``labels``.
        metric: the searcher's metric, or the first objective.
        smaller_is_better: its direction; None if unknown.
        curve: the best value so far at equal steps of time, from the first validation to the last event.
        best_metric: the value of the best trial; docs/comparing.md has the rule.
        best_trial: its number.
        best_by: what that value is: "one seed", or "mean of 3 seeds".
        lowest_metric, lowest_trial: the best single validation, and its trial, if that is not the best trial.
        front: with several objectives, the trials on the Pareto front.
        began: the time of its creation.
        last: the time of its last event.
        ran_s: total time of its drivers, in s.
        left_s: estimated time until its end, in s, to two digits; None if it does not run, or that can't be told.
        failure: if trials failed, the most frequent error, and the line of the user's code.
        unread: the hyperparameters that are searched, but that no trial has read, as a sentence.
        reason: why it ended before its search did, such as "budget.time is spent".
        budget: what is ``spent`` of the ``total``, by field of the config's budget, the time in s; None without one.
        usage: the budget as text: "1.2 of 2 h".
        total: the number of trials at the search's end, as far as it is known.
        is_local: whether it is a local run: one trial, without a search.
    """

    ALSO: ClassVar = ("total", "usage")

    name: str
    path: str
    number: int | None = None
    title: str = ""
    state: ExperimentState = "DAMAGED"
    trials: int = 0
    ended: int = 0
    failed: int = 0
    max_trials: int | None = None
    requested: int = 0
    num_repeats: int = 0
    method: str | None = None
    sampler: str | None = None
    labels: Sequence[str] = ()
    metric: str | None = None
    smaller_is_better: bool | None = None
    curve: Sequence[float] = ()
    best_metric: float | None = None
    best_trial: int | None = None
    best_by: str | None = None
    lowest_metric: float | None = None
    lowest_trial: int | None = None
    front: Sequence[int] | None = None
    began: float | None = None
    last: float | None = None
    ran_s: float = 0.0
    left_s: float | None = None
    failure: str | None = None
    unread: str | None = None
    reason: str | None = None
    budget: Mapping[str, Spent] | None = None
    is_local: bool = False
    why: str | None = None

    def __post_init__(self) -> None:
        if not self.title:
            object.__setattr__(self, "title", self.name)

    def on_server(self, state: str, error: str) -> Overview:
        """This overview with the state that a server gives: the list, the description and the page all show it."""
        if state == "COMPLETED" and self.state in (*COMPLETED, "DAMAGED"):
            return self
        left_s = self.left_s if state == "RUNNING" else None
        return replace(self, state=cast("ExperimentState", state), why=self.why or error or None, left_s=left_s)

    @property
    def total(self) -> int:
        return max((self.max_trials or 0) + self.requested + self.num_repeats, self.trials)

    @property
    def usage(self) -> str | None:
        texts = [spent_of(name, each["spent"], each["total"]) for name, each in (self.budget or {}).items()]
        return ", ".join(texts) or None

    def why_failed(self, typed: str) -> str:
        """The reason why an experiment that does not run has no complete result; "" if it has one. `typed`: what is
        shortest to type for it."""
        if self.state in COMPLETED:
            return ""
        if self.state == "ERROR":
            return f"{self.name} failed: {self.why or f'every trial did; see: dray experiment logs {typed}'}"
        return f"{self.name} is {self.state}; continue it with: dray experiment resume {typed}"

    @property
    def label(self) -> str:
        return self.name if self.number is None else f"{self.number}: {self.name}"

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Overview:
        """An overview from its JSON; missing fields get their defaults, and others are ignored."""
        return cls(**{each.name: found[each.name] for each in fields(cls) if each.name in found})


def drawn_by(searcher: Mapping[str, Any]) -> str | None:
    """The name of the sampler of a raw ``searcher`` section; None if the method needs none, as a grid."""
    name, sampler = searcher.get("name"), searcher.get("sampler") or {}
    if name in ("grid", "single"):
        return None
    if name == "auto":
        return "multi_fidelity"
    chosen = sampler if isinstance(sampler, str) else str(sampler.get("name") or "random")
    return None if name == "pbt" and chosen == "random" else chosen


def compared_by(searcher: Mapping[str, Any]) -> Objectives:
    """The objectives of a raw ``searcher`` section; a single metric is one objective."""
    if metrics := searcher.get("metrics"):
        return of_names(metrics)
    smaller = bool(searcher.get("smaller_is_better", True))
    return Objectives((Metric(name=str(searcher["metric"]), smaller_is_better=smaller),))


@dataclass(frozen=True, slots=True)
class Heading:
    """Sections of experiment.yaml as they are written there, but for ``objectives`` and the totals of ``budget``."""

    title: str
    searcher: Mapping[str, Any]
    objectives: Objectives
    labels: tuple[str, ...]
    budget: Mapping[str, float]
    prices: Mapping[str, Any]
    repeat: Mapping[str, Any] | None

    @classmethod
    def of(cls, config: Path) -> Heading:
        """Read a config file; `DamagedFile` if that fails."""
        errors = (LookupError, TypeError, AttributeError, ValueError, RecursionError)
        with rows.readable(config, *errors):
            raw, fault = _parsed(_sections(rows.read(config).decode()))
            if fault is not None or not isinstance(raw, Mapping):
                raise TypeError(fault.what if fault is not None else "it has no fields")
            return cls(
                title=str(raw["name"]),
                searcher=raw["searcher"],
                objectives=compared_by(raw["searcher"]),
                labels=tuple(map(str, raw.get("labels") or ())),
                budget=totals_of(raw.get("budget")),
                prices=raw.get("prices") or {},
                repeat=raw.get("repeat"),
            )


def _sections(config: str) -> str:
    """The sections of a config that a list needs. Parsing all of it would take most of a list's time, and `load_config`
    imports libraries that the config names, such as Optuna."""
    sections = re.split(r"^(?=\S)", config, flags=re.M)
    if "&" in config or not all(re.match(r"\w+:[ \n]", section) for section in sections[1:]):
        return config  # written by hand
    names = ("name:", "searcher:", "budget:", "prices:", "repeat:", "labels:")
    return "".join(each for each in sections if each.startswith(names))


_parsed = functools.lru_cache(maxsize=64)(yaml_file.parsed)  # many experiments of a list have the same sections
