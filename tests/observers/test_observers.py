"""What follows a run is told everything once, in its own time, and can't disturb it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import dray.observers.observer
from dray.observers.observer import Followed, News, Observers
from dray.records.metrics import PACK_EVERY_S, PACKED, TAIL, MetricsLog
from searchers.events import Event, Exited, Reported, Started
from tests.records.test_result import Story, config

Told = dict[int, tuple[str, list[tuple[int, str, float]]]]


class Notebook:
    """An observer that keeps what it is told: by trial its latest state, and all rows."""

    def __init__(self, fails: Callable[[], bool] = lambda: False) -> None:
        self.told: Told = {}
        self.times: dict[int, tuple[float | None, float | None]] = {}
        self.done: bool | None = None
        self.threads: set[str] = set()
        self._fails = fails

    def update(self, news: Sequence[News]) -> None:
        self.threads.add(threading.current_thread().name)
        if self._fails():
            raise OSError("no space left")
        assert len({one.trial.id for one in news}) == len(news)
        for one in news:
            rows = self.told.get(one.trial.id, ("", []))[1]
            rows += [(row["batches"], row["name"], row["value"]) for row in one.rows if row["kind"] == "validation"]
            self.told[one.trial.id] = (one.trial.state, rows)
            self.times[one.trial.id] = (one.trial.started, one.trial.ended)

    def close(self, done: bool) -> None:
        self.done = done


class Run(Story):
    """An experiment whose driver has observers."""

    def __init__(
        self, path: Path, observers: Mapping[str, Callable[[], Notebook]], say: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(path, config())
        self.said: list[str] = []
        self.observers = Observers(self.directory, observers)
        self.observers.begin(say or self.said.append)

    def validate(self, trial: int, batches: int, error: float, *, decides: bool = False, save: bool = False) -> None:
        self.metrics.append(trial, [row(batches, error)])
        self.observers.wake()
        if decides:
            self.happen(Reported(trial=trial, step=batches, value=error))

    def close(self, done: bool = False) -> None:
        self.observers.close(done)


def row(batches: int, error: float) -> dict[str, Any]:
    of = {"kind": "validation", "name": "error", "value": error}
    return {"batches": batches, "epochs": 0.0, "time": 1000.0 + batches, **of}


LATE = row(20, 0.125)
EVENTS: list[Event] = [Started(trial=0), Started(trial=1)]


def tell(story: Run) -> None:
    story.happen(*EVENTS)
    story.validate(0, 10, 0.5)
    story.validate(1, 10, 0.75)
    story.validate(0, 20, 0.25, decides=True)
    story.happen(Exited(trial=0, reason="completed"))


TOLD: Told = {
    0: ("COMPLETED", [(10, "error", 0.5), (20, "error", 0.25)]),
    1: ("RUNNING", [(10, "error", 0.75)]),
    2: ("PENDING", []),
    3: ("PENDING", []),
}


def test_an_observer_receives_every_event_once_in_its_own_thread(tmp_path: Path) -> None:
    notes = Notebook()
    story = Run(tmp_path / "experiment", {"notes": lambda: notes})
    tell(story)
    story.close(done=True)
    assert notes.told == TOLD
    assert notes.times == {0: (1002.0, 1005.0), 1: (1003.0, None), 2: (None, None), 3: (None, None)}
    assert notes.done is True
    assert notes.threads == {"dray-notes"}
    assert story.said == []


def test_an_observer_of_a_resumed_run_receives_its_past_too(tmp_path: Path) -> None:
    story = Run(tmp_path / "experiment", {})
    tell(story)
    story.close()
    story.metrics.close()
    story.journal.close()
    notes = Notebook()
    again = Observers(story.directory, {"notes": lambda: notes})
    again.begin(story.said.append)
    MetricsLog(story.directory.metrics).append(1, [LATE])
    again.close()
    assert notes.told == {**TOLD, 1: ("RUNNING", [(10, "error", 0.75), (20, "error", 0.125)])}
    assert notes.times[0] == (1002.0, 1005.0)
    assert notes.done is False


def test_nothing_is_made_before_there_is_something_to_write(tmp_path: Path) -> None:
    made = threading.Event()

    def make() -> Notebook:
        made.set()
        return Notebook()

    story = Run(tmp_path / "experiment", {"notes": make})
    story.happen(*EVENTS)
    assert not made.is_set()
    story.validate(0, 10, 0.5)
    assert made.wait(30)
    story.close()


def test_a_failing_observer_is_reported_once_and_others_continue(tmp_path: Path) -> None:
    notes, failing = Notebook(), Notebook(fails=lambda: True)
    story = Run(tmp_path / "experiment", {"bad": lambda: failing, "notes": lambda: notes})
    tell(story)
    story.close(done=True)
    *before, last = story.said
    assert last == "bad: lacks the end of the search, resume the experiment to write it: OSError: no space left"
    # Unless the search ended before the first attempt.
    assert before in ([], ["bad: can't write for now, the search continues: OSError: no space left"])
    assert notes.told == TOLD
    assert failing.done is None


def test_a_failed_observer_receives_everything_again_at_the_end(tmp_path: Path) -> None:
    made: list[Notebook] = []
    begun = threading.Event()

    def make() -> Notebook:
        made.append(Notebook(fails=lambda: len(made) == 1))
        begun.set()
        return made[-1]

    story = Run(tmp_path / "experiment", {"notes": make})
    tell(story)
    assert begun.wait(30)  # what is made at the end alone has no second chance
    story.close(done=True)
    assert story.said[1:] == ["notes: is writing again and has caught up"]
    assert len(made) == 2
    assert (made[1].told, made[1].done) == (TOLD, True)


def test_observer_of_a_deleted_experiment_is_not_made_again(tmp_path: Path) -> None:
    made: list[Notebook] = []
    begun, deleted = threading.Event(), threading.Event()

    def make() -> Notebook:
        made.append(Notebook(fails=lambda: deleted.wait(30)))
        begun.set()
        return made[-1]

    story = Run(tmp_path / "experiment", {"notes": make})
    tell(story)
    assert begun.wait(30)
    shutil.rmtree(tmp_path / "experiment")
    deleted.set()
    story.close()
    assert len(made) == 1
    assert story.said == []  # the run says it


def test_a_failed_observer_is_created_again_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dray.observers.observer, "RETRY_S", 0.0)
    made: list[Notebook] = []
    all_told, again = threading.Event(), threading.Event()

    def say(text: str) -> None:
        story.said.append(text)
        if "caught up" in text:
            again.set()

    def make() -> Notebook:
        made.append(Notebook(fails=lambda: all_told.wait(30) and len(made) < 3))
        return made[-1]

    story = Run(tmp_path / "experiment", {"notes": make}, say)
    tell(story)
    all_told.set()
    assert again.wait(30)
    assert story.said == [
        "notes: can't write for now, the search continues: OSError: no space left",
        "notes: is writing again and has caught up",
    ]
    story.metrics.append(1, [LATE])
    story.close()
    assert len(made) == 3
    assert made[2].told == {**TOLD, 1: ("RUNNING", [(10, "error", 0.75), (20, "error", 0.125)])}


def test_rows_that_were_packed_twice_between_two_looks_come_once(tmp_path: Path) -> None:
    story, now = Story(tmp_path / "experiment", config()), [0.0]
    story.happen(*EVENTS)
    log, followed = MetricsLog(story.directory.metrics, clock=lambda: now[0]), Followed(story.directory)

    def seen() -> list[tuple[int, list[int]]]:
        return [(one.trial.id, [each["batches"] for each in one.rows]) for news in followed.news() for one in news]

    log.append(0, [row(1, 0.5)])
    log.pack()
    shutil.copyfile(story.directory.metrics / PACKED, story.directory.metrics / TAIL)  # a kill leaves it in both
    log.append(0, [row(2, 0.5)])
    assert seen() == [(0, [1, 2]), (1, []), (2, []), (3, [])]
    for batches in (3, 4):
        now[0] += PACK_EVERY_S
        log.append(0, [row(batches, 0.5)])
        log.pack()
    log.append(1, [row(1, 0.5)])
    assert seen() == [(0, [3, 4]), (1, [1]), (2, []), (3, [])]
    log.append(0, [row(5, 0.5)])
    assert seen() == [(0, [5])]
    assert seen() == []


def test_observers_that_never_began_can_be_closed(tmp_path: Path) -> None:
    story = Story(tmp_path / "experiment", config())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
        Observers(story.directory, {"notes": Notebook}).close()
