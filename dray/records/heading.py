"""What a list needs of an experiment's config."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dray.records.overview import compared_by
from dray.records.spending import totals_of
from searchers import rows
from searchers.objectives import Objectives


@dataclass(frozen=True, slots=True)
class Heading:
    """Sections of experiment.yaml as they are written there, but for ``objectives`` and the totals of ``budget``."""

    title: str
    searcher: Mapping[str, Any]
    objectives: Objectives
    labels: tuple[str, ...]
    budget: Mapping[str, float]
    prices: Mapping[str, Any]
    repeat: Mapping[str, Any] | None

    @classmethod
    def of(cls, config: Path) -> Heading:
        """Read a config file; `DamagedFile` if that fails."""
        errors = (yaml.YAMLError, LookupError, TypeError, AttributeError, ValueError, RecursionError)
        with rows.readable(config, *errors):
            raw = _parsed(_sections(rows.read(config).decode()))
            if not isinstance(raw, Mapping):
                raise TypeError("it has no fields")
            return cls(
                title=str(raw["name"]),
                searcher=raw["searcher"],
                objectives=compared_by(raw["searcher"]),
                labels=tuple(map(str, raw.get("labels") or ())),
                budget=totals_of(raw.get("budget")),
                prices=raw.get("prices") or {},
                repeat=raw.get("repeat"),
            )


def _sections(config: str) -> str:
    """The sections of a config that a list needs. Parsing all of it would take most of a list's time, and `load_config`
    imports libraries that the config names, such as Optuna."""
    sections = re.split(r"^(?=\S)", config, flags=re.M)
    if "&" in config or not all(re.match(r"\w+:[ \n]", section) for section in sections[1:]):
        return config  # written by hand
    names = ("name:", "searcher:", "budget:", "prices:", "repeat:", "labels:")
    return "".join(each for each in sections if each.startswith(names))


@functools.lru_cache(maxsize=64)
def _parsed(sections: str) -> Any:
    """Cached, because many experiments of a list have the same sections."""
    # The fast parser crashes at a nesting of some 50,000 levels; the other one raises an error.
    is_flat = sum(map(sections.count, "[{-?:")) < 1000
    return yaml.load(sections, getattr(yaml, "CSafeLoader", yaml.SafeLoader) if is_flat else yaml.SafeLoader)
