"""A page of an experiment's trials as a table, filtered by facets; and what each facet would leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from aiohttp import web

from dray.figures.data import rung_name, rungs_reached
from dray.records.reader import ExperimentReader
from dray.records.trial_record import TrialRecord
from dray.serve import near, trials
from dray.serve.answers import BadInput, encoded, number, plain

MAX_ROWS = 500  # most rows of a page
MAX_COLUMNS = 20  # most metrics as columns
MAX_CODES = 12  # most variants of the code to filter by
Keys = Mapping[str, Callable[[TrialRecord], str]]


def page(reader: ExperimentReader, request: web.Request) -> bytes:
    """JSON: ``trials``, the rows of a page, see `trials.find` and `near.nearest`; ``found``: the number of matches;
    ``of``: the number of trials; with ``facets=1`` also `facets`. With ``ids=1`` in place of the rows only the numbers
    of all matches, in ``ids``."""
    offset, limit = number(request, "offset"), number(request, "limit", 50, most=MAX_ROWS)
    query, keys = request.query, _keys(reader)
    sort, point = query.get("sort", "trial"), query.get("near")
    chosen = {name: set(query[name].split(",")) for name in keys if query.get(name)}
    searched = trials.find(
        reader.ranked() if sort == trials.RANK else reader.trials.values(),
        reader,
        sort=sort,
        descending=query.get("descending") == "1",
        search=query.get("search", ""),
    )
    found = _filtered(searched, keys, chosen)
    head: dict[str, Any] = {"found": len(found), "of": len(reader.trials), "offset": offset}
    if query.get("facets") == "1":
        head["facets"] = facets(reader, searched, chosen)
    if query.get("ids") == "1":
        return encoded(head | {"ids": [trial.id for trial in found]})
    if point is not None:
        found, sent = near.nearest(reader.config.space, found, point, offset, limit)
        head["found"] = len(found)
    else:
        sent = rows(reader, found[offset : offset + limit], query.getall("metric", []))
    return encoded(head)[:-1] + b',"trials":[' + b",".join(sent) + b"]}"


def rows(reader: ExperimentReader, found: Sequence[TrialRecord], metrics: Sequence[str]) -> list[bytes]:
    """The rows of trials; the last values of metrics such as ``training.loss`` are in ``metrics``."""
    if not metrics:
        return [trials.row(trial) for trial in found]
    if len(metrics) > MAX_COLUMNS:
        raise BadInput(f"metric: at most {MAX_COLUMNS} of them are columns, got {len(metrics)}")
    columns = {name: trials.last_value(reader, name) for name in metrics}
    values = [{name: plain(get(trial)) for name, get in columns.items()} for trial in found]
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
) -> dict[str, list[dict[str, Any]]]:
    """The values of each facet: ``value``, ``label`` and ``count``, how many trials have it among those that the other
    facets leave."""
    keys, found = _keys(reader), {}
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
