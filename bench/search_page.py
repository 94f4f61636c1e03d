"""The page of search_quality.py: tables, and the figure of regret over time, from kept searches."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

import numpy as np
import numpy.typing as npt
from _measure import BENCH, Paper
from search_ways import WAYS

Trace = Sequence[tuple[float, float]]
"""When the regret of an incumbent changed, in full trainings, and to what, ascending from (0, 1)."""
Key = tuple[str, int]
"""A task and a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The outcome of one search.

    Args:
        problems, regime, task, seed, way: which search.
        trials: how many it began.
        cpu_s: of the search itself.
        lowest, highest: the regrets of both incumbents.
        machine, versions: where it ran, and with which libraries.
    """

    problems: str
    regime: str
    task: str
    seed: int
    way: str
    trials: int
    cpu_s: float
    lowest: Trace
    highest: Trace
    machine: str
    versions: Sequence[str]


Group = Mapping[str, Mapping[Key, Found]]
"""Searches by way. A way that takes long may have fewer cases than the others, those of the first seeds."""

INCUMBENTS = {
    "lowest": "Incumbent: the trial with the lowest report",
    "highest": "Incumbent: the trial with the lowest report at the highest rung reached so far",
}
MARKS, EARLIER, PAIRED = (5, 10, 20, 50), (4, 8, 16, 32), (5, 20, 50)
"""Times in full trainings; `EARLIER` are the eighth, quarter, half and end of searches that were as long as 32."""
SHOWN = (
    "auto",
    "auto+like",
    "ray+optuna",
    "optuna+hyperband",
    "syne-tune+cqr",
    "smac",
    "neps",
    "dehb",
    "bohb",
    "full",
)
"""The ways in the figure: more lines could not be told apart."""


def at(trace: Trace, time: float) -> float:
    """The regret at a time.

    >>> at([(0.0, 1.0), (2.0, 0.5)], 1.9), at([(0.0, 1.0), (2.0, 0.5)], 2.0)
    (1.0, 0.5)
    """
    return trace[bisect_right(trace, time, key=lambda step: step[0]) - 1][1]


def means(values: npt.NDArray[np.float64], samples: int = 10_000) -> npt.NDArray[np.float64]:
    """The mean over the rows, and its 95% bootstrap interval, of shape (3, columns).

    >>> means(np.full((9, 1), 0.5)).ravel().tolist()
    [0.5, 0.5, 0.5]
    """
    count = len(values)
    drawn = np.random.default_rng(0).multinomial(count, [1 / count] * count, size=samples) @ values / count
    return np.vstack([values.mean(axis=0), np.quantile(drawn, [0.025, 0.975], axis=0)])


def grouped(found: Sequence[Found]) -> Mapping[tuple[str, str], Group]:
    """The searches by problems and regime."""
    groups: dict[tuple[str, str], dict[str, dict[Key, Found]]] = {}
    for each in sorted(found, key=lambda each: (each.problems, each.regime, list(WAYS).index(each.way))):
        groups.setdefault((each.problems, each.regime), {}).setdefault(each.way, {})[each.task, each.seed] = each
    return groups


def regrets(by_key: Mapping[Key, Found], incumbent: str, times: Sequence[float]) -> npt.NDArray[np.float64]:
    """Of shape (cases, times)."""
    return np.array([[at(getattr(found, incumbent), time) for time in times] for found in by_key.values()])


# --------------------------------------------------------------------------------------------------------------- tables
def report(paper: Paper, found: Sequence[Found]) -> None:
    """Print the tables."""
    paper.say("\n".join(sorted({each.machine for each in found})) + "\n")
    libraries = {library for each in found for library in each.versions}
    paper.say(f"Libraries: {', '.join(sorted(libraries)) or 'none but dray'}.")
    paper.say()
    ways = {each.way for each in found}
    paper.table(["way", "what"], [[name, way.what] for name, way in WAYS.items() if name in ways])
    for (problems, regime), group in grouped(found).items():
        main, *others = group
        keys = list(group[main])
        seeds, tasks = sorted({seed for _, seed in keys}), list(dict.fromkeys(task for task, _ in keys))
        on = f" on {len(tasks)} tasks" if tasks != [""] else ""
        paper.say(
            f"\n## {problems}: {regime}\n\n{len(keys)} searches{on}, seeds {seeds[0]} to {seeds[-1]}; slow ways: fewer."
        )
        for incumbent, what in INCUMBENTS.items():
            paper.say(f"\n{what}; regret after so many trainings:\n")
            earlier = " / ".join(map(str, EARLIER))
            paper.table(
                ["way", "searches", *map(str, MARKS), earlier, "trials", "CPU s"],
                [[way, *_row(by_key, incumbent)] for way, by_key in group.items()],
            )
        if others:
            paper.say(f"\nLess regret of `{main}` than of the others in their cases, ahead on tasks:\n")
            head = [f"{incumbent}, {time}" for incumbent in INCUMBENTS for time in PAIRED]
            rows = [[way, *_less(group[main], group[way])] for way in others]
            paper.table(["than", *head, "ahead, " + " / ".join(map(str, PAIRED))], rows)


def _row(by_key: Mapping[Key, Found], incumbent: str) -> list[str]:
    values = means(regrets(by_key, incumbent, MARKS)).T
    earlier = regrets(by_key, incumbent, EARLIER).mean(axis=0)
    return [
        f"{len(by_key)}",
        *(f"{mean:.3f} ({low:.3f} .. {high:.3f})" for mean, low, high in values),
        " / ".join(f"{mean:.3f}" for mean in earlier),
        f"{fmean(found.trials for found in by_key.values()):.0f}",
        f"{fmean(found.cpu_s for found in by_key.values()):.1f}",
    ]


def _less(ours: Mapping[Key, Found], others: Mapping[Key, Found]) -> list[str]:
    cells = []
    both = [key for key in ours if key in others]
    ours, others = ({key: searches[key] for key in both} for searches in (ours, others))
    for incumbent in INCUMBENTS:
        less = regrets(others, incumbent, PAIRED) - regrets(ours, incumbent, PAIRED)
        cells += [f"{mean:+.3f} ({low:+.3f} .. {high:+.3f})" for mean, low, high in means(less).T]
        if incumbent == "lowest":
            # By task; a synthetic seed is a problem of its own.
            names = np.array([task or str(seed) for task, seed in ours])
            tasks = np.array([less[names == name].mean(axis=0) for name in dict.fromkeys(names)])
            ahead = " / ".join(f"{count}" for count in (tasks > 0).sum(axis=0)) + f" of {len(tasks)}"
    return [*cells, ahead]


# --------------------------------------------------------------------------------------------------------------- figure
WIDTH, HEIGHT, LEFT, TOP, RIGHT = 430, 270, 44, 26, 12
FROM, UNTIL, LEAST, MOST = 1.0, 50.0, 0.01, 1.0
COLOURS = ("#d62728", "#ff7f0e", "#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf", "#7f7f7f")


def figure(found: Sequence[Found]) -> str:
    """An SVG: mean regret over time with its 95% interval, a row for each regime, a column for each incumbent."""
    groups = grouped(found)
    colours = dict(zip(SHOWN, COLOURS, strict=True))
    ways = [way for way in SHOWN if any(way in group for group in groups.values())]
    parts = []
    for place, way in enumerate(ways):
        x, y = 10 + place % 5 * 172, 16 + place // 5 * 18
        parts.append(f'<path d="M{x} {y - 4}h18" stroke="{colours[way]}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 23}" y="{y}">{escape(way)}</text>')
    above = 40
    for row, ((problems, regime), group) in enumerate(groups.items()):
        for column, incumbent in enumerate(INCUMBENTS):
            title = f"{problems}: {regime}, incumbent by {incumbent} {'report' if incumbent == 'lowest' else 'rung'}"
            lines = {colours[way]: group[way] for way in SHOWN if way in group}
            panel = _panel(title, {colour: regrets(by_key, incumbent, TIMES) for colour, by_key in lines.items()})
            parts.append(f'<g transform="translate({column * WIDTH} {above + row * HEIGHT})">{panel}</g>')
    size = f'width="{2 * WIDTH}" height="{above + len(groups) * HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11" fill="none"'
    text = "<style>text{fill:#222;stroke:none}</style>"
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{text}{background}{"".join(parts)}</svg>\n'


TIMES = np.geomspace(FROM, UNTIL, 60).tolist()


def _x(time: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * math.log(time / FROM) / math.log(UNTIL / FROM)


def _y(regret: float) -> float:
    bottom = HEIGHT - 34
    return bottom - (bottom - TOP) * math.log(min(max(regret, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)


def _panel(title: str, lines: Mapping[str, npt.NDArray[np.float64]]) -> str:
    parts = [f'<text x="{LEFT}" y="{TOP - 8}">{escape(title)}</text>', f'<text x="4" y="{TOP - 8}">regret</text>']
    for time in (1, 2, 5, 10, 20, 50):
        parts.append(f'<path d="M{_x(time):.1f} {_y(MOST)}V{_y(LEAST)}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{_x(time):.1f}" y="{_y(LEAST) + 14}" text-anchor="middle">{time}</text>')
    for regret in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1):
        parts.append(f'<path d="M{LEFT} {_y(regret):.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{_y(regret) + 4:.1f}" text-anchor="end">{regret:g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">full trainings</text>')
    for colour, values in lines.items():
        mean, low, high = (
            [(_x(time), _y(value)) for time, value in zip(TIMES, row, strict=True)] for row in means(values, 1000)
        )
        parts.append(f'<polygon points="{_points([*low, *reversed(high)])}" fill="{colour}" fill-opacity=".13"/>')
        parts.append(f'<polyline points="{_points(mean)}" stroke="{colour}" stroke-width="1.6"/>')
    return "".join(parts)


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def page(found: Sequence[Found]) -> None:
    """Write the page to bench/results/, and its figure to docs/."""
    paper = Paper()
    paper.say("![regret over time, with 95% intervals](../../docs/search_quality.svg)\n")
    paper.say("The docstring of `bench/search_quality.py` says how this was measured.\n")
    report(paper, found)
    (BENCH.parent / "docs" / "search_quality.svg").write_text(figure(found))
    paper.save("search_quality", "What a search finds: dray, and its peers")
