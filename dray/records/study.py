"""An experiment as an `optuna.Study`, for Optuna's plots and its dashboard: made from the journal and the metrics.

Trials have Optuna's states: WAITING until they start, RUNNING (also while paused), then COMPLETE, PRUNED if the search
stopped them, or FAIL. A trial's intermediate values are the searcher's metric at each validation, by batches trained;
its value, once it has ended, is the best of these. The user attribute `state` is dray's own state. The sampler's study
is a separate one, with comparable values only.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from dray.config.schema import ExperimentConfig
from searchers.domains import DOMAINS, Categorical, Const, Nested, parameters
from searchers.optuna_space import encoded, to_optuna
from searchers.space import Space
from searchers.views import TrialView

_ENDS = {"COMPLETED": TrialState.COMPLETE, "PRUNED": TrialState.PRUNED}
"""Other ends are FAIL."""


def create_study(
    config: ExperimentConfig,
    trials: Mapping[int, TrialView],
    *,
    started: Mapping[int, float],
    ended: Mapping[int, float],
    values: Mapping[int, Mapping[int, float]],
    storage: str | BaseStorage | None,
) -> optuna.Study:
    """The study; it has the experiment's name.

    Args:
        config: of the experiment.
        trials: of its search.
        started, ended: by trial, in seconds since the epoch.
        values: by trial, the searcher's metric at each validation, by batches.
        storage: as for `optuna.create_study`.
    """
    internal, names = to_optuna(config.space), shown(config.space)

    def frozen(view: TrialView) -> FrozenTrial:
        state = TrialState.WAITING if view.hparams is None else TrialState.RUNNING
        seen = values.get(view.id, {})
        finite = [value for value in seen.values() if math.isfinite(value)]
        best: float | None = None
        if view.ended:
            state = _ENDS.get(view.state, TrialState.FAIL)
            if state != TrialState.FAIL and finite:
                best = min(finite) if config.searcher.sign == 1 else max(finite)
            elif state == TrialState.COMPLETE:  # in Optuna such a trial must have a value
                state = TrialState.FAIL
        end = ended.get(view.id, 0.0) if view.ended else None
        begin = None if state == TrialState.WAITING else started.get(view.id, end or 0.0)
        params = {} if view.hparams is None else encoded(config.space.root, view.hparams, internal)
        distributions = {names[name][0]: names[name][1] for name in params}
        return FrozenTrial(
            number=view.id,
            trial_id=view.id,
            state=state,
            value=best,
            datetime_start=None if begin is None else datetime.fromtimestamp(begin),
            datetime_complete=None if end is None else datetime.fromtimestamp(end),
            params={names[name][0]: names[name][1].to_external_repr(value) for name, value in params.items()},
            distributions=distributions,
            user_attrs={"state": view.state},
            system_attrs={},
            intermediate_values=dict(seen),
        )

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # without the message that a study was created
    try:
        study = optuna.create_study(
            storage=storage,
            study_name=config.name,
            direction="minimize" if config.searcher.sign == 1 else "maximize",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names([config.searcher.first_metric])
        study.add_trials(map(frozen, trials.values()))
    finally:
        optuna.logging.set_verbosity(verbosity)
    return study


def shown(space: Space) -> dict[str, tuple[str, BaseDistribution]]:
    """Readable names of a space's parameters, and their distributions, by their names in `to_optuna`.

    `optimizer.momentum` for `optimizer[0].momentum`, unless another category has a different one of that name.
    Categories are shown by value instead of number, those that are spaces by their constants.
    """
    labels = {
        each.name: _labels(each.domain) for each in parameters(space.root) if isinstance(each.domain, Categorical)
    }
    found = {
        name: CategoricalDistribution(labels[name]) if name in labels else distribution
        for name, distribution in to_optuna(space).items()
    }
    alike: defaultdict[str, list[BaseDistribution]] = defaultdict(list)
    for name, distribution in found.items():
        alike[_plain(name)].append(distribution)
    return {
        name: (_plain(name) if all(other == distribution for other in alike[_plain(name)]) else name, distribution)
        for name, distribution in found.items()
    }


def _plain(name: str) -> str:
    return re.sub(r"\[\d+\]", "", name)


def _labels(category: Categorical) -> tuple[Any, ...]:
    labels = [_label(val) for val in category.vals]
    are_unique = len(set(map(repr, labels))) == len(labels)
    return tuple(labels if are_unique else (f"{i}: {label}" for i, label in enumerate(labels)))


def _label(val: object) -> object:
    if isinstance(val, Nested):
        constants = {key: inner.val for key, inner in val.domains if isinstance(inner, Const)}
        val = next(iter(constants.values())) if len(constants) == 1 else constants
    elif isinstance(val, DOMAINS):
        return type(val).__name__.lower()
    return val if val is None or isinstance(val, bool | int | float | str) else json.dumps(val)
