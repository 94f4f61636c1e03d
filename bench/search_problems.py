"""Problems for multi-fidelity search in closed form: learning curves over a space of six hyperparameters.

`CurveProblem(seed, crossing, noise)` is one instance of a family; `REGIMES` names settings of problem and cluster. Time
is in units of one average training step, and a full training takes `max_t` of them. Regret is normalised: 0 is the best
configuration of the space, found by an exhaustive search, 1 the median random one, both trained to `max_t` without
noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from searchers import parse_space

Array = npt.NDArray[np.float64]

LR, DECAY, WIDTH = (1e-5, 1.0), (1e-6, 1e-1), (32, 512)
DROPOUT, WARMUP, OPTIMIZERS = (0.0, 0.7), (0.0, 0.3), ("sgd", "adam", "lion")

SPACE: dict[str, object] = {
    "lr": {"type": "log", "base": 10, "minval": -5, "maxval": 0},
    "weight_decay": {"type": "log", "base": 10, "minval": -6, "maxval": -1},
    "width": {"type": "int", "minval": WIDTH[0], "maxval": WIDTH[1]},
    "dropout": {"type": "double", "minval": DROPOUT[0], "maxval": DROPOUT[1]},
    "warmup": {"type": "double", "minval": WARMUP[0], "maxval": WARMUP[1]},
    "optimizer": {"type": "categorical", "vals": list(OPTIMIZERS)},
}
"""The space as an experiment's `hyperparameters`."""


class CurveProblem:
    """Power-law learning curves over a six-dimensional mixed space; one instance per seed.

        loss(t) = a(x) + (L0 - a(x)) * (1 + t / tau(x)) ** -c(x)

    * a(x), the asymptote: a bowl whose optimum (per optimizer, random per instance) couples the learning rate to the
      width, plus small random ripples, so it is neither separable nor smooth.
    * tau(x), c(x): how fast the curve gets there. `crossing` makes small learning rates, long warm-ups and wide models
      slow starters, though they may end best.
    * A learning rate beyond the instance's stability edge diverges: from t = 2 on the loss is `DIVERGED`.
    * `cost(x)` is the price of a step: wide models are up to four times dearer than narrow ones.

    Args:
        seed: The seed of the instance.
        crossing: 0: early ranks are almost the final ones; 1: they mislead.
        noise: Standard deviation of the Gaussian noise of a report, for the caller to add.
        mute: Up to this step the loss is uninformative: L0 plus a random number that depends on the configuration.
        first: The first of the steps at which trials are compared.
        max_t: Steps of a full training.

    Attributes:
        space: `SPACE`.
        optimum: The best configuration, as a row of numbers from 0 to 1 and the number of the optimizer.
        rungs: Steps at which trials are compared: `first`, 3 * `first`, 9 * `first`, ..., `max_t`.
    """

    space = parse_space(SPACE)

    L0, DIVERGED = 2.3, 10.0

    def __init__(
        self,
        seed: int = 0,
        *,
        crossing: float = 0.5,
        noise: float = 0.01,
        mute: int = 0,
        first: int = 1,
        max_t: int = 81,
    ) -> None:
        rng = np.random.default_rng([seed, 7919])
        self.seed, self.crossing, self.noise, self.mute, self.max_t = seed, crossing, noise, mute, max_t
        self.rungs = tuple(first * 3**r for r in range(round(math.log(max_t / first, 3)) + 1))
        self._optimum = rng.uniform(0.2, 0.8, size=(3, 5))  # of each optimizer
        self._offset = np.sort(rng.uniform(0, 0.15, 3))[rng.permutation(3)]
        self._weight = rng.dirichlet(np.full(5, 2.0)) * 2.0 + 0.1
        self._weight[0] += 0.6  # the learning rate always matters
        self._couple = rng.uniform(0.1, 0.3)
        self._frequency = rng.normal(0, 6, size=(8, 5))
        self._phase = rng.uniform(0, 2 * np.pi, 8)
        self._edge = rng.uniform(0.85, 0.95)
        self.median = float(np.median(self._final(_cube(rng, 30000))))
        self.optimum = self._refine(rng)
        self.best = float(self._final(self.optimum[None])[0])

    def curve(self, config: Mapping[str, Any]) -> Callable[[float], float]:
        """The loss after t steps, without noise."""
        row = self._unit(config)
        (a,), (tau,), (c,), (diverges,) = (part.tolist() for part in self._shape(row[None]))

        said = self.L0 + 0.05 * Random(f"{self.seed}:{row.tolist()}").gauss(0, 1) if self.mute else 0.0

        def loss(t: float) -> float:
            if t <= self.mute:
                return said
            return self.DIVERGED if diverges and t >= 2 else a + (self.L0 - a) * math.pow(1.0 + t / tau, -c)

        return loss

    def cost(self, config: Mapping[str, Any]) -> float:
        """Time of one step, in average steps."""
        return 0.4 + 1.2 * float(config["width"] - WIDTH[0]) / (WIDTH[1] - WIDTH[0])

    def regret(self, config: Mapping[str, Any]) -> float:
        """The regret of a configuration, trained to the end."""
        return (self.curve(config)(self.max_t) - self.best) / (self.median - self.best)

    @staticmethod
    def _unit(config: Mapping[str, Any]) -> Array:
        """A configuration in the unit cube; the last number is the optimizer's."""
        return np.array(
            [
                math.log(config["lr"] / LR[0]) / math.log(LR[1] / LR[0]),
                math.log(config["weight_decay"] / DECAY[0]) / math.log(DECAY[1] / DECAY[0]),
                (config["width"] - WIDTH[0]) / (WIDTH[1] - WIDTH[0]),
                config["dropout"] / DROPOUT[1],
                config["warmup"] / WARMUP[1],
                OPTIMIZERS.index(config["optimizer"]),
            ]
        )

    @staticmethod
    def config(row: Array) -> dict[str, Any]:
        """The configuration at a place in the unit cube, the inverse of `_unit`."""
        lr, decay, width, dropout, warmup, optimizer = row.tolist()
        return {
            "lr": LR[0] * (LR[1] / LR[0]) ** lr,
            "weight_decay": DECAY[0] * (DECAY[1] / DECAY[0]) ** decay,
            "width": round(WIDTH[0] + width * (WIDTH[1] - WIDTH[0])),
            "dropout": dropout * DROPOUT[1],
            "warmup": warmup * WARMUP[1],
            "optimizer": OPTIMIZERS[int(optimizer)],
        }

    def _shape(self, u: Array) -> tuple[Array, Array, Array, npt.NDArray[np.bool_]]:
        """For each row: asymptote, tau, exponent, whether it diverges."""
        optimizer = u[:, 5].astype(int)
        d = u[:, :5] - self._optimum[optimizer]
        d[:, 0] += self._couple * (u[:, 2] - 0.5)  # wide models want smaller learning rates
        ripple = np.cos(u[:, :5] @ self._frequency.T + self._phase).mean(axis=1)
        a = 0.2 + self._offset[optimizer] + (np.abs(d) ** 1.5 * self._weight).sum(axis=1) + 0.03 * ripple
        slow = 2.0 * (0.5 - u[:, 0]) + 0.8 * (u[:, 2] - 0.5) + 0.6 * (u[:, 4] - 0.5)
        tau = 1.5 * np.exp(self.crossing * 1.6 * slow)
        c = 1.1 - 0.25 * self.crossing * slow
        return np.minimum(a, 2.2), tau, np.clip(c, 0.5, 1.8), u[:, 0] > self._edge

    def _final(self, u: Array) -> Array:
        a, tau, c, diverges = self._shape(u)
        return np.where(diverges, self.DIVERGED, a + (self.L0 - a) * (1.0 + self.max_t / tau) ** -c)

    def _refine(self, rng: np.random.Generator) -> Array:
        """The row with the smallest final loss: the best of many draws, and of ever smaller steps around them."""
        u = _cube(rng, 30000)
        top, scale = u[np.argsort(self._final(u))[:30]], 0.2
        for _ in range(40):
            near = np.repeat(top, 20, axis=0)
            near[:, :5] = np.clip(near[:, :5] + rng.normal(0, scale, (len(near), 5)), 0, 1)
            near = np.vstack([top, near])
            top, scale = near[np.argsort(self._final(near))[:30]], scale * 0.85
        best: Array = top[0]
        return best


def _cube(rng: np.random.Generator, n: int) -> Array:
    u = rng.random((n, 6))
    u[:, 5] = rng.integers(0, 3, n)
    return u


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """A kind of problem on a kind of cluster.

    Args:
        crossing, noise, mute, first: of the problem, if it is a `CurveProblem`.
        workers: of the cluster.
        start_cost, resume_cost: in average steps.
        trainings: the budget, in full trainings per worker.
    """

    crossing: float = 0.25
    noise: float = 0.01
    mute: int = 0
    first: int = 1
    workers: int = 4
    start_cost: float = 0.0
    resume_cost: float = 0.0
    trainings: float = 12.5


REGIMES = {
    "base": Regime(),
    "startup": Regime(start_cost=10, resume_cost=5),
    "many": Regime(workers=32, trainings=2.5),
    "noise": Regime(noise=0.10),
    "crossing": Regime(crossing=0.75),
    "useless": Regime(mute=3, first=3),
    "hard": Regime(crossing=0.5, noise=0.05, workers=32, start_cost=10, resume_cost=5, trainings=2.5),
}
