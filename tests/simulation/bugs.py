"""Bugs that are reintroduced, one at a time, to show that the simulation finds them.

`python -m tests.simulation.bugs` prints the seed that finds each.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from dray.desk.desk import Desk
from dray.desk.lease import Client
from dray.experiment import driver, open_search
from dray.experiment.alerts import Alerts
from dray.experiment.core import RunCore
from dray.experiment.driver import ExperimentDriver
from dray.experiment.limits import Limits
from dray.experiment.retention import Retention
from dray.experiment.reuse import Reuse
from dray.records.spending import Spending
from searchers.search import Search
from tests.simulation.schedule import Schedule, drawn
from tests.simulation.simulation import failure_of

MOST = 200


class Bug(NamedTuple):
    """A fault in the code of a method or function: `wrong` replaces `right`. The seed finds it, with a person's
    requests, budgets, alerts, and code that works once in a process on demand."""

    owner: Any
    name: str
    right: str
    wrong: str
    seed: int
    requests: bool = False
    budgets: bool = False
    alerts: bool = False
    once: bool = False

    def schedule(self, seed: int) -> Schedule:
        return drawn(seed, requests=self.requests, budgets=self.budgets, alerts=self.alerts, once=self.once)

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Put the bug into the code within the block."""
        right = getattr(self.owner, self.name)
        function = right.fget if isinstance(right, property) else right
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.right) == 1, f"{self.name} has changed: adapt this bug"
        namespace: dict[str, Any] = {}
        exec(source.replace(self.right, self.wrong), function.__globals__, namespace)
        setattr(self.owner, self.name, namespace[self.name])
        try:
            yield
        finally:
            setattr(self.owner, self.name, right)

    def find(self) -> tuple[int, str] | None:
        """Return the first seed that finds the bug, and the failure.

        The bug's own seed is tried first, but may no longer find it after changes to the code or the simulator.
        """
        with self.present():
            tried = ((seed, failure_of(self.schedule(seed))) for seed in itertools.chain([self.seed], range(MOST)))
            return next((found for found in tried if found[1]), None)


BUGS = {
    # Issue 39 names these. The first three were orders of messages between threads. Now there is only one thread, and
    # each is the same mistake in the code that decides today.
    "a trial queued outside the lock": Bug(
        ExperimentDriver, "_granted", "if view.state not in RUNNABLE or self._closing", "if self._closing", 2_388
    ),
    "a drained trial lost": Bug(
        Desk, "group_ended", 'lease.state in ("granted", "moving")', 'lease.state == "granted"', 1_152
    ),
    "a closed terminal that hung": Bug(ExperimentDriver, "close", 'self._answer_all(lease, "interrupt")', "pass", 438),
    "an acknowledgement before the flush": Bug(
        ExperimentDriver, "_append", "Append(record, wait)", "Append(record, False)", 0
    ),
    "a lease granted twice": Bug(Client, "next_trial", "if not self._is_held(trial)", "if True", 134, requests=True),
    "a lost wakeup: the parameters of a lease": Bug(Desk, "bind", "self._answer_ranks(state.group)", "pass", 0),
    "a lost wakeup: a trial that is queued": Bug(Desk, "enqueue", "    self._match()\n", "", 3),
    "a retry outside the lock": Bug(
        ExperimentDriver,
        "_left",
        "has_ended = self.search.trials[trial].ended or self._results.ends(trial)",
        "has_ended = False",
        430,
    ),
    "retention deletes what a paused trial needs": Bug(
        driver,
        "checkpoints_needed",
        '2 if trial.state == "RUNNING" else 1',
        '2 if trial.state == "RUNNING" else 0',
        76,
    ),
    # Most of these were found by the simulation.
    "a drained trial lost that has saved": Bug(
        Desk, "leave", 'if state.state == "moving" and departure.outcome == "interrupted"', "if False", 14
    ),
    "a drained trial lost that another rank has left alone": Bug(
        Desk, "leave", "departure.is_failure or departure.alone or rank == 0", "departure.is_failure or rank == 0", 33
    ),
    "a trial that restarted, and waits for what was decided": Bug(
        ExperimentDriver, "_act", 'if lease is not None and answer.decision == "stop":', "if False:", 61_366
    ),
    "a lease that ends under ranks that have taken it up": Bug(
        Desk, "close", "if lease.parameters is None:", 'if lease.state == "granted":', 13_398
    ),
    "a fork's source deleted": Bug(Retention, "_prune", "(trial, each.batches) in sources", "False", 14, requests=True),
    "a fork's source kept only until its own checkpoint is written": Bug(
        Retention, "saved", "self._prune()", "self.unpin(trial); self._prune()", 9, requests=True
    ),
    "a fork with other code": Bug(Search, "code_of", "self._origin(trial)", "trial", 19, requests=True),
    "a request read twice": Bug(
        ExperimentDriver, "request", "if request.id in self._requested or", "if", 4, requests=True
    ),
    "a canceled trial that was stopped by the method": Bug(
        open_search, "_end_stopped", '"canceled" if trial in canceled else "stopped"', '"stopped"', 349, requests=True
    ),
    "a budget that is exceeded": Bug(Limits, "spend", "self.share >= 1:", "self.share >= 1.5:", 9, budgets=True),
    "an alert sent again by each driver": Bug(
        Alerts, "_take", 'self.pending.pop(record["id"], None)', "pass", 8, alerts=True
    ),
    "an alert forgotten that a killed driver was sending": Bug(
        Alerts, "_take", 'self.pending[record["id"]] = record', "pass", 21, alerts=True
    ),
    "an alert raised again by another driver": Bug(
        Alerts, "_take", 'self._raised.add(record["key"])', "pass", 0, alerts=True
    ),
    "an alert that is not on the disk with its cause": Bug(
        RunCore, "settle", "self._write(records + alerts)", "self._write(records)", 5, alerts=True
    ),
    "a failure that an earlier trial in its process has caused counts": Bug(
        Reuse, "withhold", "if not left.reused", "if True", 0, once=True
    ),
    "a used group for a trial that needs a new one": Bug(
        Desk, "_match", "if group.used and trial in client.new:", "if False:", 0, once=True
    ),
    "a killed run that counts up to the next": Bug(
        Spending,
        "add",
        'if name == "opened":\n',
        'if name == "opened":\n        self._advance(event["time"])\n',
        9,
        budgets=True,
    ),
}
