"""An experiment's trials for the page: a table that can be sorted and searched, and learning curves."""

from __future__ import annotations

import json
import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dray.records.metrics import read_trials
from dray.records.reader import ExperimentReader
from dray.records.trial_record import TrialRecord
from dray.report.data import rung_name, rungs_reached, some_ranks, thinned
from dray.report.figures import BEST_COLOUR, rung_colour
from dray.report.scale import scaled
from dray.serve.answers import BadInput, plain
from dray.text import shown

MAX_ROWS = 500  # most rows in a page of the table
MAX_CURVES = 200
AXIS_S = 15.0  # how long an axis is kept while the best value and the number of trials stay the same
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


# ---------------------------------------------------------------------------------------------------------- the table
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


# ---------------------------------------------------------------------------------------------------------- curves
def curves(reader: ExperimentReader) -> bytes:
    """The curves of the searcher's metric, as JSON: see `_encoded`."""
    chosen = _chosen(reader)
    along = _along(reader)
    drawn = []
    for trial in chosen:
        if "curve" not in trial.derived:
            xs = trial.epochs if along == "epochs" else trial.at
            trial.derived["curve"] = _curve(trial.id, xs, trial.values)
        drawn.append(trial.derived["curve"])
    best = reader.best()
    key, now = (best and best.best_metric, len(chosen)), time.monotonic()
    axis = reader.derived.get("axis")
    if axis is None or axis[0] != key or now - axis[1] > AXIS_S:
        values = [value for trial in chosen for value in trial.values]
        axis = reader.derived["axis"] = key, now, scaled({"layout": {}}, reader.metric, values, reader.sign)
    return _encoded(reader, chosen, drawn, reader.metric, axis[2])


def other_curves(reader: ExperimentReader, kind: str, name: str) -> bytes:
    """The curves of another metric for the same trials, read from the disk."""
    with reader.lock:
        chosen, along = _chosen(reader), _along(reader)
    rows = read_trials(reader.directory.metrics, [trial.id for trial in chosen])
    rows = rows[(rows["kind"] == kind) & (rows["name"] == name)]
    by_trial = dict(iter(rows.groupby("trial_id")))
    found = [trial for trial in chosen if trial.id in by_trial]
    drawn = [
        _curve(trial.id, by_trial[trial.id][along].tolist(), by_trial[trial.id]["value"].tolist()) for trial in found
    ]
    label = name if name.startswith(kind) else f"{kind} {name}"
    with reader.lock:
        return _encoded(reader, found, drawn, label, scaled({"layout": {}}, label, rows["value"], None))


def _along(reader: ExperimentReader) -> str:
    return "epochs" if reader.config.searcher.unit == "epochs" and reader.has_epochs else "batches"


def _chosen(reader: ExperimentReader) -> list[TrialRecord]:
    ranked = reader.ranked()
    return [ranked[rank] for rank in some_ranks(len(ranked), MAX_CURVES)]


def _curve(trial: int, xs: Sequence[float | None], values: Sequence[float]) -> bytes:
    """A curve: ``x`` in batches or epochs, ``y`` the metric, null where it is not finite."""
    points = thinned(len(xs))
    ys = [values[i] if math.isfinite(values[i]) else None for i in points]
    curve = {"trial": trial, "x": [xs[i] for i in points], "y": ys, "of": len(xs)}
    return json.dumps(curve, allow_nan=False, separators=(",", ":")).encode()


def _encoded(
    reader: ExperimentReader, chosen: list[TrialRecord], drawn: list[bytes], label: str, axis: Mapping[str, Any]
) -> bytes:
    """Curves as JSON.

    ``shown`` of ``of`` trials that have validated, and ``how`` they were chosen, in words; ``groups`` by the highest
    rung reached, with name and colour; ``curves``, best first, each with its trial, ``x``, ``y`` and its number of
    points before thinning, and in ``group_of`` the index of its group; ``scales`` and ``scale``: see
    `dray.report.scale.scaled`.
    """
    of, searcher, rungs = len(reader.ranked()), reader.config.searcher, reader.rungs
    groups = [rungs_reached(rungs, trial.last_step) for trial in chosen]
    kinds, best = sorted(set(groups)), reader.best()
    others = sorted(reader.metrics - {("validation", reader.metric)})
    head: dict[str, Any] = {
        "version": reader.version,
        "metric": label,
        "metrics": [f"{kind} {name}" for kind, name in others],
        "along": _along(reader),
        "shown": len(chosen),
        "of": of,
        "how": f"the best {MAX_CURVES // 2} and {MAX_CURVES - MAX_CURVES // 2} evenly by rank"
        if of > MAX_CURVES
        else "all",
        "best": None if best is None else best.id,
        "best_colour": BEST_COLOUR,
        "groups": [
            {"name": rung_name(rungs, rung, searcher.unit), "colour": rung_colour(rungs, rung)} for rung in kinds
        ],
        "group_of": [kinds.index(group) for group in groups],
        "scales": axis["scales"],
        "scale": axis["scale"],
    }
    return json.dumps(head)[:-1].encode() + b',"curves":[' + b",".join(drawn) + b"]}"
