"""Bugs that are put back, one at a time, to show that the simulation finds them.

python -m tests.simulation.bugs: which seed finds each, and how many it took.
"""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dray.desk.desk import Desk
from dray.desk.lease import Client
from dray.experiment import driver
from dray.experiment.driver import ExperimentDriver
from tests.simulation.schedule import schedule_of
from tests.simulation.simulation import failure_of

MOST = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A fault in the code.

    Attributes:
        owner, name: the method, or the function.
        right, wrong: what its source has, and has with the bug.
        seed: finds it; None: which does is not known.
    """

    owner: Any
    name: str
    right: str
    wrong: str
    seed: int | None

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Within the block, the code has it."""
        right = getattr(self.owner, self.name)
        function = right.fget if isinstance(right, property) else right
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.right) == 1, f"{self.name} has changed: adapt this bug"
        made: dict[str, Any] = {}
        exec(source.replace(self.right, self.wrong), function.__globals__, made)
        setattr(self.owner, self.name, made[self.name])
        try:
            yield
        finally:
            setattr(self.owner, self.name, right)

    def find(self) -> tuple[int, str] | None:
        """The first seed that finds it, and what fails: its own seed comes first, and ceases to find it if the code,
        or the simulator, takes another way."""
        with self.present():
            for seed in range(MOST) if self.seed is None else (self.seed, *range(MOST)):
                if why := failure_of(schedule_of(seed)):
                    return seed, why
        return None


BUGS = {
    "a trial queued outside the lock": Bug(
        owner=ExperimentDriver,
        name="_granted",
        right="if view.state not in RUNNABLE or self._closing",
        wrong="if self._closing",
        seed=None,
    ),
    "a drained trial lost": Bug(
        owner=Desk,
        name="group_ended",
        right='if lease.state in ("granted", "moving"):',
        wrong='if lease.state == "granted":',
        seed=514,
    ),
    "a drained trial lost that has saved": Bug(
        owner=Desk,
        name="leave",
        right='if state.state == "moving" and departure.outcome == "interrupted":',
        wrong="if False:",
        seed=14,
    ),
    "a closed terminal that hung": Bug(
        owner=ExperimentDriver, name="close", right='self._answer_all(lease, "interrupt")', wrong="pass", seed=None
    ),
    "an acknowledgement before the flush": Bug(
        owner=ExperimentDriver, name="_append", right="Append(record, wait)", wrong="Append(record, False)", seed=0
    ),
    "a lease granted twice": Bug(
        owner=Client, name="next_trial", right="if not self._is_held(trial)", wrong="if True", seed=718
    ),
    "a lost wakeup: the parameters of a lease": Bug(
        owner=Desk, name="bind", right="self._answer_ranks(state.group)", wrong="pass", seed=0
    ),
    "a lost wakeup: a trial that is queued": Bug(
        owner=Desk, name="enqueue", right="    self._match()\n", wrong="", seed=3
    ),
    "a retry outside the state": Bug(
        owner=ExperimentDriver,
        name="_left",
        right="has_ended = self.search.trials[trial].ended or self._results.ends(trial)",
        wrong="has_ended = False",
        seed=190,
    ),
    "a late call of a handle that has died": Bug(
        owner=ExperimentDriver,
        name="fetch",
        right="Reply(self._fetching, [])",
        wrong="Reply(self._fetching, None)",
        seed=None,
    ),
    "a lease that ends under ranks that have taken it up": Bug(
        owner=Desk,
        name="close",
        right="if lease.parameters is None:",
        wrong='if lease.state == "granted":',
        seed=None,
    ),
    "retention deletes what a paused trial needs": Bug(
        owner=driver,
        name="checkpoints_needed",
        right='2 if trial.state == "RUNNING" else 1',
        wrong='2 if trial.state == "RUNNING" else 0',
        seed=76,
    ),
}


if __name__ == "__main__":
    for name, bug in BUGS.items():
        found = bug.find()
        print(f"{name}: {'not found' if found is None else f'seed {found[0]}: {found[1]:.150}'}", flush=True)
