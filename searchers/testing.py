"""The contract of a search method, as plain functions: call `check_method(make, max_creations=...)` from any test.

Each check drives the method through a random history: trials start, report (in order, late, out of order, not finite),
obey a stop or finish before it comes, pause at once or one report later, fail (also while paused), turn out invalid,
are canceled; the search is extended, while it runs and when it is done. A broken rule raises an `AssertionError` that
names the rule and the seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol, cast

from searchers.errors import IllegalEvent, MethodError
from searchers.events import (
    Action,
    Create,
    Done,
    Event,
    Exited,
    Pause,
    Reason,
    Reported,
    Resume,
    Started,
    Stop,
)
from searchers.method import Method
from searchers.records import event_from_json
from searchers.search import Record, Search
from searchers.space import parse

Make = Callable[[], Method]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """A call of `extend`, among the events of a history."""

    max_trials: int | None = None
    max_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What happened to a method: its first actions, then every event with the actions that followed."""

    first: list[Action]
    steps: list[tuple[Event | Extension, list[Action]]]

    def actions(self) -> list[Action]:
        """All actions in order."""
        return [*self.first, *(action for _, actions in self.steps for action in actions)]


class Driven(Protocol):
    """A `Method` or a `Search`."""

    def start(self) -> list[Action]: ...
    def on(self, event: Event) -> list[Action]: ...
    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]: ...


def check_method(make: Make, *, max_creations: int, seeds: Iterable[int] = range(10)) -> None:
    """All checks, on several histories each.

    Args:
        make: Makes a new method, configured the same each time.
        max_creations: Most trials that it may create: its budget, and the replacements of invalid ones.
        seeds: One history for each.
    """
    for seed in seeds:
        for check in (
            check_equal_events_give_equal_states,
            check_dump_and_load_change_nothing,
            check_repeated_and_late_events_change_nothing,
            check_illegal_events_change_nothing,
            check_actions_name_trials_that_can_obey,
            check_done_comes_exactly_once,
            check_progress_never_falls,
            check_sign_of_the_metric_changes_nothing,
            check_replay_restores,
        ):
            check(make, seed)
        check_creations_are_bounded(make, seed, max_creations=max_creations)
        check_extensions(make, seed, max_creations=max_creations)


def check_equal_events_give_equal_states(make: Make, seed: int) -> None:
    """A method is a function of its events: replay is restore."""
    first = make()
    _check_equal_states(make, play(first, seed, length=_length(first)), first, seed)


def _check_equal_states(make: Make, history: History, first: Method, seed: int) -> None:
    second = make()
    assert second.start() == history.first, f"seed {seed}: start() returned other actions the second time"
    for event, actions in history.steps:
        assert tell(second, event) == actions, f"seed {seed}: {event} led to other actions the second time"
    assert second.dump() == first.dump(), f"seed {seed}: equal events led to different states"


def check_dump_and_load_change_nothing(make: Make, seed: int) -> None:
    """After every event the state is dumped as strict JSON and loaded into a new method, which goes on the same."""
    _check_dump_and_load(make, play(method := make(), seed, length=_length(method)), seed)


def _check_dump_and_load(make: Make, history: History, seed: int) -> None:
    method = make()
    assert method.start() == history.first
    for event, actions in history.steps:
        state = method.dump()
        text = json.dumps(state, allow_nan=False)
        method = make()
        method.load(json.loads(text))
        assert json.dumps(method.dump()) == text, f"seed {seed}: load(dump()) changed the state"
        assert tell(method, event) == actions, f"seed {seed}: {event} led to other actions after load(dump())"


def check_repeated_and_late_events_change_nothing(make: Make, seed: int) -> None:
    """A repeated event, and a report of a trial that has ended, return [] and leave the state as it was."""
    method = make()
    history = play(make(), seed, length=_length(method))
    method.start()
    ended: list[int] = []
    for event, _ in history.steps:
        tell(method, event)
        if isinstance(event, Exited) and event.trial not in ended:
            ended.append(event.trial)
        before = method.dump()
        late = [Reported(trial=trial, step=_length(method), value=0.0) for trial in ended[-2:]]
        assert not isinstance(event, Extension)
        for again in [event, *late, *(Exited(trial=trial, reason="errored") for trial in ended[-2:])]:
            assert method.on(again) == [], f"seed {seed}: {again} is late or repeated, but led to actions"
            assert method.dump() == before, f"seed {seed}: {again} is late or repeated, but changed the state"


def check_illegal_events_change_nothing(make: Make, seed: int) -> None:
    """Events of a trial never created raise `IllegalEvent` and leave the state as it was."""
    method = make()
    created = sum(isinstance(action, Create) for action in method.start())
    before = method.dump()
    for trial in (created, created + 7, -1):
        for event in (
            Started(trial=trial),
            Reported(trial=trial, step=1, value=0.0),
            Exited(trial=trial, reason="errored"),
        ):
            try:
                method.on(event)
            except IllegalEvent:
                assert method.dump() == before, f"{event} raised, but changed the state"
            else:
                raise AssertionError(f"{event} is of a trial that was never created, but did not raise IllegalEvent")


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
    """Trials are numbered in order of creation, and there are at most `max_creations`, also if all are invalid."""
    for reason in (None, "invalid_hp"):
        history = play(method := make(), seed, length=_length(method), always=_INVALID if reason else None)
        created = [action.trial for action in history.actions() if isinstance(action, Create)]
        assert created == list(range(len(created))), f"seed {seed}: trials must be numbered 0, 1, 2, ..., got {created}"
        assert len(created) <= max_creations, (
            f"seed {seed}: {len(created)} trials were created, but at most {max_creations} may be"
        )


def check_done_comes_exactly_once(make: Make, seed: int) -> None:
    """`Done` is the last action of every history, and comes when all trials have ended, not before."""
    for always in (None, "completed", "errored", "invalid_hp", "canceled"):
        history = play(method := make(), seed, length=_length(method), always=always)
        actions = history.actions()
        assert sum(isinstance(action, Done) for action in actions) == 1, f"seed {seed}: Done must come once"
        assert isinstance(actions[-1], Done), f"seed {seed}: {actions[-1]} follows Done"
        _check_actions(history, seed)


def check_progress_never_falls(make: Make, seed: int) -> None:
    """It is between 0 and 1, never falls, and is 1 exactly when the search is done."""
    history = play(method := make(), seed, length=_length(method))
    _check_progress(make, history, seed)


def _check_progress(make: Make, history: History, seed: int) -> None:
    method, trained, before = make(), dict[int, float](), 0.0
    method.start()
    done = any(isinstance(action, Done) for action in history.first)
    for event, actions in history.steps:
        tell(method, event)
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
    """A search can be extended at any moment, and keeps the rules; an extension that is refused changes nothing."""
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
        _check_equal_states(make, history, method, seed)
        _check_dump_and_load(make, history, seed)
        _check_actions(history, seed)
        _check_progress(make, history, seed)
        _check_replay(make, seed, wanted)


def check_sign_of_the_metric_changes_nothing(make: Make, seed: int) -> None:
    """With values negated, and larger ones better, actions and state are the same."""
    small, large = make(), make()
    one, other = _search(small, smaller_is_better=True), _search(large, smaller_is_better=False)
    history = play(one, seed, length=_length(small), normalised=False)
    assert other.start() == history.first
    for event, actions in history.steps:
        if isinstance(event, Reported) and event.value is not None:
            event = replace(event, value=-event.value)
        assert tell(other, event) == actions, f"seed {seed}: {event} led to other actions when larger is better"
    assert small.dump() == large.dump(), f"seed {seed}: the state differs when larger is better"


def check_replay_restores(make: Make, seed: int) -> None:
    """A search that is replayed from its log, cut anywhere, goes on like the one that wrote it."""
    _check_replay(make, seed, ())


def _check_replay(make: Make, seed: int, extensions: Iterable[Extension]) -> None:
    log: list[Record] = []
    search = _search(make(), log=log.append)
    play(search, seed, length=_length(search.method), normalised=False, extensions=extensions)
    records = _through_json(log)
    for cut in (Random(seed).randrange(len(records)), len(records)):
        rest: list[Record] = []
        again = Search.replay(records[:cut], make(), _SPACE, seed=0, smaller_is_better=True, log=rest.append)
        assert rest == [], "replayed records must not be logged again"
        for record in records[cut:]:
            _happens(again, record)
        assert _through_json(rest) == records[cut:], f"seed {seed}: the actions differ after a replay of {cut} records"
        assert again.method.dump() == search.method.dump(), f"seed {seed}: the state differs after a replay"
        assert str(dict(again.trials)) == str(dict(search.trials)), (
            f"seed {seed}: the trials differ after a replay"
        )  # nan
        assert again.done == search.done


def _through_json(records: list[Record]) -> list[Record]:
    decoded: list[Record] = json.loads(json.dumps(records, allow_nan=False))
    return decoded


def _happens(search: Search, record: Record) -> None:
    """Tell the search what the record says."""
    match record:
        case {"event": "start"}:
            search.start()
        case {"event": "extended", "max_trials": max_trials, "max_length": max_length}:
            search.extend(max_trials=cast("int | None", max_trials), max_length=cast("int | None", max_length))
        case _:
            search.on(event_from_json(record))


def tell(subject: Driven, event: Event | Extension) -> list[Action]:
    """The answer of a method or search to a step of a history."""
    if isinstance(event, Extension):
        return subject.extend(max_trials=event.max_trials, max_length=event.max_length)
    return subject.on(event)


def play(
    subject: Driven,
    seed: int,
    *,
    length: float,
    normalised: bool = True,
    always: Reason | None = None,
    extensions: Iterable[Extension] = (),
) -> History:
    """Drive a method or a search through a random history until it is done.

    Args:
        subject: A new one; it is started here.
        seed: The same seed and the same answers give the same history.
        length: Length at which trials end by themselves. An extension may change it.
        normalised: Report values as a method gets them; else also NaN, None and infinities, as a search does.
        always: Every trial ends this way, without a report.
        extensions: Asked for in this order, at random moments, or at the latest when the search is done. Those that are
            refused are not in the history.
    """
    player = _Player(
        subject=subject,
        rng=Random(seed),
        length=length,
        normalised=normalised,
        always=always,
        extensions=list(extensions),
    )
    first = subject.start()
    player.obey(first)
    while not player.done or player.extensions:
        assert len(player.steps) < 100_000, f"seed {seed}: the search did not end within 100,000 events"
        player.step()
    for trial in sorted(player.ended)[-3:]:  # late reports, after the end
        player.tell(Reported(trial=trial, step=length, value=0.5))
    return History(first=first, steps=player.steps)


@dataclass(slots=True, kw_only=True)
class _Player:
    subject: Driven
    rng: Random
    length: float
    normalised: bool
    always: Reason | None
    extensions: list[Extension]
    pending: list[int] = field(default_factory=list)
    running: dict[int, float] = field(default_factory=dict)  # trial: step it has reached
    paused: set[int] = field(default_factory=set)
    stopping: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    reached: dict[int, float] = field(default_factory=dict)  # steps of those that are paused or have ended
    steps: list[tuple[Event | Extension, list[Action]]] = field(default_factory=list)
    done: bool = False

    def step(self) -> None:
        rng = self.rng
        if self.extensions and (self.done or rng.random() < 0.02):
            self.extend(self.extensions.pop(0))
            return
        if self.paused and rng.random() < 0.05:
            self.step_paused(rng.choice(sorted(self.paused)))
            return
        if self.pending and (not self.running or (len(self.running) < 4 and rng.random() < 0.4)):
            trial = self.pending.pop(rng.randrange(len(self.pending)))
            self.running[trial] = self.reached.get(trial, 0)
            self.tell(Started(trial=trial))
            return
        assert self.running, f"no trial is pending or running, {len(self.paused)} are paused, but Done did not come"
        trial = rng.choice(list(self.running))
        chance = rng.random()
        if self.always is not None:
            self.exit(trial, self.always)
        elif self.ended and chance < 0.05:
            self.tell(Reported(trial=rng.choice(sorted(self.ended)), step=self.length, value=self.value()))
        elif chance < 0.1:
            self.exit(trial, rng.choice(_REASONS))
        elif chance < 0.15:  # restarted from an earlier checkpoint
            self.running[trial] *= rng.random()
            self.tell(Started(trial=trial))
        elif chance < 0.18:  # out of order
            self.tell(Reported(trial=trial, step=self.running[trial] * rng.random(), value=self.value()))
        elif trial in self.stopping and chance < 0.7:
            self.exit(trial, "stopped")
        elif self.running[trial] >= self.length:
            self.exit(trial, "completed")
        else:
            self.running[trial] = self.further(self.running[trial])
            self.tell(Reported(trial=trial, step=self.running[trial], value=self.value()))

    def step_paused(self, trial: int) -> None:
        """A paused trial fails, is canceled, or reports, since it was not quite paused yet."""
        if self.rng.random() < 0.3:
            self.exit(trial, self.rng.choice(("errored", "canceled", "invalid_hp")))
        else:
            self.reached[trial] = self.further(self.reached[trial])
            self.tell(Reported(trial=trial, step=self.reached[trial], value=self.value()))

    def further(self, step: float) -> float:
        return min(step + max(1, round(self.rng.random() ** 3 * self.length)), self.length)

    def value(self) -> float | None:
        odd = self.rng.random()
        if odd < 0.15:
            return math.inf if self.normalised else self.rng.choice([math.nan, math.inf, -math.inf, None])
        return round(self.rng.random(), 1 if odd < 0.5 else 6)  # one decimal: many ties

    def exit(self, trial: int, reason: Reason) -> None:
        self.reached[trial] = self.running.pop(trial, self.reached.get(trial, 0))
        self.paused.discard(trial)
        self.stopping.discard(trial)
        self.ended.add(trial)
        self.tell(Exited(trial=trial, reason=reason))

    def extend(self, extension: Extension) -> None:
        method = self.subject.method if isinstance(self.subject, Search) else self.subject
        assert isinstance(method, Method)
        before = method.dump()
        try:
            actions = tell(self.subject, extension)
        except MethodError:
            assert method.dump() == before, f"{extension} was refused, but changed the state"
            return
        if method.rungs:
            self.length = method.rungs[-1]
        self.done = False
        self.steps.append((extension, actions))
        self.obey(actions)

    def tell(self, event: Event) -> None:
        actions = self.subject.on(event)
        self.steps.append((event, actions))
        self.obey(actions)

    def obey(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Create(trial=trial):
                    self.pending.append(trial)
                case Stop(trial=trial):
                    self.stopping.add(trial)
                    if trial in self.paused:
                        self.paused.remove(trial)
                        self.running[trial] = self.reached[trial]
                case Pause(trial=trial):
                    self.reached[trial] = self.running.pop(trial)
                    self.paused.add(trial)
                case Resume(trial=trial):
                    self.paused.discard(trial)
                    self.ended.discard(trial)
                    self.pending.append(trial)
                case Done():
                    self.done = True


_INVALID: Reason = "invalid_hp"
_REASONS: tuple[Reason, ...] = ("completed", "stopped", "errored", "invalid_hp", "canceled")
_SPACE = parse({"x": {"type": "double", "minval": 0, "maxval": 1}})


def _length(method: Method) -> float:
    return method.rungs[-1] if method.rungs else 16


def _search(method: Method, *, smaller_is_better: bool = True, log: Callable[[Record], None] | None = None) -> Search:
    return Search(method, _SPACE, seed=0, smaller_is_better=smaller_is_better, log=log or (lambda record: None))
