"""The time that training takes, as measured in an earlier experiment."""

from __future__ import annotations

import math
from statistics import fmean, stdev

from dray.config.searcher import Searcher
from dray.errors import NoExperiment
from dray.records.lookup import Name
from dray.records.result import Result
from searchers.previews import Rates

_PER_LEASE = ("starting", "ending")
"""The phases that a trial has whenever it gets a worker group, no matter how long it trains."""
_MEASURED = ("COMPLETED", "PRUNED", "PAUSED")
"""States of trials that trained as far as they reported; others may have trained further."""


def unit_of(searcher: Searcher) -> str:
    """The unit that times are given in: the searcher's unit of length, or trials if a program's ``fit()`` sets it."""
    return "trials" if searcher.length is None else searcher.unit


def measured_rates(experiment: Name, searcher: Searcher) -> Rates:
    """The rates of an experiment's trials, from its timeline, for a search with trials of the same kind.

    Raises:
        NoExperiment: there is none, several match, it has another unit of length, or none of its trials has trained.
    """
    result = Result(experiment)
    name, unit = result.path.name, unit_of(result.config.searcher)
    if unit != unit_of(searcher):
        raise NoExperiment(
            f"--like needs an experiment whose trials have their length in {unit_of(searcher)}, but {name} has {unit}; "
            "give another one, or --seconds-per-trial"
        )
    table = result.timeline.assign(seconds=lambda rows: rows["end"] - rows["start"])
    is_leased, is_per_lease = table["trial_id"] >= 0, table["phase"].isin(_PER_LEASE)
    trained_s = table[is_leased & ~is_per_lease].groupby("trial_id")["seconds"].sum()
    lengths = {
        trial.id: trial.last_step if unit != "trials" else 1
        for trial in result.reader.trials.values()
        if trial.state in _MEASURED and trial.source_trial is None
    }
    rates = [trained_s[trial] / length for trial, length in lengths.items() if length and trained_s.get(trial, 0.0)]
    if not rates:
        raise NoExperiment(f"--like needs an experiment with trials that have trained; {name} has none")
    is_next = (table[["group", "trial_id"]] != table[["group", "trial_id"]].shift()).any(axis=1)
    start_s = float(table[is_leased & is_per_lease]["seconds"].sum()) / int((is_leased & is_next).sum())
    boots_s = table[table["phase"] == "booting"]["seconds"]
    boot_s = float(boots_s.mean()) if len(boots_s) else 0.0  # a server's groups may have been up before
    reused = result.config.resources.reuse_workers
    return Rates(
        mean=fmean(rates),
        spread=stdev(map(math.log, rates)) if len(rates) > 1 else 0.0,
        measured=len(rates),
        start=start_s if reused else start_s + boot_s,
        boot=boot_s if reused else 0.0,
    )
