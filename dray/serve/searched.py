"""What an experiment searches, and how."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml
from typing_extensions import TypedDict

from dray.config.searcher import SamplingSearcher
from dray.records.reader import ExperimentReader
from dray.text import shown
from dray.training.units import amount
from searchers.domains import parameters, ranges


class Searched(TypedDict):
    config: str  # the text of experiment.yaml
    written: str  # the same without the fields that have their defaults
    facts: list[tuple[str, str]]  # about the search: method, metric, lengths, slots
    space: list[tuple[str, str]]  # the hyperparameters with their values


def searched(reader: ExperimentReader) -> Searched:
    space = [*ranges(reader.config.space.root), *_constants(reader)]
    directory = reader.directory
    written = yaml.dump(directory.config().written(), Dumper=yaml.CSafeDumper, sort_keys=False)
    return {"config": directory.config_text(), "written": written, "facts": list(_facts(reader)), "space": space}


def _facts(reader: ExperimentReader) -> Iterator[tuple[str, str]]:
    searcher, resources = reader.config.searcher, reader.config.resources
    sampler = f", sampler {searcher.sampler.name}" if isinstance(searcher, SamplingSearcher) else ""
    yield "method", f"{searcher.name}{sampler}"
    if searcher.objectives is None:
        yield "metric", f"{reader.metric}, {'smaller' if searcher.sign == 1 else 'larger'} is better"
    else:
        yield from (
            ("constraint" if each.is_constraint else "objective", str(each)) for each in searcher.objectives.metrics
        )
    length = "set by its program" if searcher.length is None else amount(f"{searcher.length:g}", searcher.unit)
    rungs = ", ".join(f"{rung:g}" for rung in reader.rungs[:-1])
    yield "length of a trial", length + (f"; compared at {rungs}" if rungs else "")
    yield "trials", f"{searcher.trial_count:,} at most" if searcher.trial_count else "set by the method"
    yield "slots per trial", resources.share or str(resources.slots_per_trial)


def _constants(reader: ExperimentReader) -> Iterator[tuple[str, str]]:
    """Hyperparameters that are not searched, with the value of all trials."""
    searched = {re.sub(r"\[\d+\]", "", each.name) for each in parameters(reader.config.space.root)}
    for name in reader.hparam_names:
        if name not in searched and name not in reader.varying:
            values = [trial.hparams[name] for trial in reader.trials.values() if trial.hparams.get(name) is not None]
            if values:
                yield name, shown(values[0])
