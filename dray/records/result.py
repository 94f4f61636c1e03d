"""An experiment's results, read from its directory, while it runs or years later."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd

from dray.code.factory import FromDirectory
from dray.config.schema import ExperimentConfig
from dray.config.search import recorded_search
from dray.errors import ExperimentError
from dray.records.fronts import Standing, order_of, standings
from dray.records.hparams import flatten, in_order
from dray.records.listing import open_experiment
from dray.records.lookup import Name
from dray.records.metrics import read_metrics, read_system
from dray.records.outcomes import nan_since, no_best_reason, ranked, sound
from dray.records.overview import Overview
from dray.records.timeline import gpu_types, read_timeline
from dray.script import Script
from dray.storage import CheckpointStore
from searchers.journal import Journal
from searchers.search import Search

if TYPE_CHECKING:
    import optuna
    from ray.train import Checkpoint

    from dray.pytorch import PyTorchTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class BestTrial:
    """The trial with the best validation of an experiment.

    Attributes:
        trial_id: its number.
        hparams: its hyperparameters.
        metric: the searcher's metric at its best validation; of several the first objective.
        metrics: all metrics of the searcher there, by name.
        batches: batches trained at that validation.
        checkpoint: the checkpoint of that validation; the trial's latest if ``checkpoint_policy`` kept none there.
    """

    trial_id: int
    hparams: Mapping[str, Any]
    metric: float
    metrics: Mapping[str, float]
    batches: int
    checkpoint: Checkpoint


class Result:
    """An experiment's results.

    Args:
        path: the experiment, as the command takes it: its number, a unique part of its name, ``"latest"``, its
            directory, or ``s3://bucket/results/digits-1``, whose small files are then copied for as long as this object
            lives.
        trial: its class, if the experiment was given one that can't be imported from the copy of its code.

    Attributes:
        path: the experiment's directory; that of the copy, for one in an object store.

    Raises:
        NoExperiment: there is none, or several match.
        StorageError: the object store can't be used.
    """

    def __init__(self, path: Name, *, trial: type[PyTorchTrial] | None = None) -> None:
        copies = ExitStack()
        self._found = copies.enter_context(open_experiment(path))
        weakref.finalize(self, copies.close)
        self._directory = self._found.directory
        self.path = self._directory.path
        self._trial = trial

    def __repr__(self) -> str:
        from dray.records.result_repr import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from dray.records.result_repr import as_html

        return as_html(self)

    @property
    def overview(self) -> Overview:
        """The experiment at a glance, as ``dray experiment list`` shows it: its state, name and number now.

        Raises:
            JournalError: its journal is damaged.
        """
        return self._found.overview()

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row per metric: trial_id, batches, epochs, kind (training | validation), name, value, time (Unix, s)."""
        return read_metrics(self._directory.metrics)

    @cached_property
    def system_metrics(self) -> pd.DataFrame:
        """What trials used of their machines, and of time: trial_id, batches, name, value, time (Unix, s).

        A row per figure, every few seconds and at the end of each trial; ``docs/results.md`` has the names.
        """
        return read_system(self._directory.metrics).drop(columns=["epochs", "kind"])

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """When each worker group was in which phase, a row each: group, slots, trial_id, phase, start, end (Unix, s),
        gpu_type.

        ``docs/results.md`` has the phases.
        """
        return read_timeline(self._directory.metrics, self.system_metrics)

    @cached_property
    def trials(self) -> pd.DataFrame:
        """A row per trial.

        ``trial_id`` (int), ``state`` (PENDING, RUNNING, PAUSED, COMPLETED, PRUNED, ERRORED, INVALID_HP, CANCELED),
        ``hparams.<name>`` (one column each, in the config's order), ``batches`` (int, trained), ``metric`` and
        ``best_metric`` (float: the searcher's metric at the last and at the best validation, NaN before the first),
        ``nan_since`` (the batches at which a loss was first reported as NaN or infinite, if it has stayed so),
        ``restarts`` (int), ``started`` and ``ended`` (UTC; NaT if it has not). Where nodes have GPUs: ``gpu_type``,
        those that it ran on, by Ray's names.

        With several metrics, ``metric`` and ``best_metric`` are the first objective, and there are in addition, at the
        best validation, ``metrics.<name>`` (float), ``violation`` (float: by how much limits are exceeded, as a share
        of them; 0 if none is) and ``front`` (int: 1 is the Pareto front; missing if a limit is exceeded or the trial
        failed).
        """
        started, ended, restarts = self._started, self._ended, Counter(self._trials_of("restarted"))
        views = self.search.trials.values()
        hparams = [flatten(view.hparams or {}) for view in views]
        table = pd.DataFrame({"trial_id": [view.id for view in views], "state": [view.state for view in views]})
        names = dict.fromkeys(name for drawn in hparams for name in drawn)
        for name in in_order(names, self.config.hyperparameters):
            table[f"hparams.{name}"] = pd.Series([drawn.get(name) for drawn in hparams])
        ids = table["trial_id"]
        table["batches"] = ids.map(self.metrics.groupby("trial_id")["batches"].max()).fillna(0).astype("int64")
        # Not groupby().last(), which passes over NaN.
        last = self._validations.drop_duplicates("trial_id", keep="last").set_index("trial_id")
        table["metric"] = ids.map(last["value"]).astype("float64")
        table["best_metric"] = ids.map(self._best_rows.set_index("trial_id")["value"]).astype("float64")
        if (objectives := self.config.searcher.objectives) is not None:
            there, states = self._standings, dict(zip(ids, table["state"], strict=True))
            for name in dict.fromkeys(objectives.names):
                table[f"metrics.{name}"] = ids.map({t: each.metrics[name] for t, each in there.items()}).astype(
                    "float64"
                )
            order = order_of(there, states)
            table["violation"] = ids.map({t: each.losses.violation for t, each in there.items()}).astype("float64")
            table["front"] = ids.map({t: order.front_of(t) for t in order}).astype("Int64")
        table["nan_since"] = ids.map(nan_since(self.metrics, self.config.searcher.first_metric)).astype("Int64")
        table["restarts"] = [restarts[view.id] for view in views]
        if types := gpu_types(self._directory.metrics):
            table["gpu_type"] = ids.map(types).fillna("")
        for name, times in (("started", started), ("ended", ended)):
            table[name] = pd.to_datetime([times.get(view.id, math.nan) for view in views], unit="s")
        return table

    def _trials_of(self, event: str) -> list[int]:
        """The trials of this event's records."""
        found = (record.get("trial") for record in self._records if record.get("event") == event)
        return [trial for trial in found if isinstance(trial, int)]

    @property
    def _started(self) -> dict[int, float]:
        """When each trial first started: Unix, s."""
        return _last_times(reversed(self._records), "started")

    @property
    def _ended(self) -> dict[int, float]:
        """When each trial that has ended did: Unix, s. An extension may have resumed a trial after an earlier end."""
        times = _last_times(self._records, "exited")
        return {trial: time for trial, time in times.items() if self.search.trials[trial].ended}

    @cached_property
    def best_trial(self) -> BestTrial:
        """The trial with the best validation, among those that did not fail; with several metrics that of
        ``best_trials`` with the best first objective.

        Raises:
            ExperimentError: no trial has validated, or all that have failed, or exceed a limit; or the best has no
                checkpoint.
        """
        return self._best(self._ranked.iloc[0])

    @cached_property
    def best_trials(self) -> list[BestTrial]:
        """The Pareto front: the trials that no other one surpasses in every objective, the best in the first objective
        first. With one metric only ``best_trial``.

        Raises:
            ExperimentError: as ``best_trial``.
        """
        there = self._ranked
        front = there[there["front"] == 1] if "front" in there else there.head(1)
        return [self._best(row) for _, row in front.iterrows()]

    @property
    def _ranked(self) -> pd.DataFrame:
        """The trials that can be the best, the best first; at least one."""
        there = ranked(self.trials, self.config.searcher.sign)
        if there.empty:
            raise ExperimentError(f"no trial of {self.path} has validated yet, so there is no best trial")
        if why := no_best_reason(there, self.config.searcher.first_metric):
            raise ExperimentError(f"{self.path}: {why}")
        return sound(there)

    def _best(self, row: pd.Series[Any]) -> BestTrial:
        trial_id = int(row["trial_id"])
        batches = int(self.best_batches()[trial_id])
        store = self._directory.store(trial_id)
        checkpoint = store.find(batches) or store.latest()
        if checkpoint is None:
            raise ExperimentError(
                f"trial {trial_id} of {self.path} is the best, but it has no checkpoint; checkpoint_policy sets which "
                "are saved, and checkpoint_storage.save_trial_best how many are kept"
            )
        return BestTrial(
            trial_id=trial_id,
            hparams=dict(self.search.trials[trial_id].hparams or {}),
            metric=float(row["best_metric"]),
            metrics=self._standings[trial_id].metrics
            if self.config.searcher.objectives is not None
            else {self.config.searcher.first_metric: float(row["best_metric"])},
            batches=batches,
            checkpoint=_as_ray_checkpoint(store, checkpoint),
        )

    def load_best_trial(self, trial_kwargs: Mapping[str, Any] | None = None) -> Any:
        """Your own trial with the weights of ``best_trial.checkpoint``, on this machine's first device.

        Args:
            trial_kwargs: arguments of its constructor beside ``context``, if a program gives it some.
        """
        from dray.pytorch import load_trial_from_checkpoint_path

        entrypoint = self.config.entrypoint
        trial = self._trial
        if trial is None:
            assert entrypoint is not None, "an experiment without an entrypoint was given its class"
            found = FromDirectory(entrypoint=entrypoint, directory=str(self._directory.code))()
            # Of a program: its checkpoints name the class that it trains.
            trial = None if isinstance(found, Script) else found
        with self.best_trial.checkpoint.as_directory() as checkpoint:
            return load_trial_from_checkpoint_path(checkpoint, trial_class=trial, trial_kwargs=dict(trial_kwargs or {}))

    def study(self, storage: str | optuna.storages.BaseStorage | None = None) -> optuna.Study:
        """The trials so far as a study for Optuna's tools; ``docs/looking.md`` has what its fields mean.

        Args:
            storage: as for ``optuna.create_study``; by default the study is in memory.
        """
        from dray.records.study import create_study  # here, not above: Optuna's import takes half a second

        values = {
            int(str(trial)): dict(zip(rows["batches"].tolist(), rows["value"].tolist(), strict=True))
            for trial, rows in self._validations.groupby("trial_id")
        }
        trials = self.search.trials
        return create_study(
            self.config, trials, started=self._started, ended=self._ended, values=values, storage=storage
        )

    def best_batches(self) -> pd.Series[int]:
        """Batches trained at each trial's best validation, by trial_id."""
        return self._best_rows.set_index("trial_id")["batches"]

    @cached_property
    def config(self) -> ExperimentConfig:
        """The config that it was created with."""
        return self._directory.config()

    @cached_property
    def _records(self) -> list[dict[str, object]]:
        journal = self._directory.journal
        return Journal.read(journal) if journal.exists() else []  # there is none before the experiment first runs

    @cached_property
    def search(self) -> Search:
        """The search as the journal has it, with a view of each trial in ``search.trials``; to look at, not to run."""
        return recorded_search(self.config, self._records)

    @cached_property
    def _validations(self) -> pd.DataFrame:
        rows, metric = self.metrics, self.config.searcher.first_metric
        return rows[(rows["kind"] == "validation") & (rows["name"] == metric)]

    @cached_property
    def _standings(self) -> dict[int, Standing]:
        objectives = self.config.searcher.objectives
        return {} if objectives is None else standings(self.metrics, objectives)

    @cached_property
    def _best_rows(self) -> pd.DataFrame:
        """The earliest best validation of each trial."""
        if self.config.searcher.objectives is not None:
            at = [(trial, each.batches) for trial, each in self._standings.items()]
            return self._validations.set_index(["trial_id", "batches"], drop=False).loc[at].reset_index(drop=True)
        finite = self._validations[self._validations["value"].abs() < float("inf")]
        ranked = finite.assign(score=self.config.searcher.sign * finite["value"])
        return ranked.sort_values(["score", "batches"], kind="stable").drop_duplicates("trial_id")


def _last_times(records: Iterable[Mapping[str, object]], event: str) -> dict[int, float]:
    """When an event last happened to each trial, in the order of these records."""
    times: dict[int, float] = {}
    for record in records:
        if record.get("event") == event:
            trial, time = record.get("trial"), record.get("time")
            if isinstance(trial, int) and isinstance(time, int | float):
                times[trial] = float(time)
    return times


def _as_ray_checkpoint(store: CheckpointStore, checkpoint: str) -> Checkpoint:
    """A checkpoint of dray's as one of Ray's."""
    from ray.train import Checkpoint

    filesystem, path = store.filesystem_of(checkpoint)
    return Checkpoint(path, filesystem)
