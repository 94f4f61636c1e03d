"""Drives a search with Ray Tune, through a single Tune trial, the handle, which returns the results of all trials.

One Tune trial per trial of the search would not work: hyperparameters are drawn when a trial gets its workers, long
after Tune needs the configuration. And each would cost memory that Tune never frees, 15 ms to reset its process, and a
process on the head node (0.1 GB) while it runs. So there is one: its ``step()`` waits for results of any trials, and
returns all available ones. Tune passes them to the scheduler, which asks the search. If the handle's process is killed,
Tune starts another, which gets the unanswered results again.

Of Tune's internals only `_drop_results` uses one. The environment variables below are not documented either.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle, tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from searchers.events import TrialResult

logger = logging.getLogger(__name__)

MAX_HANDLE_DEATHS = 5
"""The run fails when its handle has died this many times in a row without a result."""

ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}
"""Tune's settings while it runs here; a variable that is already set wins."""


class Handle(tune.Trainable):  # type: ignore[misc]  # Ray's classes are untyped here
    """The Tune trial: fetches results from the source in its configuration.

    That is a pickled function. What it returns is called with this process's id, waits, and returns each `TrialResult`
    of the search that this process has not got yet; None when the search is over, or the source gone. This class is
    pickled by value; its configuration says where to import other modules from.
    """

    def setup(self, config: dict[str, Any]) -> None:
        if config["path"] is not None:
            sys.path.insert(0, config["path"])
        self._fetch = pickle.loads(config["source"])()

    def step(self) -> dict[str, Any]:
        """Wait for the next results."""
        results = self._fetch(os.getpid())
        return {"done": True} if results is None else {"results": results}


def this_node() -> dict[str, float]:
    """Resources that place an actor on the node of this process. They take nothing that trials need.

    (Tune refuses `CPU: 0`, and a fraction of a CPU could deadlock with the placement groups of the trials' workers.)
    """
    return {f"node:{ray.util.get_node_ip_address()}": 0.0001}


class _NotStored:
    """A part of Tune that refers to the running search: pickled without its state, which is never read back."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Scheduler(_NotStored, FIFOScheduler):  # type: ignore[misc]
    """Tune's scheduler: passes every result to the search.

    Not a Tune callback, which would see the same: with any callback, Tune imports MLflow, Weights & Biases and the like
    if they are installed, which takes a second of CPU before the first batch.
    """

    def __init__(self, take: Callable[[Sequence[TrialResult]], bool], died: Callable[[str], None]) -> None:
        super().__init__()
        self._take, self._died = take, died

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """CONTINUE until the search is over."""
        _drop_results(tune_controller)
        return str(TrialScheduler.CONTINUE if self._take(result["results"]) else TrialScheduler.STOP)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """The handle's process died, or could not start."""
        error = ""
        with contextlib.suppress(OSError, AttributeError, TypeError):  # for the message only
            error = Path(trial.error_file).read_text()
        self._died(error)


def _drop_results(tune_controller: Any) -> None:
    """Free the results that Tune has passed on: it keeps an actor's while the actor lives, here until the end.

    A call that is still awaited may be forgotten too: Tune only uses this record to ignore the calls of an ended actor.
    """
    try:
        for calls in tune_controller._actor_manager._tracked_actors_to_task_futures.values():
            calls.clear()
    except AttributeError as error:
        _warn_of_memory(str(error))


@functools.cache
def _warn_of_memory(why: str) -> None:
    """Log once per process."""
    logger.warning(
        "the driver needs about 1 kB more memory per trial, because Ray %s has changed: %s", ray.__version__, why
    )


class TuneDriver:
    """Runs a search through `ray.tune.Tuner`, in a thread, until its source says that it is over, or `stop()`.

    It may start before there is a search: the handle takes seconds to come up.

    Args:
        source: Connects to what the handle fetches results from, see `Handle`. Called in the handle's process.
        directory: Where Tune keeps its state, which is never read back. It has the source: let nobody else read it.
        path: The directory from which the handle is to import this package and the source's, on this machine. None:
            Python finds them.

    Attributes:
        take: Called in Tune's thread with the results that the handle has fetched, to be passed to the search. To be
            set before there are any.
        started: Whether `start()` was called.
        ended: Done when the run has ended.
        error: The error that ended the run, if any.
    """

    take: Callable[[Sequence[TrialResult]], None]

    def __init__(
        self,
        *,
        source: Callable[[], Callable[[int], Sequence[TrialResult] | None]],
        directory: Path,
        path: str | None = None,
    ) -> None:
        self._source, self._directory, self._path = source, directory, path
        self._stopping = False
        self._deaths = 0
        self.started = False
        self.ended: Future[None] = Future()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start the run, which ends when the search is over, by `stop()`, or by an error, kept in `error`."""
        self.started = True
        threading.Thread(target=self._run, name="dray-tune", daemon=True).start()

    def _run(self) -> None:
        try:
            with _settings(pickle_by_value=self._path is not None):
                self._fit()
        except BaseException as e:
            self.error = self.error or e
        finally:
            self.ended.set_result(None)

    def _fit(self) -> None:
        tuner = tune.Tuner(
            tune.with_resources(Handle, tune.PlacementGroupFactory([this_node()])),
            param_space={"source": pickle.dumps(self._source), "path": self._path},
            tune_config=tune.TuneConfig(scheduler=_Scheduler(self._pass_on, self._died)),
            run_config=tune.RunConfig(
                name=self._directory.name,
                storage_path=str(self._directory.parent),
                verbose=0,
                # In a notebook, Tune's default reporter clears the cell.
                progress_reporter=tune.CLIReporter(),
                stop=_StopAll(lambda: self._stopping),
                failure_config=tune.FailureConfig(max_failures=-1),
                # By default Tune saves at the end, but a handle has nothing to save.
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            ),
        )
        tuner.fit()

    def stop(self) -> None:
        """End the run soon, whether the search is over or not."""
        self._stopping = True

    def _died(self, error: str) -> None:
        self._deaths += 1
        if self._deaths >= MAX_HANDLE_DEATHS and not self._stopping:
            why = error.strip().splitlines()[-1:] or ["no reason given"]
            self.error = RuntimeError(f"its Tune handle died {self._deaths} times in a row without a result: {why[0]}")
            self._stopping = True

    def _pass_on(self, results: Sequence[TrialResult]) -> bool:
        """Pass results to the search. Returns whether the run goes on."""
        self._deaths = 0
        self.take(results)
        return not self._stopping


@contextlib.contextmanager
def _settings(*, pickle_by_value: bool) -> Iterator[None]:
    """Within the block: Tune's settings and, on request, this module pickled by value."""
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
