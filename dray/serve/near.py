"""The trials nearest to a point of the search space."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dray.records.trial_record import TrialRecord, flatten
from dray.serve import trials
from dray.serve.answers import BadInput
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
        raise BadInput(f"near: {unknown[0][:60]} is not searched, or has no such value; searched are {searched}")

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
        raise BadInput(f'near={point[:80]}: must be hyperparameters as a JSON object, such as {{"lr": 0.01}}')
    found: dict[str, Any] = {}
    for name, value in given.items():
        *groups, last = name.split(".")
        inner = found
        for group in groups:
            inner = inner.setdefault(group, {})
            if not isinstance(inner, dict):
                raise BadInput(f"near: {name[:60]} and {group[:60]} can't both be given")
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
