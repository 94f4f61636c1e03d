"""Creates samplers by their names in a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from searchers.errors import FieldError
from searchers.objectives import Objectives
from searchers.samplers import Prior, RandomSampler, Sampler
from searchers.space import Space


def named_sampler(
    name: str,
    space: Space,
    *,
    seed: int,
    rungs: Sequence[float],
    options: Mapping[str, object] = MappingProxyType({}),
    objectives: Objectives | None = None,
    prior: Prior = MappingProxyType({}),
) -> Sampler:
    """Create the sampler "random", "multi_fidelity", or one of `OptunaSampler`, which documents the arguments.

    Args:
        prior: Beliefs, see `searchers.beliefs`.

    Raises:
        FieldError: The sampler does not exist, or does not take these options, objectives or beliefs. Paths begin with
            `searcher`.
    """
    check_use(prior, name)
    # Optuna and scipy take most of a second to import, so they are imported only when needed.
    if name not in ("random", "multi_fidelity"):
        from searchers.optuna_sampler import OptunaSampler

        return OptunaSampler(space, seed=seed, rungs=rungs, name=name, options=options, objectives=objectives)
    if options:
        raise FieldError([("searcher.sampler.options", f"{name} has no options, got {options}; remove them")])
    if name == "random":
        return RandomSampler(space, seed)
    from searchers.multi_fidelity import MultiFidelitySampler

    return MultiFidelitySampler(space, seed=seed, rungs=rungs, objectives=objectives, prior=prior)


def check_use(prior: Prior, name: str) -> None:
    """Raise `FieldError` if there are beliefs that a sampler of this name would ignore."""
    if prior and name != "multi_fidelity":
        raise FieldError([("searcher.prior", f"has no effect with sampler {name}; use multi_fidelity, or remove it")])
