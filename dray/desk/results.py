"""Results for the search to decide on: the desk hands them to the Tune handle, and keeps them until answered."""

from __future__ import annotations

import itertools
from collections import deque

from dray.desk.messages import Decision, Outcome, Result
from dray.desk.wakeup import Signal


class Results:
    """Of each trial the first result is handed over; the others wait until it is answered."""

    def __init__(self) -> None:
        self._handle = -1  # its process id
        self._of: dict[int, deque[Result]] = {}
        self._numbers = itertools.count(1)
        self._due: list[Result] = []  # not yet handed over, in order
        self._news = Signal()
        self._finished = False

    def add(
        self, trial: int, *, step: float | None = None, value: float | None = None, outcome: Outcome | None = None
    ) -> int:
        """Add a result of a trial. Returns its number."""
        result = Result(number=next(self._numbers), trial=trial, step=step, value=value, outcome=outcome)
        mine = self._of.setdefault(trial, deque())
        mine.append(result)
        if len(mine) == 1:
            self._hand_over(result)
        return result.number

    def answered(self, trial: int, number: int, decision: Decision) -> None:
        """The driver has decided on a result of a trial. Later results of a stopped trial are dropped."""
        mine = self._of.get(trial, deque())
        while mine and mine[0].number <= number:
            mine.popleft()
        if decision == "stop" or not mine:
            self._of.pop(trial, None)
        else:
            self._hand_over(mine[0])

    def is_new(self, process: int) -> bool:
        """Whether this is a new handle; it then gets all unanswered results again."""
        if process == self._handle:
            return False
        self._handle = process
        self._due = sorted((mine[0] for mine in self._of.values() if mine), key=lambda result: result.number)
        self._news.fire()
        return True

    async def due(self, process: int) -> list[Result] | None:
        """All results for this handle; waits until there are some. None when the search is over."""
        while process == self._handle and not self._due and not self._finished:
            await self._news.wait()
        if process != self._handle:  # the handle has died, but its call lives on
            return None
        due, self._due = self._due, []
        return due or None

    def finish(self) -> None:
        """The search is over: `due` returns None."""
        self._finished = True
        self._news.fire()

    def _hand_over(self, result: Result) -> None:
        self._due.append(result)
        self._news.fire()
