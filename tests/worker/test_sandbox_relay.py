"""What a trial in a sandbox may say to the driver and the desk, through its worker."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from dray.leases.failure import Failure
from dray.leases.messages import Departure, DeskReport, Unfit
from dray.rpc.connection import ConnectionLost
from dray.rpc.wire import Malformed
from dray.worker.ranks import Place
from dray.worker.sandbox import Relay, remove_links
from tests.workers import lease_in


class Loop:
    """Runs what is posted at once."""

    def post(self, call: Any, *args: Any) -> None:
        call(*args)


class Callee:
    """Keeps its calls, and answers each one so."""

    def __init__(self, answer: Any = True) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._answer = answer

    def tell(self, method: str, *args: Any) -> None:
        self.calls.append((method, *args))

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> Future[Any]:
            self.calls.append((method, *args))
            answer: Future[Any] = Future()
            if isinstance(self._answer, Exception):
                answer.set_exception(self._answer)
            else:
                answer.set_result(self._answer)
            return answer

        return call


class Call:
    """A call of the child."""

    def __init__(self, method: str, *args: Any) -> None:
        self.method, self.args, self.session = method, args, self
        self.answers: list[Any] = []
        self.has_ended = False

    def answer(self, value: Any = None) -> None:
        self.answers.append(value)

    def end(self) -> None:
        self.has_ended = True


def relay(directory: Path, driver: Any = None, desk: Any = None) -> Relay:
    """The one of trial 3, in lease 7 on group-0."""
    lease = lease_in(directory / "trial_3", number=7, trial_id=3, client="run")
    loop: Any = Loop()
    return Relay(loop, driver or Callee(), desk or Callee(), "group-0", lease, Place("node-7", "10.0.0.7"))


ROW = {"batches": 5, "epochs": None, "kind": "validation", "name": "loss", "value": 0.5, "time": 1.0}
OWN: list[tuple[Any, ...]] = [
    ("report", 7, DeskReport(rows=(ROW,), step=5.0), True),
    ("may_commit", 7),
    ("improves", 7, 0.5),
    ("best",),
    ("damaged", 3, "{}/trial_3/checkpoint_5", "torn"),
    ("saved", 3, "{}/trial_3/checkpoint_5", 5, 0.5, None),
    ("stop_wanted", 7),
    ("broken", "run", "group-0", Unfit(message="no")),
]
TO_DESK = ("stop_wanted", "broken")


def placed(call: tuple[Any, ...], directory: Path) -> tuple[Any, ...]:
    return tuple(each.format(directory) if isinstance(each, str) else each for each in call)


@pytest.mark.parametrize("call", OWN, ids=lambda call: str(call[0]))
def test_a_call_about_its_own_lease_is_passed_on(call: tuple[Any, ...], tmp_path: Path) -> None:
    driver, desk = Callee(), Callee()
    call = placed(call, tmp_path)
    made: Any = Call(*call)
    relay(tmp_path, driver, desk).take(made)
    assert (desk if call[0] in TO_DESK else driver).calls == [call]
    assert made.answers == ([] if call[0] in ("saved", "damaged") else [True])


OF_OTHERS: list[tuple[Any, ...]] = [
    ("report", 8, DeskReport(), True),
    ("report", 7, DeskReport(rows=({**ROW, "batches": -1},)), True),
    ("report", 7, DeskReport(step=-1.0), True),
    ("may_commit", 6),
    ("improves", 8, 0.5),
    ("saved", 4, "{}/trial_4/checkpoint_5", 5, None, None),
    ("saved", 3, "{}/trial_4/checkpoint_5", 5, None, None),
    ("saved", 3, "{}/trial_3/checkpoint_5", 6, None, None),
    ("damaged", 3, "{}/trial_4/checkpoint_5", "torn"),
    ("damaged", 4, "{}/trial_3/checkpoint_5", "torn"),
    ("stop_wanted", 8),
    ("broken", "another run", "group-0", Unfit(message="no")),
    ("leave", 8, 0, Departure(outcome="completed")),
    # What no trial calls.
    ("spec",),
    ("next_lease", "run", "group-0", 1, 0, 1, 0, ""),
    ("arrived", "run", "group-0", 1, "node", "", ""),
    ("fetch", 1),
    ("remove", "run"),
    ("take", 1),
    # Other types than it has.
    ("report", 7, {"final": True}, True),
    ("report", 7, DeskReport(), 1),
    ("best", 1),
]


@pytest.mark.parametrize("call", OF_OTHERS, ids=str)
def test_any_other_call_ends_the_connection_and_goes_nowhere(call: tuple[Any, ...], tmp_path: Path) -> None:
    driver, desk = Callee(), Callee()
    one, made = relay(tmp_path, driver, desk), Call(*placed(call, tmp_path))
    with pytest.raises(Malformed):
        one.take(made)  # type: ignore[arg-type]
    assert driver.calls == desk.calls == []
    assert one.departure is None


def test_the_first_departure_counts_and_cant_blame_another_node(tmp_path: Path) -> None:
    one = relay(tmp_path)
    failure = Failure(kind="device", node="another")
    first = Departure(outcome="errored", error="went wrong", failure=failure, stale="out of order")
    for departure in (first, Departure(outcome="completed")):
        call: Any = Call("leave", 7, 0, departure)
        one.take(call)
        assert call.answers == [None]
    assert one.departure is not None
    assert one.departure.failure is not None
    assert (one.departure.error, one.departure.stale) == ("went wrong", "")
    assert one.departure.failure.node == "node-7"


def test_a_driver_that_is_lost_is_lost_to_the_trial_too(tmp_path: Path) -> None:
    lost = ConnectionLost("it has ended")
    one, call = relay(tmp_path, Callee(lost)), Call("may_commit", 7)
    one.take(call)  # type: ignore[arg-type]
    assert (call.has_ended, call.answers, one.unreachable) == (True, [], lost)


def test_pipes_and_links_to_others_that_a_trial_leaves_are_removed(tmp_path: Path) -> None:
    outside, own = tmp_path / "outside", tmp_path / "trial_3"
    (own / "checkpoint_5" / "code").mkdir(parents=True)
    outside.mkdir()
    (outside / "manifest.json").write_text("theirs")
    (own / "checkpoint_5" / "manifest.json").write_text("its own")
    (own / "checkpoint_6").symlink_to(outside)
    (own / "checkpoint_5" / "state").symlink_to(outside / "manifest.json")
    os.mkfifo(own / "checkpoint_5" / "code" / "pipe")
    (own / "checkpoint_5" / "code" / "same").symlink_to("../manifest.json")
    (own / "checkpoint_5" / "code").chmod(0o500)
    remove_links(own)
    assert [str(each.relative_to(own)) for each in sorted(own.rglob("*"))] == [
        "checkpoint_5",
        "checkpoint_5/code",
        "checkpoint_5/code/same",
        "checkpoint_5/manifest.json",
    ]
    assert (outside / "manifest.json").read_text() == "theirs"
