"""An experiment's search, opened to be run: replayed from its journal, and extended if requested."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

from dray._version import __version__
from dray.config.custom import Custom
from dray.config.load import with_limits
from dray.config.notify import Watched
from dray.config.schema import ExperimentConfig
from dray.config.search import CHANGEABLE, as_extended, build_search, sizes_of
from dray.environment import versions
from dray.errors import ConfigError
from dray.experiment.alerts import Alerts
from dray.experiment.driver import OpenSearch
from dray.experiment.limits import Limits
from dray.experiment.request_files import RequestFiles
from searchers.answers import carry_out
from searchers.errors import IllegalEvent, MethodError
from searchers.events import Exited
from searchers.journal import Journal
from searchers.search import Record, Search


def open_search(
    config: ExperimentConfig,
    custom: Custom,
    extension: Mapping[str, Any],
    *,
    journal: Journal,
    records: list[dict[str, Any]],
    requests: RequestFiles,
    watched: Watched | None = None,
) -> OpenSearch:
    """Replay the search, start or extend it, and carry out the requests that no driver has answered.

    Args:
        config: the config that the experiment was created with.
        extension: new values of ``max_trials``, ``max_length``, ``budget``, ``until``, ``patience`` and
            ``prices``, if any.
        records: the journal's records so far.
        watched: what its receivers of alerts want to know; by default, those of the config.

    Raises:
        ConfigError: an object that was given from Python is missing, or the extension is invalid.
    """
    _check_given(custom, records)
    custom.check(config.searcher)
    new: list[Record] = []

    def log(record: Record) -> None:
        stamped = {**record, "time": time.time()}
        journal.append(stamped)
        new.append(stamped)

    search = build_search(config, log, records=records, where=journal.path, custom=custom)
    opened = {"event": "opened", "version": __version__, "versions": versions(), **custom.names()}
    journal.append({**opened, "time": time.time()})
    if not search.started:
        search.start()
    _end_stopped(search, records)
    _carry_out_requests(search, journal, records, requests)
    extended = _extended(search, as_extended(config, records), extension)
    limited = with_limits(extended, {name: extension[name] for name in CHANGEABLE if name in extension})
    new_limits = None
    if limited != extended:
        new_limits = {"event": "limits", **limited.model_dump(include=set(CHANGEABLE)), "time": time.time()}
        new.append(new_limits)
    limits = Limits(limited, itertools.chain(records, new))
    alerts = Alerts(watched or Watched.by(config.notify), limits, itertools.chain(records, new))
    return OpenSearch(
        search=search, config=limited, records=records, limits=limits, alerts=alerts, new_limits=new_limits
    )


def _check_given(custom: Custom, records: list[dict[str, Any]]) -> None:
    """Check that objects given from Python when the experiment was created are given again."""
    faults = []
    for argument, value in custom.names().items():
        opened = (record for record in records if record.get("event") == "opened")
        had = next((record[argument] for record in opened if record.get(argument)), None)
        if had is not None and value is None:
            what = f"the experiment was created with {had}, which can't be stored in its directory; pass it again, "
            faults.append((argument, f"{what}from Python: dray.Experiment.resume(path, {argument}=...)"))
    if faults:
        raise ConfigError(faults)


def _end_stopped(search: Search, records: list[dict[str, Any]]) -> None:
    """End trials that the search had stopped when the driver died before it recorded their end."""
    canceled = {record.get("trial") for record in records if record.get("event") == "requested"}
    while stopped := [view.id for view in search.trials.values() if view.stop_requested and not view.ended]:
        for trial in stopped:
            search.on(Exited(trial=trial, reason="canceled" if trial in canceled else "stopped"))


def _carry_out_requests(
    search: Search, journal: Journal, records: list[dict[str, Any]], requests: RequestFiles
) -> None:
    answered = {record.get("id") for record in records}
    for request in requests.waiting():
        if request.id not in answered:
            try:
                requests.check(request)
                carry_out(search, request)
            except IllegalEvent as error:
                journal.append({"event": "rejected", "id": request.id, "error": str(error), "time": time.time()})
        requests.remove(request.id)


def _extended(search: Search, config: ExperimentConfig, extension: Mapping[str, Any]) -> ExperimentConfig:
    """Extend the search if that is requested and not done yet. Returns the config as extended."""
    now = sizes_of(config.searcher)
    wanted = {field: extension[field] for field in now if field in extension and extension[field] != now[field]}
    if not wanted:
        return config
    if "max_trials" in wanted and getattr(config.searcher, "max_trials", 1) is None:
        raise ConfigError(
            [("searcher.max_trials", "is not set, so the search has no end; extend its limits instead")],
            "The extension",
        )
    try:
        search.extend(**wanted)
    except MethodError as error:
        raise ConfigError(error.faults, "The extension") from None
    return as_extended(config, [{"event": "extended", **wanted}])
