"""Spaces written as Optuna distributions or as `ray.tune` domains, as the hyperparameters that `parse` takes.

Objects are known by the names of their classes and attributes, so neither library is imported. What comes back is plain
JSON, which a configuration can hold: `parse(from_optuna({...}))`.
"""

from __future__ import annotations

from collections.abc import Mapping


def from_optuna(distributions: Mapping[str, object], *, path: str = "hyperparameters") -> dict[str, object]:
    """Hyperparameters of Optuna's distributions: `{"lr": FloatDistribution(1e-5, 1e-1, log=True)}`.

    Values that are no distributions stay as they are: constants, nested mappings, domains in Determined's YAML.

    Raises:
        SpaceError: A distribution has no counterpart; all are named.
    """
    raise NotImplementedError


def from_ray_tune(domains: Mapping[str, object], *, path: str = "hyperparameters") -> dict[str, object]:
    """Hyperparameters of Ray Tune's domains: `{"lr": tune.loguniform(1e-5, 1e-1), "n": tune.randint(1, 9)}`.

    Values that are no domains stay as they are: constants, nested mappings, domains in Determined's YAML.

    Raises:
        SpaceError: A domain has no counterpart (`randn` has no bounds, `sample_from` is a function); all are named.
    """
    raise NotImplementedError
