"""Where a trial comes from, and which trials come from it."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import TypedDict

from dray.records.trial_record import TrialRecord
from dray.text import some

_SHOWN = 12


class _Trial(TypedDict):
    trial: int


class Relative(_Trial, total=False):
    """A trial, by its number."""

    batches: int | None  # of the checkpoint
    seed: int  # of a repeat


class Lineage(TypedDict):
    """The relatives of a trial."""

    ancestors: list[Relative]  # those whose checkpoints it began from, the nearest first
    children: list[Relative]  # those that began from its own checkpoints
    repeats: list[Relative]  # those that run it again


def lineage(trials: Mapping[int, TrialRecord], trial: int) -> Lineage:
    """The relatives of a trial."""
    ancestors, one = list[Relative](), trials[trial]
    while one.source_trial is not None:
        ancestors.append({"trial": one.source_trial, "batches": one.source_batches})
        if one.source_trial not in trials:
            break
        one = trials[one.source_trial]
    children = [each for each in trials.values() if each.source_trial == trial]
    repeats = [each for each in trials.values() if each.repeat is not None and each.repeat.trial == trial]
    return {
        "ancestors": ancestors,
        "children": [{"trial": each.id, "batches": each.source_batches} for each in children],
        "repeats": [{"trial": each.id, "seed": each.repeat.seed} for each in repeats if each.repeat is not None],
    }


def relatives(found: list[Relative]) -> str:
    """ "trial 5 at batch 10, trial 7 at batch 20"; "" for no relatives."""
    texts = [
        f"trial {each['trial']} " + (f"at batch {each['batches']}" if "batches" in each else f"(seed {each['seed']})")
        for each in found
    ]
    return some(texts, _SHOWN)
