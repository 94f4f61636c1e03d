"""An experiment's results, read from its directory, while it runs or years later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from html import escape
from typing import TYPE_CHECKING, Any

import pandas as pd

from dray.code.factory import FromDirectory
from dray.config.schema import ExperimentConfig
from dray.errors import ExperimentError
from dray.records.checkpoints import choose, reading
from dray.records.comparison import Comparison, compare
from dray.records.directory import ExperimentDirectory
from dray.records.listing import open_experiment
from dray.records.lookup import Name
from dray.records.metrics import read_metrics, read_system
from dray.records.overview import Overview
from dray.records.reader import ExperimentReader
from dray.records.standing import Standing, standing
from dray.records.timeline import gpu_types, read_timeline
from dray.records.trial_record import TrialRecord
from dray.script import Script
from dray.text import counted, shown
from searchers.intervals import Interval

if TYPE_CHECKING:
    import optuna
    from ray.train import Checkpoint

    from dray.pytorch import PyTorchTrial


SHOWN = 10
"""Most trials in a notebook's table."""


@dataclass(frozen=True, kw_only=True)
class BestTrial:
    """The best trial of an experiment, by the rule in docs/comparing.md.

    Attributes:
        trial_id: its number.
        hparams: its hyperparameters.
        metric: its value of the searcher's metric, or of the first objective.
        best_by: what that value is: "one seed", at its best validation, or "mean of 3 seeds", if it was repeated.
        metrics: all metrics of the searcher, by name, at the best validation of its best run, which may be a repeat.
        batches: how far it trained.
        best_batches: batches trained at that validation.
        checkpoint: the checkpoint of that validation; if it is missing or damaged, an `ExperimentError` that names it
            and the others.
        checkpoint_at: returns another one: ``checkpoint_at("last")``, or ``checkpoint_at(352)`` after so many batches.
        repeated: the mean of its repeats and its 95% confidence interval (``mean``, ``low``, ``high``, ``runs``); None
            without repeats. ``batches``, ``best_batches`` and ``checkpoint`` are those of its best run.
    """

    trial_id: int
    hparams: Mapping[str, Any]
    metric: float
    best_by: str
    metrics: Mapping[str, float]
    batches: int
    best_batches: int
    checkpoint_at: Callable[[str | int], Checkpoint] = field(repr=False, compare=False)
    repeated: Interval | None = None

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return self.checkpoint_at("best")


class Result:
    """An experiment's results.

    Args:
        path: the experiment, as for the command: its number, a unique part of its name, ``"latest"``, its directory, or
            a URI such as ``s3://bucket/results/digits-1``, whose small files are copied for this object's lifetime.
        trial: the trial class, if it can't be imported from the experiment's copy of the code.

    Attributes:
        path: the experiment's directory, or that of the copy if it is in an object store.

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
        try:
            return f"<dray.Result {self._line()}>"
        except Exception:  # its files can't be read
            return f"<dray.Result {self.path}>"

    def _repr_html_(self) -> str:
        """A summary line, and a table of the best trials with the hyperparameters that differ between them."""
        try:
            line, reader = self._line(), self.reader
        except Exception:
            return f"<p>{escape(repr(self))}</p>"
        varying = reader.varying
        rows = [
            [
                each.id,
                each.state,
                each.batches,
                each.best_batches,
                each.best_metric,
                *(each.hparams.get(name) for name in varying),
            ]
            for each in reader.eligible()[:SHOWN]
        ]
        names = ["trial", "state", "batches", "best at", f"best {reader.metric}", *varying]
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{''.join(f'<td>{escape(shown(cell))}</td>' for cell in row)}</tr>" for row in rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
        return f"<div><p><b>{escape(line)}</b><br>{escape(str(self.path))}</p>{table}</div>"

    def _line(self) -> str:
        """``12: digits-asha-20261121-175912-ab9a, COMPLETED, 16 trials, best validation_loss 0.031 by trial 7``."""
        seen = self.overview
        ended = "" if seen.ended == seen.trials else f"{seen.ended} of "
        best = (
            ""
            if seen.best_metric is None
            else f", best {seen.metric} {shown(seen.best_metric)} by trial {seen.best_trial}"
        )
        best += f" ({seen.best_by})" if self.reader.finalists() else ""
        return f"{seen.label}, {seen.state}, {ended}{counted(seen.trials, 'trial')}{' ended' if ended else ''}{best}"

    @property
    def overview(self) -> Overview:
        """The experiment's current state, name and progress, as ``dray experiment list`` shows them.

        Raises:
            DamagedFile: one of its files can't be read. The other attributes raise this, too.
        """
        return self._found.overview()

    @property
    def standing(self) -> Standing:
        """The current state of the search. ``dray experiment describe`` prints its ``sentence``."""
        return standing(self.overview, self.reader)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row per metric: trial_id, batches, epochs, kind (training | validation), name, value, time (Unix, s)."""
        return read_metrics(self._directory.metrics)

    @cached_property
    def system_metrics(self) -> pd.DataFrame:
        """The trials' use of their machines and their time: trial_id, batches, name, value, time (Unix, s).

        A row per figure, every few seconds and at the end of each trial; ``docs/machine.md`` lists the names.
        """
        return read_system(self._directory.metrics).drop(columns=["epochs", "kind"])

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """A row per phase of each worker group: group, slots, trial_id, phase, start, end (Unix, s), gpu_type.

        ``docs/machine.md`` lists the phases.
        """
        return read_timeline(self._directory.metrics, self.system_metrics)

    @cached_property
    def trials(self) -> pd.DataFrame:
        """A row per trial.

        ``trial_id`` (int), ``state`` (PENDING, RUNNING, PAUSED, COMPLETED, PRUNED, ERRORED, INVALID_HP, OUT_OF_MEMORY,
        CANCELED),
        ``hparams.<name>`` (one column each, in the config's order), ``batches`` (int, trained), ``metric`` and
        ``best_metric`` (float: the searcher's metric at the last and at the best validation, NaN before the first),
        ``nan_since`` (the batch at which a loss was first reported as NaN or infinite, if it has stayed so),
        ``restarts`` (int), ``started`` and ``ended`` (UTC; NaT if it has not). If nodes have GPUs: ``gpu_type``, Ray's
        names of the GPU types that the trial ran on. If trials were added with other code: ``code``, the name of its
        directory in ``variants``, or "" for the experiment's own.

        With several metrics, ``metric`` and ``best_metric`` are the first objective, and there are further columns for
        the best validation: ``metrics.<name>`` (float), ``violation`` (float: the excess over the limits, relative to
        them; 0 if all are kept) and ``front`` (int: 1 is the Pareto front; missing if a limit is exceeded or the trial
        failed).
        """
        return table_of(self.reader, gpu_types(self._directory.metrics))

    @cached_property
    def best_trial(self) -> BestTrial:
        """The best trial among those that did not fail, by the rule in docs/comparing.md; with several metrics, the one
        of ``best_trials`` with the best first objective.

        Raises:
            ExperimentError: no trial has validated, or all trials that have failed or exceed a limit.
        """
        return self._best(self.reader.best())

    @cached_property
    def lowest(self) -> BestTrial:
        """The trial with the best single validation, however short its training: often luck, and not ``best_trial``.
        Its ``metric`` is that of its own run. With several metrics, ``best_trial``.

        Raises:
            ExperimentError: as ``best_trial``.
        """
        if self.reader.is_pareto:
            return self.best_trial
        return self._best(self.reader.lowest() or self.reader.best(), own=True)

    @cached_property
    def best_trials(self) -> list[BestTrial]:
        """The Pareto front: the trials that no other trial surpasses in every objective, ordered by the first
        objective. With one metric, only ``best_trial``.

        Raises:
            ExperimentError: as ``best_trial``.
        """
        front = self.reader.front()
        return [self._best(self.reader.trials[trial]) for trial in front] if front else [self.best_trial]

    def _best(self, trial: TrialRecord | None, *, own: bool = False) -> BestTrial:
        if trial is None:
            why = self.reader.no_best_reason()
            none = f"no trial of {self.path} has validated yet, so there is no best trial"
            raise ExperimentError(f"{self.path}: {why}" if why else none)
        run = trial if own else self.reader.best_run(trial.id)
        assert run.best_batches is not None
        value = trial.best_metric if own else self.reader.value_of(trial)
        assert value is not None
        return BestTrial(
            trial_id=trial.id,
            hparams=dict(trial.drawn or {}),
            metric=value,
            best_by="one seed" if own else self.reader.valued_by(trial),
            metrics=run.best_metrics,
            batches=run.batches,
            best_batches=run.best_batches,
            checkpoint_at=partial(_checkpoint, self._directory, run),
            repeated=None if own else self.reader.mean_of_repeats(trial.id),
        )

    def compare(self, a: int | Result, b: int | None = None) -> Comparison:
        """The difference between two trials, by their repeats with the same seeds if they have any.

        ``print(result.compare(7, 12))`` prints "trial 7 is better than trial 12 by 0.013 (0.004 .. 0.022), 3 seeds".

        Args:
            a: a trial, or the result of another experiment: its best trial is compared with the best one here.
            b: the other trial.

        Raises:
            ExperimentError: they can't be compared, for example because a trial has not validated.
        """
        if isinstance(a, int) and isinstance(b, int):
            return compare(self.reader, a, self.reader, b)
        if isinstance(a, Result) and b is None:
            bests = [(each, each.reader.best()) for each in (self, a)]
            for result, best in bests:
                if best is None:
                    raise ExperimentError(f"{result.path} has no best trial yet")
            (_, mine), (_, other) = bests
            assert mine is not None
            assert other is not None
            return compare(self.reader, mine.id, a.reader, other.id)
        raise TypeError(f"compare() takes two trials' numbers, or another Result; got {a!r:.60} and {b!r:.60}")

    def load_best_trial(self, trial_kwargs: Mapping[str, Any] | None = None, *, at: str | int = "best") -> Any:
        """The trial with the weights of ``best_trial.checkpoint``, in eval mode, on this machine's first device.

        Args:
            trial_kwargs: further arguments of its constructor besides ``context``.
            at: another checkpoint of it: ``"last"``, or a number of batches.

        Raises:
            ExperimentError: there is no best trial, or the checkpoint is missing or damaged.
        """
        from dray.pytorch import load_trial_from_checkpoint_path

        chosen = self.best_trial.checkpoint_at(at)
        entrypoint = self.config.entrypoint
        trial = self._trial
        if trial is None:
            assert entrypoint is not None, "an experiment without an entrypoint was given its class"
            code = self._directory.code_of(self.reader.trials[self.best_trial.trial_id].code)
            found = FromDirectory(entrypoint=entrypoint, directory=str(code))()
            # A program's checkpoints name the class that it trains.
            trial = None if isinstance(found, Script) else found
        with chosen.as_directory() as checkpoint:
            return load_trial_from_checkpoint_path(checkpoint, trial_class=trial, trial_kwargs=dict(trial_kwargs or {}))

    def study(self, storage: str | optuna.storages.BaseStorage | None = None) -> optuna.Study:
        """The trials so far as a study for Optuna's tools; ``docs/looking.md`` explains its fields.

        Args:
            storage: as for ``optuna.create_study``; by default the study is in memory.
        """
        from dray.records.study import create_study  # here, not above: Optuna's import takes half a second

        return create_study(self.reader, storage)

    @cached_property
    def config(self) -> ExperimentConfig:
        """The config that the experiment was created with."""
        return self._directory.config()

    @cached_property
    def reader(self) -> ExperimentReader:
        """The reader of the experiment's journal and metrics."""
        return self._found.read()


def table_of(reader: ExperimentReader, gpu_types: Mapping[int, str] | None = None) -> pd.DataFrame:
    """`Result.trials`."""
    trials = list(reader.trials.values())
    table = pd.DataFrame({"trial_id": [each.id for each in trials], "state": [each.state for each in trials]})
    for name in reader.hparam_names:
        table[f"hparams.{name}"] = pd.Series([each.hparams.get(name) for each in trials])

    def numbers(values: Iterable[float | None], kind: Any = "float64") -> pd.Series[Any]:
        return pd.Series(list(values), dtype="object").astype(kind)

    table["batches"] = numbers((each.batches for each in trials), "int64")
    table["metric"] = numbers(each.metric for each in trials)
    table["best_metric"] = numbers(each.best_metric for each in trials)
    table["best_batches"] = numbers((each.best_batches for each in trials), "Int64")
    if reader.is_pareto:
        fronts = reader.fronts()
        for name in dict.fromkeys(reader.objectives.names):
            table[f"metrics.{name}"] = numbers(each.best_metrics.get(name) for each in trials)
        table["violation"] = numbers(each.losses and each.losses.violation for each in trials)
        table["front"] = numbers((fronts.get(each.id) for each in trials), "Int64")
    table["nan_since"] = numbers((each.nan_since for each in trials), "Int64")
    table["restarts"] = numbers((each.restarts for each in trials), "int64")
    if any(each.repeat is not None for each in trials):
        table["repeat_of"] = numbers((None if each.repeat is None else each.repeat.trial for each in trials), "Int64")
        table["repeat"] = numbers((None if each.repeat is None else each.repeat.seed for each in trials), "Int64")
    if any(each.source_trial is not None for each in trials):
        table["source_trial"] = numbers((each.source_trial for each in trials), "Int64")
        table["source_batches"] = numbers((each.source_batches for each in trials), "Int64")
    if any(each.code is not None for each in trials):
        table["code"] = [each.code or "" for each in trials]
    if gpu_types:
        table["gpu_type"] = [gpu_types.get(each.id, "") for each in trials]
    table["started"] = pd.to_datetime(numbers(each.started for each in trials), unit="s")
    table["ended"] = pd.to_datetime(numbers(each.ended for each in trials), unit="s")
    return table


def _checkpoint(directory: ExperimentDirectory, run: TrialRecord, at: str | int) -> Checkpoint:
    from ray.train import Checkpoint

    found, store = choose(directory, run, at), directory.store(run.id)
    with reading(directory, run, found):
        store.verify(found)
    filesystem, path = store.filesystem_of(found)
    return Checkpoint(path, filesystem)
