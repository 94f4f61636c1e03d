"""What came out of an experiment: read from its directory, while it runs or years later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from dray.experiment.code import FromDirectory
from dray.experiment.directory import ExperimentDirectory
from dray.experiment.errors import ExperimentError
from dray.experiment.metrics_log import read_metrics
from dray.experiment.search import recorded_search
from dray.script import Script
from dray.storage import CheckpointStore
from searchers.journal import Journal
from searchers.search import Search

if TYPE_CHECKING:
    from ray.train import Checkpoint

    from dray.pytorch import PyTorchTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class BestTrial:
    """The trial with the best validation of an experiment.

    Attributes:
        trial_id: its number.
        hparams: what it was trained with.
        metric: the searcher's metric at its best validation.
        batches: where that was.
        checkpoint: the state at that validation; of its latest checkpoint if ``checkpoint_policy`` kept none there.
    """

    trial_id: int
    hparams: Mapping[str, Any]
    metric: float
    batches: int
    checkpoint: Checkpoint


class Result:
    """An experiment's outcome.

    Args:
        path: the experiment's directory.
        trial: its class, where the experiment was given one that can't be imported from the copy of its code.
    """

    def __init__(self, path: Path, *, trial: type[PyTorchTrial] | None = None) -> None:
        self.path = Path(path)
        self._directory = ExperimentDirectory.open(self.path)
        self._trial = trial

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row a metric: trial_id, batches, epochs, kind (training | validation), name, value, time (Unix, s)."""
        return read_metrics(self._directory.metrics)

    @cached_property
    def trials(self) -> pd.DataFrame:
        """A row a trial: trial_id, state, hparams.*, batches, metric (last), best_metric, restarts, started, ended."""
        records, search = self._records, self._search
        times: dict[str, dict[int, float]] = {"started": {}, "exited": {}}
        restarts: Counter[int] = Counter()
        for record in records:
            event, trial = record.get("event"), record.get("trial")
            if event == "restarted" and isinstance(trial, int):
                restarts[trial] += 1
            elif isinstance(event, str) and event in times and isinstance(trial, int):
                times[event].setdefault(trial, float(str(record["time"])))
        batches = self.metrics.groupby("trial_id")["batches"].max()
        mine = self._validations
        last = mine.groupby("trial_id")["value"].last()
        best = self._best_rows.set_index("trial_id")["value"]
        rows = [
            {
                "trial_id": view.id,
                "state": view.state,
                **{f"hparams.{name}": value for name, value in _flat(view.hparams or {})},
                "batches": int(batches.get(view.id, 0)),
                "metric": last.get(view.id),
                "best_metric": best.get(view.id),
                "restarts": restarts[view.id],
                "started": pd.Timestamp(times["started"][view.id], unit="s") if view.id in times["started"] else None,
                "ended": pd.Timestamp(times["exited"][view.id], unit="s") if view.id in times["exited"] else None,
            }
            for view in search.trials.values()
        ]
        return pd.DataFrame(rows).astype({"metric": "float64", "best_metric": "float64"})

    @cached_property
    def best_trial(self) -> BestTrial:
        """The trial with the best validation.

        Raises:
            ExperimentError: no trial has validated, or none has a checkpoint.
        """
        valid = {view.id for view in self._search.trials.values() if view.state != "INVALID_HP"}
        rows = self._best_rows[self._best_rows["trial_id"].isin(list(valid))]
        if rows.empty:
            raise ExperimentError(f"no trial of {self.path} has validated yet, so none is the best")
        row = rows.iloc[(self._sign * rows["value"]).argmin()]
        trial_id, batches = int(row["trial_id"]), int(row["batches"])
        store = self._directory.store(trial_id)
        checkpoint = store.find(batches) or store.latest()
        if checkpoint is None:
            raise ExperimentError(
                f"trial {trial_id} of {self.path} is the best, but it has no checkpoint; checkpoint_policy says which "
                "are made, and checkpoint_storage.save_trial_best how many are kept"
            )
        return BestTrial(
            trial_id=trial_id,
            hparams=dict(self._search.trials[trial_id].hparams or {}),
            metric=float(row["value"]),
            batches=batches,
            checkpoint=_handed_out(store, checkpoint),
        )

    def load_best_trial(self, trial_kwargs: Mapping[str, Any] | None = None) -> PyTorchTrial:
        """The user's trial with the weights of ``best_trial.checkpoint``, on this machine's first device.

        Args:
            trial_kwargs: arguments of its constructor beside ``context``, as a program may give it some.
        """
        from dray.pytorch import load_trial_from_checkpoint_path

        entrypoint = self._directory.config().entrypoint
        trial = self._trial
        if trial is None:
            assert entrypoint is not None, "an experiment without an entrypoint was given its class"
            found = FromDirectory(entrypoint=entrypoint, directory=str(self._directory.code))()
            # The class that a program trains is known by its checkpoints.
            trial = None if isinstance(found, Script) else found
        with self.best_trial.checkpoint.as_directory() as checkpoint:
            return load_trial_from_checkpoint_path(checkpoint, trial_class=trial, trial_kwargs=dict(trial_kwargs or {}))

    def best_batches(self) -> pd.Series[int]:
        """Where each trial had its best validation, by trial_id."""
        return self._best_rows.set_index("trial_id")["batches"]

    @cached_property
    def _records(self) -> list[dict[str, object]]:
        return Journal.read(self._directory.journal)

    @cached_property
    def _search(self) -> Search:
        return recorded_search(self._directory.config(), self._records)

    @property
    def _sign(self) -> int:
        return 1 if self._directory.config().searcher.smaller_is_better else -1

    @cached_property
    def _validations(self) -> pd.DataFrame:
        rows, metric = self.metrics, self._directory.config().searcher.metric
        return rows[(rows["kind"] == "validation") & (rows["name"] == metric)]

    @cached_property
    def _best_rows(self) -> pd.DataFrame:
        """The earliest best validation of each trial."""
        finite = self._validations[self._validations["value"].abs() < float("inf")]
        ranked = finite.assign(score=self._sign * finite["value"])
        return ranked.sort_values(["score", "batches"], kind="stable").drop_duplicates("trial_id")


def _handed_out(store: CheckpointStore, checkpoint: str) -> Checkpoint:
    """A checkpoint of dray's as Ray's."""
    from ray.train import Checkpoint

    filesystem, path = store.filesystem_of(checkpoint)
    return Checkpoint(path, filesystem)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested hyperparameters as dotted names."""
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        flat += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
    return flat
