"""The driver of a search on Ray Tune, through a single Tune trial, the handle, which returns the results of all trials.

One Tune trial for each trial of the search would not work, because hyperparameters are drawn when a trial gets its
workers, long after Tune needs the configuration. Each Tune trial would also need memory that Tune never frees, 15 ms to
reset its process, and a process on the head node (0.1 GB) while it runs. The handle's ``step()`` waits for results of
any trials, and returns all available ones. Tune passes them to the scheduler, which asks the search. If the handle's
process is killed, Tune starts another, which gets the unanswered results again.

Only `_drop_results` uses an internal of Tune's. The environment variables below are undocumented too.
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
"""The run fails after this many deaths of the handle in a row without a result."""

ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}
"""Tune's settings during the run; variables that are already set take precedence."""


class Handle(tune.Trainable):  # type: ignore[misc]  # Ray's classes are untyped here
    """The Tune trial, which fetches results from the source in its configuration.

    The source is a pickled function that returns a `fetch` function. `fetch(process_id)` waits, and returns each
    `TrialResult` of the search that this process has not received yet, or None when the search is over or the source
    has gone. This class is pickled by value; its configuration has the path from which to import other modules.
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
    """Return resources that place an actor on this process's node without taking any that trials need.

    Tune rejects `CPU: 0`, and a fraction of a CPU could deadlock with the placement groups of the trials' workers.
    """
    return {f"node:{ray.util.get_node_ip_address()}": 0.0001}


class _NotStored:
    """Base class of the parts of Tune that refer to the running search; pickled without state, as it is never read."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Scheduler(_NotStored, FIFOScheduler):  # type: ignore[misc]
    """Tune's scheduler, which passes every result to the search.

    A Tune callback would see the same results, but with any callback Tune imports MLflow, Weights & Biases and similar
    packages if they are installed, which takes a second of CPU before the first batch.
    """

    def __init__(self, take: Callable[[Sequence[TrialResult]], bool], died: Callable[[str], None]) -> None:
        super().__init__()
        self._take, self._died = take, died

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        _drop_results(tune_controller)
        return str(TrialScheduler.CONTINUE if self._take(result["results"]) else TrialScheduler.STOP)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """The handle's process died, or could not start."""
        error = ""
        with contextlib.suppress(OSError, AttributeError, TypeError):  # for the message only
            error = Path(trial.error_file).read_text()
        self._died(error)


def _drop_results(tune_controller: Any) -> None:
    """Free the results that Tune has passed on, which it otherwise keeps as long as the handle's actor lives.

    A call that is still awaited may be dropped too, since Tune uses this record only to ignore calls of ended actors.
    """
    try:
        for calls in tune_controller._actor_manager._tracked_actors_to_task_futures.values():
            calls.clear()
    except Exception as error:  # a newer Ray may have changed anything
        _warn_of_memory(str(error))


@functools.cache
def _warn_of_memory(why: str) -> None:
    """Log once per process."""
    logger.warning(
        "the driver needs about 1 kB more memory per trial, because Ray %s has changed: %s", ray.__version__, why
    )


class TuneDriver:
    """Runs a search through `ray.tune.Tuner`, in a thread, until its source reports the end or `stop()` is called.

    The driver may be started before there is a search, because the handle needs seconds to start.

    Args:
        source: Returns the handle's `fetch` function, see `Handle`. Called in the handle's process.
        directory: Tune's directory for its state, which is never read back. It contains the source, so no other user
            should be able to read it.
        path: Directory on this machine from which the handle imports this package and the source's. None: the default
            import path.

    Attributes:
        take: Called in Tune's thread with the fetched results, to pass them to the search. Must be set before the first
            result.
        started: Whether `start()` was called.
        ended: Completed when the run has ended.
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
        """Start the run, which ends when the search is over, after `stop()`, or with an error, stored in `error`."""
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
                # By default Tune saves a checkpoint at the end, but a handle has no state.
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            ),
        )
        tuner.fit()

    def stop(self) -> None:
        """End the run soon, even if the search is not over."""
        self._stopping = True

    def _died(self, error: str) -> None:
        self._deaths += 1
        if self._deaths >= MAX_HANDLE_DEATHS and not self._stopping:
            reason = (error.strip().splitlines() or ["no reason given"])[-1]
            self.error = RuntimeError(f"its Tune handle died {self._deaths} times in a row without a result: {reason}")
            self._stopping = True

    def _pass_on(self, results: Sequence[TrialResult]) -> bool:
        """Pass results to the search, and return whether the run continues."""
        self._deaths = 0
        self.take(results)
        return not self._stopping


@contextlib.contextmanager
def _settings(*, pickle_by_value: bool) -> Iterator[None]:
    """Apply Tune's settings and, if requested, pickle this module by value, within the block."""
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
