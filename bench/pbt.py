"""Population-based training by dray and by Ray's `PopulationBasedTraining`: the decisions' quality, and wall time.

Quality: the methods decide on the same training in virtual time, from the same first hyperparameters, paired by seed.
Both explore at random or by PB2, for which Ray's needs scikit-learn. Ray's scheduler runs as it is, with a stand-in for
Tune's controller. Two problems, with workers for all trials or for a quarter of them, whose speeds differ by 10 %:

  toy      the paper's figure 2: maximise 1.2 - (x0^2 + x1^2) along the gradient of 1.2 - (h0 x0^2 + h1 x1^2)
  digits   a classifier of digits, trained for real, by SGD: its rate, momentum and weight decay; the validation loss

Wall time: examples/digits/pbt.yaml, from the start of a process to its end, each with a Ray of its own, in turn:

  dray       through `dray experiment create`
  ray        a class trainable of Tune, whose actors end when a trial exploits another or waits for its turn
  ray-reuse  the same with `reuse_actors=True` and `reset_config`

A run of `ray` takes many minutes, most of them for the imports of its actors.

    python bench/pbt.py [--seeds 20] [--methods dray "dray, PB2"] [--rounds 3] [--ways dray ray-reuse] [--save]
"""

from __future__ import annotations

import argparse
import copy
import heapq
import json
import logging
import math
import os
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from _measure import DIGITS, Paper, arguments, end_on_sigterm, machine, of_kind, perform, run, spread, stamp, verdict
from scipy.stats import t as student
from torch import nn

from searchers import Create, Exited, Pause, Reported, Resume, Search, Started, Stop, parse_space
from searchers.pb2 import PB2
from searchers.pbt import PBT, Explorer
from searchers.samplers import Sampler
from searchers.space import Space

POPULATION, QUANTILE = 8, 0.25
TIMES_SOONER = 3.0
EPOCHS, INTERVAL = 16, 2


# -------------------------------------------------------------------------------------------------------- the problems
@dataclass(frozen=True, slots=True)
class Problem:
    """A training. `train(state, hparams, seed, step)` returns the state after an interval from `step`, and the loss."""

    space: dict[str, Any]
    begin: Callable[[int], Any]
    train: Callable[[Any, dict[str, Any], int, int], tuple[Any, float]]
    interval: int
    length: int


def _toy_interval(state: tuple[float, float], hparams: dict[str, Any], seed: int, step: int) -> tuple[Any, float]:
    x0, x1 = state
    for _ in range(4):
        x0, x1 = x0 - 0.02 * 2 * hparams["h0"] * x0, x1 - 0.02 * 2 * hparams["h1"] * x1
    return (x0, x1), x0**2 + x1**2 - 1.2


class Digits:
    """A hidden layer, trained by SGD on the real images; `state` is that of the model and of the optimizer."""

    def __init__(self) -> None:
        sys.path.insert(0, str(DIGITS))
        from model_def import datasets

        self.train_set, self.test_set = (each.tensors for each in datasets())

    def begin(self, seed: int) -> Any:
        torch.manual_seed(seed)
        return new_model().state_dict(), None

    def train(self, state: Any, hparams: dict[str, Any], seed: int, step: int) -> tuple[Any, float]:
        model = new_model()
        model.load_state_dict(state[0])
        optimizer = torch.optim.SGD(model.parameters(), **hparams)
        if state[1] is not None:
            optimizer.load_state_dict(state[1])
            for group in optimizer.param_groups:
                group.update(hparams)
        for epoch in range(step, step + INTERVAL):
            train_epoch(model, optimizer, self.train_set, seed=1000 * seed + epoch)
        loss = validate(model, self.test_set)
        return copy.deepcopy((model.state_dict(), optimizer.state_dict())), loss if math.isfinite(loss) else 1e9


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, data: Sequence[torch.Tensor], *, seed: int) -> None:
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))
    for batch in order.split(64):
        loss = nn.functional.cross_entropy(model(data[0][batch]), data[1][batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def validate(model: nn.Module, data: Sequence[torch.Tensor]) -> float:
    return nn.functional.cross_entropy(model(data[0]), data[1]).item()


def problems() -> dict[str, Problem]:
    unit = {"type": "double", "minval": 0, "maxval": 1}
    space = {
        "lr": {"type": "log", "base": 10, "minval": -3, "maxval": 0},
        "momentum": {"type": "double", "minval": 0, "maxval": 0.95},
        "weight_decay": {"type": "log", "base": 10, "minval": -6, "maxval": -2},
    }
    digits = Digits()
    return {
        "toy": Problem({"h0": unit, "h1": unit}, lambda seed: (0.9, 0.9), _toy_interval, 4, 64),
        "digits": Problem(space, digits.begin, digits.train, INTERVAL, EPOCHS),
    }


# --------------------------------------------------------------------------------------------------------- the methods
@dataclass(slots=True)
class Job:
    """A trial that trains: its number, its state after `step`, and its hyperparameters."""

    trial: int
    state: Any
    step: int
    hparams: dict[str, Any]


class Dray:
    """dray's search; a driver's part."""

    def __init__(self, problem: Problem, seed: int, new_sampler: Callable[[Space, int], Sampler] = Explorer) -> None:
        space = parse_space(problem.space)
        method = PBT(max_length=problem.length, population=POPULATION, interval=problem.interval, quantile=QUANTILE)
        self._search = Search(
            method,
            space,
            seed=seed,
            smaller_is_better=True,
            log=lambda record: None,
            sampler=new_sampler(space, seed),
        )
        self._problem, self._seed = problem, seed
        self._reached: dict[int, tuple[int, Any]] = {}
        self._saved: dict[tuple[int, float], Any] = {}
        self._queue = deque(action.trial for action in self._search.start() if isinstance(action, Create))

    def next(self) -> Job | None:
        if not self._queue:
            return None
        trial = self._queue.popleft()
        self._search.on(Started(trial=trial))
        if trial not in self._reached:
            source = self._search.source(trial)
            begin = (0, self._problem.begin(self._seed))
            self._reached[trial] = (
                begin if source is None else (int(source.step), self._saved[source.trial, source.step])
            )
        step, state = self._reached[trial]
        return Job(trial, state, step, dict(self._search.params(trial)))

    def continues(self, job: Job, loss: float) -> bool:
        """Decide whether the trial trains on at once, after its report."""
        self._reached[job.trial] = job.step, job.state
        self._saved[job.trial, job.step] = job.state
        actions = self._search.on(Reported(trial=job.trial, step=job.step, value=loss))
        ends = job.step >= self._problem.length
        if ends:
            actions += self._search.on(Exited(trial=job.trial, reason="completed"))
        for action in actions:
            if isinstance(action, Stop):
                actions += self._search.on(Exited(trial=action.trial, reason="stopped"))
        self._queue.extend(action.trial for action in actions if isinstance(action, Create | Resume))
        return not ends and not any(isinstance(action, Stop | Pause) for action in actions)


class Ray:
    """Ray's scheduler, with a stand-in for Tune's controller. A checkpoint is a step and a state."""

    def __init__(self, problem: Problem, seed: int, *, pb2: bool = False) -> None:
        from ray.tune.schedulers import PopulationBasedTraining
        from ray.tune.schedulers.pb2 import PB2 as RayPB2

        self._problem = problem
        random.seed(seed)
        np.random.seed(seed)
        common: dict[str, Any] = {
            "time_attr": "step",
            "metric": "loss",
            "mode": "min",
            "perturbation_interval": problem.interval,
            "quantile_fraction": QUANTILE,
            "log_config": False,
        }
        # Ray's PB2 has only linear ranges, so that its trials' configs hold the logarithms.
        self._logs = {name for name, spec in problem.space.items() if pb2 and spec["type"] == "log"}
        if pb2:
            bounds = {name: [spec["minval"], spec["maxval"]] for name, spec in problem.space.items()}
            self._scheduler = RayPB2(**common, hyperparam_bounds=bounds)
        else:
            mutations = {name: _domain(spec) for name, spec in problem.space.items()}
            self._scheduler = PopulationBasedTraining(**common, hyperparam_mutations=mutations)
        space = parse_space(problem.space)
        self.search_alg = None
        points = [space.sample(Random(f"{seed}:{number}")) for number in range(POPULATION)]
        self._trials = [
            _RayTrial(
                number, {name: math.log10(float(str(x))) if name in self._logs else x for name, x in point.items()}
            )
            for number, point in enumerate(points)
        ]
        for trial in self._trials:
            trial.state = (0, problem.begin(seed))
            self._scheduler.on_trial_add(self, trial)

    def next(self) -> Job | None:
        trial = self._scheduler.choose_trial_to_run(self)
        if trial is None:
            return None
        if (cloned := trial.run_metadata.checkpoint_manager._latest_checkpoint_result) is not None:
            trial.state = cloned.checkpoint
            trial.run_metadata.checkpoint_manager._latest_checkpoint_result = None
        trial.status = "RUNNING"
        step, state = trial.state
        hparams = {name: 10**value if name in self._logs else value for name, value in trial.config.items()}
        return Job(self._trials.index(trial), state, step, hparams)

    def continues(self, job: Job, loss: float) -> bool:
        trial = self._trials[job.trial]
        trial.state = job.step, job.state
        trial.last_result = result = {"step": job.step, "loss": loss}
        if job.step >= self._problem.length:
            trial.status = "TERMINATED"
            return False
        decision = self._scheduler.on_trial_result(self, trial, result)
        if decision == "PAUSE":
            trial.status = "PAUSED"
        return trial.status == "RUNNING"

    # As Tune's controller.
    def get_trials(self) -> list[Any]:
        return self._trials

    def _schedule_trial_save(self, trial: Any, result: Any) -> Any:
        return trial.state

    def pause_trial(self, trial: Any, should_checkpoint: bool) -> None:
        trial.status = "PAUSED"


class _RayTrial:
    """What the scheduler uses of a trial."""

    def __init__(self, number: int, config: dict[str, Any]) -> None:
        self.trial_id, self.config, self.status, self.experiment_tag = str(number), config, "PENDING", str(number)
        manager = SimpleNamespace(checkpoint_config=SimpleNamespace(num_to_keep=None), _latest_checkpoint_result=None)
        self.run_metadata = SimpleNamespace(checkpoint_manager=manager)
        self.temporary_state = SimpleNamespace(saving_to=None)
        self.evaluated_params: dict[str, Any] = {}
        self.last_result: dict[str, Any] = {}
        self.state: Any = None

    def is_finished(self) -> bool:
        return self.status == "TERMINATED"

    def set_experiment_tag(self, tag: str) -> None:
        self.experiment_tag = tag

    def set_config(self, config: dict[str, Any]) -> None:
        self.config = config


def _domain(spec: dict[str, Any]) -> Any:
    from ray import tune

    if spec["type"] == "log":
        return tune.loguniform(10 ** spec["minval"], 10 ** spec["maxval"])
    return tune.uniform(spec["minval"], spec["maxval"])


@dataclass(slots=True)
class Outcome:
    best: float = math.inf  # the best loss at the full length
    trained: int = 0  # total length


def simulated(method: Dray | Ray, problem: Problem, workers: int, seed: int) -> Outcome:
    """Let the workers train in virtual time."""
    outcome, speeds = Outcome(), Random(f"{seed}:speeds")
    running: list[tuple[float, int, Job]] = []
    now, number = 0.0, 0

    def train(job: Job) -> None:
        nonlocal number
        number += 1
        heapq.heappush(running, (now + problem.interval * math.exp(speeds.gauss(0, 0.1)), number, job))

    while True:
        while len(running) < workers and (job := method.next()) is not None:
            train(job)
        if not running:
            return outcome
        now, _, job = heapq.heappop(running)
        job.state, loss = problem.train(job.state, job.hparams, seed, job.step)
        length = min(problem.interval, problem.length - job.step)
        job.step += length
        outcome.trained += length
        if job.step >= problem.length:
            outcome.best = min(outcome.best, loss)
        if method.continues(job, loss):
            train(job)


METHODS: dict[str, Callable[[Problem, int], Dray | Ray]] = {
    "dray": Dray,
    "dray, PB2": lambda problem, seed: Dray(problem, seed, lambda space, seed: PB2(space, seed=seed)),
    "Ray": Ray,
    "Ray, PB2": lambda problem, seed: Ray(problem, seed, pb2=True),
}


def quality(paper: Paper, seeds: int, names: Sequence[str]) -> None:
    paper.say("## The decisions, in virtual time")
    paper.say()
    paper.say(
        f"{seeds} seeds; a population of {POPULATION}, quantile {QUANTILE}. The loss is the best at the full length; "
        f"that of toy is -Q, whose optimum is -1.2. Differences are to {names[0]}, with their mean's 95 % interval."
    )
    paper.say()
    paper.say("| problem | workers | method | median | difference | better | trained |")
    paper.say("|---|---:|---|---:|---|---:|---:|")
    for problem_name, problem in problems().items():
        for workers in (POPULATION, POPULATION // 4):
            reference: list[Outcome] = []
            for name in names:
                found = [simulated(METHODS[name](problem, seed), problem, workers, seed) for seed in range(seeds)]
                difference = _difference(found, reference) if reference else " | "
                reference = reference or found
                paper.say(
                    f"| {problem_name} | {workers} | {name} | {statistics.median(each.best for each in found):.4f} | "
                    f"{difference} | {statistics.fmean(each.trained for each in found):.0f} |"
                )
    paper.say()


def _difference(found: Sequence[Outcome], reference: Sequence[Outcome]) -> str:
    gaps = [one.best - other.best for one, other in zip(found, reference, strict=True)]
    mean, error = statistics.fmean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))
    half = float(student.ppf(0.975, len(gaps) - 1)) * error
    better = f"{sum(gap < 0 for gap in gaps)} of {len(gaps)}"
    return f"{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f}) | {better}"


# ------------------------------------------------------------------------------------------------------------ wall time
def child(way: str, directory: Path) -> None:
    os.environ["RAY_ADDRESS"] = "local"
    if way == "dray":
        from dray.cli import main

        try:
            main(["experiment", "create", str(DIGITS / "pbt.yaml"), str(DIGITS), "--path", str(directory / "pbt")])
        finally:
            lines = (directory / "pbt" / "journal.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines]
            created = [action for record in records for action in record.get("actions", ()) if "source" in action]
            for record in records:
                if record["event"] == "reported":
                    stamp("interval")
            stamp("trained", exploited=len(created))
        return
    import ray
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    sys.path.insert(0, str(DIGITS))

    class Trainable(tune.Trainable):  # type: ignore[misc]
        def setup(self, config: dict[str, Any]) -> None:
            from model_def import datasets

            torch.set_num_threads(1)
            self.train_set, self.test_set = (each.tensors for each in datasets())
            self.reset_config(config)

        def reset_config(self, config: dict[str, Any]) -> bool:
            self.epoch, self.model = 0, new_model()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config["lr"])
            self.config = config
            return True

        def step(self) -> dict[str, float]:
            stamp("interval")
            for _ in range(INTERVAL):
                train_epoch(self.model, self.optimizer, self.train_set, seed=self.epoch)
                self.epoch += 1
            return {"validation_loss": validate(self.model, self.test_set)}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": self.epoch}
            torch.save(state, Path(checkpoint_dir) / "state.pt")

        def load_checkpoint(self, checkpoint_dir: Any) -> None:
            state = torch.load(Path(checkpoint_dir) / "state.pt")
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.epoch = state["epoch"]
            for group in self.optimizer.param_groups:
                group["lr"] = self.config["lr"]

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=1,
        hyperparam_mutations={"lr": tune.loguniform(1e-4, 1e-1)},
    )
    tune.Tuner(
        tune.with_resources(Trainable, {"cpu": 1}),
        param_space={"lr": tune.loguniform(1e-4, 1e-1)},
        tune_config=tune.TuneConfig(
            metric="validation_loss",
            mode="min",
            num_samples=POPULATION,
            scheduler=scheduler,
            reuse_actors=way == "ray-reuse",
        ),
        run_config=tune.RunConfig(
            storage_path=str(directory), stop={"training_iteration": EPOCHS // INTERVAL}, verbose=0
        ),
    ).fit()
    stamp("trained", exploited=scheduler._num_perturbations)
    ray.shutdown()


@dataclass(slots=True)
class Times:
    seconds: list[float] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    exploited: list[int] = field(default_factory=list)


def wall_time(paper: Paper, ways: Sequence[str], rounds: int, directory: Path) -> None:
    times = {way: Times() for way in ways}
    for way, place in _turns(times, rounds, directory):
        ran = run(__file__, ["--child", way, str(place)], place, limit_s=1800)
        [trained] = [each.fields for each in of_kind(ran.stamps, "trained")]
        times[way].seconds.append(ran.ended - ran.began)
        times[way].epochs.append(INTERVAL * len(of_kind(ran.stamps, "interval")))
        times[way].exploited.append(trained["exploited"])
    paper.say("## Wall time")
    paper.say()
    paper.say(
        f"examples/digits/pbt.yaml: {POPULATION} trials of {EPOCHS} epochs on 2 CPUs; {rounds} rounds, in turn. "
        "Medians, with the smallest and the largest value."
    )
    paper.say()
    paper.say("| way | s, with its Ray's start | epochs trained | exploited | s per 100 epochs |")
    paper.say("|---|---:|---:|---:|---:|")
    for way, found in times.items():
        pace = [100 * s / epochs for s, epochs in zip(found.seconds, found.epochs, strict=True)]
        epochs, exploited = statistics.median(found.epochs), statistics.median(found.exploited)
        paper.say(f"| {way} | {spread(found.seconds)} | {epochs:.0f} | {exploited:.0f} | {spread(pace)} |")
    paper.say()
    for way in set(ways) - {"dray"}:
        ratio = statistics.median(times[way].seconds) / statistics.median(times["dray"].seconds)
        goal = f"the goal of {TIMES_SOONER:g} is {verdict(ratio >= TIMES_SOONER)}"
        paper.say(f"dray ends {ratio:.1f} times sooner than {way}; {goal}")


def _turns(times: dict[str, Times], rounds: int, directory: Path) -> Iterator[tuple[str, Path]]:
    for number in range(rounds):
        for way in times:
            yield way, directory / f"{way}-{number}"


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    paper.say(machine())
    paper.say()
    torch.set_num_threads(1)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    if options.seeds:
        quality(paper, options.seeds, options.methods)
    if options.rounds:
        wall_time(paper, options.ways, options.rounds, directory)


def main() -> None:
    end_on_sigterm()
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]))
        return
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--methods", nargs="+", default=["dray", "dray, PB2", "Ray"], choices=METHODS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=["dray", "ray-reuse"], choices=["dray", "ray", "ray-reuse"])
    perform(measure, parser.parse_args(), name="pbt", title="Population-based training")


if __name__ == "__main__":
    main()
