"""What the experiments of tokens spend, read from the timelines that their processes write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from dray.records.directory import ExperimentDirectory
from dray.records.spending import Spending
from dray.serve.queue import Item
from dray.serve.quota import UNITS
from dray.serve.tokens import Tokens


class Meters:
    """One meter for each experiment that may spend, with the prices of its owner's quota."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._meters: dict[str, Spending] = {}

    def read(self, items: Iterable[Item], soon: float) -> dict[str, Mapping[str, float]]:
        """What each of these experiments will have spent by a time (Unix time in s)."""
        return {item.name: _by_unit(self._meter(item).by(soon)) for item in items}

    def close(self, item: Item, ended: float | None = None) -> dict[str, float]:
        """What an experiment has spent whose process and trials have ended; if they were killed, its timeline does not
        say when. `ended`: when its last trial left (Unix time in s); None: the server was killed too."""
        meter = self._meter(item)
        with suppress(OSError):
            last = meter.last_alive(item.budget) if ended is None else ended
            meter.close(ExperimentDirectory(item.path).metrics, last)
        del self._meters[item.name]
        return _by_unit(meter.usage.spent)

    def _meter(self, item: Item) -> Spending:
        meter = self._meters.setdefault(item.name, Spending(self._tokens.quota(item.owner).prices))
        with suppress(OSError, ValueError, LookupError, TypeError):  # deleted, or changed by the trials' code
            meter.read(ExperimentDirectory(item.path).metrics)
        return meter


def _by_unit(spent: Mapping[str, float]) -> dict[str, float]:
    return {unit: spent[unit] for unit in UNITS}
