"""What the adapter to Ray Tune makes of a search's decisions, without Tune: the desk is a list of its answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from searchers.answers import Answer
from searchers.events import Action, Create, Done, Event, Exited, Pause, Reported, Resume, Started, Stop
from searchers.promotion import PromotionASHA
from searchers.ray_tune import TuneDriver
from searchers.search import Search
from searchers.space import parse


class Scripted:
    """A method that says what it is told to say, whatever happens."""

    rungs = (1.0, 2.0)

    def __init__(self, trials: int, answers: dict[Event, list[Action]]) -> None:
        self._trials, self._answers = trials, answers

    def start(self) -> list[Action]:
        return [Create(trial=trial) for trial in range(self._trials)]

    def on(self, event: Event) -> list[Action]:
        return self._answers.pop(event, [])

    def progress(self, trained: Mapping[int, float]) -> float:
        return 0.0

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        return []


def _no_results() -> Any:
    raise AssertionError("no handle runs here")


class Tune:
    """Hands results to a driver as Tune does: `told` are the answers, in order."""

    def __init__(self, method: Any, *, started: int) -> None:
        self.records: list[dict[str, Any]] = []
        self.search = Search(method, parse({}), seed=0, smaller_is_better=True, log=self.records.append)
        self.told: list[Answer] = []
        self.on_disk = 0
        self.driver = TuneDriver(source=_no_results, directory=Path())
        self.driver.attach(self.search, lock=threading.RLock(), together=self._on_disk, act=self._carry_out)
        self.search.start()
        for trial in range(started):
            self.search.on(Started(trial=trial))

    @contextlib.contextmanager
    def _on_disk(self) -> Iterator[None]:
        """What the search is told within is on disk after it, and is not to be carried out before."""
        yield
        self.on_disk = len(self.records)

    def _carry_out(self, answer: Answer) -> None:
        assert self.on_disk == len(self.records)
        self.told.append(answer)

    def result(
        self, number: int, trial: int, step: float | None = None, value: float = 0.0, outcome: str | None = None
    ) -> None:
        told = SimpleNamespace(trial=trial, number=number, step=step, value=value, metrics=(), outcome=outcome)
        goes_on = self.driver.take([told])  # type: ignore[list-item]  # any object with these
        if self.driver.error is not None:
            raise self.driver.error
        assert goes_on


def test_a_trial_is_paused_and_a_resumed_one_is_queued() -> None:
    tune = Tune(PromotionASHA(max_trials=4, max_length=4, num_rungs=2, divisor=2, max_concurrent_trials=1), started=1)
    tune.result(1, 0, step=2, value=0.5)
    tune.search.on(Started(trial=1))
    tune.result(2, 1, step=2, value=0.6)
    assert tune.told == [
        Answer(trial=0, number=1, decision="pause", creates=(1,)),
        Answer(trial=1, number=2, decision="pause", resumes=(0,)),
    ]
    assert [tune.search.trials[trial].state for trial in (0, 1)] == ["PENDING", "PAUSED"]
    tune.search.on(Started(trial=0))
    tune.result(3, 0, step=4, value=0.4, outcome="completed")
    assert tune.told[-1] == Answer(trial=0, number=3, decision="stop", creates=(2,))


def test_paused_trials_without_hope_end_with_the_decision_and_the_search_with_them() -> None:
    tune = Tune(PromotionASHA(max_trials=2, max_length=4, num_rungs=2, divisor=2, max_concurrent_trials=2), started=2)
    tune.result(1, 0, step=2, value=0.5)
    tune.result(2, 1, step=2, value=0.4)
    assert tune.told[-1] == Answer(trial=1, number=2, decision="continue", stops=(0,))
    tune.result(3, 1, step=4, value=0.4, outcome="completed")
    assert tune.told[-1].done
    assert [view.state for view in tune.search.trials.values()] == ["PRUNED", "COMPLETED"]
    assert [record["trial"] for record in tune.records if record["event"] == "exited"] == [0, 1]


def test_a_result_that_comes_again_is_decided_and_carried_out_once() -> None:
    tune = Tune(PromotionASHA(max_trials=4, max_length=4, num_rungs=2, divisor=2, max_concurrent_trials=1), started=1)
    tune.result(1, 0, step=2)
    tune.result(1, 0, step=2)
    assert len(tune.told) == 1
    # Reported anew, as after a restart that crossed the pause: it still is paused.
    tune.result(2, 0, step=2)
    assert tune.told[-1] == Answer(trial=0, number=2, decision="pause")


def test_a_trial_that_is_paused_and_resumed_by_one_decision_keeps_its_workers() -> None:
    report = Reported(trial=0, step=1, value=0.5)
    tune = Tune(Scripted(1, {report: [Pause(trial=0), Resume(trial=0)]}), started=1)
    tune.result(1, 0, step=1, value=0.5)
    assert tune.told == [Answer(trial=0, number=1, decision="continue")]
    assert tune.search.trials[0].state == "RUNNING"


def test_a_trial_that_is_resumed_and_stopped_in_one_breath_is_not_queued() -> None:
    last = Reported(trial=0, step=2, value=0.5)
    answers: dict[Event, list[Action]] = {
        Reported(trial=1, step=1, value=0.7): [Pause(trial=1)],
        last: [Resume(trial=1)],
        Exited(trial=0, reason="completed"): [Stop(trial=1)],
        Exited(trial=1, reason="stopped"): [Done(reason="completed")],
    }
    tune = Tune(Scripted(2, answers), started=2)
    tune.result(1, 1, step=1, value=0.7)
    tune.result(2, 0, step=2, value=0.5, outcome="completed")
    assert tune.told[-1] == Answer(trial=0, number=2, decision="stop", stops=(1,), done=True)


def test_a_paused_trial_that_failed_ends() -> None:
    report = Reported(trial=0, step=1, value=0.5)
    tune = Tune(Scripted(1, {report: [Pause(trial=0)]}), started=1)
    tune.result(1, 0, step=1, value=0.5)
    tune.result(2, 0, outcome="errored")
    assert tune.told[-1] == Answer(trial=0, number=2, decision="stop")
    assert tune.search.trials[0].state == "ERRORED"


def test_a_search_that_fails_ends_the_run_with_its_error() -> None:
    tune = Tune(Scripted(1, {Reported(trial=0, step=1, value=0.5): [Stop(trial=7)]}), started=1)
    told = SimpleNamespace(trial=0, number=1, step=1, value=0.5, metrics=(), outcome=None)
    assert not tune.driver.take([told])  # type: ignore[list-item]
    assert tune.driver.error is not None


def test_results_that_come_at_once_are_decided_in_their_order_and_carried_out_when_all_are_on_disk() -> None:
    tune = Tune(PromotionASHA(max_trials=2, max_length=4, num_rungs=2, divisor=2, max_concurrent_trials=2), started=2)
    told = [
        SimpleNamespace(trial=trial, number=number, step=2, value=value, metrics=(), outcome=None)
        for number, trial, value in ((1, 0, 0.5), (2, 1, 0.4))
    ]
    assert tune.driver.take(told)  # type: ignore[arg-type]
    assert tune.told == [
        Answer(trial=0, number=1, decision="pause"),
        Answer(trial=1, number=2, decision="continue", stops=(0,)),
    ]
