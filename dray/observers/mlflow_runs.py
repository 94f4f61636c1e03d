"""MLflow: a run for the experiment, and a child run for each trial, on a tracking server or in MLflow's own files.

Parameters are the hyperparameters, by dotted name. Metrics are `training/loss`, `validation/accuracy` and so on, with
batches trained as their step, and `best/...`, the best value of the searcher's metric. A trial that waits or is paused
is SCHEDULED; one that the search stopped is FINISHED, like one that completed, and the tag `dray.state` tells them
apart. When the search is over, the experiment's run gets `experiment.yaml` and `best_trial.json`, which has the path of
the checkpoint.

Runs are found by tags: a resumed experiment finds its own, and adds what is missing.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run

from dray.config.schema import ExperimentConfig
from dray.errors import ExperimentError
from dray.observers.observer import News, identity
from dray.records.directory import ExperimentDirectory
from dray.records.result import Result
from dray.records.trial_record import flatten

T = TypeVar("T")

AT_ONCE = 1000
"""Metrics in one request: MLflow's limit."""
PARAMS_AT_ONCE = 100
LONGEST_PARAM = 500
"""Most characters of a value on older servers."""
_STATUS = {
    "PENDING": "SCHEDULED",
    "RUNNING": "RUNNING",
    "PAUSED": "SCHEDULED",
    "COMPLETED": "FINISHED",
    "PRUNED": "FINISHED",
    "CANCELED": "KILLED",
}
_OVER = ("FINISHED", "FAILED", "KILLED")
ID, KIND, TRIAL, STATE, PARENT = "dray.id", "dray.kind", "dray.trial", "dray.state", "mlflow.parentRunId"


def open_experiment(config: ExperimentConfig) -> tuple[MlflowClient, str]:
    """A client, and the id of the MLflow experiment for the runs, created if necessary."""
    assert config.loggers.mlflow is not None
    # After a longer outage, the observer starts over.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    # Otherwise MLflow prints the address of each run that ends.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    logging.getLogger("urllib3.connectionpool").addFilter(_is_not_of_mlflow)
    client = MlflowClient(tracking_uri=config.loggers.mlflow.tracking_uri)
    name = config.loggers.mlflow.experiment_name or config.name
    known = client.get_experiment_by_name(name)
    return client, str(client.create_experiment(name) if known is None else known.experiment_id)


class MLflowRuns:
    """An `Observer` that writes these runs."""

    def __init__(self, directory: ExperimentDirectory, config: ExperimentConfig) -> None:
        self._directory, self._config = directory, config
        self._sign = config.searcher.sign
        self._client, self._experiment = open_experiment(config)
        self._id = _key(identity(directory, config))
        parent = next(self._found("search"), None) or self._client.create_run(
            self._experiment, run_name=directory.path.name, tags={ID: self._id, KIND: "search"}
        )
        self._parent = str(parent.info.run_id)
        if not parent.data.params:
            searcher = {f"searcher.{name}": value for name, value in config.to_dict()["searcher"].items()}
            self._client.log_batch(self._parent, params=_params(searcher))
        #: The runs of an earlier driver, until they have been compared.
        self._before = {int(run.data.tags[TRIAL]): run for run in self._found("trial")}
        self._runs = {trial: run.info.run_id for trial, run in self._before.items()}
        self._states = {trial: run.data.tags.get(STATE) for trial, run in self._before.items()}
        self._best: dict[int, tuple[float, Metric]] = {}
        self._client.update_run(self._parent, status="RUNNING")

    def update(self, news: Sequence[News]) -> None:
        for one in news:
            if one.trial.drawn is not None:
                self._write(one)

    def close(self, done: bool) -> None:
        if done:
            self._write_best()
        self._client.set_terminated(self._parent, "FINISHED" if done else "KILLED")

    def _write(self, one: News) -> None:
        trial, state = one.trial.id, one.trial.state
        params: list[Param] = []
        if trial not in self._runs:
            self._runs[trial] = self._create(one)
        if self._states.get(trial) is None:  # new, or a killed driver created it and had not described it yet
            params = _params(one.trial.drawn or {})
        run = self._runs[trial]
        metrics = [_metric(row) for row in one.rows]
        self._note_best(trial, one.rows)
        if one.trial.has_ended and trial in self._best:
            metrics.append(self._best[trial][1])
        if (before := self._before.pop(trial, None)) is not None:
            metrics = self._missing(before, metrics)
        for some in _pieces(params, PARAMS_AT_ONCE):
            self._client.log_batch(run, params=some)
        for some_metrics in _pieces(metrics, AT_ONCE):
            self._client.log_batch(run, metrics=some_metrics)
        if self._states.get(trial) != state:
            self._states[trial] = state
            status = _STATUS.get(state, "FAILED")
            if one.trial.ended is not None:
                self._client.set_terminated(run, status, int(1000 * one.trial.ended))
            else:
                self._client.update_run(run, status)
            # Written last: a resumed experiment relies on it, and repeats the unfinished work of a killed driver.
            self._client.set_tag(run, STATE, state)

    def _note_best(self, trial: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            if row["kind"] == "validation" and row["name"] == self._config.searcher.first_metric:
                score = self._sign * row["value"]
                if math.isfinite(score) and score < self._best.get(trial, (math.inf,))[0]:
                    self._best[trial] = (score, _metric({**row, "kind": "best"}))

    def _missing(self, run: Run, metrics: list[Metric]) -> list[Metric]:
        """The metrics that are not in the run yet."""
        by_key: defaultdict[str, list[Metric]] = defaultdict(list)
        for metric in metrics:
            by_key[metric.key].append(metric)
        missing: list[Metric] = []
        for key, mine in by_key.items():
            if run.info.status in _OVER and _same(run.data.metrics.get(key), mine[-1].value):
                continue  # the run is over, and has the last value
            history = self._client.get_metric_history(run.info.run_id, key)
            known = {(each.step, each.timestamp) for each in history}
            missing += [metric for metric in mine if (metric.step, metric.timestamp) not in known]
        return missing

    def _found(self, kind: str) -> Iterator[Run]:
        page: str | None = None
        wanted = f"tags.`{ID}` = '{self._id}' and tags.`{KIND}` = '{kind}'"
        while True:
            found = self._client.search_runs([self._experiment], wanted, max_results=AT_ONCE, page_token=page)
            yield from found
            page = found.token
            if not page:
                return

    def _create(self, one: News) -> str:
        tags = {ID: self._id, KIND: "trial", TRIAL: str(one.trial.id), PARENT: self._parent}
        started = None if one.trial.started is None else int(1000 * one.trial.started)
        run = self._client.create_run(self._experiment, started, tags, f"trial_{one.trial.id}")
        return str(run.info.run_id)

    def _write_best(self) -> None:
        self._client.log_artifact(self._parent, str(self._directory.config_file))
        try:
            best = Result(self._directory.path).best_trial
            checkpoint = str(best.checkpoint.path)
        except ExperimentError:  # no trial has validated, or the best one's checkpoint is missing
            return
        summary = {
            "trial_id": best.trial_id,
            "hparams": dict(best.hparams),
            "metric": best.metric,
            "best_by": best.best_by,
            "batches": best.batches,
            "best_batches": best.best_batches,
            "checkpoint": checkpoint,
        }
        self._client.log_dict(self._parent, summary, "best_trial.json")
        self._client.set_tag(self._parent, "dray.best_trial", str(best.trial_id))
        self._client.log_batch(self._parent, metrics=[self._best[best.trial_id][1]])


def _is_not_of_mlflow(record: logging.LogRecord) -> bool:
    """Whether a log record is not about MLflow's requests. Retries are normal, as an idle server closes connections;
    the last failure is raised."""
    return "/mlflow" not in record.getMessage()


def _params(values: Mapping[str, Any]) -> list[Param]:
    return [Param(_key(name), str(value)[:LONGEST_PARAM]) for name, value in flatten(values).items()]


def _metric(row: Mapping[str, Any]) -> Metric:
    key = _key(f"{row['kind']}/{row['name']}")
    return Metric(key, float(row["value"]), int(1000 * row["time"]), int(row["batches"]))


def _key(name: str) -> str:
    """A name that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _same(one: float | None, other: float) -> bool:
    return one == other or (one is not None and math.isnan(one) and math.isnan(other))


def _pieces(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
