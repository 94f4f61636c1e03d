"""A search's answer to a trial's result, shared by both drivers on Ray Tune.

`ray_tune` drives a search over dray's own trials through a single Tune trial; in `tune` each trial is a Tune trial.
"""

from __future__ import annotations

from dataclasses import dataclass

from searchers.events import (
    Action,
    Create,
    Decision,
    Done,
    Event,
    Exited,
    Reported,
    Requested,
    Resume,
    Started,
    Stop,
    TrialResult,
)
from searchers.search import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The search's decisions about one result."""

    trial: int  # -1: a new trial was requested
    number: int  # the result's number; -1 for a request
    decision: Decision  # also "stop" if the trial ended with this result
    creates: tuple[int, ...] = ()  # new trials to queue
    resumes: tuple[int, ...] = ()  # paused trials to queue before others, but `trial` after them; they continue
    stops: tuple[int, ...] = ()  # paused trials to end, since they can no longer be promoted
    done: bool = False  # the search is over


def decide(search: Search, result: TrialResult) -> Answer:
    """Pass the result to the search, followed by an `Exited` event for every trial that the search stops.

    A stopped trial counts as ended before its workers have left, because it has just saved a checkpoint.
    """
    events: list[Event] = []
    if result.step is not None:
        events.append(
            Reported(
                trial=result.trial,
                step=result.step,
                value=result.value,
                metrics=tuple(result.metrics),
                batches=result.batches,
            )
        )
    if result.outcome is not None:
        events.append(Exited(trial=result.trial, reason=result.outcome))
    return _answer(search, [action for event in events for action in search.on(event)], result.trial, result.number)


def carry_out(search: Search, request: Requested) -> Answer:
    """Pass a request to the search. A trial that is to end is CANCELED at once, wherever it is.

    Raises:
        IllegalEvent: See `Search.request`.
    """
    actions = search.request(request)
    if request.trial is not None:
        actions = search.on(Exited(trial=request.trial, reason="canceled"))
    return _answer(search, actions, -1 if request.trial is None else request.trial, -1)


def _answer(search: Search, actions: list[Action], trial: int, number: int) -> Answer:
    stops: list[int] = []
    for action in actions:  # the list grows during iteration
        if isinstance(action, Stop) and not search.trials[action.trial].ended:
            stops.append(action.trial)
            actions += search.on(Exited(trial=action.trial, reason="stopped"))
    resumes = [a.trial for a in actions if isinstance(a, Resume) and search.trials[a.trial].state == "PENDING"]
    if trial in resumes and search.states["PENDING"] == len(resumes):
        # The trial was paused and resumed at once, and no other waits: it keeps its workers.
        resumes.remove(trial)
        actions += search.on(Started(trial=trial))
    view = search.trials.get(trial)
    decision: Decision = "continue"
    if view is not None and view.ended:
        decision = "stop"
    elif view is not None and (view.state == "PAUSED" or trial in resumes):
        decision = "pause"
    return Answer(
        trial=trial,
        number=number,
        decision=decision,
        creates=tuple(action.trial for action in actions if isinstance(action, Create)),
        resumes=tuple(resumes),
        stops=tuple(stop for stop in stops if stop != trial),
        done=any(isinstance(action, Done) for action in actions),
    )
