"""A preview of a search before it runs, as a table or plain data: ``dray preview asha.yaml --seconds-per-epoch 12``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dray.config.custom import Custom
from dray.config.resources import SlotRange
from dray.config.schema import ExperimentConfig
from dray.config.search import build_method, sampler_of
from dray.config.searcher import (
    AdaptiveASHASearcher,
    ASHASearcher,
    PBTSearcher,
    SamplingSearcher,
    Searcher,
)
from dray.display.text import searched_line
from dray.errors import ConfigError, NoExperiment
from dray.records.lookup import Name
from dray.records.result import Result
from dray.records.spending import totals_of
from dray.text import counted, rough, rough_time
from searchers.auto import Auto
from searchers.method import Method, limit_points
from searchers.pbt import PBT
from searchers.previews import WORKERS, Preview, Range, Rates, expected, is_certain, is_endless, is_simulated
from searchers.repeats import Repeats

_PER_LEASE = ("starting", "ending")
"""The phases that a trial has whenever it gets a worker group, no matter how long it trains."""
_MEASURED = ("COMPLETED", "PRUNED", "PAUSED")
"""States of trials that trained as far as they reported; others may have trained further."""


def unit_of(searcher: Searcher) -> str:
    """The unit that times are given in: the searcher's unit of length, or trials if a program's ``fit()`` sets it."""
    return "trials" if searcher.length is None else searcher.unit


def measured_rates(experiment: Name, searcher: Searcher) -> Rates:
    """The rates of an experiment's trials, from its timeline, for a search with trials of the same kind.

    Raises:
        NoExperiment: there is none, several match, it has another unit of length, or none of its trials has trained.
    """
    result = Result(experiment)
    name, unit = result.path.name, unit_of(result.config.searcher)
    if unit != unit_of(searcher):
        raise NoExperiment(
            f"--like needs an experiment whose trials have their length in {unit_of(searcher)}, but {name} has {unit}; "
            "give another one, or --seconds-per-trial"
        )
    table = result.timeline.assign(seconds=lambda rows: rows["end"] - rows["start"])
    is_leased, is_per_lease = table["trial_id"] >= 0, table["phase"].isin(_PER_LEASE)
    trained_s = table[is_leased & ~is_per_lease].groupby("trial_id")["seconds"].sum()
    lengths = {
        trial.id: trial.last_step if unit != "trials" else 1
        for trial in result.reader.trials.values()
        if trial.state in _MEASURED and trial.source_trial is None
    }
    rates = [trained_s[trial] / length for trial, length in lengths.items() if length and trained_s.get(trial, 0.0)]
    if not rates:
        raise NoExperiment(f"--like needs an experiment with trials that have trained; {name} has none")
    is_next = (table[["group", "trial_id"]] != table[["group", "trial_id"]].shift()).any(axis=1)
    start_s = float(table[is_leased & is_per_lease]["seconds"].sum()) / int((is_leased & is_next).sum())
    boots_s = table[table["phase"] == "booting"]["seconds"]
    boot_s = float(boots_s.mean()) if len(boots_s) else 0.0  # a server's groups may have been up before
    reused = result.config.resources.reuse_workers
    return Rates(
        mean=fmean(rates),
        spread=stdev(map(math.log, rates)) if len(rates) > 1 else 0.0,
        measured=len(rates),
        start=start_s if reused else start_s + boot_s,
        boot=boot_s if reused else 0.0,
    )


_RANGE = "in 9 of 10 simulated searches"
_SINGULAR = {"epochs": "epoch", "batches": "batch", "records": "record", "trials": "trial"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPreview:
    """The expected course of a config's search.

    Args:
        config: the config.
        method: a new method of this search.
        seen: the preview of the method.
        workers: number of trials that train at the same time, as far as the config says.
        rates: the time that training takes, if known.
        price: of a slot-hour in US dollars, if known.
        budget: what ends the search; see `totals_of`.
    """

    config: ExperimentConfig
    method: Method
    seen: Preview
    workers: int
    rates: Rates | None
    price: float | None
    budget: Mapping[str, float]

    @property
    def hours(self) -> Range | None:
        """The duration of the search; None if it is unknown, like the other two."""
        return None if self.seen.wall_s is None else self.seen.wall_s.times(1 / 3600)

    @property
    def slot_hours(self) -> Range | None:
        return None if self.seen.busy_s is None else self.seen.busy_s.times(_slots(self.config) / 3600)

    @property
    def usd(self) -> Range | None:
        slot_hours = self.slot_hours
        return None if slot_hours is None or self.price is None else slot_hours.times(self.price)

    def as_dict(self) -> dict[str, Any]:
        """The preview as plain data. The ranges, such as ``likely_total``, are those of nine in ten searches. Unknown
        values are None, and so are ranges of values that are certain."""
        seen, counts = self.seen, self._has_counts
        brackets = [
            [
                {
                    "length": rung.length,
                    "trials": rung.trials if counts else None,
                    "last": rung.last if counts else None,
                }
                for rung in bracket.rungs
            ]
            for bracket in seen.brackets
        ]
        return {
            "trials": seen.trials if counts else None,
            "likely_trials": seen.likely_trials,
            "total": round(seen.total, 2) if counts and seen.total is not None else None,
            "likely_total": seen.likely,
            "likely_hours": _ends(self.hours),
            "likely_slot_hours": _ends(self.slot_hours),
            "likely_usd": _ends(self.usd),
            "unit": self.config.searcher.unit,
            "brackets": brackets,
            "repeats": seen.brackets[-1].trials if counts and self.repeats is not None else None,
        }

    def show(self, console: Console) -> None:
        """Print brackets, rungs, trials at each rung, the search space, and the totals, with a range if they vary."""
        console.print(self._table())
        lines = [searched_line(self.config.space), *self._totals(), *self._times()]
        points = self.config.space.every_point()
        if (
            points is not None
            and points.size == getattr(self.method, "max_trials", None) != self.config.searcher.trial_count
        ):
            lines.append(f"the space has {counted(points.size, 'point')}, each of which is tried once")
        if self.repeats is not None:
            lines.append(self._repeated(self.repeats))
        if isinstance(pbt := self.method, PBT):
            count = pbt.replaced_at_once
            line = (
                f"every {pbt.interval} {self.config.searcher.unit}, the worst {count} of {pbt.population} are replaced"
            )
            more = f"up to about {count * (len(pbt.rungs) - 1):,} more trials continue from the best"
            lines.append(f"{line}: {more}")
        if isinstance(auto := self.method if self.repeats is None else self.repeats.method, Auto):
            lines += _explained(auto, self.config, self.seen)
        if getattr(self.config.searcher, "skip_uninformative_rungs", False):
            lines.append("at rungs that predict the next one poorly, more trials continue")
        if is_simulated(self.method):
            lines.append("custom method, simulated with random metric values")
        for line in filter(None, lines):
            console.print(Text(line), soft_wrap=True)

    @property
    def repeats(self) -> Repeats | None:
        return self.method if isinstance(self.method, Repeats) else None

    def _repeated(self, repeats: Repeats) -> str:
        unit, number = self.config.searcher.unit, self.seen.brackets[-1]
        total = "" if number.total is None else f", {_number(number.total)} {unit}"
        trials = f"{_number(number.trials)} more trial{'s' * (number.trials != 1)}{total}"
        best = "the best trial is" if repeats.top == 1 else f"the best {repeats.top} trials are"
        return f"then {best} trained again with {counted(repeats.seeds, 'seed')}: {trials}"

    @property
    def _has_counts(self) -> bool:
        """Whether the number of trials is known, at least as a range."""
        return not is_endless(self.method) or self.seen.wall_s is not None

    @property
    def _expected(self) -> str:
        return "" if is_certain(self.method) and self.seen.likely_trials is None else "expected "

    def _table(self) -> Table:
        config, seen, word = self.config, self.seen, self._expected
        table = Table(title=f"{config.name}: {_method(config)}", title_justify="left")
        unit = config.searcher.unit
        for heading in ("bracket", "rung", f"length, {unit}", f"{word}trials", "ending here", f"{word}total, {unit}"):
            table.add_column(heading, justify="right")
        for number, bracket in enumerate(seen.brackets, start=1):
            for place, rung in enumerate(bracket.rungs, start=1):
                length = "set by fit()" if rung.length is None else f"{rung.length:,}"
                total = "" if rung.length is None else _number(rung.length * rung.last)
                counts = (_number(rung.trials), _number(rung.last), total) if self._has_counts else ()
                name = "repeats" if self.repeats is not None and bracket is seen.brackets[-1] else str(number)
                table.add_row(name if place == 1 else "", str(place), length, *counts)
            table.add_section()
        return table

    def _totals(self) -> list[str]:
        length, unit, seen, word = self.config.searcher.length, self.config.searcher.unit, self.seen, self._expected
        if not self._has_counts:
            return ["the search creates trials until its budget, target or patience ends it"]
        lines, likely = [f"{_number(seen.trials)} trial{'s' * (seen.trials != 1)}"], seen.likely
        if (trials := seen.likely_trials) is not None:
            lines = [f"expected {seen.trials:,.0f} trials ({trials[0]:,.0f} to {trials[1]:,.0f} {_RANGE})"]
        if seen.total is not None and length is not None:
            full = seen.total / length
            range_ = "" if likely is None else f" ({likely[0]:,.0f} to {likely[1]:,.0f} {_RANGE})"
            at_least = " or more" if word and likely is None else ""
            lines[0] += f", {word}total {seen.total:,.0f} {unit}{at_least}{range_}"
            share = f", {full / seen.trials:.0%} of training all of them to the end" if seen.trials else ""
            lines.append(f"equivalent to {full:,.1f} trials of {length:,} {unit}{share}")
        return lines

    def _times(self) -> list[str]:
        rates, hours, slot_hours, usd = self.rates, self.hours, self.slot_hours, self.usd
        if rates is None:
            missing = "to estimate their number, the time that training takes is needed: see dray preview --help"
            return [missing] if self.budget and not self._has_counts else []
        at_a_time = f"with {counted(self.workers, 'trial')} at a time"
        if hours is None or slot_hours is None:
            many, total = "there are too many trials to simulate", self.seen.total
            if total is None or not self._has_counts:
                return [many] if self.budget or self._has_counts else []
            return [f"at least {rough_time(total * rates.mean / self.workers)} {at_a_time}; {many}"]
        unit = unit_of(self.config.searcher)
        at = f"at {rough(rates.mean)} s per {_SINGULAR.get(unit, unit)}"
        if rates.measured:
            at += f" ({counted(rates.measured, 'trial')}), {rough(rates.start)} s to start a trial, "
            at += f"{rough(rates.boot)} s to start its workers"
        lines = [
            f"about {_ranged(hours, _hours, of=f' {_RANGE}')} {at_a_time}",
            f"about {_ranged(slot_hours, _quantity, unit=' slot-hours')}"
            + ("" if usd is None else f", {_ranged(usd, _usd)}"),
            at,
        ]
        if self.seen.cut and not is_endless(self.method):
            lines.append(f"the budget ends {self.seen.cut:.0%} of the simulated searches early")
        return lines


def preview_search(
    config: ExperimentConfig,
    *,
    model_dir: Path | None = None,
    rates: Rates | None = None,
    price: float | None = None,
) -> SearchPreview:
    """Preview a config's search.

    Args:
        model_dir: where the user's own method is imported from.
        rates: the time that training takes, if known.
        price: of a slot-hour in US dollars; by default, that of the config.

    Raises:
        ConfigError: the user's own method can't be loaded, or breaks the rules of a method.
    """

    points = config.space.every_point()  # once: a constraint is asked about each

    def make() -> Method:
        method = build_method(config, Custom(directory=model_dir))
        limit_points(method, None if points is None else points.size)
        return method

    # Methods create as many trials at the start as they may have at a time; a custom one may create more later.
    workers = WORKERS if is_simulated(make()) else len(make().start())
    if (most := config.resources.max_slots) is not None:
        workers = max(min(workers, int(most / _slots(config) + 0.01)), 1)
    price = _price(config) if price is None else price
    budget = totals_of(None if config.budget is None else config.budget.model_dump())
    limits = {} if rates is None else budget
    slot_hours = limits.get("slot_hours", math.inf)
    if price:
        slot_hours = min(slot_hours, limits.get("usd", math.inf) / price)
    try:
        seen = expected(
            make,
            learns=sampler_of(config.searcher).name != "random",
            workers=workers,
            rates=rates,
            max_wall_s=limits.get("time", math.inf),
            max_busy_s=slot_hours * 3600 / _slots(config),
        )
    except RuntimeError as error:
        raise ConfigError([("searcher.name", str(error))]) from error
    return SearchPreview(
        config=config, method=make(), seen=seen, workers=workers, rates=rates, price=price, budget=budget
    )


def _explained(auto: Auto, config: ExperimentConfig, seen: Preview) -> list[str]:
    """What the search will do, for which nothing is configured."""
    unit, lines = config.searcher.unit, list[str]()
    if rungs := ", ".join(f"{rung:,}" for rung in auto.rungs[:-1]):
        more = "" if auto.pareto else ", and more from a length that predicts the next one poorly"
        shown = _SINGULAR.get(unit, unit) if rungs == "1" else unit
        lines.append(f"each trial pauses after {rungs} {shown}; the best {1 / auto.divisor:.0%} so far continue{more}")
        trials = [rung.trials for rung in seen.brackets[0].rungs]
        if seen.likely is not None and (paused := sum(trials[:-1])):
            share = f"about {sum(trials[1:]) / paused:.0%} of the trials at a length continue in the end"
            lines.append(f"{share}, since later trials tend to be better than earlier ones")
    drawn = "random or from the prior" if getattr(config.searcher, "prior", None) else "random"
    lines.append(
        f"hyperparameters are {drawn} until there are 12 results, one for each rung that a trial reaches; then a model "
        "of all results proposes most of them"
    )
    return lines


def _price(config: ExperimentConfig) -> float | None:
    """The price of a slot-hour: the highest one of the types that the search may run on."""
    prices, resources = config.prices or {}, config.resources
    kinds: list[str] = ["CPU"] if resources.slot == "cpu" else [*(resources.slot_type or [])]
    known = [price for kind, price in prices.items() if kind.removesuffix("-spot") in kinds]
    return max(known or prices.values(), default=None)


def _slots(config: ExperimentConfig) -> float:
    """The slots of a trial. A trial with a range of slots gets all free ones, so it has the most."""
    asked, most = config.resources.slots_per_trial, config.resources.max_slots
    return min(asked.max, most or asked.max) if isinstance(asked, SlotRange) else asked


def _ends(found: Range | None) -> tuple[float, float] | None:
    return None if found is None else (found.low, found.high)


def _ranged(found: Range, text: Callable[[float], str], *, unit: str = "", of: str = "") -> str:
    """The median, with the range if that differs: "12 slot-hours (9 to 17)"."""
    middle, low, high = map(text, found)
    return middle + unit + ("" if low == high else f" ({low} to {high}{of})")


def _hours(value: float) -> str:
    return rough_time(3600 * value)


def _quantity(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _usd(value: float) -> str:
    return f"${value:,.2f}" if value < 10 else f"${value:,.0f}"


def _number(value: float) -> str:
    """A whole number, or the mean of some."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _method(config: ExperimentConfig) -> str:
    searcher = config.searcher
    words: list[str] = [searcher.name]
    if isinstance(searcher, ASHASearcher | AdaptiveASHASearcher):
        words += [searcher.variant, f"divisor {searcher.divisor:g}"]
    if isinstance(searcher, PBTSearcher):
        words += [f"population {searcher.population}", f"quantile {searcher.quantile:g}"]
    if isinstance(searcher, SamplingSearcher):
        words.append(f"sampler {searcher.sampler.name}")
    return ", ".join(words)
