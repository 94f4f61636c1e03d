"""How an experiment stands, in one sentence: its state, the time and the budget left, its best trial, what failed, and
what its search does now. The commands, the page and the tools for agents show the same."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dray.records.overview import Overview
from dray.records.spending import Spent
from dray.text import counted, rough_time, shown
from dray.training.units import amount
from searchers.samplers import STARTUP

if TYPE_CHECKING:
    from dray.config.searcher import Searcher
    from dray.records.reader import ExperimentReader

_BEGINS = {
    "QUEUED": "queued",
    "PREEMPTED": "waiting for slots, which other experiments have",
    "RESTARTING": "restarting",
    "STOPPING": "stopping while its running trials save",
    "PAUSED": "paused",
    "STOPPED": "stopped",
    "COMPLETED": "completed",
    "PARTLY_FAILED": "completed",
    "ERROR": "failed",
}
_WAITING = ("QUEUED", "PREEMPTED", "RESTARTING", "PAUSED", "STOPPED")
"""States in which the search has not ended and nothing trains."""

PartKind = Literal["state", "left", "trials", "failed", "best", "search"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the sentence."""

    about: PartKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RungNow:
    """A rung."""

    length: float  # in the searcher's unit
    reached: int  # trials that have reached it
    running: int  # trials that train to it
    paused: int  # trials that are paused at it


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How an experiment stands.

    Attributes:
        sentence: the same as the page and the commands show.
        parts: the parts of the sentence, with what each is about.
        left_s: estimated seconds until its end; None if it does not run, or that is not known.
        budget_left: the share of the budget that is left, of its scarcest field; None without one.
        search: what the search does now; "" if it does not run.
        rungs: the rungs of a search that compares trials at lengths; [] for others.
    """

    ALSO: ClassVar = ("sentence",)

    parts: list[Part]
    left_s: float | None
    budget_left: float | None
    search: str
    rungs: list[RungNow]

    @property
    def sentence(self) -> str:
        text = "; ".join(part.text for part in self.parts)
        return text[:1].upper() + text[1:]


def standing(
    seen: Overview, reader: ExperimentReader | None, *, queued: float | None = None, now: float | None = None
) -> Standing:
    """How an experiment stands.

    Args:
        seen: its overview, with the server's state if it has one.
        reader: what its files say; None if it has not begun, or they can't be read.
        queued: when it was submitted, in Unix time (s).
        now: the time; by default, the clock's.
    """
    running = seen.state == "RUNNING"
    now = time.time() if now is None else now
    ran_s = seen.ran_s + (max(now - seen.last, 0.0) if running and seen.last else 0.0)
    budget_left = _budget_left(seen.budget)
    counts = None if reader is None else _counts(reader)
    search = ", ".join(_doings(reader.config.searcher, counts)) if reader and counts and running else ""
    parts = [Part("state", _state(seen, ran_s, None if queued is None else now - queued))]
    left = [f"about {rough_time(seen.left_s)}"] if running and seen.left_s is not None else []
    if budget_left is not None and (running or seen.state in _WAITING):
        left.append(f"{budget_left:.0%} of the budget")
    if left:
        parts.append(Part("left", f"{' and '.join(left)} left"))
    if seen.trials:
        parts.append(Part("trials", f"{seen.ended:,} of {counted(seen.total, 'trial', ',')} ended"))
    if seen.failed:
        parts.append(Part("failed", f"{counted(seen.failed, 'trial', ',')} failed"))
    if reader is not None and seen.trials:
        parts.append(Part("best", _best(seen, reader)))
    if search:
        parts.append(Part("search", search))
    return Standing(
        parts=parts, left_s=seen.left_s, budget_left=budget_left, search=search, rungs=counts.rungs if counts else []
    )


def _lasted(seconds: float) -> str:
    """A time that has passed, as the page's tiles have it: 40 s, 12 min 03 s, 3 h 05 min."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02} min"


def _state(seen: Overview, ran_s: float, queued_s: float | None) -> str:
    ran = f" after {_lasted(ran_s)}" if ran_s else ""
    match seen.state:
        case "RUNNING":
            return f"running for {_lasted(ran_s)}"
        case "DAMAGED":
            return f"its files can't be read: {seen.why}"
        case "UNKNOWN":
            return f"ran for {_lasted(ran_s)}, and may still run on another machine"
        case "STOPPED" if seen.why:
            return f"stopped: {seen.why}"
        case _ if seen.began is None and seen.state == "STOPPED":
            return "not begun"
    begins = _BEGINS[seen.state]
    if seen.began is None:
        return begins if queued_s is None else f"{begins} for {_lasted(max(queued_s, 0.0))}"
    why = seen.reason or (seen.why if seen.state in ("ERROR", "RESTARTING") else "")
    return f"{'ended' if seen.reason else begins}{ran}{f': {why}' if why else ''}"


def _budget_left(budget: Mapping[str, Spent] | None) -> float | None:
    shares = (1 - each["spent"] / each["total"] for each in (budget or {}).values() if each["total"])
    return max(min(shares, default=-1.0), 0.0) if budget else None


def _best(seen: Overview, reader: ExperimentReader) -> str:
    if seen.best_trial is None:
        return reader.no_best_reason() or "no trial has validated yet"
    front = f", {counted(len(seen.front), 'trial')} on the Pareto front" if seen.front else ""
    by = f" ({seen.best_by})" if reader.finalists() else ""
    best = f"best {seen.metric} {shown(seen.best_metric)} of trial {seen.best_trial}{by}{front}"
    if seen.lowest_trial is None:
        return best
    which = "lowest" if seen.smaller_is_better else "highest"
    return f"{best}, {which} {shown(seen.lowest_metric)} of trial {seen.lowest_trial}"


@dataclass(frozen=True, slots=True)
class _Counts:
    """What is counted over all trials, once for each version of an experiment."""

    version: int
    rungs: list[RungNow]
    repeats: int  # that run
    results: int  # trials that have reported


def _counts(reader: ExperimentReader) -> _Counts:
    found: _Counts | None = reader.derived.get("standing")
    if found is None or found.version != reader.version:
        found = reader.derived["standing"] = _count(reader)
    return found


def _count(reader: ExperimentReader) -> _Counts:
    lengths = sorted(set(reader.rungs))
    reached, running, paused = ([0] * (len(lengths) + 1) for _ in range(3))
    repeats = results = 0
    for trial in reader.trials.values():
        results += trial.last_step > 0
        if trial.repeat is not None:
            repeats += trial.state == "RUNNING"
            continue
        place = bisect_right(lengths, trial.last_step)
        reached[place] += 1
        running[place] += trial.state == "RUNNING"
        paused[place] += trial.state == "PAUSED"
    rungs = [
        RungNow(length=length, reached=sum(reached[at + 1 :]), running=running[at], paused=paused[at + 1])
        for at, length in enumerate(lengths)
    ]
    return _Counts(reader.version, rungs, repeats, results)


def _doings(searcher: Searcher, counts: _Counts) -> Iterator[str]:
    """What a search does, from its trials and its settings."""
    from dray.config.search import sampler_of

    rungs = counts.rungs
    if counts.repeats:
        train = "trains" if counts.repeats == 1 else "train"
        yield f"{counted(counts.repeats, 'repeat')} of the best trials {train} with other seeds"
    on = [place for place, rung in enumerate(rungs, 1) if rung.running]
    number = sum(rung.running for rung in rungs)
    if on:
        place = f"{on[0]}" if len(on) == 1 else f"{on[0]} to {on[-1]}"
        if searcher.name == "pbt":
            yield f"the population trains generation{'s' * (len(on) > 1)} {place} of {len(rungs)}"
        elif len(rungs) == 1:
            length = amount(f"{rungs[0].length:g}", searcher.unit)
            yield f"{counted(number, 'trial')} train{'s' * (number == 1)} to {length}"
        else:
            rung = f"rung{'s' * (len(on) > 1)} {place} of {len(rungs)}"
            yield f"{counted(number, 'trial')} train{'s' * (number == 1)} to {rung}"
    if paused := sum(rung.paused for rung in rungs):
        yield f"{paused:,} {'is' if paused == 1 else 'are'} paused at rungs"
    sampler = sampler_of(searcher)
    startup = STARTUP.get(sampler.name, 0) and sampler.options.get("n_startup_trials", STARTUP[sampler.name])
    results = counts.results
    if searcher.name not in ("grid", "single", "pbt") and results < startup:
        enough = f"{counted(startup, 'trial')} {'has' if startup == 1 else 'have'}"
        had = f"{results} {'has' if results == 1 else 'have'}"
        yield f"hyperparameters are random until {enough} results ({had})"
