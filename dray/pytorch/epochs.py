"""Data sets that change from epoch to epoch: `set_epoch(epoch)`, in the training process and in loader workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from torch.utils.data import Dataset

from dray.training import rng


def set_epoch(dataset: Any, epoch: int, seed: int) -> None:
    """Call `set_epoch(epoch)` of a data set, or of those that it wraps.

    Its random draws are the same in all processes and in a resumed run, and leave the global RNGs unchanged.
    """
    with rng.seeded(Random(f"{seed}:dataset:{epoch}").getrandbits(63)):
        for each in _with_epochs(dataset, set()):
            each.set_epoch(epoch)


def _with_epochs(dataset: Any, seen: set[int]) -> Iterator[Any]:
    """The outermost data sets that have `set_epoch`: those wrapped by one are its own affair."""
    if id(dataset) in seen:
        return
    seen.add(id(dataset))
    if callable(getattr(dataset, "set_epoch", None)):
        yield dataset
        return
    for name, value in getattr(dataset, "__dict__", {}).items():
        # Of containers only those named like torch's (ConcatDataset.datasets): others may hold a million records.
        is_group = name.endswith("datasets") and isinstance(value, (list, tuple, Mapping))
        inner = (value.values() if isinstance(value, Mapping) else value) if is_group else (value,)
        for each in inner:
            if is_group or isinstance(each, Dataset) or name.endswith("dataset"):
                yield from _with_epochs(each, seen)
