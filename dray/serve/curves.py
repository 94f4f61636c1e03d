"""The learning curves of an experiment, as data: of many trials the best and others evenly by rank."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from dray.records.metrics import read_metrics
from dray.report.data import rung_name, rungs_reached, some_ranks
from dray.report.figures import BEST_COLOUR, rung_colour
from dray.report.scale import scaled
from dray.serve.live import Live
from dray.serve.trial import Trial
from searchers.views import TrialView

MAX_CURVES = 200
AXIS_S = 15.0
"""How long an axis stays as it is while the best value and the number of trials do."""


def curves(live: Live) -> bytes:
    """The curves of the searcher's metric, as JSON: see `encode`."""
    chosen = _chosen(live)
    best = live.best()
    key, now = (best and best.best_value, len(chosen)), time.monotonic()
    if live.axis is None or live.axis[0] != key or now - live.axis[1] > AXIS_S:
        values = [value for it in chosen for value in it.values if math.isfinite(value)]
        live.axis = (key, now, scaled({"layout": {}}, live.metric, values, live.sign))
    return encode(live, chosen, [it.curve(live.along) for it in chosen], live.metric, live.axis[2])


def other_curves(live: Live, kind: str, name: str) -> bytes:
    """The curves of another metric, of the same trials. Reads all metrics from the disk."""
    with live.lock:
        chosen = _chosen(live)
    rows = read_metrics(live.directory.metrics)
    rows = rows[(rows["kind"] == kind) & (rows["name"] == name)]
    by_trial = dict(iter(rows.groupby("trial_id")))
    found, drawn, values = [], [], []
    for it in chosen:
        if (mine := by_trial.get(it.view.id)) is not None:
            copy = Trial(TrialView(id=it.view.id), live.sign)
            columns = [mine[column].tolist() for column in ("batches", "epochs", "value", "time")]
            copy.at, copy.epochs, copy.values, copy.times = columns
            found.append(it)
            drawn.append(copy.curve(live.along))
            values += [value for value in copy.values if math.isfinite(value)]
    with live.lock:
        label = name if name.startswith(kind) else f"{kind} {name}"
        return encode(live, found, drawn, label, scaled({"layout": {}}, label, values, None))


def _chosen(live: Live) -> list[Trial]:
    ranked = live.ranked()
    return [ranked[rank] for rank in some_ranks(len(ranked), MAX_CURVES)]


def encode(live: Live, chosen: list[Trial], drawn: list[bytes], label: str, axis: Mapping[str, Any]) -> bytes:
    """Curves as JSON.

    ``shown`` of ``of`` trials that have validated, and ``how`` they were chosen, in words; ``groups``: how far trials
    got, with name and colour; ``curves``: best first, each with its trial, ``x``, ``y``, of how many points they are,
    and in ``group_of`` its group; ``scales`` and ``scale``: see `dray.report.scale.scaled`.
    """
    of, shown = len(live.ranked()), len(chosen)
    groups = [rungs_reached(live.rungs, it.view.last_step) for it in chosen]
    kinds = sorted(set(groups))
    best = live.best()
    head: dict[str, Any] = {
        "version": live.version,
        "metric": label,
        "metrics": [
            f"{kind} {name}" for kind, name in sorted(live.metrics) if (kind, name) != ("validation", live.metric)
        ],
        "along": live.along,
        "shown": shown,
        "of": of,
        "how": f"the best {MAX_CURVES // 2} and {MAX_CURVES - MAX_CURVES // 2} evenly by rank"
        if of > MAX_CURVES
        else "all",
        "best": None if best is None else best.view.id,
        "best_colour": BEST_COLOUR,
        "groups": [
            {"name": rung_name(live.rungs, rung, live.config.searcher.unit), "colour": rung_colour(live.rungs, rung)}
            for rung in kinds
        ],
        "group_of": [kinds.index(group) for group in groups],
        "scales": axis["scales"],
        "scale": axis["scale"],
    }
    return json.dumps(head)[:-1].encode() + b',"curves":[' + b",".join(drawn) + b"]}"
