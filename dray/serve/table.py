"""A page of an experiment's trials as a table, filtered by facets, or the nearest to a point of the search space.

For each facet it has what that would leave.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict

from dray.errors import Invalid
from dray.figures.data import rung_name, rungs_reached
from dray.records.reader import ExperimentReader
from dray.records.trial_record import Number, TrialRecord, TrialRow, flatten
from dray.serve import trials
from dray.serve.answers import encoded
from dray.serve.given import TrialsQuery
from dray.text import some
from searchers.domains import Categorical, numbers_of, parameters
from searchers.space import Space
from searchers.unit_cube import place


def nearest(
    space: Space, among: Sequence[TrialRecord], point: str, offset: int, limit: int
) -> tuple[list[TrialRecord], list[bytes]]:
    """The trials that have started, by their distance from a point; and some of their rows, with ``distance``.

    The distance is Euclidean in the unit cube, over the hyperparameters that the point has. Another category is 1 away,
    and so is a trial that lacks one of these hyperparameters.

    Args:
        point: hyperparameters as JSON, with dotted names or nested as in the config.
    """
    given = _nested(point)
    wanted = _places(space, given)
    known = [re.sub(r"\[\d+\]", "", name) for name in wanted]
    if unknown := [name for name in flatten(given) if not any(f"{name}.".startswith(f"{each}.") for each in known)]:
        searched = some([each.name for each in parameters(space.root)], 20)
        raise Invalid(f"near: {unknown[0][:60]} is not searched, or has no such value; searched are {searched}")

    def distance(trial: TrialRecord) -> float:
        has = _places(space, trial.drawn or {})
        return math.sqrt(sum(_apart(name, has.get(name), at) ** 2 for name, at in wanted.items()))

    def _apart(name: str, one: float | None, other: float) -> float:
        return float(one != other) if one is None or name in categoricals else one - other

    categoricals = {each.name for each in parameters(space.root) if isinstance(each.domain, Categorical)}
    found = sorted((distance(trial), trial.id) for trial in among if trial.drawn is not None)
    by_id = {trial.id: trial for trial in among}
    rows = [
        trials.row(by_id[trial])[:-1] + f',"distance":{apart:.6g}}}'.encode()
        for apart, trial in found[offset : offset + limit]
    ]
    return [by_id[trial] for _, trial in found], rows


def _nested(point: str) -> dict[str, Any]:
    """The point as a mapping like the config's hyperparameters."""
    try:
        given = json.loads(point)
    except ValueError:
        given = None
    if not isinstance(given, dict) or not given:
        raise Invalid(f'near={point[:80]}: must be hyperparameters as a JSON object, such as {{"lr": 0.01}}')
    found: dict[str, Any] = {}
    for name, value in given.items():
        *groups, last = name.split(".")
        inner = found
        for group in groups:
            inner = inner.setdefault(group, {})
            if not isinstance(inner, dict):
                raise Invalid(f"near: {name[:60]} and {group[:60]} can't both be given")
        inner[last] = value
    return found


def _places(space: Space, point: Mapping[str, Any]) -> dict[str, float]:
    """The place of each searched hyperparameter of a point, from 0 to 1; the index of a categorical's choice."""
    domains = {each.name: each.domain for each in parameters(space.root)}
    found = {}
    for name, value in numbers_of(space.root, point):
        domain = domains[name]
        found[name] = value if isinstance(domain, Categorical) else place(domain, value)
    return found


MAX_CODES = 12  # most variants of the code to filter by
Keys = Mapping[str, Callable[[TrialRecord], str]]


class Facet(TypedDict):
    value: str  # for the parameter of the facet's name
    label: str
    count: int  # trials that match the search and the other facets


class FoundTrial(TrialRow, total=False):
    metrics: dict[str, Number]  # the last values of the metrics that were asked for, by KIND.NAME
    distance: float  # from the point near, over its hyperparameters: 1 is a whole range, or another category


class _Found(TypedDict):
    found: int  # the number of matches
    of: int  # the number of trials
    offset: int


class TrialPage(_Found, total=False):
    ids: list[int]
    facets: dict[str, list[Facet]]
    trials: list[FoundTrial]


def page(reader: ExperimentReader, query: TrialsQuery) -> bytes:
    """A `TrialPage` as JSON, see `trials.find` and `near.nearest`."""
    keys = _keys(reader)
    chosen = {name: set(given.split(",")) for name in keys if (given := getattr(query, name))}
    searched = trials.find(
        reader.ranked() if query.sort == trials.RANK else reader.trials.values(),
        reader,
        sort=query.sort,
        descending=query.descending,
        search=query.search,
    )
    found = _filtered(searched, keys, chosen)
    head: TrialPage = {"found": len(found), "of": len(reader.trials), "offset": query.offset}
    if query.facets:
        head["facets"] = facets(reader, searched, chosen)
    if query.ids:
        return encoded(head | {"ids": [trial.id for trial in found]})
    if query.near is not None:
        found, sent = nearest(reader.config.space, found, query.near, query.offset, query.limit)
        head["found"] = len(found)
    else:
        sent = rows(reader, found[query.offset : query.offset + query.limit], query.metric)
    return encoded(head)[:-1] + b',"trials":[' + b",".join(sent) + b"]}"


def rows(reader: ExperimentReader, found: Sequence[TrialRecord], metrics: Sequence[str]) -> list[bytes]:
    """The rows of trials; the last values of metrics such as ``training.loss`` are in ``metrics``."""
    if not metrics:
        return [trials.row(trial) for trial in found]
    columns = {name: trials.last_value(reader, name) for name in metrics}
    values = [{name: get(trial) for name, get in columns.items()} for trial in found]
    return [
        trials.row(trial)[:-1] + b',"metrics":' + encoded(mine) + b"}"
        for trial, mine in zip(found, values, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------- facets
def _keys(reader: ExperimentReader) -> Keys:
    """What trials can be filtered by: the state's word, the code ("": the experiment's own), and the rungs reached."""
    rungs = reader.rungs
    return {
        "state": lambda trial: trial.word,
        "code": lambda trial: trial.code or "",
        "rung": lambda trial: str(rungs_reached(rungs, trial.last_step)),
    }


def _filtered(found: Iterable[TrialRecord], keys: Keys, chosen: Mapping[str, set[str]]) -> list[TrialRecord]:
    left = list(found)
    for name, values in chosen.items():
        key = keys[name]
        left = [trial for trial in left if key(trial) in values]
    return left


def facets(
    reader: ExperimentReader, searched: Sequence[TrialRecord], chosen: Mapping[str, set[str]]
) -> dict[str, list[Facet]]:
    """The values of each facet, and how many trials have them among those that the other facets leave."""
    keys, found = _keys(reader), dict[str, list[Facet]]()
    for name, key in keys.items():
        left = _filtered(searched, keys, {other: chosen[other] for other in chosen if other != name})
        counts = Counter(map(key, left))
        values = counts.most_common(MAX_CODES)
        if name == "rung":
            values = sorted(counts.items(), key=lambda item: int(item[0]))
        found[name] = [{"value": value, "label": _label(reader, name, value), "count": n} for value, n in values]
    return found


def _label(reader: ExperimentReader, facet: str, value: str) -> str:
    if facet == "rung":
        return rung_name(reader.rungs, int(value), reader.config.searcher.unit)
    return value or "the experiment's own"
