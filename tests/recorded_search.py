"""The search of a journal that was written by hand: it repeats the recorded decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dray.config.schema import ExperimentConfig
from searchers.errors import Faults
from searchers.events import Action, Create, Done, Pause, Repeat, Resume, Stop
from searchers.records import KINDS, request_from_json
from searchers.search import Search
from searchers.space import Space


def action_from_json(record: Mapping[str, Any]) -> Action:
    if record["action"] == "done":
        return Done(reason=record["reason"])
    if record["action"] != "create":
        return {"stop": Stop, "pause": Pause, "resume": Resume}[record["action"]](trial=record["trial"])
    repeat, new = record.get("repeat"), request_from_json(record)
    of = None if repeat is None else Repeat(**repeat)
    return Create(trial=record["trial"], source=new.source, hparams=new.hparams, code=new.code, repeat=of)


class RecordedMethod:
    """Repeats the decisions in a journal's records, one per call."""

    rungs = ()

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._records = (record for record in records if record.get("event") in KINDS)

    def on(self, *event: Any, **budget: Any) -> list[Action]:
        return [action_from_json(action) for action in next(self._records)["actions"]]

    start = extend = on

    def progress(self, trained: Mapping[int, float]) -> float:
        return 0.0


class AnySpace(Space):
    """What was drawn is a point of it."""

    def faults(self, point: object) -> Faults:
        return []


def recorded_search(config: ExperimentConfig, records: list[dict[str, Any]]) -> Search:
    search = Search(
        RecordedMethod(records),
        AnySpace(root=config.space.root),
        seed=config.reproducibility.experiment_seed,
        smaller_is_better=config.searcher.sign == 1,
        log=lambda record: None,
        objectives=config.searcher.objectives,
    )
    return search.replay(records)
