"""Random search: trials run to their end; each end makes room for the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from searchers.events import Action, Event, Exited
from searchers.method import Fields, check_extension, check_state
from searchers.roster import Roster, default_max_invalid


class RandomSearch:
    """Determined's `random`: `max_trials` independent trials, `max_concurrent_trials` at a time.

    Source: Bergstra and Bengio, "Random Search for Hyper-Parameter Optimization" (JMLR 13, 2012).

    Args:
        max_trials: Trials to run, >= 1. Trials with invalid hyperparameters are replaced and don't count.
        max_concurrent_trials: Most trials at a time that were created and have not ended; 0 = no limit.
        max_length: Length of a trial, >= 1, if the search sets it; trials then validate there.
        max_invalid: Invalid trials that are replaced before the search gives up, >= 0.
            By default 4 per trial, and 16 at least.

    Raises:
        MethodError: A field is invalid; all are named.

    >>> RandomSearch(max_trials=3, max_concurrent_trials=2).start()
    [Create(trial=0), Create(trial=1)]
    """

    _name = "random"
    _budget, _least = "max_trials", 1
    _fixed_trials: str | None = None  # why there can't be more trials

    def __init__(
        self,
        *,
        max_trials: int,
        max_concurrent_trials: int = 16,
        max_length: int | None = None,
        max_invalid: int | None = None,
    ) -> None:
        check = Fields()
        check.whole(self._budget, max_trials, at_least=self._least)
        check.whole("max_concurrent_trials", max_concurrent_trials, at_least=0)
        if max_length is not None:
            check.whole("max_length", max_length, at_least=1)
        if max_invalid is not None:
            check.whole("max_invalid", max_invalid, at_least=0)
        check.done()
        self.rungs: tuple[int, ...] = () if max_length is None else (max_length,)
        self._max_concurrent, self._max_invalid = max_concurrent_trials, max_invalid
        self._roster = Roster(
            max_trials=max_trials, width=self._width(max_trials), max_invalid=self._invalid_bound(max_trials)
        )

    @property
    def max_trials(self) -> int:
        """Trials to run, as given or extended to."""
        return self._roster.max_trials

    def _width(self, max_trials: int) -> int:
        return self._max_concurrent or max_trials

    def _invalid_bound(self, max_trials: int) -> int | None:
        return default_max_invalid(max_trials) if self._max_invalid is None else self._max_invalid

    def start(self) -> list[Action]:
        """One `Create` for each place, as far as there are trials."""
        return self._roster.settle()

    def on(self, event: Event) -> list[Action]:
        """A successor when a trial ends; else nothing."""
        if not self._roster.is_live(event.trial) or not isinstance(event, Exited):
            return []
        self._roster.end(event.trial, event.reason)
        return self._roster.settle()

    def progress(self, trained: Mapping[int, float]) -> float:
        """Ended trials, and what live ones have trained of their length, as a share of `max_trials`.

        Determined divides by the trials created so far, which falls with every new one.
        """
        return self._roster.progress((self._roster.ended + self._roster.trained(trained)) / (self.max_trials or 1))

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        """More trials; or longer ones: then all that completed are resumed, in their order.

        Raises:
            MethodError: The budget does not grow, or this method cannot do it. Nothing has changed.
        """
        check_extension(
            max_trials=(max_trials, self._fixed_trials or self.max_trials),
            max_length=(
                max_length,
                self.rungs[0] if self.rungs else "this search does not set the length of its trials",
            ),
        )
        longer = max_length is not None and self.rungs != (max_length,)
        if max_length is not None:
            self.rungs = (max_length,)
        trials = max_trials or self.max_trials
        self._roster.extend(
            max_trials=trials,
            width=self._width(trials),
            max_invalid=self._invalid_bound(trials),
            again=sorted(self._roster.completed) if longer else (),
        )
        return self._roster.settle()

    def dump(self) -> dict[str, object]:
        """The state as JSON."""
        return {"method": self._name, "rungs": self.rungs, "roster": self._roster.dump()}

    def load(self, state: dict[str, object]) -> None:
        """Continue from a dump."""
        check_state(self._name, state)
        self.rungs = tuple(cast("list[int]", state["rungs"]))
        self._roster.load(cast("dict[str, object]", state["roster"]))
