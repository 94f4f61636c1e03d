"""Random search: trials run to their end; each end makes room for the next."""

from __future__ import annotations

from typing import cast

from searchers.events import Action, Event, Exited
from searchers.method import Fields, check_state
from searchers.roster import Roster, default_max_invalid


class RandomSearch:
    """Determined's `random`: `max_trials` independent trials, `max_concurrent_trials` at a time.

    Args:
        max_trials: Trials to run, >= 1. Trials with invalid hyperparameters are replaced and don't count.
        max_concurrent_trials: Trials created and not ended at any time; 0 = no limit.
        max_length: Length of a trial, >= 1, if it is the search that sets it; a validation is wanted there.
        max_invalid: Invalid trials that are replaced before the search gives up, >= 0.
            By default 4 per trial, and 16 at least.

    Raises:
        MethodError: A field is invalid; all are named.

    >>> RandomSearch(max_trials=3, max_concurrent_trials=2).start()
    [Create(trial=0), Create(trial=1)]
    """

    _name = "random"

    def __init__(
        self,
        *,
        max_trials: int,
        max_concurrent_trials: int = 16,
        max_length: int | None = None,
        max_invalid: int | None = None,
    ) -> None:
        check = Fields()
        check.whole("max_trials", max_trials, at_least=1)
        check.whole("max_concurrent_trials", max_concurrent_trials, at_least=0)
        if max_length is not None:
            check.whole("max_length", max_length, at_least=1)
        if max_invalid is not None:
            check.whole("max_invalid", max_invalid, at_least=0)
        check.done()
        self.rungs: tuple[int, ...] = () if max_length is None else (max_length,)
        self._roster = Roster(
            max_trials=max_trials,
            width=max_concurrent_trials or max_trials,
            max_invalid=default_max_invalid(max_trials) if max_invalid is None else max_invalid,
        )

    def start(self) -> list[Action]:
        """One `Create` for each place, as far as there are trials."""
        return self._roster.settle()

    def on(self, event: Event) -> list[Action]:
        """A successor when a trial ends; else nothing."""
        if not self._roster.is_live(event.trial) or not isinstance(event, Exited):
            return []
        self._roster.end(event.trial, event.reason)
        return self._roster.settle()

    def dump(self) -> dict[str, object]:
        """The state as JSON."""
        return {"method": self._name, "roster": self._roster.dump()}

    def load(self, state: dict[str, object]) -> None:
        """Continue from a dump."""
        check_state(self._name, state)
        self._roster.load(cast("dict[str, object]", state["roster"]))
