"""A preview of a search, as a table, before it runs: ``dray preview asha.yaml --trials-per-hour 12``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dray.config.custom import Custom
from dray.config.schema import ExperimentConfig
from dray.config.search import build_method
from dray.config.searcher import AdaptiveASHASearcher, ASHASearcher, PBTSearcher, SamplingSearcher
from dray.display.text import rough_time, searched_line
from dray.errors import ConfigError
from searchers.method import Method
from searchers.pbt import PBT
from searchers.previews import Preview, expected, is_certain, is_simulated


def show_preview(
    config: ExperimentConfig,
    *,
    model_dir: Path | None = None,
    trials_per_hour: float | None = None,
    console: Console,
) -> None:
    """Print brackets, rungs, trials at each rung, the search space, and the totals, with a range if they vary.
    `trials_per_hour`: trials of full length that the cluster trains in an hour; None: no times are shown.

    Raises:
        ConfigError: the user's own method, from `model_dir`, can't be loaded, or breaks the rules of a method.
    """
    method, seen = build_method(config, Custom(directory=model_dir)), _previewed(config, model_dir)
    word = "" if is_certain(method) else "expected "
    console.print(_table(config, seen, word))
    if line := searched_line(config.space):
        console.print(Text(line), soft_wrap=True)
    for line in _totals(config, seen, trials_per_hour, word):
        console.print(Text(line), soft_wrap=True)
    if isinstance(method, PBT):
        count = method.replaced_at_once
        line = f"every {method.interval} {config.searcher.unit}, the worst {count} of {method.population} are replaced"
        more = f"up to about {count * (len(method.rungs) - 1):,} more trials continue from the best"
        console.print(Text(f"{line}: {more}"), soft_wrap=True)
    if getattr(config.searcher, "skip_uninformative_rungs", False):
        console.print(Text("at rungs that predict the next one poorly, more trials continue"), soft_wrap=True)
    if is_simulated(method):
        console.print(Text("custom method, simulated with random metric values"), soft_wrap=True)


def preview_as_dict(config: ExperimentConfig, *, model_dir: Path | None = None) -> dict[str, Any]:
    """The preview as plain data: ``trials``, ``total``, ``likely_total`` (the range of nine in ten searches, or None),
    ``brackets`` of rungs, and the ``unit`` of lengths."""
    seen = _previewed(config, model_dir)
    brackets = [
        [{"length": rung.length, "trials": rung.trials, "last": rung.last} for rung in bracket.rungs]
        for bracket in seen.brackets
    ]
    return {
        "trials": seen.trials,
        "total": None if seen.total is None else round(seen.total, 2),
        "likely_total": seen.likely,
        "unit": config.searcher.unit,
        "brackets": brackets,
    }


def _previewed(config: ExperimentConfig, model_dir: Path | None) -> Preview:
    def make() -> Method:
        return build_method(config, Custom(directory=model_dir))

    try:
        return expected(make)
    except RuntimeError as error:
        raise ConfigError([("searcher.name", str(error))]) from error


def _table(config: ExperimentConfig, seen: Preview, word: str) -> Table:
    table = Table(title=f"{config.name}: {_method(config)}", title_justify="left")
    unit = config.searcher.unit
    for heading in ("bracket", "rung", f"length, {unit}", f"{word}trials", "ending here", f"{word}total, {unit}"):
        table.add_column(heading, justify="right")
    for number, bracket in enumerate(seen.brackets, start=1):
        for place, rung in enumerate(bracket.rungs, start=1):
            length = "set by fit()" if rung.length is None else f"{rung.length:,}"
            total = "" if rung.length is None else _number(rung.length * rung.last)
            table.add_row(
                str(number) if place == 1 else "", str(place), length, _number(rung.trials), _number(rung.last), total
            )
        table.add_section()
    return table


def _totals(config: ExperimentConfig, seen: Preview, trials_per_hour: float | None, word: str) -> list[str]:
    length, unit = config.searcher.length, config.searcher.unit
    lines, full, likely = [f"{_number(seen.trials)} trials"], seen.trials, seen.likely
    if seen.total is not None and length is not None:
        full = seen.total / length
        range_ = "" if likely is None else f" ({likely[0]:,.0f} to {likely[1]:,.0f} in 9 of 10 simulated searches)"
        at_least = " or more" if word and likely is None else ""
        lines[0] += f", {word}total {seen.total:,.0f} {unit}{at_least}{range_}"
        share = f", {full / seen.trials:.0%} of training all of them to the end" if seen.trials else ""
        lines.append(f"equivalent to {full:,.1f} trials of {length:,} {unit}{share}")
    if trials_per_hour is not None:
        between = ""
        if likely is not None and length is not None:
            between = " (" + " to ".join(rough_time(3600 * total / length / trials_per_hour) for total in likely) + ")"
        rate = f"at {trials_per_hour:g} full-length trials per hour"
        lines.append(f"about {rough_time(3600 * full / trials_per_hour)}{between} {rate}")
    return lines


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
