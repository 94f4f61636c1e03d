"""The experiments of a simulation, as their users have set them up."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dray.config.load import load_config
from dray.config.notify import Notify
from dray.config.schema import ExperimentConfig
from dray.config.sections import Budget, Repeat
from dray.leases.failure import FailureKind
from dray.training.plan import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialError:
    """An exception that a trial's code raises in a batch; `times` is 1 if a restart cures it."""

    trial: int
    batch: int
    kind: FailureKind
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A user's experiment.

    Attributes:
        searcher: of the config; `points`: of a grid.
        policy, report, validate, checkpoint: of the training loop's `Plan`.
        keeps: `save_experiment_best`, `save_trial_best`, `save_trial_latest`.
        invalid, diverging: shares of trials with invalid hyperparameters, and with a loss that becomes NaN.
        extensions: extensions of the experiment, each applied when it is opened again.
        priority, weight, max_slots: its share of the slots.
        once: whether what its program does works only once in a process. No failure of that counts.
        budget: of the config. The user increases it when it is spent.
        repeat: numbers of seeds and of trials that are trained again, or none.
        program: whether its code is a program with a loop of its own.
        notify: after how many trials without a gain, and at what share of the budget, somebody is told; or none.
    """

    searcher: tuple[tuple[str, Any], ...]
    points: int
    policy: Policy
    report: int | None
    validate: int | None
    checkpoint: int | None
    keeps: tuple[int, int, int]
    invalid: float
    diverging: float
    stops_on_nan: bool
    max_restarts: int
    reuse_workers: bool
    errors: tuple[TrialError, ...]
    extensions: tuple[tuple[tuple[str, Any], ...], ...]
    priority: int
    weight: float
    max_slots: int | None
    batch_s: float
    once: bool = False
    budget: tuple[tuple[str, float], ...] = ()
    repeat: tuple[int, int] | None = None
    notify: tuple[int, float] | None = None
    program: bool = False

    @property
    def is_population(self) -> bool:
        return dict(self.searcher)["name"] == "pbt"

    @property
    def has_plain_rungs(self) -> bool:
        """Whether `tests.simulation.facts.Rungs` describes its search."""
        searcher = dict(self.searcher)
        return searcher["name"] == "asha" and searcher["variant"] == "stopping" and not self.repeat

    def loss(self, hparams: Mapping[str, Any], batches: int) -> float:
        """Return a trial's metric after this many batches."""
        quality = hparams["lr"] * 1e6 % 1
        if quality < self.diverging and batches > 2:
            return math.nan
        return float((math.log10(hparams["lr"]) + 2.5) ** 2 + 3 * quality / (1 + batches))

    def is_invalid(self, hparams: Mapping[str, Any]) -> bool:
        return bool(hparams["lr"] * 1e7 % 1 < self.invalid)

    def smaller(self) -> Iterator[Setup]:
        """Yield experiments that are simpler by one step."""
        searcher = dict(self.searcher)
        for number in range(len(self.errors)):
            yield replace(self, errors=self.errors[:number] + self.errors[number + 1 :])
        if self.once:
            yield replace(self, once=False)
        if self.program:
            yield replace(self, program=False)
        if self.budget:
            yield replace(self, budget=())
        if self.repeat:
            yield replace(self, repeat=None)
        if self.notify:
            yield replace(self, notify=None)
        if self.extensions:
            yield replace(self, extensions=self.extensions[1:])
        before = searcher.get("max_trials", self.points)
        for trials in (before // 2, before - 1):
            if trials > 0 and self.points:
                yield replace(self, points=trials)
            elif trials > 0:
                yield replace(self, searcher=tuple({**searcher, "max_trials": trials}.items()))

    def config(self) -> ExperimentConfig:
        """Checking one takes as long as several trials, so equal ones are checked only once."""
        config, names = _config(self.searcher, self.points), ("experiment_best", "trial_best", "trial_latest")
        storage = {f"save_{name}": keep for name, keep in zip(names, self.keeps, strict=True)}
        return config.model_copy(
            update={
                "checkpoint_storage": config.checkpoint_storage.model_copy(update=storage),
                "resources": config.resources.model_copy(
                    update={
                        "max_slots": self.max_slots,
                        "reuse_workers": self.reuse_workers,
                        "priority": self.priority,
                        "weight": self.weight,
                    }
                ),
                "max_restarts": self.max_restarts,
                "stop_on_nan": self.stops_on_nan,
                "budget": Budget(**in_config(dict(self.budget))) if self.budget else None,
                "repeat": None
                if self.repeat is None
                else Repeat.model_validate({"seeds": self.repeat[0], "for": f"top {self.repeat[1]}"}),
                "notify": Notify()
                if self.notify is None
                else Notify(url="https://hooks", no_gain=self.notify[0], budget=self.notify[1]),
            }
        )


@functools.cache
def _config(searcher: tuple[tuple[str, Any], ...], points: int) -> ExperimentConfig:
    lr = {"type": "log", "base": 10, "minval": -4, "maxval": -1, **({"count": points} if points else {})}
    return load_config(
        {
            "name": "simulated",
            "entrypoint": "model:Trial",
            "hyperparameters": {"global_batch_size": 1, "lr": lr},
            "searcher": {"metric": "loss", **dict(searcher), "max_length": {"batches": dict(searcher)["max_length"]}},
            "reproducibility": {"experiment_seed": 7},
        }
    )


def in_config(budget: Mapping[str, float]) -> dict[str, Any]:
    """The config's form of a budget."""
    return {name: f"{total:.3f}s" if name == "time" else total for name, total in budget.items()}
