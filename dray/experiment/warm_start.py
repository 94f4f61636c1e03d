"""Reads what the experiments of ``searcher.warm_start`` have learned, and keeps it in the journal of the new one.

They are read once, when the experiment is created: from then on they may continue, or be deleted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dray.config.schema import ExperimentConfig
from dray.config.search import as_extended, rungs_of
from dray.config.searcher import SamplingSearcher
from dray.errors import ConfigError, NoExperiment
from dray.records.listing import StoredExperiment, open_experiment
from dray.storage import StorageError
from searchers.errors import JournalError
from searchers.journal import Journal
from searchers.search import Record
from searchers.warm_start import Source, tell_all

log = logging.getLogger(__name__)

_EVENT = "warm_start"


def read_sources(config: ExperimentConfig) -> list[Source]:
    """What the experiments that the config names have learned.

    Raises:
        ConfigError: one can't be read, or has nothing to learn from; all that can't are named.
    """
    sources, faults = [], []
    for number, name in enumerate(_named(config)):
        field = f"searcher.warm_start[{number}]"
        try:
            with open_experiment(name) as stored:
                source, metric = _source(stored)
        except (NoExperiment, StorageError, JournalError, ConfigError) as error:
            faults.append((field, f"{name} can't be read: {error}"))
            continue
        if why := _why_useless(source, config):
            faults.append((field, f"{why}; remove it from the list"))
        if metric != config.searcher.first_metric:
            given = f"{source.name} has optimized {metric}, not {config.searcher.first_metric}"
            log.warning("%s: %s; what is best in one must be best in the other", field, given)
        sources.append(source)
    if faults:
        raise ConfigError(faults)
    return sources


def recorded_sources(records: Iterable[Mapping[str, Any]]) -> list[Source] | None:
    """What a journal keeps of other experiments; None if it has no record of that."""
    found = next((record for record in records if record.get("event") == _EVENT), None)
    return None if found is None else [Source.from_json(source) for source in found["sources"]]


def record_of(sources: Sequence[Source]) -> Record:
    """The journal's record of them."""
    return {"event": _EVENT, "sources": [source.to_json() for source in sources]}


def weights(config: ExperimentConfig, records: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """The name and the weight of each of those experiments, by the results so far.

    Args:
        config: of the experiment.
        records: its journal.
    """
    sources = recorded_sources(records)
    if not sources:
        return []
    from searchers.multi_fidelity import MultiFidelitySampler  # with scipy, which takes a while

    rungs = rungs_of(as_extended(config, records))
    sampler = MultiFidelitySampler(config.space, seed=0, rungs=rungs, sources=sources)
    tell_all(records, sampler)
    return [(source.name, weight) for source, weight in zip(sources, sampler.weights(), strict=True)]


def with_whole_paths(config: ExperimentConfig) -> ExperimentConfig:
    """The config with paths in ``warm_start`` that are relative to the working directory made absolute."""
    named = _named(config)
    if not named:
        return config
    whole = [os.path.abspath(os.path.expanduser(name)) if _is_relative(name) else name for name in named]
    return config.model_copy(update={"searcher": config.searcher.model_copy(update={"warm_start": whole})})


def _is_relative(name: str) -> bool:
    return "://" not in name and (os.sep in name or name.startswith((".", "~")))


def _named(config: ExperimentConfig) -> Sequence[str]:
    return config.searcher.warm_start if isinstance(config.searcher, SamplingSearcher) else ()


def _source(stored: StoredExperiment) -> tuple[Source, str]:
    """What the experiment has learned, and its metric."""
    directory = stored.directory
    records = Journal.read(directory.journal) if directory.journal.exists() else []
    config = as_extended(directory.config(), records)
    return Source.of_records(records, rungs=rungs_of(config), name=stored.name), config.searcher.first_metric


def _why_useless(source: Source, config: ExperimentConfig) -> str:
    """Why nothing can be learned from a source; "" if something can."""
    if not source.trials:
        return f"{source.name} has no results"
    if not source.shares_with(config.space):
        return f"{source.name} has none of this experiment's hyperparameters, {', '.join(config.space.names())}"
    if not any(True for _ in source.within(config.space)):
        return f"{source.name} has no trial within the ranges of this experiment's hyperparameters"
    return ""
