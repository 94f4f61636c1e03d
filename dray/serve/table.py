"""The table of trials: sorted, searched and cut into pages at the server."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dray.serve.answers import BadInput
from dray.serve.trial import Trial, shown

MAX_ROWS = 500
"""Most rows of a page."""
HPARAMS = "hparams."
_FIELDS: dict[str, Callable[[Trial], Any]] = {
    "trial": lambda it: it.view.id,
    "state": lambda it: it.view.state,
    "batches": lambda it: it.batches,
    "metric": lambda it: it.values[-1] if it.values else None,
    "best_metric": lambda it: it.best_value,
    "restarts": lambda it: it.restarts,
    "started": lambda it: it.started,
    "ended": lambda it: it.ended,
    "nan_since": lambda it: min(it.nan.values(), default=None),
}
_CONDITION = re.compile(r"([\w.\-/]+)(<=|>=|!=|<|>|=)(\S+)")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What part of the table is wanted.

    Attributes:
        sort: a field, or "hparams." and the dotted name of a hyperparameter. What has no value comes last either way.
        descending: the largest first.
        search: words, all of which a trial must have in its number, state or hyperparameters; or conditions such as
            ``lr<0.01``, ``state=running`` and ``best_metric<=0.3``.
        offset, limit: which of the rows that were found; limit is at most 500.
    """

    sort: str = "trial"
    descending: bool = False
    search: str = ""
    offset: int = 0
    limit: int = 50


def find(trials: Sequence[Trial], query: Query) -> list[Trial]:
    """All trials that the query's search finds, sorted.

    Args:
        trials: by number.
        query: what is wanted; its offset and limit are not looked at.

    Raises:
        BadInput: there is no such field.
    """
    found = list(trials)
    for word in query.search.split():
        test = _test(word)
        found = [it for it in found if test(it)]
    get = _getter(query.sort)
    if get is None:
        raise BadInput(
            f"sort={query.sort}: there is no such column; it must be one of {', '.join(_FIELDS)} or hparams.NAME"
        )
    numbers: list[Trial] = []
    texts: list[Trial] = []
    missing: list[Trial] = []
    for it in found:
        value = get(it)
        if isinstance(value, float | int):
            (numbers if value == value else missing).append(it)
        else:
            (missing if value is None else texts).append(it)
    # By a key without pairs: so many new ones make Python look for garbage. Rows of equal value stay in their order.
    numbers.sort(key=get, reverse=query.descending)
    texts.sort(key=lambda it: str(get(it)), reverse=query.descending)
    return [*texts, *numbers, *missing] if query.descending else [*numbers, *texts, *missing]


def _getter(name: str) -> Callable[[Trial], Any] | None:
    if name.startswith(HPARAMS):
        key = name.removeprefix(HPARAMS)
        return lambda it: it.hparams.get(key)
    return _FIELDS.get(name)


def _test(word: str) -> Callable[[Trial], bool]:
    """Whether a trial has a word, or meets a condition."""
    match = _CONDITION.fullmatch(word)
    if match is None:
        text = word.lower()
        return lambda it: text in it.text()
    name, sign, wanted = match.groups()
    get = _FIELDS.get({"best": "best_metric"}.get(name, name)) or (lambda it: it.hparams.get(name))
    limit = _number(wanted)
    if sign in _COMPARE:
        compare = _COMPARE[sign]
        if limit is None:  # not yet typed to its end
            return lambda it: True
        return lambda it: isinstance(value := get(it), int | float) and compare(value, limit)

    def equal(it: Trial) -> bool:
        value = get(it)
        if limit is not None and isinstance(value, int | float) and not isinstance(value, bool):
            return math.isclose(value, limit, rel_tol=1e-4)  # as it is shown
        return shown(value).lower() == wanted.lower()

    return equal if sign == "=" else lambda it: not equal(it)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
