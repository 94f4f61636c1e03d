"""A search in virtual time: asynchronous workers, costs of starting and resuming, failures, noise.

It drives the same objects as a real driver, by the same rules: hyperparameters are drawn when a trial gets its worker,
a `Pause` frees the worker and keeps what was trained, and a stopped trial has exited before its worker is given away.
Nothing is predicted by formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from searchers.events import Action, DoneReason, Event, Reason
from searchers.method import Method
from searchers.search import Search
from searchers.simulator import Conditions, Curve, Simulator

__all__ = ["Curve", "Simulation", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The outcome of a simulated search.

    Attributes:
        time: Time of the last event, or `until`.
        done: Why the search ended; None if it was cut at `until`.
        trials: Trials that were created.
        ended: How many ended, by reason.
        trained: Length trained by all trials together, including what failures lost.
        busy: Time in which workers had a trial, summed over workers; `busy / (workers * time)` is the utilisation.
        events: Number of events sent to the search.
    """

    time: float
    done: DoneReason | None
    trials: int
    ended: Mapping[Reason, int]
    trained: float
    busy: float
    events: int


def simulate(
    search: Search | Method,
    workers: int,
    trial: Callable[[Mapping[str, object]], Curve | None],
    *,
    reports: Sequence[float] | None = None,
    start_cost: float = 0.0,
    resume_cost: float = 0.0,
    failures: float = 0.0,
    max_restarts: int = 5,
    noise: float = 0.0,
    jitter: float = 0.0,
    until: float = math.inf,
    seed: int = 0,
    watch: Callable[[float, Event, list[Action]], None] | None = None,
) -> Simulation:
    """Run a search to its end in virtual time. Time has the unit of `Curve.cost`.

    The same arguments give the same events. A trial's random numbers depend on `seed` and its number alone, so that two
    methods can be compared on the same draws.

    Args:
        search: A new search or method; or a `Search` that has started (replayed, extended, or cut by `until`), which
            continues as after the death of its driver, each live trial from its last report.
        workers: Trials that train at the same time, >= 1.
        trial: From hyperparameters to the trial's curve, or None if they are invalid ("invalid_hp"). Called when the
            trial first gets a worker. With a bare method, the hyperparameters are `{"trial": its number}`.
        reports: Lengths at which each trial reports, ascending; it ends by itself at the last one. By default the
            method's rungs; needed for a method that has none.
        start_cost: Time from getting a worker to the first step.
        resume_cost: The same for a trial that continues after a `Pause` or a failure.
        failures: Failures of a busy worker per unit of time. The trial restarts on the same worker from its last report
            (`Started` comes again).
        max_restarts: How many failures a trial survives; at the next it exits "errored".
        noise: Standard deviation of the noise added to each value.
        jitter: Standard deviation of the logarithm of training times between reports, and of the workers' speeds.
        until: Nothing happens after this time.
        seed: For failures, noise and jitter; hyperparameters are drawn by the search.
        watch: Called at every event with the time, the event and the actions that followed.

    Raises:
        ValueError: An argument is out of its range; all are named.
        RuntimeError: The method acts on a trial that does not exist, or all workers are idle before `Done`.

    >>> from searchers import ASHA
    >>> asha = ASHA(max_trials=3, max_length=4, num_rungs=2, max_concurrent_trials=1)
    >>> worse_and_worse = lambda hparams: Curve(lambda step: hparams["trial"] / step)
    >>> simulate(asha, 1, worse_and_worse, start_cost=10).time  # 10 + 4, 10 + 1, 10 + 1
    36.0
    """
    method = search.method if isinstance(search, Search) else search
    steps = tuple(dict.fromkeys(method.rungs if reports is None else reports))
    conditions = Conditions(start_cost, resume_cost, failures, max_restarts, noise, jitter, until, seed)
    rules = (
        (workers >= 1, f"workers: must be >= 1, got {workers}"),
        (steps and min(steps) > 0, f"reports: must be lengths > 0, got {reports!r} (rungs: {method.rungs!r})"),
        (list(steps) == sorted(steps), f"reports: must be ascending, got {reports!r}"),
        *(
            (value >= 0, f"{name}: must be >= 0, got {value!r}")
            for name, value in asdict(conditions).items()
            if name != "seed"
        ),
    )
    if faults := [fault for holds, fault in rules if not holds]:
        raise ValueError("\n".join(faults))
    run = Simulator(search, workers, trial, steps, conditions, watch)
    run.run()
    return Simulation(
        time=run.time,
        done=run.done,
        trials=run.created,
        ended=dict(run.ended),
        trained=run.trained,
        busy=run.busy,
        events=run.events,
    )
