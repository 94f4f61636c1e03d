"""Drives a search with Ray Tune, through a single Tune trial: a handle, whose results are those of all trials.

A Tune trial for each trial of the search would be of no use: hyperparameters are drawn when a trial gets its workers,
long after Tune needs the configuration, and Tune need not know of paused trials. And each would cost memory that Tune
never frees, 15 ms to reset its process, and a process on the head (0.1 GB) for each trial that runs. So there is one:
its ``step()`` waits for results of any trials, and returns all that there are. Tune asks the scheduler about them,
which asks the search. If the handle's process is killed, Tune starts another, which gets the unanswered results again.

What is not in Tune's public API (the arguments of a custom scheduler, and the environment variables below) is used in
this file only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
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
"""Places an actor on the head node. It takes nothing that trials need, and keeps no idle worker node up. (Tune refuses
`CPU: 0`, and a fraction of a CPU could deadlock against the placement groups that the trials' workers wait for.)"""

HANDLE_DEATHS_IN_VAIN = 5
"""The search ends when its handle has died so often without a result in between."""

ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}
"""Tune's settings while it runs here, unless the process has others."""

Decision = Literal["continue", "stop", "pause"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the search decided on one result, and what else follows from it.

    Attributes:
        decision: On the trial that reported: it goes on, stops (also if this result ended it), or leaves its workers
            until it is resumed.
        creates, resumes: Trials to queue: new ones, and paused ones that go on from their checkpoints.
        stops: Other trials that end by this: paused ones that can't be promoted any more.
        done: Whether the search is over.
    """

    trial: int
    number: int
    decision: Decision
    creates: tuple[int, ...] = ()
    resumes: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    done: bool = False


class Result(Protocol):
    """What the search is asked about: a trial's report, its end, or both at once."""

    @property
    def number(self) -> int:
        """Greater than in earlier results of the trial."""

    @property
    def trial(self) -> int: ...

    @property
    def step(self) -> float | None: ...

    @property
    def value(self) -> float | None: ...

    @property
    def outcome(self) -> Reason | None: ...


class Handle(tune.Trainable):  # type: ignore[misc]  # Ray's classes are untyped here
    """The Tune trial: waits for results of an actor, which its configuration names, and hands them on.

    The actor has ``serve(process)``, which returns each `Result` that this process has not been given yet, and None
    when the search is over. This class is pickled by value; its configuration says where to import other classes from.
    """

    def setup(self, config: dict[str, Any]) -> None:
        if config["path"] is not None:
            sys.path.insert(0, config["path"])
        self._source = ray.get_actor(config["source"], namespace=config["namespace"])

    def step(self) -> dict[str, Any]:
        """Wait for the next results."""
        try:
            results = ray.get(self._source.serve.remote(os.getpid()))
        except ray.exceptions.RayActorError:  # the actor has died: the driver starts over, with another handle
            results = None
        return {"done": True} if results is None else {"results": results}


class _NotStored:
    """Tune pickles whatever it is given; parts that hold the running search are left out, and never read back."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Decide(_NotStored, FIFOScheduler):  # type: ignore[misc]
    """Tune's scheduler: asks the search about every result.

    Not one of Tune's callbacks, which would be told the same: with any callback Tune imports MLflow, Weights & Biases
    and the like, if they are installed, which takes a second of CPU before the first batch.
    """

    def __init__(self, take: Callable[[Sequence[Result]], bool], died: Callable[[str], None]) -> None:
        super().__init__()
        self._take, self._died = take, died

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """CONTINUE as long as the search goes on."""
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
        together: entered around what the search is told at once, so that its journal waits for the disk only once.
        act: carries out what the search decided. Called in Tune's thread, under no lock.
        source, namespace: name and Ray namespace of the actor that the handle asks for results.
        directory: where Tune keeps its state, which is never read back.
        path: finds the directory, on the head, from which to import this package and that actor's class; None: Python
            finds them.
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
        """Block until the search is done. An error ends the run, and is kept in `error`."""
        with _settings(pickle_by_value=self._path is not None):
            self._run()

    def _run(self) -> None:
        source = {**self._source, "path": None}
        if self._path is not None:
            try:
                source["path"] = self._path()
            except ray.exceptions.RayError:  # the actor has died, as the driver will find out
                return
        tuner = tune.Tuner(
            tune.with_resources(Handle, tune.PlacementGroupFactory([HEAD_NODE])),
            param_space=source,
            tune_config=tune.TuneConfig(scheduler=_Decide(self._take, self._died)),
            run_config=tune.RunConfig(
                name=self._directory.name,
                storage_path=str(self._directory.parent),
                verbose=0,
                # By default Tune takes, in a notebook, a reporter that clears the cell when it is made.
                progress_reporter=tune.CLIReporter(),
                stop=_StopAll(lambda: self._stopping),
                failure_config=tune.FailureConfig(max_failures=-1),
                # A handle has nothing to save; by default Tune asks it to, at its end.
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            ),
        )
        try:
            tuner.fit()
        except BaseException as e:
            self.error = self.error or e

    def stop(self) -> None:
        """End the run soon, whatever the search is doing."""
        self._stopping = True

    def _died(self, told: str) -> None:
        self._deaths += 1
        if self._deaths >= HANDLE_DEATHS_IN_VAIN and not self._stopping:
            why = told.strip().splitlines()[-1:] or ["no reason given"]
            self.error = RuntimeError(f"its Tune handle died {self._deaths} times in a row without a result: {why[0]}")
            self._stopping = True

    def _take(self, results: Sequence[Result]) -> bool:
        """Feed results to the search, and carry out its decisions; False if the run is to end."""
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
        """Whether the result was not answered before, for another process of the handle."""
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
            # Paused and resumed at once: it keeps its workers.
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
    """Tell the search these events, and, of every trial that it stops, that the trial has ended.

    For the search a stopped trial is over, also if its workers have not left it yet: it is at a checkpoint.

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


@contextlib.contextmanager
def _settings(*, pickle_by_value: bool) -> Iterator[None]:
    """Tune's settings in the block, and this module pickled by value, on request. Neither stays in the process."""
    before = dict(os.environ)
    os.environ.update({**ENVIRONMENT, **before})
    module = sys.modules[__name__]
    if pickle_by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(("TUNE_", "RAY_AIR_"))]:  # Tune sets some itself
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
        if pickle_by_value:
            cloudpickle.unregister_pickle_by_value(module)


class _StopAll(_NotStored, tune.Stopper):  # type: ignore[misc]
    def __init__(self, stopping: Callable[[], bool]) -> None:
        self._stopping = stopping

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._stopping()
