"""What a search answers to a trial's result: the translation that both drivers on Ray Tune share.

`ray_tune` drives a search of dray's own trials through one Tune trial; `tune` a search whose trials are Tune's.
"""

from __future__ import annotations

from dataclasses import dataclass

from searchers.events import Create, Decision, Done, Event, Exited, Reported, Resume, Started, Stop, TrialResult
from searchers.search import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the search decided about one result."""

    trial: int
    number: int  # of the result
    decision: Decision  # "stop" also if this result ended the trial
    creates: tuple[int, ...] = ()  # new trials to queue
    resumes: tuple[int, ...] = ()  # paused ones to queue, which continue from their checkpoints
    stops: tuple[int, ...] = ()  # paused ones that end, because they can no longer be promoted
    done: bool = False


def decide(search: Search, result: TrialResult) -> Answer:
    """Pass the result to the search, and an `Exited` of every trial that it stops.

    To the search a stopped trial has ended, even if its workers have not left yet: it is at a checkpoint.
    """
    events: list[Event] = []
    if result.step is not None:
        events.append(Reported(trial=result.trial, step=result.step, value=result.value, metrics=tuple(result.metrics)))
    if result.outcome is not None:
        events.append(Exited(trial=result.trial, reason=result.outcome))
    actions = [action for event in events for action in search.on(event)]
    stops: list[int] = []
    for action in actions:  # which grows
        if isinstance(action, Stop) and not search.trials[action.trial].ended:
            stops.append(action.trial)
            actions += search.on(Exited(trial=action.trial, reason="stopped"))
    trial = result.trial
    resumes = [a.trial for a in actions if isinstance(a, Resume) and search.trials[a.trial].state == "PENDING"]
    if trial in resumes:
        # Paused and resumed at once: it keeps its workers.
        resumes.remove(trial)
        actions += search.on(Started(trial=trial))
    view = search.trials[trial]
    return Answer(
        trial=trial,
        number=result.number,
        decision="stop" if view.ended else "pause" if view.state == "PAUSED" else "continue",
        creates=tuple(action.trial for action in actions if isinstance(action, Create)),
        resumes=tuple(resumes),
        stops=tuple(stop for stop in stops if stop != trial),
        done=any(isinstance(action, Done) for action in actions),
    )
