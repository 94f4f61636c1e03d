"""An experiment as an `optuna.Study`, made from the journal and the metrics, for Optuna's plots and its dashboard.

Trials have Optuna's states: WAITING until they start, RUNNING (also while paused), then COMPLETE, PRUNED if the search
stopped them, or FAIL. A trial's intermediate values are the searcher's metric at each validation, by batches trained;
its value, after it has ended, is the best of these. The user attribute `state` is dray's own state. The sampler uses a
different study, which has only comparable values.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import defaultdict
from datetime import datetime
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from dray.records.reader import ExperimentReader
from dray.records.trial_record import TrialRecord
from searchers.domains import DOMAINS, Categorical, Const, Nested, parameters
from searchers.optuna_space import encode, to_optuna
from searchers.space import Space

_ENDS = {"COMPLETED": TrialState.COMPLETE, "PRUNED": TrialState.PRUNED}
"""All other final states become FAIL."""


def create_study(reader: ExperimentReader, storage: str | BaseStorage | None) -> optuna.Study:
    """Create the study, named after the experiment. `storage`: as for `optuna.create_study`."""
    config = reader.config
    internal, names = to_optuna(config.space), shown(config.space)

    def frozen(trial: TrialRecord) -> FrozenTrial:
        state = TrialState.WAITING if trial.drawn is None else TrialState.RUNNING
        if trial.has_ended:
            state = _ENDS.get(trial.state, TrialState.FAIL)
            if state == TrialState.COMPLETE and trial.best_metric is None:  # Optuna requires a value of complete trials
                state = TrialState.FAIL
        params = {} if trial.drawn is None else encode(config.space.root, trial.drawn, internal)
        begin = None if state == TrialState.WAITING else trial.started or trial.ended or 0.0
        return FrozenTrial(
            number=trial.id,
            trial_id=trial.id,
            state=state,
            value=trial.best_metric if trial.has_ended and state != TrialState.FAIL else None,
            datetime_start=None if begin is None else datetime.fromtimestamp(begin),
            datetime_complete=datetime.fromtimestamp(trial.ended or 0.0) if trial.has_ended else None,
            params={names[name][0]: names[name][1].to_external_repr(value) for name, value in params.items()},
            distributions={names[name][0]: names[name][1] for name in params},
            user_attrs={"state": trial.state},
            system_attrs={},
            intermediate_values=dict(zip(trial.at, trial.values, strict=True)),
        )

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # no message that a study was created
    try:
        study = optuna.create_study(
            storage=storage,
            study_name=config.name,
            direction="minimize" if reader.sign == 1 else "maximize",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names([reader.metric])
        study.add_trials(map(frozen, reader.trials.values()))
    finally:
        optuna.logging.set_verbosity(verbosity)
    return study


def shown(space: Space) -> dict[str, tuple[str, BaseDistribution]]:
    """Readable names of a space's parameters, and their distributions, by their names in `to_optuna`.

    `optimizer[0].momentum` becomes `optimizer.momentum`, unless another category has a different parameter of that
    name. Categories are shown by value instead of number; those that are spaces, by their constants.
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
