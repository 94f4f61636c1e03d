"""Drives a search with Ray Tune: its trials are handles, its searcher and scheduler two faces of one `Search`.

A Tune trial does no work and carries no hyperparameters: those are bound when the search's trial gets its workers, long
after Tune had to know the configuration. It is a *handle*: its ``step()`` waits for the next result of whichever trial
of the search it comes to stand for, hands that to Tune, and Tune asks the search. So any number of handles can be
killed. And a paused trial is none of Tune's affairs: its handle ends, and when it is resumed it finds another one.

Events reach the search from the scheduler's side only: Tune passes over ``Searcher.on_trial_result`` when a trial is
stopped, and calls ``on_trial_complete`` of both sides.

The uses of Ray Tune that are not of its public API (what a custom scheduler and searcher are called with, and the
environment variables below) are all in this file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from searchers.events import Action, Create, Done, Event, Exited, Reported, Resume, Started, Stop
from searchers.search import Search

HEAD_NODE = {"node:__internal_head__": 0.0001}
"""Holds an actor on the head node, without a claim on what trials need, and holds up no idle worker node. (Tune refuses
`CPU: 0`; a part of a CPU could deadlock against the placement groups that the trials' workers wait for.)"""


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


class Handle(tune.Trainable):  # type: ignore[misc]  # Ray's classes are untyped here
    """A Tune trial: waits for results at an actor named in its configuration and hands them on.

    The actor has ``serve(handle_id, process, seen)``, which returns the next result (an object with ``number``,
    ``trial``, ``step``, ``value`` and ``outcome``) or None when the search is over.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self._source = ray.get_actor(config["source"], namespace=config["namespace"])
        self._seen = 0

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """This process goes on as another Tune trial."""
        self._seen = 0
        return True

    def step(self) -> dict[str, Any]:
        """Wait for the next result."""
        try:
            result = ray.get(self._source.serve.remote(self.trial_id, os.getpid(), self._seen))
        except ray.exceptions.RayActorError:  # the actor has died: the driver starts over, without this handle
            result = None
        if result is None:
            return {"done": True}
        self._seen = result.number
        return {
            "number": result.number,
            "search_trial": result.trial,
            "step": result.step,
            "value": result.value,
            "outcome": result.outcome,
            "done": result.outcome is not None,
        }


class _NotStored:
    """Tune pickles whatever it is given; our parts hold the running search, and are never read back."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Suggest(_NotStored, Searcher):  # type: ignore[misc]
    """Tune's searcher: hands out as many handles as are wanted, until the search is done."""

    def __init__(
        self,
        wanted: Callable[[], int],
        done: Callable[[], bool],
        expect: Callable[[str], None],
        config: dict[str, Any],
    ) -> None:
        super().__init__()
        self._wanted, self._done, self._expect, self._config = wanted, done, expect, config
        self._live: set[str] = set()

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """A handle if one is wanted."""
        if self._done():
            return str(Searcher.FINISHED)
        if len(self._live) >= self._wanted():
            return None
        self._live.add(trial_id)
        self._expect(trial_id)
        return dict(self._config)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """This handle has ended."""
        self._live.discard(trial_id)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the search's journal is the only truth."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""


class _Decide(_NotStored, FIFOScheduler):  # type: ignore[misc]
    """Tune's scheduler: asks the search about every result, exactly once; and hears of handles that died, or ended.

    It hears all that one of Tune's callbacks would. With a callback, whatever it is, Tune imports what it has for
    MLflow, Weights & Biases and others, and so all of these that are installed: a second of CPU before the first batch.
    """

    def __init__(self, take: Callable[[dict[str, Any]], bool], lost: Callable[[str], None]) -> None:
        super().__init__()
        self._take, self._lost = take, lost

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """STOP or CONTINUE, as the search says."""
        return str(TrialScheduler.STOP if self._take(result) else TrialScheduler.CONTINUE)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Tune brings a result that says `done` here, and not to `on_trial_result`."""
        if result.get("outcome") is not None:
            self._take(result)
        # Tune keeps these of all handles that have ended: 20 kB of statistics each, that nobody reads.
        trial.metric_analysis.clear()
        trial.metric_n_steps.clear()

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """The process of this handle has died, and Tune starts it anew."""
        self._lost(trial.trial_id)

    def choose_trial_to_run(self, tune_controller: Any) -> None:
        """Tune's own queue of pending trials is in the right order; scanning all trials for one costs O(trials)."""
        return None


class TuneDriver:
    """Runs a `Search` through `ray.tune.Tuner` until it is done or `stop()` is called.

    Args:
        search: the search; events are fed to it under `lock`.
        lock: held around every use of the search.
        act: carries out what the search decided. Called in Tune's thread, under no lock.
        wanted: how many handles there should be now.
        expect, lost: called in Tune's thread with the id of a handle that was made, and of one whose process has died
            (Tune makes another for it).
        source, namespace: name and Ray namespace of the actor that handles ask for results.
        directory: where Tune keeps its own books, which are never read back.
    """

    def __init__(
        self,
        search: Search,
        *,
        lock: threading.RLock,
        act: Callable[[Answer], None],
        wanted: Callable[[], int],
        expect: Callable[[str], None],
        lost: Callable[[str], None],
        source: str,
        namespace: str,
        directory: Path,
    ) -> None:
        self._search, self._lock, self._act, self._wanted = search, lock, act, wanted
        self._expect, self._lost = expect, lost
        self._source = {"source": source, "namespace": namespace}
        self._directory = directory
        self._stopping = False
        self._answered: dict[int, tuple[int, Decision]] = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        """Block until the search is done. Errors of the search end the run, and are kept in `error`."""
        for variable, value in {
            # `suggest` is what limits them.
            "TUNE_MAX_PENDING_TRIALS_PG": "10000",
            "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
            "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
            "TUNE_GLOBAL_CHECKPOINT_S": "86400",
            "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
            "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
            "RAY_AIR_NEW_OUTPUT": "0",
        }.items():
            os.environ.setdefault(variable, value)
        tuner = tune.Tuner(
            tune.with_resources(Handle, tune.PlacementGroupFactory([HEAD_NODE])),
            tune_config=tune.TuneConfig(
                search_alg=_Suggest(self._wanted, self._over, self._expect, self._source),
                scheduler=_Decide(self._take, self._lost),
                num_samples=-1,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name=self._directory.name,
                storage_path=str(self._directory.parent),
                verbose=0,
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

    def _over(self) -> bool:
        with self._lock:
            return self._stopping or self._search.done is not None

    def _take(self, result: dict[str, Any]) -> bool:
        """Feed one result to the search; True when its trial needs this handle no more: it has ended, or is paused.

        A paused trial takes no part in Tune: when it is resumed, its next result finds another handle. A result that
        comes again changes nothing.
        """
        trial, number, outcome = result["search_trial"], result["number"], result["outcome"]
        known = self._answered.get(trial)
        if known is not None and known[0] >= number:
            return known[1] != "continue"
        try:
            with self._lock:
                events: list[Event] = []
                if result["step"] is not None:
                    events.append(Reported(trial=trial, step=result["step"], value=result["value"]))
                if outcome is not None:
                    events.append(Exited(trial=trial, reason=outcome))
                actions, stops = feed(self._search, events)
                answer = self._answer(trial, number, actions, stops)
            self._answered[trial] = (number, answer.decision)
            self._act(answer)
        except BaseException as e:
            self.error, self._stopping = self.error or e, True
            return True
        return answer.decision != "continue"

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
