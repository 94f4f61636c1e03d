"""Drives a search with Ray Tune, whose one trial is a handle on the search: its results are those of all trials.

A Tune trial for each trial of the search would bear nothing: hyperparameters are bound when the search's trial gets its
workers, long after Tune had to know the configuration, and a paused trial is none of Tune's affairs. And each costs
Tune memory for good, and 15 ms until its process is reset; and where trials run side by side, each has a process on
the head (0.1 GB). So there is one: its ``step()`` waits for results of any trials, and hands Tune all that there are.
Tune asks the scheduler, and that asks the search. When its process is killed Tune starts another, which is handed again
what was not answered.

The uses of Ray Tune that are not of its public API (what a custom scheduler is called with, and the environment
variables below) are all in this file.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import ray
from ray import cloudpickle, tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from searchers.events import Action, Create, Done, Event, Exited, Reason, Reported, Resume, Started, Stop
from searchers.search import Search

HEAD_NODE = {"node:__internal_head__": 0.0001}
"""Holds an actor on the head node, without a claim on what trials need, and holds up no idle worker node. (Tune refuses
`CPU: 0`; a part of a CPU could deadlock against the placement groups that the trials' workers wait for.)"""

HANDLE_DEATHS_IN_VAIN = 5
"""A search ends when its handle dies so often without a result in between."""

Decision = Literal["continue", "stop", "pause"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the search decided on one result, and what else follows from it.

    Attributes:
        decision: On the trial that reported: it goes on, goes no further (also after the result that ended it), or
            leaves its workers until it is resumed.
        creates, resumes: Trials to be queued: new ones; and paused ones, which go on from their checkpoints.
        stops: Other trials that have ended by this: paused ones without hope.
        done: The search is over.
    """

    trial: int
    number: int
    decision: Decision
    creates: tuple[int, ...] = ()
    resumes: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    done: bool = False


class Result(Protocol):
    """What the search is asked about: what a trial reports, how it ended, or both at once."""

    @property
    def number(self) -> int:
        """Greater than those of earlier results of its trial."""

    @property
    def trial(self) -> int: ...

    @property
    def step(self) -> float | None: ...

    @property
    def value(self) -> float | None: ...

    @property
    def outcome(self) -> Reason | None: ...


class Handle(tune.Trainable):  # type: ignore[misc]  # Ray's classes are untyped here
    """The Tune trial: waits for results at an actor named in its configuration and hands them on.

    The actor has ``serve(process)``, which returns a list of each `Result` that this process has not been given yet,
    and None when the search is over. This class comes to the process whole, and finds there where to import others.
    """

    def setup(self, config: dict[str, Any]) -> None:
        if config["path"] is not None:
            sys.path.insert(0, config["path"])
        self._source = ray.get_actor(config["source"], namespace=config["namespace"])

    def step(self) -> dict[str, Any]:
        """Wait for the next results."""
        try:
            results = ray.get(self._source.serve.remote(os.getpid()))
        except ray.exceptions.RayActorError:  # the actor has died: the driver starts over, without this handle
            results = None
        return {"done": True} if results is None else {"results": results}


class _NotStored:
    """Tune pickles whatever it is given; our parts hold the running search, and are never read back."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Decide(_NotStored, FIFOScheduler):  # type: ignore[misc]
    """Tune's scheduler: asks the search about every result.

    It hears all that one of Tune's callbacks would. With a callback, whatever it is, Tune imports what it has for
    MLflow, Weights & Biases and others, and so all of these that are installed: a second of CPU before the first batch.
    """

    def __init__(self, take: Callable[[Sequence[Result]], bool], died: Callable[[str], None]) -> None:
        super().__init__()
        self._take, self._died = take, died

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """CONTINUE, as long as the search does."""
        return str(TrialScheduler.CONTINUE if self._take(result["results"]) else TrialScheduler.STOP)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """The handle's process has died, or could not start."""
        told = ""
        with contextlib.suppress(OSError):
            told = Path(trial.error_file).read_text()
        self._died(told)


class TuneDriver:
    """Runs a `Search` through `ray.tune.Tuner` until it is done or `stop()` is called.

    Args:
        search: the search; events are fed to it under `lock`.
        lock: held around every use of the search.
        together: entered around what the search is told at once, so that its journal waits for the disk once for all.
        act: carries out what the search decided. Called in Tune's thread, under no lock.
        source, namespace: name and Ray namespace of the actor that the handle asks for results.
        directory: where Tune keeps its own books, which are never read back.
        path: finds out where, on the head, this package is and that actor's class; None: where Python looks.
    """

    def __init__(
        self,
        search: Search,
        *,
        lock: threading.RLock,
        together: Callable[[], AbstractContextManager[None]],
        act: Callable[[Answer], None],
        source: str,
        namespace: str,
        directory: Path,
        path: Callable[[], str] | None = None,
    ) -> None:
        self._search, self._lock, self._together, self._act = search, lock, together, act
        self._source: dict[str, str | None] = {"source": source, "namespace": namespace}
        self._path = path
        self._directory = directory
        self._stopping = False
        self._answered: dict[int, int] = {}
        self._deaths = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        """Block until the search is done. Errors of the search end the run, and are kept in `error`."""
        for variable, value in {
            "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
            "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
            "TUNE_GLOBAL_CHECKPOINT_S": "86400",
            "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
            "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
            "RAY_AIR_NEW_OUTPUT": "0",
        }.items():
            os.environ.setdefault(variable, value)
        source = {**self._source, "path": None}
        if self._path is not None:
            try:
                source["path"] = self._path()
            except ray.exceptions.RayError:  # the actor has died, as the driver will find out
                return
            cloudpickle.register_pickle_by_value(sys.modules[__name__])
        tuner = tune.Tuner(
            tune.with_resources(Handle, tune.PlacementGroupFactory([HEAD_NODE])),
            param_space=source,
            tune_config=tune.TuneConfig(scheduler=_Decide(self._take, self._died)),
            run_config=tune.RunConfig(
                name=self._directory.name,
                storage_path=str(self._directory.parent),
                verbose=0,
                # Else Tune looks for one, and in a notebook takes one that clears the cell when it is made.
                progress_reporter=tune.CLIReporter(),
                stop=_StopAll(lambda: self._stopping),
                failure_config=tune.FailureConfig(max_failures=-1),
                # A handle has nothing to save; Tune asks classes to, at their end, unless told otherwise.
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            ),
        )
        try:
            tuner.fit()
        except BaseException as e:
            self.error = self.error or e

    def stop(self) -> None:
        """End the run soon, whatever the search is at."""
        self._stopping = True

    def _died(self, told: str) -> None:
        self._deaths += 1
        if self._deaths >= HANDLE_DEATHS_IN_VAIN and not self._stopping:
            why = told.strip().splitlines()[-1:] or ["no reason is told"]
            self.error = RuntimeError(f"its Tune handle died {self._deaths} times without a result between: {why[0]}")
            self._stopping = True

    def _take(self, results: Sequence[Result]) -> bool:
        """Feed results to the search, and carry out what it decides on each; False when the run is to end."""
        self._deaths = 0
        try:
            with self._lock, self._together():
                answers = [self._decide(result) for result in results if self._is_new(result)]
            for answer in answers:
                self._act(answer)
        except BaseException as e:
            self.error, self._stopping = self.error or e, True
        return not self._stopping

    def _is_new(self, result: Result) -> bool:
        """Whether it does not come again, from another process."""
        return self._answered.get(result.trial, -1) < result.number

    def _decide(self, result: Result) -> Answer:
        self._answered[result.trial] = result.number
        events: list[Event] = []
        if result.step is not None:
            events.append(Reported(trial=result.trial, step=result.step, value=result.value))
        if result.outcome is not None:
            events.append(Exited(trial=result.trial, reason=result.outcome))
        actions, stops = feed(self._search, events)
        return self._answer(result.trial, result.number, actions, stops)

    def _answer(self, trial: int, number: int, actions: list[Action], stops: tuple[int, ...]) -> Answer:
        trials = self._search.trials
        resumes = [a.trial for a in actions if isinstance(a, Resume) and trials[a.trial].state == "PENDING"]
        view = trials[trial]
        decision: Decision = "continue"
        if view.ended:
            decision = "stop"
        elif view.state == "PAUSED":
            decision = "pause"
        elif trial in resumes:
            # Paused, and resumed at once: it keeps its workers.
            resumes.remove(trial)
            actions += self._search.on(Started(trial=trial))
        return Answer(
            trial=trial,
            number=number,
            decision=decision,
            creates=tuple(action.trial for action in actions if isinstance(action, Create)),
            resumes=tuple(resumes),
            stops=tuple(stop for stop in stops if stop != trial),
            done=any(isinstance(action, Done) for action in actions),
        )


def feed(search: Search, events: list[Event]) -> tuple[list[Action], tuple[int, ...]]:
    """Tell the search these events, and of every trial that it stops that it has ended.

    For the search a stopped trial is over: it is at a checkpoint, also where its workers have yet to leave it.

    Returns:
        All actions that followed, and the trials that were stopped.
    """
    actions = [action for event in events for action in search.on(event)]
    stops: list[int] = []
    for action in actions:  # which grows
        if isinstance(action, Stop) and not search.trials[action.trial].ended:
            stops.append(action.trial)
            actions += search.on(Exited(trial=action.trial, reason="stopped"))
    return actions, tuple(stops)


class _StopAll(_NotStored, tune.Stopper):  # type: ignore[misc]
    def __init__(self, stopping: Callable[[], bool]) -> None:
        self._stopping = stopping

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._stopping()
