"""A worker that reaches the desk but no longer the trial's driver: the trial goes on, as the driver may be there."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.experiment.restarts import Restarts
from dray.leases.desk import Desk
from dray.leases.effects import Reply, Tell
from dray.leases.messages import DeskReport, LeaseGranted, TrialLeft
from dray.rpc.connection import ConnectionLost
from dray.training.host import Report
from dray.worker import link
from dray.worker.host import RayHost
from dray.worker.lease import DriverLost, LeaseLost
from dray.worker.link import TrialLink
from dray.worker.trial import lost_driver
from tests.workers import SETTINGS, lease_in


def test_rows_that_can_no_longer_be_sent_do_not_hide_how_the_trial_has_left(tmp_path: Path) -> None:
    answer: Future[Any] = Future()
    driver: Any = SimpleNamespace(report=lambda *_: answer)
    host = RayHost(driver=driver, desk=driver, lease=lease_in(tmp_path), settings=SETTINGS, code_dir=None)
    host.publish(Report(batches=1, training={"loss": 1.0}))
    answer.set_exception(ConnectionLost("lost"))
    with pytest.raises(DriverLost):
        host.publish(Report(batches=2, training={"loss": 1.0}))
    host.close()


def test_a_permission_to_commit_that_a_lost_connection_has_held_up_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, answers = [0.0], [(60.0, True), (0.1, False)]  # another process got the lease while there was no connection
    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def may_commit(lease: int) -> Future[bool]:
        took, granted = answers.pop(0)
        clock[0] += took
        answer: Future[bool] = Future()
        answer.set_result(granted)
        return answer

    driver: Any = SimpleNamespace(may_commit=may_commit)
    trial = TrialLink(driver, driver, lease_in(tmp_path))
    with pytest.raises(LeaseLost):
        trial.confirm_commit()
    answers[:] = [(60.0, True), (0.1, True), (0.1, False)]
    trial.confirm_commit()
    assert len(answers) == 1


def test_its_trial_is_restarted() -> None:
    answer: Future[Any] = Future()
    answer.set_exception(ConnectionLost("lost the connection to the experiment's desk at 10.0.0.7:8300"))
    driver: Any = SimpleNamespace(report=lambda *_: answer)
    lease: Any = SimpleNamespace(number=1, trial_id=3)
    with pytest.raises(DriverLost) as lost:
        TrialLink(driver, driver, lease).send(DeskReport(), wait=True)
    effects: list[Any] = []
    desk = Desk(effects.append)
    desk.add("groups", is_owner=True)
    desk.add("run")
    desk.enqueue("run", [3], first=False)
    desk.next_lease("next", "groups", "group-0", 1, 0, 1, 0)
    told = [each for each in effects if isinstance(each, Tell) and each.client == "run"]
    [granted] = [each.message for each in told if isinstance(each.message, LeaseGranted)]
    desk.begun(None, granted.lease)
    effects.clear()
    desk.leave("bye", granted.lease, 0, lost_driver(lost.value, batches=20))
    assert effects[0] == Reply("bye", None), "one that hangs waits for it before it ends its process"
    left = next(each.message for each in effects if isinstance(each, Tell) and isinstance(each.message, TrialLeft))
    assert Restarts([], max_restarts=0, code_of=lambda trial: None, emit=effects.append).end_of(left) is None, (
        "as if its node were lost"
    )
    assert left.error.startswith("trial 3 has lost its driver: lost the connection to the experiment's desk at 10.0")
