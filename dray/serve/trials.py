"""An experiment's trials for the page: a table that can be sorted and searched."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

from dray.records.trial_record import TrialRecord
from dray.serve.answers import BadInput, plain
from dray.text import shown

MAX_ROWS = 500  # most rows in a page of the table
HPARAMS = "hparams."
RANK = "rank"
_FIELDS: dict[str, Callable[[TrialRecord], Any]] = {"trial": lambda trial: trial.id} | {
    name: operator.attrgetter(name)
    for name in ("state", "batches", "metric", "best_metric", "restarts", "started", "ended", "nan_since", "code")
}
_CONDITION = re.compile(r"([\w.\-/]+)(<=|>=|!=|<|>|=)(\S+)")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def row(trial: TrialRecord) -> bytes:
    if "row" not in trial.derived:
        trial.derived["row"] = json.dumps(plain(trial.to_json()), allow_nan=False, separators=(",", ":")).encode()
    found: bytes = trial.derived["row"]
    return found


def find(
    trials: Iterable[TrialRecord], *, sort: str = "trial", descending: bool = False, search: str = ""
) -> list[TrialRecord]:
    """The trials that match a search, sorted.

    Args:
        sort: a field, or "hparams." and the dotted name of a hyperparameter, or "rank" for the order in which they are
            given. Missing values come last in both orders.
        descending: the largest first.
        search: words that a trial's number, state or hyperparameters must all contain, or conditions such as
            ``lr<0.01``, ``state=running`` and ``best_metric<=0.3``.
    """
    found = list(trials)
    for word in search.split():
        matches = _matcher(word)
        found = [trial for trial in found if matches(trial)]
    if sort == RANK:
        return found[::-1] if descending else found
    get = _FIELDS.get(sort)
    if sort.startswith(HPARAMS):
        get = _hparam(sort.removeprefix(HPARAMS))
    if get is None:
        raise BadInput(
            f"sort={sort}: there is no such column; it must be one of rank, {', '.join(_FIELDS)} or hparams.NAME"
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


def _hparam(name: str) -> Callable[[TrialRecord], Any]:
    return lambda trial: trial.hparams.get(name)


def _text(trial: TrialRecord) -> str:
    """The text of a trial that a search looks through, in lower case."""
    if "text" not in trial.derived:
        words = f"{trial.id} {trial.state} {trial.word} {trial.code or ''} {shown(trial.hparams)}"
        trial.derived["text"] = words.lower()
    found: str = trial.derived["text"]
    return found


def _matcher(word: str) -> Callable[[TrialRecord], bool]:
    """A predicate for trials: they contain the word, or meet the condition."""
    match = _CONDITION.fullmatch(word)
    if match is None:
        text = word.lower()
        return lambda trial: text in _text(trial)
    name, sign, wanted = match.groups()
    get = _FIELDS.get({"best": "best_metric"}.get(name, name)) or _hparam(name)
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
        return shown(value).lower() == wanted.lower()

    return equal if sign == "=" else lambda trial: not equal(trial)
