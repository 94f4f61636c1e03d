"""An experiment's trials for the page: a table that can be sorted and searched."""

from __future__ import annotations

import math
import operator
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from dray.records.reader import ExperimentReader
from dray.records.trial_record import TrialRecord
from dray.serve.answers import BadInput, encoded, plain
from dray.text import shown

HPARAMS, METRICS = "hparams.", "metrics."
RANK = "rank"
Get = Callable[[TrialRecord], Any]
_ATTRIBUTES = (
    *("state", "batches", "metric", "best_metric", "best_batches"),
    *("restarts", "started", "ended", "nan_since", "code"),
)
_FIELDS: dict[str, Get] = {
    "trial": lambda trial: trial.id,
    "duration": lambda trial: _duration(trial),
    **{name: operator.attrgetter(name) for name in _ATTRIBUTES},
}
_CONDITION = re.compile(r"([\w.\-/]+)(<=|>=|!=|<|>|=)(\S+)")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def row(trial: TrialRecord) -> bytes:
    if "row" not in trial.derived:
        trial.derived["row"] = encoded(plain(trial.to_json()))
    found: bytes = trial.derived["row"]
    return found


def find(
    trials: Iterable[TrialRecord],
    *,
    sort: str = "trial",
    descending: bool = False,
    search: str = "",
    reader: ExperimentReader | None = None,
) -> list[TrialRecord]:
    """The trials that match a search, sorted.

    Args:
        sort: a field, or "hparams." and the dotted name of a hyperparameter, or "metrics." and a metric's kind and name
            with a dot between them, or "rank" for the order in which they are given. Missing values come last in both
            orders.
        descending: the largest first.
        search: words that a trial's number, state or hyperparameters must all contain, or conditions such as
            ``lr<0.01``, ``state=running``, ``best_metric<=0.3`` and ``training.loss>1``.
        reader: that of the trials, for metrics other than the searcher's.
    """
    found = list(trials)
    for word in search.split():
        matches = _matcher(word, reader)
        found = [trial for trial in found if matches(trial)]
    if sort == RANK:
        return found[::-1] if descending else found
    get = _FIELDS.get(sort)
    if sort.startswith(HPARAMS):
        get = _hparam(sort.removeprefix(HPARAMS))
    if sort.startswith(METRICS) and reader is not None:
        get = last_value(reader, sort.removeprefix(METRICS))
    if get is None:
        raise BadInput(
            f"sort={sort[:80]}: there is no such column; it must be one of rank, {', '.join(_FIELDS)}, hparams.NAME or "
            "metrics.KIND.NAME"
        )
    numbers: list[TrialRecord] = []
    texts: list[TrialRecord] = []
    missing: list[TrialRecord] = []
    for trial in found:
        value = get(trial)
        if isinstance(value, float | int):
            (numbers if value == value else missing).append(trial)
        else:
            (missing if value is None else texts).append(trial)
    # The keys are no tuples: so many new ones would start Python's garbage collector. Sorting is stable.
    numbers.sort(key=get, reverse=descending)
    texts.sort(key=lambda trial: str(get(trial)), reverse=descending)
    return [*texts, *numbers, *missing] if descending else [*numbers, *texts, *missing]


def _hparam(name: str) -> Get:
    return lambda trial: trial.hparams.get(name)


def last_value(reader: ExperimentReader, name: str) -> Get:
    kind, _, metric = name.partition(".")
    if (kind, metric) not in reader.metrics:
        raise BadInput(f"metric {name[:80]}: no trial has reported it")
    last = reader.last.of((kind, metric))
    return lambda trial: last.get(trial.id)


def _duration(trial: TrialRecord) -> float | None:
    """Seconds from its first start to its end, or until now."""
    return None if trial.started is None else (trial.ended or time.time()) - trial.started


def _text(trial: TrialRecord) -> str:
    """The text of a trial that a search looks through, in lower case."""
    if "text" not in trial.derived:
        words = f"{trial.id} {trial.state} {trial.word} {trial.code or ''} {shown(trial.hparams)}"
        trial.derived["text"] = words.lower()
    found: str = trial.derived["text"]
    return found


def _matcher(word: str, reader: ExperimentReader | None) -> Callable[[TrialRecord], bool]:
    """A predicate for trials: they contain the word, or meet the condition."""
    match = _CONDITION.fullmatch(word)
    if match is None:
        text = word.lower()
        return lambda trial: text in _text(trial)
    name, sign, wanted = match.groups()
    get = _FIELDS.get({"best": "best_metric", "last": "metric"}.get(name, name)) or _hparam(name)
    if reader is not None and tuple(name.split(".", 1)) in reader.metrics:
        get = last_value(reader, name)
    try:
        limit: float | None = float(wanted)
    except ValueError:
        limit = None
    if sign in _COMPARE:
        compare = _COMPARE[sign]
        if limit is None:  # still being typed
            return lambda trial: True
        return lambda trial: isinstance(value := get(trial), int | float) and compare(value, limit)

    def equal(trial: TrialRecord) -> bool:
        value = get(trial)
        if limit is not None and isinstance(value, int | float) and not isinstance(value, bool):
            return math.isclose(value, limit, rel_tol=1e-4)  # to the digits that the table shows
        if name == "state":
            return wanted.lower() in (trial.state.lower(), trial.word)
        return shown(value).lower() == wanted.lower()

    return equal if sign == "=" else lambda trial: not equal(trial)
