"""The contract of a search method, as plain functions: call `check_method(make, max_creations=...)` from any test.

Each check drives the method through random histories (see `searchers.histories`), and raises an `AssertionError` that
names the broken rule and the seed. State is compared by what follows from it: the actions in the rest of a history.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from random import Random
from typing import cast

from searchers.errors import IllegalEvent
from searchers.events import Create, Done, Exited, Pause, Reason, Reported, Resume, Started, Stop
from searchers.histories import OBJECTIVES, Extension, History, play, send
from searchers.method import Method
from searchers.objectives import Losses
from searchers.records import event_from_json
from searchers.search import Record, Search
from searchers.space import parse

Make = Callable[[], Method]


def check_method(make: Make, *, max_creations: int, seeds: Iterable[int] = range(10)) -> None:
    """Run all checks.

    Args:
        make: Returns a new method, configured the same each time.
        max_creations: Most trials it may create: its budget, plus replacements of invalid trials.
        seeds: One random history for each.

    Raises:
        AssertionError: The method breaks a rule of `searchers.Method`.

    >>> from searchers import ASHA
    >>> make = lambda: ASHA(max_trials=6, max_length=4, num_rungs=2, max_invalid=3)
    >>> check_method(make, max_creations=6 + 3, seeds=[0])
    """
    for seed in seeds:
        for check in (
            check_equal_events_give_equal_actions,
            check_repeated_and_late_events_change_nothing,
            check_illegal_events_change_nothing,
            check_actions_name_trials_that_can_obey,
            check_done_comes_exactly_once,
            check_progress_never_falls,
            check_replay_restores,
        ):
            check(make, seed)
        check_creations_are_bounded(make, seed, max_creations=max_creations)
        check_extensions(make, seed, max_creations=max_creations)


def check_equal_events_give_equal_actions(make: Make, seed: int) -> None:
    """A method is a function of its events, so a replay restores its state."""
    _check_same_actions(make(), play(method := make(), seed, length=_length(method)), seed)


def _check_same_actions(method: Method, history: History, seed: int) -> None:
    assert method.start() == history.first, f"seed {seed}: start() returned other actions the second time"
    for event, actions in history.steps:
        assert send(method, event) == actions, f"seed {seed}: {event} led to other actions the second time"


def check_repeated_and_late_events_change_nothing(make: Make, seed: int) -> None:
    """A repeated event, or one of a trial that has ended, returns [] and changes nothing that follows."""
    method = make()
    history = play(make(), seed, length=_length(method))
    method.start()
    ended: list[int] = []
    for event, actions in history.steps:
        assert send(method, event) == actions, (
            f"seed {seed}: {event} led to other actions after late or repeated events"
        )
        if isinstance(event, Exited) and event.trial not in ended:
            ended.append(event.trial)
        before = method.progress({})
        late = [Reported(trial=trial, step=_length(method), value=0.0, losses=_NONE_LOST) for trial in ended[-2:]]
        assert not isinstance(event, Extension)
        for again in [event, *late, *(Exited(trial=trial, reason="errored") for trial in ended[-2:])]:
            assert method.on(again) == [], f"seed {seed}: {again} is late or repeated, but led to actions"
            assert method.progress({}) == before, f"seed {seed}: {again} is late or repeated, but changed the progress"


def check_illegal_events_change_nothing(make: Make, seed: int) -> None:
    """Events of a trial that was never created raise `IllegalEvent` and change nothing that follows."""
    history = play(method := make(), seed, length=_length(method))
    method = make()
    created = sum(isinstance(action, Create) for action in method.start())
    for trial in (created, created + 7, -1):
        for event in (
            Started(trial=trial),
            Reported(trial=trial, step=1, value=0.0),
            Exited(trial=trial, reason="errored"),
        ):
            try:
                method.on(event)
            except IllegalEvent:
                continue
            raise AssertionError(f"{event} is of a trial that was never created, but did not raise IllegalEvent")
    for step, actions in history.steps:
        assert send(method, step) == actions, f"seed {seed}: {step} led to other actions after illegal events"


def check_actions_name_trials_that_can_obey(make: Make, seed: int) -> None:
    """`Stop` names live trials, once each; `Pause` running ones; `Resume` paused ones."""
    history = play(method := make(), seed, length=_length(method))
    _check_actions(history, seed)


def _check_actions(history: History, seed: int) -> None:
    running: set[int] = set()
    paused: set[int] = set()
    stopped: set[int] = set()
    ended: set[int] = set()
    extended = False
    for event, actions in [(None, history.first), *history.steps]:
        extended |= isinstance(event, Extension)
        if isinstance(event, Exited):
            for known in (running, paused, stopped):
                known.discard(event.trial)
            ended.add(event.trial)
        for action in actions:
            match action:
                case Create(trial=trial):
                    running.add(trial)
                case Stop(trial=trial):
                    assert trial in running | paused, (
                        f"seed {seed}: {action} names a trial that has ended or was stopped"
                    )
                    running.discard(trial)
                    paused.discard(trial)
                    stopped.add(trial)
                case Pause(trial=trial):
                    assert trial in running, f"seed {seed}: {action} names a trial that is not running"
                    running.remove(trial)
                    paused.add(trial)
                case Resume(trial=trial):
                    may = paused | ended if extended else paused
                    assert trial in may, f"seed {seed}: {action} names a trial that is not paused"
                    paused.discard(trial)
                    ended.discard(trial)
                    running.add(trial)
                case Done():
                    assert not running | paused | stopped, (
                        f"seed {seed}: Done came before trials {running | paused | stopped} ended"
                    )


def check_creations_are_bounded(make: Make, seed: int, *, max_creations: int) -> None:
    """Trials are numbered in order of creation, and at most `max_creations` are created, even if all are invalid."""
    reasons: tuple[Reason | None, ...] = (None, "invalid_hp")
    for reason in reasons:
        history = play(method := make(), seed, length=_length(method), always=reason)
        created = [action.trial for action in history.actions() if isinstance(action, Create)]
        assert created == list(range(len(created))), f"seed {seed}: trials must be numbered 0, 1, 2, ..., got {created}"
        assert len(created) <= max_creations, (
            f"seed {seed}: {len(created)} trials were created, but at most {max_creations} may be"
        )


def check_done_comes_exactly_once(make: Make, seed: int) -> None:
    """`Done` is the last action of every history, and comes when all trials have ended, not before."""
    for always in (None, "completed", "diverged", "errored", "invalid_hp", "canceled"):
        history = play(method := make(), seed, length=_length(method), always=always)
        actions = history.actions()
        assert sum(isinstance(action, Done) for action in actions) == 1, f"seed {seed}: Done must come once"
        assert isinstance(actions[-1], Done), f"seed {seed}: {actions[-1]} follows Done"
        _check_actions(history, seed)


def check_progress_never_falls(make: Make, seed: int) -> None:
    """Progress is between 0 and 1, never falls, and is 1 exactly when the search is done."""
    history = play(method := make(), seed, length=_length(method))
    _check_progress(make, history, seed)


def _check_progress(make: Make, history: History, seed: int) -> None:
    method, trained, before = make(), dict[int, float](), 0.0
    method.start()
    done = any(isinstance(action, Done) for action in history.first)
    for event, actions in history.steps:
        send(method, event)
        if isinstance(event, Reported):
            trained[event.trial] = event.step / _length(method)
        if isinstance(event, Extension):
            done, before = False, 0.0
        done |= any(isinstance(action, Done) for action in actions)
        progress = method.progress(trained)
        assert before <= progress <= 1, (
            f"seed {seed}: progress fell, or left 0..1: from {before} to {progress}, after {event}"
        )
        assert (progress == 1) == done, f"seed {seed}: progress is {progress}, and done is {done}, after {event}"
        before = progress


def check_extensions(make: Make, seed: int, *, max_creations: int) -> None:
    """A search can be extended at any time and keeps the rules; a refused extension changes nothing that follows."""
    method = make()
    length = math.ceil(_length(method))
    for wanted in (
        [Extension(max_trials=max_creations + 7), Extension(max_length=4 * length)],
        [Extension(max_length=3 * length), Extension(max_trials=max_creations + 5, max_length=7 * length)],
        [Extension(), Extension(max_trials=0), Extension(max_length=0), Extension(max_trials=max_creations + 1)],
    ):
        history = play(method := make(), seed, length=length, extensions=wanted)
        created = [action.trial for action in history.actions() if isinstance(action, Create)]
        assert created == list(range(len(created))), f"seed {seed}: trials must be numbered 0, 1, 2, ..., got {created}"
        assert isinstance(history.actions()[-1], Done), f"seed {seed}: an extended search did not end"
        _check_same_actions(make(), history, seed)  # a refused extension is not in the history
        _check_actions(history, seed)
        _check_progress(make, history, seed)
        check_replay_restores(make, seed, wanted)


def check_replay_restores(make: Make, seed: int, extensions: Iterable[Extension] = ()) -> None:
    """A search replayed from its log, cut anywhere, continues like the one that wrote it."""
    log: list[Record] = []
    method = make()
    objectives = OBJECTIVES if getattr(method, "pareto", False) else None
    search = Search(method, _SPACE, seed=0, smaller_is_better=True, log=log.append, objectives=objectives)
    play(search, seed, length=_length(search.method), normalised=False, extensions=extensions)
    records = _through_json(log)
    for cut in (Random(seed).randrange(len(records)), len(records)):
        rest: list[Record] = []
        again = Search.replay(
            records[:cut], make(), _SPACE, seed=0, smaller_is_better=True, log=rest.append, objectives=objectives
        )
        assert rest == [], "replayed records must not be logged again"
        for record in records[cut:]:
            _repeat(again, record)
        assert _through_json(rest) == records[cut:], f"seed {seed}: the actions differ after a replay of {cut} records"
        same = str(dict(again.trials)) == str(dict(search.trials))  # as text, since NaN is not equal to itself
        assert same, f"seed {seed}: the trials differ after a replay"
        assert again.done == search.done
        same = again.method.progress({}) == search.method.progress({})
        assert same, f"seed {seed}: the progress differs after a replay"


def _through_json(records: list[Record]) -> list[Record]:
    decoded: list[Record] = json.loads(json.dumps(records, allow_nan=False))
    return decoded


def _repeat(search: Search, record: Record) -> None:
    match record:
        case {"event": "start"}:
            search.start()
        case {"event": "extended", "max_trials": max_trials, "max_length": max_length}:
            search.extend(max_trials=cast("int | None", max_trials), max_length=cast("int | None", max_length))
        case _:
            search.on(event_from_json(record))


_NONE_LOST = Losses((0.0, 0.0))
_SPACE = parse({"x": {"type": "double", "minval": 0, "maxval": 1}})


def _length(method: Method) -> float:
    return method.rungs[-1] if method.rungs else 16
