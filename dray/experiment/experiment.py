"""An experiment: a search over trials of one class, run on Ray, stored in one directory, resumable from it."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dray
from dray.code.factory import ByValue, FromDirectory, place_of
from dray.code.load import check_entrypoint
from dray.config.custom import Custom
from dray.config.faults import missing_field
from dray.config.load import ExperimentConfig, load_config
from dray.config.search import as_extended, build_sampler, build_search
from dray.display.display import Display
from dray.errors import ConfigError, DeskLost, DirectoryGone, EntrypointError, ExperimentError
from dray.experiment.checkpoint_source import with_source, with_storage
from dray.experiment.interrupts import Interrupts
from dray.observers import loggers
from dray.observers.observer import Make, Observer, Observers
from dray.records.directory import ExperimentDirectory, check_storage, link_into_results, new_path
from dray.records.lookup import Name, locate
from dray.records.metrics import MetricsLog
from dray.records.mirror import Mirror, fetch_experiment
from dray.records.numbering import take_number
from dray.records.result import Result
from dray.records.secrets import check_secrets, with_secrets
from searchers.errors import MethodError
from searchers.events import Exited, Reason
from searchers.journal import Journal
from searchers.method import Method
from searchers.records import event_from_json
from searchers.samplers import Sampler
from searchers.search import Record, Search
from searchers.space import Constraint

if TYPE_CHECKING:
    from dray.desk.messages import Message
    from dray.pytorch import PyTorchTrial


MAX_DESK_LOSSES = 3
"""An experiment fails when it loses its desk this often in a row without a trial's report in between."""


class Experiment:
    """A search over the hyperparameters of a ``PyTorchTrial``, on Ray.

    The config and the class are checked here, before Ray starts.

    Args:
        config: the path of a YAML file, or a mapping of the same form, whose ``hyperparameters`` may also be Optuna
            distributions or ``ray.tune`` domains.
        model_dir: the directory that the config's ``entrypoint`` is imported from, or run in; by default that of the
            config file. Its code is copied into the experiment (see ``.drayignore``) and sent to the workers; a
            ``startup-hook.sh`` in it runs on each machine before its first worker imports from it.
        trial: the class itself, instead of an entrypoint. The class of a script or a notebook is sent to the workers
            of a cluster with the directory that it is in.
        path: the experiment's directory; by default a new one in the config's storage.
        storage_path: a directory or ``s3://bucket/prefix``, instead of the config's ``checkpoint_storage``. If neither
            is given, that of the environment variable ``DRAY_STORAGE``.
        constraint: returns whether a dict of hyperparameters may be tried; if not, others are drawn.
        method: your own search method, not used before; the config then has ``searcher: {name: custom, ...}``. Or the
            config names its class, which is imported from ``model_dir``: ``name: my_module:MyMethod``.
        sampler: your own sampler, not used before. Or the config names its class: ``sampler: my_module:MySampler``.
        address: of a Ray cluster. By default the one that this process is connected to, or that ``RAY_ADDRESS`` names,
            or a new one on this machine.

    Raises:
        ConfigError: with every fault of the config, each with the path of its field.

    .. code-block:: python

        result = dray.Experiment("asha.yaml", model_dir=".").run()
        print(result.best_trial.hparams)
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | ExperimentConfig,
        *,
        model_dir: str | os.PathLike[str] | None = None,
        trial: type[PyTorchTrial] | None = None,
        path: str | os.PathLike[str] | None = None,
        storage_path: str | os.PathLike[str] | None = None,
        constraint: Constraint | None = None,
        method: Method | None = None,
        sampler: Sampler | None = None,
        address: str | None = None,
    ) -> None:
        checked = with_source(with_storage(load_config(config), storage_path))
        check_secrets(checked)
        code = Path(model_dir) if model_dir is not None else None
        place = place_of(trial) if trial is not None else None
        if place is not None:
            entrypoint, home = place
            checked = checked.model_copy(update={"entrypoint": entrypoint})
            code = code if code is not None else home
        elif trial is not None:
            checked = checked.model_copy(update={"entrypoint": None})
        else:
            if code is None:
                code = Path(config).parent if isinstance(config, (str, os.PathLike)) else Path()
            check_entrypoint(checked.entrypoint, code)
        if trial is not None and checked.searcher.length is None:
            raise ConfigError([missing_field("searcher.max_length")])
        self._custom = Custom(directory=code, constraint=constraint, method=method, sampler=sampler)
        self._custom.check(checked.searcher)
        build_sampler(checked, self._custom)
        loggers.check_loggers(checked)
        self._trial = trial if place is None else None
        self._config = checked
        self._code = code
        self._address = address
        self._extension: dict[str, int] = {}
        self._resumes = False
        self.path = Path(path).expanduser().resolve() if path is not None else new_path(checked)
        self._is_placed = path is None  # else its place is the caller's

    @classmethod
    def resume(
        cls,
        path: Name,
        *,
        max_trials: int | None = None,
        max_length: int | None = None,
        trial: type[PyTorchTrial] | None = None,
        constraint: Constraint | None = None,
        method: Method | None = None,
        sampler: Sampler | None = None,
        address: str | None = None,
    ) -> Experiment:
        """An experiment that was stopped, or finished, ready to continue exactly where its journal ends.

        A finished one has nothing left to do, unless it is extended: by more trials, or to a greater length, to which
        the best trials that were paused or completed continue from their checkpoints.

        Args:
            path: as for the command: its number, a unique part of its name, ``"latest"``, its directory, or its place
                in an object store, such as ``s3://bucket/results/digits-1``.
            max_trials: the new total number of trials. None: unchanged.
            max_length: the new length of a trial, in the unit of the config. None: unchanged.
            trial: the class, if the experiment was created with one from a script or a notebook.
            constraint, method, sampler: equal to those that the experiment was created with, if they were passed from
                Python, and not used before. Those that the config names are imported from its copy of the code.
            address: as for a new experiment.

        Raises:
            NoExperiment: there is none, or several match.
            ConfigError: its class must be given.
        """
        self = cls.__new__(cls)
        directory = ExperimentDirectory.open(fetch_experiment(locate(path)))
        self._config = with_secrets(directory.config(), directory.secrets_file)
        loggers.check_loggers(self._config)
        self._trial, self._code, self._address, self._resumes = trial, None, address, True
        code = directory.code if directory.code.is_dir() else None
        self._custom = Custom(directory=code, constraint=constraint, method=method, sampler=sampler)
        wanted = {"max_trials": max_trials, "max_length": max_length}
        self._extension = {field: value for field, value in wanted.items() if value is not None}
        self.path = directory.path
        if self._config.entrypoint is not None:
            check_entrypoint(self._config.entrypoint, directory.code)
        elif trial is None:
            what = "the experiment's class is from a script or a notebook; pass it again: resume(path, trial=MyTrial)"
            raise EntrypointError([("trial", what)])
        return self

    def run(self, *, on_message: Callable[[Message], None] | None = None) -> Result:
        """Run the search to its end, showing progress. Returns when it has ended.

        Ctrl-C lets running trials save a checkpoint, and stops; so do SIGTERM and SIGHUP, in the main thread. A second
        one acts as it would outside of this call. ``Experiment.resume(path).run()`` continues.

        Args:
            on_message: called with each message of the worker groups to the driver; for benchmarks.

        Returns:
            The same as ``dray.Result(experiment.path)``.

        Raises:
            ConfigError: a fault of the config that only a trial or the cluster could show; or the search can't be
                extended like that.
            ExperimentError: the search failed: every trial did, or it could not continue. Or it has completed, but
                could not be copied to its object store; then its ``Result`` is in its directory here.
            ConnectionError: no Ray cluster answers at the address.
            KeyboardInterrupt: it was stopped; the argument is the name of the signal, such as "SIGTERM".
        """
        with Interrupts() as interrupts:
            directory = self._opened_directory()
            try:
                return self._run_in(directory, interrupts, on_message)
            except Exception:
                if directory.is_gone():  # then whatever failed is a consequence
                    raise DirectoryGone(directory.path) from None
                raise

    def _opened_directory(self) -> ExperimentDirectory:
        if self._resumes or ExperimentDirectory(self.path).config_file.exists():
            directory = ExperimentDirectory.open(self.path)
            check_storage(directory.storage)
        else:
            check_storage(self._config.checkpoint_storage.location)
            directory = ExperimentDirectory.create(self.path, self._config, self._code)
            if self._is_placed:
                link_into_results(self.path)
        self._resumes = True
        return directory

    def _run_in(
        self, directory: ExperimentDirectory, interrupts: Interrupts, on_message: Callable[[Message], None] | None
    ) -> Result:
        # The mirror is closed last, once everything is on the disk.
        with (
            contextlib.closing(Mirror(directory)) as mirror,
            Journal(directory.journal) as journal,
            contextlib.closing(Observers(directory, _observers(directory, self._config))) as observers,
        ):
            records = Journal.read(directory.journal)
            search, config = self._opened(journal, observers, records)
            display = Display(
                name=config.name,
                path=directory.path,
                metric=config.searcher.metric,
                smaller_is_better=config.searcher.smaller_is_better,
                unit=config.searcher.unit,
            )
            interrupts.final_message = display.last_words
            observers.begin(records, search.trials, display.say)
            if search.done is not None:
                display.ended()
            losses = 0
            while search.done is None:
                try:
                    self._run(config, directory, journal, observers, search, display, interrupts, records, on_message)
                except DeskLost as lost:
                    known, records = len(records), Journal.read(directory.journal)
                    reported = any(record["event"] == "reported" for record in records[known:])
                    losses = 1 if reported else losses + 1
                    if losses == MAX_DESK_LOSSES:
                        raise
                    display.say(f"{str(lost).partition(';')[0]}; restarting from the journal")
                    search, config = self._opened(journal, observers, records)
            observers.close(done=True)
        result = Result(directory.path, trial=self._trial)
        display.result(result)
        if search.done.reason == "errored":
            raise ExperimentError(
                f"every trial failed; all errors are in {directory.journal}, the last one is\n{_last_error(directory)}"
            )
        if search.done.reason == "invalid_hp":
            raise ExperimentError(
                "too many trials had invalid hyperparameters (they raised InvalidHP); narrow the search space, see "
                f"{directory.config_file}"
            )
        if mirror.missing is not None:
            raise ExperimentError(f"the search has completed, but {mirror.missing}")
        return result

    def _opened(
        self, journal: Journal, observers: Observers, records: list[dict[str, object]]
    ) -> tuple[Search, ExperimentConfig]:
        """The search as replayed from the journal, and the config as extended."""
        self._check_given(records)

        def log(record: Record) -> None:
            stamped = {**record, "time": time.time()}
            journal.append(stamped)
            observers.happened(stamped, search.trials)

        search = build_search(self._config, log, records=records, custom=self._custom)
        opened = {"event": "opened", "version": dray.__version__, **self._custom.names(), "time": time.time()}
        journal.append(opened)
        if not search.started:
            search.start()
        _end_stopped(search)
        return search, self._extended(search, as_extended(self._config, records))

    def _check_given(self, records: list[dict[str, object]]) -> None:
        """Check that what was passed from Python when the experiment was created is passed again."""
        faults = []
        for argument, value in self._custom.names().items():
            opened = (record for record in records if record.get("event") == "opened")
            had = next((record[argument] for record in opened if record.get(argument)), None)
            if had is not None and value is None:
                what = f"the experiment was created with {had}, which can't be stored in its directory; pass it again, "
                faults.append((argument, f"{what}from Python: dray.Experiment.resume(path, {argument}=...)"))
        if faults:
            raise ConfigError(faults)
        self._custom.check(self._config.searcher)

    def _extended(self, search: Search, config: ExperimentConfig) -> ExperimentConfig:
        """Extend the search, if requested and not done yet; returns the config as extended."""
        now = {"max_trials": config.searcher.trial_count, "max_length": config.searcher.length}
        wanted = {field: value for field, value in self._extension.items() if value != now[field]}
        if not wanted:
            return config
        try:
            search.extend(**wanted)
        except MethodError as error:
            raise ConfigError(error.faults, "The extension") from None
        return as_extended(config, [{"event": "extended", **wanted}])

    def _run(
        self,
        config: ExperimentConfig,
        directory: ExperimentDirectory,
        journal: Journal,
        observers: Observers,
        search: Search,
        display: Display,
        interrupts: Interrupts,
        records: list[dict[str, object]],
        on_message: Callable[[Message], None] | None,
    ) -> None:
        elsewhere = "" if directory.storage.is_local else f", checkpoints in {directory.storage}"
        number = take_number(directory.path)
        numbered = "experiment" if number is None else f"experiment {number}:"
        display.say(f"{numbered} {config.name}, stored in {directory.path}{elsewhere}")
        metrics = MetricsLog(directory.metrics)
        quiet = contextlib.ExitStack()
        try:
            quiet.enter_context(display)
            display.starting("waiting for Ray")
            # Here, not above: bad input is reported before Ray is even imported.
            from dray.cluster import ray_output
            from dray.cluster.connection import connect

            quiet.enter_context(ray_output.redirect_ray_output(directory.path / ray_output.FILE))
            with ThreadPoolExecutor(1) as pool:
                # Ray's start is mostly waiting for its processes: meanwhile Train and Tune are imported.
                modules = pool.submit(importlib.import_module, "dray.experiment.run")
                cluster = connect(self._address)
                quiet.callback(cluster.close)
                run = modules.result()
            display.say(f"on {cluster.description}")
            display.begin(search, records)
            entrypoint = config.entrypoint
            self.last_run = run.Run(
                config=config,
                directory=directory,
                journal=journal,
                observers=observers,
                search=search,
                metrics=metrics,
                load_trial=FromDirectory(entrypoint=entrypoint, directory=str(directory.code))
                if entrypoint is not None
                else ByValue(trial=self._trial),
                cluster=cluster,
                display=display,
                interrupts=interrupts,
                records=records,
                revived=_ends(records),
                on_message=on_message,
            )
            self.last_run.run()
        except KeyboardInterrupt:
            display.interrupted()
            raise
        finally:
            quiet.close()
            metrics.close()


def _observers(directory: ExperimentDirectory, config: ExperimentConfig) -> dict[str, Make]:
    """The experiment's observers by name, each with a function that makes it once there is something to write."""

    def study() -> Observer:
        # Here, not above: Optuna's storage takes half a second to make.
        from dray.observers.optuna_study import OptunaStudy

        return OptunaStudy(directory.study, config)

    return {directory.study.name: study, **loggers.makes(directory, config)}


def _end_stopped(search: Search) -> None:
    """End the trials that the search had stopped, where the driver died before it recorded their end."""
    while stopped := [view.id for view in search.trials.values() if view.stop_requested and not view.ended]:
        for trial in stopped:
            search.on(Exited(trial=trial, reason="stopped"))


def _ends(records: list[dict[str, object]]) -> dict[int, Reason]:
    """How trials have ended, as far as an extension of the search may resume them."""
    exits = (event_from_json(record) for record in records if record.get("event") == "exited")
    return {exit.trial: exit.reason for exit in exits if isinstance(exit, Exited)}


def _last_error(directory: ExperimentDirectory) -> str:
    errors = [record["error"] for record in Journal.read(directory.journal) if "error" in record]
    return str(errors[-1]) if errors else "not recorded"
