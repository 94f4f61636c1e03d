"""The experiment as an Optuna study, for Optuna's tools: `optuna.db` in its directory.

Trials have Optuna's states: WAITING until they start, RUNNING (also while paused), then COMPLETE, PRUNED if the search
stopped them, or FAIL. A trial's intermediate values are the searcher's metric at each validation, by batches trained;
its value, once it has ended, is the best of these. The user attribute `state` is dray's own state. The sampler's study
is a separate one, with comparable values only.

Optuna's API takes 26 ms of CPU per trial with 3 parameters and 4 values, and a transaction for each of these. So Optuna
creates the file, and this module writes rows into its tables (the same in Optuna 3.2 to 5), many at once: 0.2 ms per
trial (`bench/results/observers.md`). All rows are derived from the journal and the metrics, and rewritten at each
resume.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sqlite3
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, distribution_to_json
from optuna.exceptions import ExperimentalWarning

from dray.config.schema import ExperimentConfig
from dray.observers.observer import News
from searchers.domains import DOMAINS, Categorical, Const, Nested
from searchers.optuna_space import encoded, to_optuna
from searchers.space import Space
from searchers.views import TrialView

BUSY_S = 30.0
"""How long a reader, such as a dashboard, may hold the file."""
_ENDS = {"COMPLETED": "COMPLETE", "PRUNED": "PRUNED", "ERRORED": "FAIL", "INVALID_HP": "FAIL", "CANCELED": "FAIL"}


class OptunaStudy:
    """An `Observer` that writes the study.

    Args:
        path: the file; its content is rewritten.
        config: of the experiment; the study has its name.
    """

    def __init__(self, path: Path, config: ExperimentConfig) -> None:
        self._metric = config.searcher.first_metric
        self._best = "min" if config.searcher.sign == 1 else "max"
        self._space = config.space
        self._internal = to_optuna(self._space)
        self._shown = shown(self._space)
        with _quiet():
            try:
                _create(path, config)
            except Exception:  # damaged, or from another version of Optuna
                path.unlink(missing_ok=True)
                _create(path, config)
        self._database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        [[self._study]] = self._database.execute("SELECT study_id FROM studies")
        self._begun = False
        self._with_params: set[int] = set()
        """Trials that have not ended and whose parameters are written."""

    def update(self, news: Sequence[News]) -> None:
        """See `Observer`."""
        with self._transaction():
            # Trials are numbered as they are created, without gaps, so the numbers are dray's.
            self._many(
                "INSERT INTO trials (trial_id, number, study_id, state, datetime_start, datetime_complete) "
                "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (trial_id) DO UPDATE SET state = excluded.state, "
                "datetime_start = excluded.datetime_start, datetime_complete = excluded.datetime_complete",
                [
                    (_id(one), one.view.id, self._study, _state(one.view), _date(one.started), _date(one.ended))
                    for one in sorted(news, key=_id)
                ],
            )
            self._many(
                "INSERT INTO trial_params (trial_id, param_name, param_value, distribution_json) VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO NOTHING",
                [(_id(one), *param) for one in news for param in self._params(one.view)],
            )
            self._many(
                "INSERT INTO trial_user_attributes (trial_id, key, value_json) VALUES (?, 'state', ?) "
                "ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json",
                [(_id(one), json.dumps(one.view.state)) for one in news],
            )
            self._many(
                "INSERT INTO trial_intermediate_values (trial_id, step, intermediate_value, intermediate_value_type) "
                "VALUES (?, ?, ?, ?) ON CONFLICT (trial_id, step) DO UPDATE SET "
                "intermediate_value = excluded.intermediate_value, "
                "intermediate_value_type = excluded.intermediate_value_type",
                [
                    (_id(one), row["batches"], *_number(row["value"]))
                    for one in news
                    for row in one.rows
                    if row["kind"] == "validation" and row["name"] == self._metric
                ],
            )
            self._many("DELETE FROM trial_values WHERE trial_id = ?", [(_id(one),) for one in news])
            ended = [(_id(one),) for one in news if _ENDS.get(one.view.state) in ("COMPLETE", "PRUNED")]
            self._many(
                "INSERT INTO trial_values (trial_id, objective, value, value_type) "
                f"SELECT trial_id, 0, {self._best}(intermediate_value), 'FINITE' FROM trial_intermediate_values "
                "WHERE trial_id = ? AND intermediate_value_type = 'FINITE' GROUP BY trial_id",
                ended,
            )
            # In Optuna a complete trial must have a value.
            self._many(
                "UPDATE trials SET state = 'FAIL' WHERE trial_id = ? AND state = 'COMPLETE' "
                "AND trial_id NOT IN (SELECT trial_id FROM trial_values)",
                ended,
            )

    def close(self, done: bool) -> None:
        """See `Observer`."""
        self._database.close()

    def _params(self, view: TrialView) -> Iterator[tuple[str, float, str]]:
        is_written = view.id in self._with_params
        if view.ended:
            self._with_params.discard(view.id)
        elif view.hparams is not None:
            self._with_params.add(view.id)
        if view.hparams is None or is_written:
            return
        for name, value in encoded(self._space.root, view.hparams, self._internal).items():
            yield (self._shown[name][0], float(value), self._shown[name][1])

    def _many(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        self._database.executemany(statement, rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            if not self._begun:
                # Not notes that users have added: the trials keep their numbers.
                for table in ("trial_params", "trial_values", "trial_intermediate_values"):
                    self._database.execute(f"DELETE FROM {table}")
                self._database.execute("DELETE FROM trials")
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")
        self._begun = True


def shown(space: Space) -> dict[str, tuple[str, str]]:
    """Readable names of a space's parameters, and their distributions as JSON, by their names in `to_optuna`.

    `optimizer.momentum` for `optimizer[0].momentum`, unless another category has a different one of that name.
    Categories are shown by value instead of number, those that are spaces by their constants.
    """
    labels: dict[str, tuple[Any, ...]] = {}
    _collect_labels(space.root, "", labels)
    found = {
        name: CategoricalDistribution(labels[name]) if name in labels else distribution
        for name, distribution in to_optuna(space).items()
    }
    alike: defaultdict[str, list[BaseDistribution]] = defaultdict(list)
    for name, distribution in found.items():
        alike[_plain(name)].append(distribution)
    return {
        name: (
            _plain(name) if all(other == distribution for other in alike[_plain(name)]) else name,
            distribution_to_json(distribution),
        )
        for name, distribution in found.items()
    }


def _plain(name: str) -> str:
    return re.sub(r"\[\d+\]", "", name)


def _collect_labels(domain: object, name: str, labels: dict[str, tuple[Any, ...]]) -> None:
    match domain:
        case Nested(domains=domains):
            for key, inner in domains:
                _collect_labels(inner, f"{name}.{key}" if name else key, labels)
        case Categorical(vals=vals):
            mine = [_label(val) for val in vals]
            unique = len(set(map(repr, mine))) == len(mine)
            labels[name] = tuple(mine if unique else (f"{i}: {label}" for i, label in enumerate(mine)))
            for i, val in enumerate(vals):
                _collect_labels(val, f"{name}[{i}]", labels)


def _label(val: object) -> object:
    if isinstance(val, Nested):
        constants = {key: inner.val for key, inner in val.domains if isinstance(inner, Const)}
        val = next(iter(constants.values())) if len(constants) == 1 else constants
    elif isinstance(val, DOMAINS):
        return type(val).__name__.lower()
    return val if val is None or isinstance(val, bool | int | float | str) else json.dumps(val)


def _create(path: Path, config: ExperimentConfig) -> None:
    study = optuna.create_study(
        storage=f"sqlite:///{path}",
        study_name=config.name,
        direction="minimize" if config.searcher.sign == 1 else "maximize",
        load_if_exists=True,
    )
    study.set_metric_names([config.searcher.first_metric])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's message that it has created a study."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def _id(news: News) -> int:
    return news.view.id + 1


def _state(view: TrialView) -> str:
    return _ENDS.get(view.state, "WAITING" if view.hparams is None else "RUNNING")


def _date(seconds: float | None) -> str | None:
    """In SQLAlchemy's format: UTC since Optuna 5, local time before."""
    from optuna.storages._rdb.models import TrialModel

    if seconds is None:
        return None
    zone = timezone.utc if hasattr(TrialModel, "_datetime_start_utc") else None
    return datetime.fromtimestamp(seconds, zone).replace(tzinfo=None).isoformat(" ", "microseconds")


def _number(value: float) -> tuple[float | None, str]:
    """A value in Optuna's encoding of numbers that SQL does not have."""
    if math.isnan(value):
        return None, "NAN"
    if math.isinf(value):
        return None, "INF_POS" if value > 0 else "INF_NEG"
    return value, "FINITE"
