"""The answers of a search to results."""

from __future__ import annotations

from typing import Any

from searchers.answers import Answer, decide
from searchers.asha_promotion import PromotionASHA
from searchers.events import Action, Done, Event, Exited, Pause, Reason, Reported, Resume, Started, Stop, TrialResult
from searchers.pbt import PBT
from tests.searchers.helpers import Scripted, new_search


class Scene:
    """A search and its answers to its trials' results."""

    def __init__(self, method: Any, *, started: int) -> None:
        self.records: list[dict[str, Any]] = []
        self.search = new_search(method, log=self.records)
        self.answers: list[Answer] = []
        self.search.start()
        for trial in range(started):
            self.search.on(Started(trial=trial))

    def result(
        self, number: int, trial: int, step: float | None = None, value: float = 0.0, outcome: Reason | None = None
    ) -> None:
        result = TrialResult(trial=trial, number=number, step=step, value=value, outcome=outcome)
        self.answers.append(decide(self.search, result))


def test_a_trial_is_paused_and_a_resumed_one_is_queued() -> None:
    scene = Scene(PromotionASHA(max_trials=4, max_length=4, num_rungs=2, divisor=2, max_concurrent_trials=1), started=1)
    scene.result(1, 0, step=2, value=0.5)
    scene.search.on(Started(trial=1))
    scene.result(2, 1, step=2, value=0.6)
    assert scene.answers == [
        Answer(trial=0, number=1, decision="pause", creates=(1,)),
        Answer(trial=1, number=2, decision="pause", resumes=(0,)),
    ]
    assert [scene.search.trials[trial].state for trial in (0, 1)] == ["PENDING", "PAUSED"]
    scene.search.on(Started(trial=0))
    scene.result(3, 0, step=4, value=0.4, outcome="completed")
    assert scene.answers[-1] == Answer(trial=0, number=3, decision="stop", creates=(2,))


def test_paused_trials_without_hope_end_with_the_decision_and_the_search_with_them() -> None:
    scene = Scene(PromotionASHA(max_trials=2, max_length=4, num_rungs=2, divisor=2, max_concurrent_trials=2), started=2)
    scene.result(1, 0, step=2, value=0.5)
    scene.result(2, 1, step=2, value=0.4)
    assert scene.answers[-1] == Answer(trial=1, number=2, decision="continue", stops=(0,))
    scene.result(3, 1, step=4, value=0.4, outcome="completed")
    assert scene.answers[-1].done
    assert [view.state for view in scene.search.trials.values()] == ["PRUNED", "COMPLETED"]
    assert [record["trial"] for record in scene.records if record["event"] == "exited"] == [0, 1]


def test_a_trial_that_is_paused_and_resumed_by_one_decision_keeps_its_workers() -> None:
    report = Reported(trial=0, step=1, value=0.5)
    scene = Scene(Scripted(1, {report: [Pause(trial=0), Resume(trial=0)]}), started=1)
    scene.result(1, 0, step=1, value=0.5)
    assert scene.answers == [Answer(trial=0, number=1, decision="continue")]
    assert scene.search.trials[0].state == "RUNNING"


def test_a_trial_that_lets_others_go_first_is_queued_behind_them() -> None:
    scene = Scene(PBT(max_length=8, population=3, interval=2), started=1)
    scene.result(1, 0, step=2, value=0.5)
    assert scene.answers == [Answer(trial=0, number=1, decision="pause", resumes=(0,))]
    assert (scene.search.trials[0].state, list(scene.search.live)) == ("PENDING", [1, 2, 0])


def test_a_trial_that_is_resumed_and_stopped_in_one_breath_is_not_queued() -> None:
    last = Reported(trial=0, step=4, value=0.5)
    answers: dict[Event, list[Action]] = {
        Reported(trial=1, step=1, value=0.7): [Pause(trial=1)],
        last: [Resume(trial=1)],
        Exited(trial=0, reason="completed"): [Stop(trial=1)],
        Exited(trial=1, reason="stopped"): [Done(reason="completed")],
    }
    scene = Scene(Scripted(2, answers), started=2)
    scene.result(1, 1, step=1, value=0.7)
    scene.result(2, 0, step=4, value=0.5, outcome="completed")
    assert scene.answers[-1] == Answer(trial=0, number=2, decision="stop", stops=(1,), done=True)


def test_a_paused_trial_that_failed_ends() -> None:
    report = Reported(trial=0, step=1, value=0.5)
    scene = Scene(Scripted(1, {report: [Pause(trial=0)]}), started=1)
    scene.result(1, 0, step=1, value=0.5)
    scene.result(2, 0, outcome="errored")
    assert scene.answers[-1] == Answer(trial=0, number=2, decision="stop")
    assert scene.search.trials[0].state == "ERRORED"
