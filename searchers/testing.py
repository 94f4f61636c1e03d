"""The contract of search methods: call `check_method(make, max_creations=...)` from any test.

The check drives a method through random histories. Trials start, report (in order, late, out of order, non-finite
values), stop or complete early, pause at once or one report later, fail (also while paused), are invalid, or are
canceled; the search is extended both before and after it is done. States are compared by the actions in the rest of a
history.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

from searchers.errors import IllegalEvent, MethodError
from searchers.events import (
    Action,
    Create,
    Done,
    Event,
    Exited,
    Losses,
    Measured,
    Pause,
    Reason,
    Reported,
    Requested,
    Resume,
    Source,
    Started,
    Stop,
)
from searchers.method import Method
from searchers.objectives import Metric, Objectives
from searchers.records import event_from_json, request_from_json
from searchers.search import Record, Search
from searchers.space import parse

Make = Callable[[], Method]

OBJECTIVES = Objectives((Metric(name="loss"), Metric(name="size"), Metric(name="time", at_most=0.8)))
"""Metrics for checking a method that ranks by losses."""
_REASONS: tuple[Reason, ...] = (
    "completed",
    "stopped",
    "diverged",
    "errored",
    "invalid_hp",
    "out_of_memory",
    "canceled",
)
_SPACE = parse({"x": {"type": "double", "minval": 0, "maxval": 1}})


def check_method(make: Make, *, max_creations: int, seeds: Iterable[int] = range(10)) -> None:
    """Check that a method obeys all rules of `searchers.Method`.

    Args:
        make: Returns a new method with the same configuration at each call.
        max_creations: Maximum number of trials that the method may create: its budget, plus replacements of invalid
            trials.
        seeds: Seeds of the random histories.

    Raises:
        AssertionError: The method breaks a rule. The message names the rule and the seed.

    >>> from searchers import ASHA
    >>> make = lambda: ASHA(max_trials=6, max_length=4, num_rungs=2)
    >>> check_method(make, max_creations=6 + 4 * 6, seeds=[0])
    """
    length = math.ceil(_length(make()))
    for seed in seeds:
        created = [_check_history(make, play(make(), seed, always=always), seed) for always in (None, *_REASONS)]
        message = f"seed {seed}: {max(created)} trials were created, but at most {max_creations} are allowed"
        assert max(created) <= max_creations, message
        _check_late_and_illegal_events(make, seed)
        _check_replay(make, seed)
        for extensions in (
            [Extension(max_trials=created[0] + 7), Extension(max_length=4 * length)],
            [Extension(max_length=3 * length), Extension(max_trials=created[0] + 5, max_length=7 * length)],
            [Extension(), Extension(max_trials=0), Extension(max_length=0), Extension(max_trials=created[0] + 1)],
        ):
            _check_history(make, play(make(), seed, extensions=extensions), seed)
            _check_replay(make, seed, extensions)
        if hasattr(make(), "requested"):
            extensions = [Extension(max_trials=created[0] + 7), Extension(max_length=4 * length)]
            _check_history(make, play(make(), seed, extensions=extensions, requests=10), seed)
            _check_replay(make, seed, extensions, requests=10)


def _check_history(make: Make, history: History, seed: int) -> int:
    """Check that a new method takes the same, valid actions, and check `Done` and the progress.

    Returns:
        Number of trials created.
    """
    method, trained, created = make(), dict[int, float](), 0
    running, paused, stopped, ended = set[int](), set[int](), set[int](), set[int]()
    progress, done, extended = 0.0, False, False
    for event, actions in [(None, history.first), *history.steps]:
        again = method.start() if event is None else send(method, event)
        assert again == actions, f"seed {seed}: {event or 'start()'} led to other actions the second time"
        match event:
            case Extension():
                progress, done, extended = 0.0, False, True
            case Requested():
                progress, done = 0.0, False
            case Reported(trial=trial, step=step):
                trained[trial] = step / _length(method)
            case Exited(trial=trial):
                for known in (running, paused, stopped):
                    known.discard(trial)
                ended.add(trial)
        for action in actions:
            assert not done, f"seed {seed}: {action} follows Done"
            names = f"seed {seed}: {action} names a trial that"
            match action:
                case Create(trial=trial):
                    assert trial == created, f"seed {seed}: trials must be numbered 0, 1, 2, ..., got {trial}"
                    created += 1
                    running.add(trial)
                case Stop(trial=trial):
                    assert trial in running | paused, f"{names} has ended or was stopped"
                    running.discard(trial)
                    paused.discard(trial)
                    stopped.add(trial)
                case Pause(trial=trial):
                    assert trial in running, f"{names} is not running"
                    running.remove(trial)
                    paused.add(trial)
                case Resume(trial=trial):
                    assert trial in (paused | ended if extended else paused), f"{names} is not paused"
                    paused.discard(trial)
                    ended.discard(trial)
                    running.add(trial)
                case Done():
                    live, done = running | paused | stopped, True
                    assert not live, f"seed {seed}: Done came before trials {live} ended"
        now = method.progress(trained)
        assert progress <= now <= 1, (
            f"seed {seed}: progress fell, or left 0..1: from {progress} to {now}, after {event}"
        )
        assert (now == 1) == done, f"seed {seed}: progress is {now}, and done is {done}, after {event}"
        progress = now
    assert done, f"seed {seed}: Done must come once"
    return created


def _check_late_and_illegal_events(make: Make, seed: int) -> None:
    """Check that repeated events, and events for ended or unknown trials, do not affect later actions."""
    history, method, ended = play(make(), seed), make(), list[int]()
    created = sum(isinstance(action, Create) for action in method.start())
    for trial in (created, created + 7, -1):
        for illegal in (
            Started(trial=trial),
            Reported(trial=trial, step=1, value=0.0),
            Exited(trial=trial, reason="errored"),
        ):
            try:
                method.on(illegal)
            except IllegalEvent:
                continue
            raise AssertionError(f"{illegal} is for a trial that was never created, but did not raise IllegalEvent")
    for event, actions in history.steps:
        again = send(method, event)
        assert again == actions, f"seed {seed}: {event} led to other actions after late, repeated or illegal events"
        assert not isinstance(event, Extension | Requested)
        if isinstance(event, Exited) and event.trial not in ended:
            ended.append(event.trial)
        before, losses = method.progress({}), Losses((0.0, 0.0))
        late = [Reported(trial=trial, step=_length(method), value=0.0, losses=losses) for trial in ended[-2:]]
        for repeated in [event, *late, *(Exited(trial=trial, reason="errored") for trial in ended[-2:])]:
            message = f"seed {seed}: {repeated} is late or repeated, but"
            assert method.on(repeated) == [], f"{message} led to actions"
            assert method.progress({}) == before, f"{message} changed the progress"


def _check_replay(make: Make, seed: int, extensions: Iterable[Extension] = (), requests: int = 0) -> None:
    """Check that a search replayed from its log, cut anywhere, continues like the original search."""

    def search_with(log: list[Record]) -> Search:
        method = make()
        objectives = OBJECTIVES if getattr(method, "pareto", False) else None
        return Search(method, _SPACE, seed=0, smaller_is_better=True, log=log.append, objectives=objectives)

    log: list[Record] = []
    search = search_with(log)
    play(search, seed, extensions=extensions, requests=requests)
    records = _through_json(log)
    for cut in (Random(seed).randrange(len(records)), len(records)):
        rest: list[Record] = []
        again = search_with(rest).replay(records[:cut])
        assert rest == [], "replayed records must not be logged again"
        for record in records[cut:]:
            repeat(again, record)
        assert _through_json(rest) == records[cut:], f"seed {seed}: the actions differ after a replay of {cut} records"
        for name, replayed, original in (
            ("trials", dict(again.trials), dict(search.trials)),
            ("end", again.done, search.done),
            ("progress", again.method.progress({}), search.method.progress({})),
        ):  # compared as strings, since NaN is not equal to itself
            assert str(replayed) == str(original), f"seed {seed}: the {name} differs after a replay"


def _through_json(records: list[Record]) -> list[Record]:
    decoded: list[Record] = json.loads(json.dumps(records, allow_nan=False))
    return decoded


def repeat(search: Search, record: Record) -> None:
    """Repeat the call that wrote this record."""
    match record:
        case {"event": "start"}:
            search.start()
        case {"event": "extended", "max_trials": max_trials, "max_length": max_length}:
            search.extend(max_trials=cast("int | None", max_trials), max_length=cast("int | None", max_length))
        case {"event": "requested"}:
            search.request(request_from_json(record))
        case _:
            search.on(event_from_json(record))


def _length(method: Method) -> float:
    return method.rungs[-1] if method.rungs else 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """A call of `extend`, among the events of a history."""

    max_trials: int | None = None
    max_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The first actions of a method, and every event with the actions that followed."""

    first: list[Action]
    steps: list[tuple[Event | Extension | Requested, list[Action]]]


def send(subject: Method | Search, event: Event | Extension | Requested) -> list[Action]:
    """Send a step of a history to a method or search, and return the actions that follow."""
    if isinstance(event, Extension):
        return subject.extend(max_trials=event.max_trials, max_length=event.max_length)
    if isinstance(event, Requested):
        return subject.request(event) if isinstance(subject, Search) else cast("Any", subject).requested(event)
    return subject.on(event)


def play(
    subject: Method | Search,
    seed: int,
    *,
    always: Reason | None = None,
    extensions: Iterable[Extension] = (),
    requests: int = 0,
) -> History:
    """Drive a method or a search through a random history until it is done.

    Args:
        subject: A new method or search, which is started here. A method gets normalised values; a search also NaN, None
            and infinities.
        seed: The same seed and the same actions give the same history.
        always: If set, every trial ends for this reason, without a report.
        extensions: Requested in this order at random moments, at the latest when the search is done. Rejected
            extensions are not in the history.
        requests: Number of new trials that are requested at random moments, also when the search is done.
    """
    player = _Player(subject, Random(seed), always, list(extensions), requests)
    first, length = subject.start(), player.length
    player.carry_out(first)
    while not player.done or player.extensions or player.requests:
        assert len(player.steps) < 100_000, f"seed {seed}: the search did not end within 100,000 events"
        player.step()
    for trial in sorted(player.ended)[-3:]:  # reports after the end
        player.send(player.report(trial, length))
    return History(first=first, steps=player.steps)


@dataclass(slots=True)
class _Player:
    subject: Method | Search
    rng: Random
    always: Reason | None
    extensions: list[Extension]
    requests: int
    method: Method = field(init=False)
    length: float = field(init=False)  # trials end by themselves at this length
    pending: list[int] = field(default_factory=list)
    running: dict[int, float] = field(default_factory=dict)  # current step by trial
    paused: set[int] = field(default_factory=set)
    stopping: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    reached: dict[int, float] = field(default_factory=dict)  # last step of paused and ended trials
    steps: list[tuple[Event | Extension | Requested, list[Action]]] = field(default_factory=list)
    done: bool = False

    def __post_init__(self) -> None:
        self.method = self.subject.method if isinstance(self.subject, Search) else self.subject
        self.length = _length(self.method)

    def step(self) -> None:
        rng = self.rng
        if self.extensions and (self.done or rng.random() < 0.02):
            self.extend(self.extensions.pop(0))
            return
        if self.requests and (self.done or rng.random() < 0.05):
            self.request()
            return
        if self.paused and rng.random() < 0.05:
            self.step_paused(rng.choice(sorted(self.paused)))
            return
        if self.pending and (not self.running or (len(self.running) < 4 and rng.random() < 0.4)):
            trial = self.pending.pop(rng.randrange(len(self.pending)))
            self.running[trial] = self.reached.get(trial, 0)
            self.send(Started(trial=trial))
            return
        assert self.running, f"no trial is pending or running, {len(self.paused)} are paused, but Done did not come"
        trial = rng.choice(list(self.running))
        chance = rng.random()
        if self.always is not None:
            self.exit(trial, self.always)
        elif self.ended and chance < 0.05:
            self.send(self.report(rng.choice(sorted(self.ended)), self.length))
        elif chance < 0.1:
            self.exit(trial, rng.choice(_REASONS))
        elif chance < 0.15:  # restarted from an earlier checkpoint
            self.running[trial] *= rng.random()
            self.send(Started(trial=trial))
        elif chance < 0.18:  # out of order
            self.send(self.report(trial, self.running[trial] * rng.random()))
        elif trial in self.stopping and chance < 0.7:
            self.exit(trial, "stopped")
        elif self.running[trial] >= self.length:
            self.exit(trial, "completed")
        else:
            self.running[trial] = self.further(self.running[trial])
            self.send(self.report(trial, self.running[trial]))

    def step_paused(self, trial: int) -> None:
        """Let a paused trial fail, be canceled, or report once more before its workers leave."""
        if self.rng.random() < 0.3:
            self.exit(trial, self.rng.choice(("errored", "canceled", "invalid_hp", "out_of_memory")))
        else:
            self.reached[trial] = self.further(self.reached[trial])
            self.send(self.report(trial, self.reached[trial]))

    def further(self, step: float) -> float:
        return min(step + max(1, round(self.rng.random() ** 3 * self.length)), self.length)

    def report(self, trial: int, step: float) -> Reported:
        """Return a report of one metric, or of two and a constraint derived from it."""
        value = self.value()
        if value is None or not math.isfinite(value):
            several: Measured = (value, 0.5, 0.5)
        else:
            several = (value, round((7919 * value) % 1, 1), round((104729 * value) % 1, 2))
        if not isinstance(self.subject, Search):
            return Reported(trial=trial, step=step, value=value, losses=OBJECTIVES.normalised(several))
        return Reported(trial=trial, step=step, value=value, metrics=several if self.subject.objectives else ())

    def value(self) -> float | None:
        chance = self.rng.random()
        if chance < 0.15:
            is_search = isinstance(self.subject, Search)
            return self.rng.choice([math.nan, math.inf, -math.inf, None]) if is_search else math.inf
        return round(self.rng.random(), 1 if chance < 0.5 else 6)  # one decimal gives many ties

    def exit(self, trial: int, reason: Reason) -> None:
        self.reached[trial] = self.running.pop(trial, self.reached.get(trial, 0))
        self.paused.discard(trial)
        self.stopping.discard(trial)
        self.ended.add(trial)
        self.send(Exited(trial=trial, reason=reason))

    def extend(self, extension: Extension) -> None:
        try:
            actions = send(self.subject, extension)
        except MethodError:
            return
        self.length = _length(self.method)
        self.done = False
        self.steps.append((extension, actions))
        self.carry_out(actions)

    def request(self) -> None:
        """Request a new trial, from the checkpoint of another one if any has trained."""
        self.requests -= 1
        known = {**self.reached, **self.running}
        sources = [
            Source(trial=trial, step=step)
            for trial, step in known.items()
            if 0 < step < self.length and trial not in self.pending
        ]
        source = self.rng.choice(sources) if sources and self.rng.random() < 0.7 else None
        self.done = False
        hparams = {"x": self.rng.random() * 2}  # half of them outside of the space
        # Only a search knows of code.
        code = (None, "a", "b")[len(self.steps) % 3] if source is None and isinstance(self.subject, Search) else None
        self.send(Requested(source=source, hparams=hparams, code=code))

    def send(self, event: Event | Requested) -> None:
        actions = send(self.subject, event)
        self.steps.append((event, actions))
        self.carry_out(actions)

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Create(trial=trial, source=source):
                    self.pending.append(trial)
                    if source is not None:
                        self.reached[trial] = source.step
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
