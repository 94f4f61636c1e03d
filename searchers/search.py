"""A search: the combination of a method, a space, a sampler and a log, which a driver holds.

    search = Search(method, space, seed=7, smaller_is_better=True, log=journal.append)
    for action in search.start(): ...             # then, for each event:
    for action in search.on(event): ...           # the event is logged before its actions are returned

A search normalises metrics (no other code does), asks the sampler for hyperparameters when a trial gets its workers (by
default those of trial 7 depend only on the seed and on 7), keeps a view of every trial, and logs one record per event.
Its state follows from these records alone, so that `replay` can restore it.

Each record is a line of the journal:

    {"event": "start", "seed": 7, "smaller_is_better": true, "rungs": [1, 4, 16], "actions": [...]}
    {"event": "started",  "trial": 3, "hparams": {...}, "actions": []}
    {"event": "reported", "trial": 3, "step": 4, "value": 0.31, "actions": [{"action": "stop", "trial": 3}, ...]}
    {"event": "exited",   "trial": 3, "reason": "stopped", "actions": []}
    {"event": "requested", "source": {"trial": 3, "step": 4}, "hparams": {"lr": 0.01}, "actions": [{"action": "create",
        "trial": 64, "source": {"trial": 3, "step": 4}, "hparams": {"lr": 0.01}}]}
    {"event": "requested", "hparams": {}, "code": "3f9c", "actions": [{"action": "create", "trial": 65, "hparams": {},
        "code": "3f9c"}]}
    {"event": "extended", "max_trials": 200, "max_length": null, "rungs": [1, 4, 16],
        "actions": [{"action": "create", "trial": 64}, ...]}

The "start" record also has the number of "points" of a small space. The rungs are for readers; a replay ignores them.
A "reported" record also has the "batches" that name the checkpoint, if the driver gives them, and "skips": true if
the trial has passed several rungs since its last report. With several metrics, the
"start" record also has these, as in an experiment file. Each "reported" record has all their values in that order; its
"value" is that of the first objective:

    {"event": "reported", "trial": 3, "step": 4, "value": 0.31, "metrics": [0.31, 12.5, 7600], "actions": [...]}
"""

from __future__ import annotations

import copy
import math
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from searchers.errors import FieldError, IllegalEvent, JournalError, SpaceError, never_created
from searchers.events import (
    Action,
    Create,
    Done,
    Event,
    Pause,
    Repeat,
    Reported,
    Requested,
    Resume,
    Source,
    Started,
    Stop,
)
from searchers.method import MAX_TRIALS, Method, limit_points
from searchers.objectives import Objectives, normalised, with_first
from searchers.records import (
    KINDS,
    action_to_json,
    event_from_json,
    event_to_json,
    hparams_from_json,
    hparams_to_json,
    request_from_json,
    request_to_json,
)
from searchers.samplers import RandomSampler, Sampler, draw, explore, notify_extended, notify_forked
from searchers.space import Space, merge
from searchers.views import NEVER_BEST, Points, State, TrainedShares, TrialView, as_dict, num_reached

if TYPE_CHECKING:
    from searchers.untried import Untried

Record = dict[str, object]

_NO_HPARAMS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Variant:
    """The trials with one code other than the experiment's."""

    sampler: Sampler  # it is told only of these trials
    numbers: dict[int, int] = field(default_factory=dict)  # their numbers for the sampler: 0, 1, 2, ...


class Search:
    """A running search.

    Args:
        method: A new method, owned by the search.
        space: The space of the hyperparameters.
        seed: Any integer. The same seed, method, space and events give the same trials.
        smaller_is_better: Whether smaller values of the metric are better.
        log: Called with one record per event, before the event's actions are returned. It should return only once the
            record is safe. If it raises, the search is ahead of its log: drop it, and `replay` the log in a new one.
        sampler: A new sampler, owned by the search. `RandomSampler(space, seed)` by default.
        new_sampler: Makes a sampler for the trials of each code other than the experiment's (`Requested.code`), because
            results of one code say nothing certain about another. `RandomSampler(space, seed)` by default.
        objectives: The objectives and constraints of a search with several metrics; `smaller_is_better` is then the
            direction of the first one. The method must rank by objectives (`ASHA(pareto=True)`) or compare nothing.

    >>> from searchers import Exited, RandomSearch, parse_space
    >>> space = parse_space({"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}})
    >>> search = Search(RandomSearch(max_trials=1), space, seed=7, smaller_is_better=True, log=lambda record: None)
    >>> search.start(), search.on(Started(trial=0))
    ([Create(trial=0)], [])
    >>> search.on(Reported(trial=0, step=1, value=0.5)), search.trials[0].best
    ([], 0.5)
    >>> search.on(Exited(trial=0, reason="completed"))
    [Done(reason='completed')]
    """

    def __init__(
        self,
        method: Method,
        space: Space,
        *,
        seed: int,
        smaller_is_better: bool,
        log: Callable[[Record], None],
        sampler: Sampler | None = None,
        new_sampler: Callable[[], Sampler] | None = None,
        objectives: Objectives | None = None,
    ) -> None:
        self.method, self.space, self.seed = method, space, operator.index(seed)
        self.sampler: Sampler = RandomSampler(space, seed) if sampler is None else sampler
        self._new_sampler = new_sampler or (lambda: RandomSampler(space, seed))
        self._variants: dict[str, _Variant] = {}  # by code
        self.done: Done | None = None  # the method's `Done` once the search is over; None again after an extension
        self.started = False  # whether `start()` was called or replayed
        self._smaller_is_better = bool(smaller_is_better)
        self.objectives = objectives
        self._identity: Record = {"seed": self.seed, "smaller_is_better": self._smaller_is_better}
        if objectives is not None:
            self._identity["metrics"] = objectives.to_json()
        self.log = log  # a driver may replace it
        self._points = Points(space)
        self._trials: dict[int, TrialView] = {}
        self.trials: Mapping[int, TrialView] = MappingProxyType(self._trials)  # all created trials, by number
        self._live: dict[int, TrialView] = {}
        # Trials that have not ended, in the order in which they are to get workers.
        self.live: Mapping[int, TrialView] = MappingProxyType(self._live)
        self.states: Counter[State] = Counter()  # number of trials in each state
        self.requested = 0  # number of trials that were created on request
        self._is_longer = False  # whether an extension has made trials longer
        self._given: dict[int, Create] = {}  # trials whose hyperparameters the sampler does not draw
        self._given_order: list[int] = []  # their numbers, ascending
        self._untried: Untried | None = None  # if the space has few points, each of which is drawn once

    def start(self) -> list[Action]:
        """Return the first actions. Must be called once, and not after a `replay` that started the search."""
        assert not self.started, "the search has already started; check Search.started after a replay"
        is_limited = getattr(self.method, "limit_points", None) is not None
        points = self.space.every_point() if is_limited else None
        few: Record = {} if points is None else {"points": points.size}
        actions = self._begin(few)
        self._write({"event": "start", **self._identity, **few, "rungs": list(self.method.rungs)}, actions)
        return actions

    def on(self, event: Event) -> list[Action]:
        """Return the actions that follow from the event. For a trial that has ended, return [] and log nothing.

        Args:
            event: Its numbers may be of any type that `float` accepts, such as NumPy's; they become ints and floats.

        Raises:
            IllegalEvent: The trial was never created, has not started but reports, or a field can't be logged. The
                state is unchanged.
            SpaceError: See `params`. The state is unchanged.
        """
        if isinstance(event, Reported) and (event.metrics or self.objectives is not None):
            event = with_first(event, self.objectives)
        record, may_skip = event_to_json(event), isinstance(event, Reported) and event.skips
        event = self._event(record)  # as a replay will see it
        if may_skip and isinstance(event, Reported) and self._passes_several_rungs(event):
            record["skips"] = True
            event = replace(event, skips=True)
        if self._is_late(event):
            return []
        hparams = self.params(event.trial) if isinstance(event, Started) else None
        actions = self._apply(event, hparams)
        if isinstance(event, Started):
            record["hparams"] = hparams_to_json(self._trials[event.trial].hparams)
        self._write(record, actions)
        return actions

    def request(self, request: Requested) -> list[Action]:
        """Return the actions that carry out a request, even if the search is done; `Done` then comes again.

        A trial that is to end gets a `Stop`; like any stopped trial it has ended only after its `Exited`.

        Raises:
            IllegalEvent: The request can't be carried out; the message says why. The state is unchanged.
        """
        assert self.started, "the search has not started"
        record = request_to_json(request)
        actions = self._carry_out(request_from_json(record))
        self._write(record, actions)
        return actions

    def source(self, trial: int) -> Source | None:
        """Return the checkpoint of another trial that this one begins from, if any."""
        given = self._given.get(trial)
        return None if given is None else given.source

    def repeat(self, trial: int) -> Repeat | None:
        """Return the trial that this one runs again, and its seed, if it is a repeat."""
        given = self._given.get(trial)
        return None if given is None else given.repeat

    def code_of(self, trial: int) -> str | None:
        """Return the code that a trial runs: its own (see `Requested.code`), its source's, or that of the trial that it
        repeats. None: the experiment's."""
        given = self._given.get(self._origin(trial))
        if given is None or given.repeat is None:
            return None if given is None else given.code
        return self.code_of(given.repeat.trial)

    def can_be_best(self, trial: int) -> bool:
        """Return whether a trial can be the best one: it has not failed, and is no repeat."""
        return self._view(trial).state not in NEVER_BEST and self.repeat(trial) is None

    def num_reached(self, trial: int) -> int:
        """Return the number of rungs that a trial has reached, see `views.num_reached`."""
        view = self._view(trial)
        # One that completed before trials became longer has not reached the new rungs.
        is_complete = view.state == "COMPLETED" and not self._is_longer
        return num_reached(self.method.rungs, view.last_step or 0, is_complete=is_complete)

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        """Continue with a larger budget, even if the search is done; `Done` then comes again.

        See `Method.extend` for arguments, actions and errors.
        """
        assert self.started, "the search has not started; configure it with the larger budget instead of extending it"
        actions = self._enlarge(max_trials, max_length)
        sizes: Record = {"max_trials": max_trials, "max_length": max_length}
        self._write({"event": "extended", **sizes, "rungs": list(self.method.rungs)}, actions)
        return actions

    def progress(self) -> float:
        """Return the share of the search that is done, from 0 to 1; 1 only when all of it is.

        It decreases only when the search is extended. Methods consider only running trials, so that the call takes
        the same time after a million trials.
        """
        return self.method.progress(TrainedShares(self._trials, self.method.rungs[-1] if self.method.rungs else 0))

    def params(self, trial: int) -> dict[str, object]:
        """Return the hyperparameters that the trial started with, or would start with now, in a new dict.

        Raises:
            IllegalEvent: The trial was never created.
            SpaceError: The sampler found no point, e.g. because none satisfies the space's constraint, or returned one
                that is not in the space.
        """
        bound, given = self._view(trial).hparams, self._given.get(trial)
        if bound is not None:
            return copy.deepcopy(as_dict(bound))
        sampler, number = self._sampler_of(trial)
        if given is None:
            drawn = draw(sampler, self.space, number)
            return drawn if self._untried is None else self._untried.closest(drawn)
        if given.repeat is not None:
            return self.params(given.repeat.trial)
        if given.source is not None:
            others = self.params(given.source.trial)
            if given.hparams is None:
                return explore(sampler, number, others)
        elif given.code is not None:
            others = draw(sampler, self.space, number)
        else:
            others = self.space.sample(Random(f"{self.seed}:{number}"))
        return merge(self.space.root, others, given.hparams or {})

    def seed_of(self, trial: int) -> int:
        """Return the trial's seed of 31 bits, a function of only the search's seed and the trial's number.

        A trial that begins from another trial's checkpoint has the same seed, so that it continues with the same data.
        Repeats of all trials share their seeds, so that they can be compared in pairs.
        """
        trial = self._origin(trial)
        repeat = self.repeat(trial)
        which = f"{trial}:seed" if repeat is None else f"repeat:{repeat.seed}"
        return Random(f"{self.seed}:{which}").getrandbits(31)

    def replay(self, records: Iterable[Mapping[str, object]], where: object = "journal") -> Search:
        """Restore the state of the search that wrote these records in this new search, and return it.

        Trials that were PENDING or RUNNING are live again. A trial with a recorded `Stop` that has not ended has
        `stop_requested`. Records of unknown events are skipped, since a driver may log its own events. The records are
        not logged again.

        The method and sampler must be configured like the original ones, without the extensions, which are in the
        records. The sampler is told the events, but not asked for points.

        Raises:
            JournalError: A record is impossible, or belongs to another search: its seed, direction or actions differ,
                or the hyperparameters are not in the space. The message names the line, and `where` it is.
        """
        for line, record in enumerate(records, start=1):
            if str(record.get("event")) not in KINDS:
                continue
            try:
                actions = self._replay_one(record)
            except (ValueError, TypeError) as error:
                raise JournalError(f"{where}: line {line}: {error}") from error
            decided = [action_to_json(action) for action in actions]
            if decided != record.get("actions"):
                raise JournalError(
                    f"{where}: line {line}: the recorded actions are {record.get('actions')}, but this search decides "
                    f"on {decided}; replay it with the searcher configuration that wrote the journal"
                )
        return self

    def _origin(self, trial: int) -> int:
        """Return the trial from whose beginning this one continues, through all its sources."""
        while (source := self.source(trial)) is not None:
            trial = source.trial
        return trial

    def _begin(self, record: Mapping[str, object]) -> list[Action]:
        self.started = True
        # Journals of earlier versions have no number of points: their searches may try a point twice.
        limit_points(self.method, cast("int | None", record.get("points")))
        if "points" in record and (points := self.space.every_point()) is not None:
            from searchers.untried import Untried  # it imports numpy

            self._untried = Untried(self.space, points)
        actions = self.method.start()
        self._follow(actions)
        return actions

    def _enlarge(self, max_trials: int | None, max_length: int | None) -> list[Action]:
        actions = self.method.extend(max_trials=max_trials, max_length=max_length)
        self._is_longer |= max_length is not None
        for sampler in (self.sampler, *(variant.sampler for variant in self._variants.values())):
            notify_extended(sampler, self.method.rungs)
        self.done = None
        self._follow(actions)
        return actions

    def _carry_out(self, request: Requested) -> list[Action]:
        actions: list[Action]
        if request.trial is not None:
            view = self._view(request.trial)
            if view.ended or view.stop_requested:
                raise IllegalEvent(f"trial {view.id} can't be stopped: it is {view.state}")
            actions = [Stop(trial=view.id)]
        else:
            request = self._checked(request)
            requested = getattr(self.method, "requested", None)
            if requested is None:
                raise IllegalEvent(f"{type(self.method).__name__} creates no trials on request")
            actions = requested(request)
            if request.code is not None:
                actions = [replace(each, code=request.code) if isinstance(each, Create) else each for each in actions]
            self.requested += 1
            self.done = None
        self._follow(actions)
        return actions

    def _checked(self, request: Requested) -> Requested:
        """Check the request of a new trial, and return it with its hyperparameters as the trial will have them."""
        if request.hparams is not None:
            try:
                request = replace(request, hparams=self.space.given(request.hparams))
            except SpaceError as error:
                raise IllegalEvent(str(error)) from None
        if request.source is None:
            return request
        trial, step = request.source.trial, request.source.step
        if self._view(trial).hparams is None:
            raise IllegalEvent(f"trial {trial} has not started, so it has no checkpoint to begin from")
        if not 0 <= step < (self.method.rungs[-1] if self.method.rungs else math.inf):
            raise IllegalEvent(
                f"a trial can't begin from step {step:g} of trial {trial}: the searcher's max_length is "
                f"{self.method.rungs[-1]:g}; extend the search, or begin from an earlier checkpoint"
            )
        if request.code not in (None, self.code_of(trial)):
            raise IllegalEvent(f"a trial that begins from a checkpoint of trial {trial} has the code of trial {trial}")
        return replace(request, code=None)

    def _sampler_of(self, trial: int) -> tuple[Sampler, int]:
        """Return the sampler that draws the trial's hyperparameters and learns from it, and its number there."""
        code = self.code_of(trial)
        if code is None:
            return self.sampler, self._sampler_number(trial)
        return self._variants[code].sampler, self._variants[code].numbers[trial]

    def _sampler_number(self, trial: int) -> int:
        """Return the trial's number for the sampler.

        Other trials are numbered as if there were none with given hyperparameters, which therefore change no draw.
        """
        if not self._given:
            return trial
        return MAX_TRIALS + trial if trial in self._given else trial - bisect_left(self._given_order, trial)

    def _write(self, record: Record, actions: list[Action]) -> None:
        self.log(record | {"actions": [action_to_json(action) for action in actions]})

    def _replay_one(self, record: Mapping[str, object]) -> list[Action]:
        if record["event"] == "start":
            if self.started:
                raise ValueError("the search is started a second time")
            for name in ("seed", "smaller_is_better", "metrics"):
                value = self._identity.get(name)
                if (recorded := record.get(name, None if name == "metrics" else value)) != value:
                    raise ValueError(f"the journal belongs to another search: its {name} is {recorded}, not {value}")
            return self._begin(record)
        if record["event"] == "extended":
            if not self.started:
                raise ValueError("the search is extended before it starts")
            # The method checks the budget.
            return self._enlarge(*(cast("int | None", record.get(name)) for name in ("max_trials", "max_length")))
        if record["event"] == "requested":
            return self._carry_out(request_from_json(record))
        event = self._event(record)
        if self._is_late(event):
            raise ValueError(f"{event} comes after the trial's end")
        # Hyperparameters are read from the log, since a sampler's draws may depend on more than the trial's number.
        hparams = hparams_from_json(record.get("hparams")) if isinstance(event, Started) else None
        if hparams is not None and not isinstance(hparams, dict):
            raise ValueError(f"hparams must be a mapping, got {hparams!r}")
        if hparams is not None and event.trial not in self._given and (faults := self.space.faults(hparams)):
            other = "the journal belongs to another search: the hyperparameters of trial"
            raise ValueError(f"{other} {event.trial} are not in this one's space: {FieldError(faults)}")
        return self._apply(event, hparams)

    def _view(self, trial: int) -> TrialView:
        if trial not in self._trials:
            raise never_created(trial, created=len(self._trials))
        return self._trials[trial]

    def _event(self, record: Mapping[str, object]) -> Event:
        trial = record.get("trial")
        view = self._trials.get(trial) if isinstance(trial, int) else None
        # Every table contains the trial's number; sharing one int object saves memory.
        return event_from_json(record if view is None else {**record, "trial": view.id})

    def _passes_several_rungs(self, reported: Reported) -> bool:
        before = None if (view := self._trials.get(reported.trial)) is None else view.last_step
        return (
            len({each for each in self.method.rungs if (before is None or before < each) and each <= reported.step}) > 1
        )

    def _is_late(self, event: Event) -> bool:
        view = self._view(event.trial)
        match event:
            case Reported(step=step) if not 0 <= step < math.inf:
                raise IllegalEvent(f"trial {event.trial} reported at step {step}, which must be a finite number >= 0")
            case Reported() if view.state == "PENDING" and view.hparams is None:
                raise IllegalEvent(f"trial {event.trial} reported at step {event.step} before it started")
        return view.ended

    def _apply(self, event: Event, hparams: dict[str, object] | None) -> list[Action]:
        normalised_event = normalised(event, self._smaller_is_better, self.objectives)
        actions = self.method.on(normalised_event)
        view = self._trials[event.trial].after(
            event,
            hparams=None if hparams is None else self._points(hparams),
            smaller_is_better=self._smaller_is_better,
            objectives=self.objectives,
        )
        self._put(view)
        drawn_hparams = _NO_HPARAMS if view.hparams is None else as_dict(view.hparams)
        if self._untried is not None and hparams is not None and view.id not in self._given:
            self._untried.add(hparams)
        if view.id not in self._given or not self.space.faults(drawn_hparams):  # given ones may be outside of the space
            sampler, number = self._sampler_of(view.id)
            told = normalised_event if number == view.id else replace(normalised_event, trial=number)
            sampler.tell(told, drawn_hparams)
        self._follow(actions)
        return actions

    def _follow(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Create(trial=trial, source=source):
                    view = TrialView(id=trial)
                    self._put(view if source is None else replace(view, begin=source.step, last_step=source.step))
                    if any(each is not None for each in (source, action.hparams, action.code, action.repeat)):
                        self._given[trial] = action
                        self._given_order.append(trial)
                    if (code := self.code_of(trial)) is not None:
                        if code not in self._variants:
                            self._variants[code] = _Variant(self._new_sampler())
                        self._variants[code].numbers[trial] = len(self._variants[code].numbers)
                    if source is not None:
                        sampler, number = self._sampler_of(trial)
                        notify_forked(sampler, number, replace(source, trial=self._sampler_of(source.trial)[1]))
                case Done():
                    self.done = action
                case _:
                    self._put(self._trials[action.trial].under(action))
                    if isinstance(action, Resume) and Pause(trial=action.trial) in actions:
                        self._live[action.trial] = self._live.pop(action.trial)  # it lets those that wait go first

    def _put(self, view: TrialView) -> None:
        before = self._trials.get(view.id)
        if before is None or before.state != view.state:
            if before is not None:
                self.states[before.state] -= 1
            self.states[view.state] += 1
        self._trials[view.id] = view
        if view.ended:
            self._live.pop(view.id, None)
        else:
            self._live[view.id] = view
