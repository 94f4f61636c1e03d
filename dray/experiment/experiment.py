"""Experiments: searches over trials, run on Ray and stored in a directory from which they resume.

Kubernetes, Slurm and the like restart a driver by repeating its command, whose path identifies the experiment: the call
that created it continues it, on this machine or another.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.code.factory import place_of
from dray.config.custom import Custom
from dray.config.faults import missing_field
from dray.config.load import load_config
from dray.config.notify import Watched
from dray.config.schema import ExperimentConfig
from dray.config.search import build_sampler
from dray.display.display import Display
from dray.display.text import searched_line
from dray.errors import AlreadyEnded, ConfigError, DirectoryGone, EntrypointError, ExperimentError, NoExperiment
from dray.experiment.checkpoint_source import with_source, with_storage
from dray.experiment.driver import OpenSearch
from dray.experiment.interrupts import Interrupts
from dray.experiment.isolation_check import check_code, check_sandbox
from dray.experiment.like import learn
from dray.experiment.notify import Notifier
from dray.experiment.open_search import open_search
from dray.experiment.request_files import RequestFiles
from dray.hosts.signals import print_no_traceback
from dray.leases.messages import GroupReady, Message
from dray.masking import hidden_text
from dray.observers import loggers
from dray.observers.observer import Observers
from dray.private import withhold_writing
from dray.records.directory import (
    ExperimentDirectory,
    check_storage,
    link_into_results,
    new_path,
    results_root,
    unlink_from_results,
)
from dray.records.driver_lock import DriverLock
from dray.records.journal import read_journal
from dray.records.logs import short_error, where
from dray.records.lookup import Name, locate
from dray.records.metrics import MetricsLog
from dray.records.mirror import Mirror, delete_trials, fetch_experiment, fetch_to
from dray.records.numbering import take_number, typed
from dray.records.reader import ExperimentReader
from dray.records.secrets import check_secrets, with_secrets, write_secrets
from dray.records.spending import spending_of
from dray.storage.errors import is_full
from searchers.events import DoneReason
from searchers.journal import Journal
from searchers.method import Method
from searchers.samplers import Sampler
from searchers.space import Constraint

if TYPE_CHECKING:
    from dray.experiment.run import Lent
    from dray.pytorch import PyTorchTrial
    from dray.records.result import Result
    from dray.records.trial_record import TrialRecord
    from dray.serve.client import Server


_RESOLVED = ("checkpoint_storage", "reproducibility.experiment_seed", "searcher.source_checkpoint_uuid")
"""Fields that are drawn or looked up when an experiment is created, and may differ."""
_NONE = "(not set)"


def config_of_existing(path: Path, config: ExperimentConfig) -> ExperimentConfig | None:
    """The config of an existing experiment in this directory, or None. An experiment of the same name in the object
    store is copied to the directory first.

    Raises:
        ConfigError: it was created with a different config, or the store can't be used.
    """
    directory, where = ExperimentDirectory(path), config.checkpoint_storage.location
    if not directory.config_file.exists():
        if where is None or where.is_local:
            return None
        check_storage(where)
        place = where.child(path.name)
        try:
            fetch_to(path, place)
        except NoExperiment:
            delete_trials(place)
            return None
        write_secrets(directory.secrets_file, config)  # the store never has them
    stored = directory.config()
    cure = f"give another path, or continue it as it is: dray experiment resume {typed(path)}"
    faults = [
        (field, f"is {now!r}, but the experiment in {path} was created with {before!r}; {cure}")
        for field, now, before in _differences(config.to_dict(), stored.to_dict())
        if not (field == "searcher.points" and getattr(config.searcher, "like", []))  # it has those that were learned
    ]
    if faults:
        raise ConfigError(faults)
    return with_secrets(stored, directory.secrets_file)


def _differences(now: Any, before: Any, *path: str) -> Iterator[tuple[str, Any, Any]]:
    """The fields that differ, each with both values."""
    if ".".join(path) in _RESOLVED or now == before:
        return
    if isinstance(now, Mapping) and isinstance(before, Mapping):
        for name in dict.fromkeys([*now, *before]):
            yield from _differences(now.get(name, _NONE), before.get(name, _NONE), *path, str(name))
    else:
        yield ".".join(path), now, before


class Experiment:
    """A search over the hyperparameters of a ``PyTorchTrial``, on Ray.

    The config and the class are checked here, before Ray starts.

    Args:
        config: the path of a YAML file, or a mapping of the same form, whose ``hyperparameters`` may also be Optuna
            distributions or ``ray.tune`` domains.
        model_dir: the directory that the config's ``entrypoint`` is imported from, or run in; by default the config
            file's directory. Its code is copied into the experiment (see ``.drayignore``) and sent to the workers; a
            ``startup-hook.sh`` in it runs on each machine before the first import.
        trial: the class itself, instead of an entrypoint. On a cluster, the class of a script or a notebook is sent to
            the workers with its directory.
        path: the experiment's directory; by default a new one in the config's storage. An existing experiment in the
            directory, or under its name in the object store, continues with its own code. So the same call on another
            machine continues where the last one ended.
        storage_path: a directory or ``s3://bucket/prefix``, instead of the config's ``checkpoint_storage``. If
            neither is given, the environment variable ``DRAY_STORAGE`` is used.
        constraint: returns whether a dict of hyperparameters may be tried; if not, others are drawn.
        method: your own search method, not used before; the config then has ``searcher: {name: custom, ...}``. Or the
            config names its class, which is imported from ``model_dir``: ``name: my_module:MyMethod``.
        sampler: your own sampler, not used before. Or the config names its class: ``sampler: my_module:MySampler``.
        address: the address of a Ray cluster. By default the one that this process is connected to, or that
            ``RAY_ADDRESS`` names, or a new one on this machine, which later experiments of this process use too, until
            it ends or calls ``ray.shutdown()``.
        server: the URL of a server (``dray serve``) to run it, or ``"auto"`` for the server of the results directory;
            by default ``DRAY_SERVER``, if it is set. The server chooses the directory and the cluster. It can't use
            objects of this process: a class from a script, a constraint, a method or a sampler.

    Raises:
        ConfigError: with every fault of the config, each with the path of its field.

    .. code-block:: python

        result = dray.Experiment("asha.yaml", model_dir=".").run()
        print(result.best_trial.hparams)
    """

    lent: Lent | None = None
    """The resources of a server's process; None: the experiment has its own worker groups."""
    learned: Sequence[str] = ()
    """What its first points were learned from, as lines for people; () unless the config has ``searcher.like``."""
    _leaves_import = False
    """The workers import the class; this process does so only if they can't."""
    _is_imported = False
    """Another process on this machine has imported the class from equal code."""

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
        server: str | None = None,
    ) -> None:
        checked = with_source(with_storage(load_config(config), storage_path))
        loggers.check_loggers(checked)
        self.path = Path(path).expanduser().resolve() if path is not None else new_path(checked)
        self._links = path is None  # into the results directory, where its name is looked up
        check_secrets(checked)
        code = Path(model_dir) if model_dir is not None else None
        if trial is not None:
            entrypoint, home = place_of(trial) or (None, None)
            code = code or home
            checked = checked.model_copy(update={"entrypoint": entrypoint})
            if checked.searcher.length is None:
                raise ConfigError([missing_field("searcher.max_length")])
        else:
            code = code or (Path(config).parent if isinstance(config, (str, os.PathLike)) else Path())
            where = checked.checkpoint_storage.location
            # A failed creation must leave nothing behind, neither in a store nor in an existing directory.
            self._leaves_import &= (where is None or where.is_local) and not self.path.exists()
            self._leaves_import &= not checked.isolation.is_sandbox  # this process must not import it at all
            check_code(checked, code, imports=not (self._leaves_import or self._is_imported))
        self._custom = Custom(directory=code, constraint=constraint, method=method, sampler=sampler)
        self._custom.check(checked.searcher)
        build_sampler(checked, self._custom)
        self._server = server or os.environ.get("DRAY_SERVER")
        check_sandbox(checked, code, here=not self._server)
        self._trial = trial if checked.entrypoint is None else None
        self._config = checked
        self._code = code
        self._address = address
        self._extension: dict[str, Any] = {}
        self._resumes = self._must_go_on = False

    @classmethod
    def of_command(
        cls, config: ExperimentConfig, *, model_dir: Path, path: Path | None = None, storage_path: str | None = None
    ) -> Experiment:
        """A new experiment whose class, if Ray is started just for it, is imported first by the workers.

        Importing it here as well would double the time. If the workers can't import it, `run` raises that error, and
        leaves nothing of the experiment behind.
        """
        self = cls.__new__(cls)
        self._leaves_import = os.environ.get("RAY_ADDRESS", "local") == "local"
        Experiment.__init__(self, config, model_dir=model_dir, path=path, storage_path=storage_path)
        return self

    @classmethod
    def of_imported(cls, config: ExperimentConfig, *, model_dir: Path) -> Experiment:
        """A new experiment whose class another process on this machine has imported from equal code."""
        self = cls.__new__(cls)
        self._is_imported = True
        Experiment.__init__(self, config, model_dir=model_dir)
        return self

    @classmethod
    def resume(
        cls,
        path: Name,
        *,
        max_trials: int | None = None,
        max_length: int | None = None,
        budget: Mapping[str, Any] | None = None,
        until: Mapping[str, float] | None = None,
        patience: int | None = None,
        prices: Mapping[str, float] | None = None,
        trial: type[PyTorchTrial] | None = None,
        constraint: Constraint | None = None,
        method: Method | None = None,
        sampler: Sampler | None = None,
        address: str | None = None,
    ) -> Experiment:
        """An experiment that was stopped or has finished, ready to continue exactly where its journal ends.

        A finished experiment has nothing left to do, unless it is extended by more trials or to a greater length. The
        best paused or completed trials then continue from their checkpoints to that length.

        Args:
            path: as for the command: its number, a unique part of its name, ``"latest"``, its directory, or its URI,
                such as ``s3://bucket/results/digits-1``.
            max_trials: the new total number of trials. None: unchanged.
            max_length: the new length of a trial, in the unit of the config. None: unchanged.
            budget: new totals of the config's budget, such as ``{"time": "4h"}``. Others, and None: unchanged.
            until, patience: new values of these fields of the config. None: unchanged.
            prices: new prices by slot type. Others, and None: unchanged.
            trial: the class, if the experiment was created with one from a script or a notebook.
            constraint, method, sampler: unused objects equal to those that the experiment was created with, if they
                were passed from Python. Classes that the config names are imported from its copy of the code.
            address: as for a new experiment.

        Raises:
            NoExperiment: there is none, or several match.
            ConfigError: the experiment's class must be given.
        """
        self = cls.__new__(cls)
        directory = ExperimentDirectory.open(fetch_experiment(locate(path)))
        self._config = with_secrets(directory.config(), directory.secrets_file)
        loggers.check_loggers(self._config)
        self._trial, self._code, self._address, self._resumes = trial, None, address, True
        self._must_go_on = True
        self._server = None
        code = directory.code if directory.code.is_dir() else None
        self._custom = Custom(directory=code, constraint=constraint, method=method, sampler=sampler)
        wanted: dict[str, Any] = {"max_trials": max_trials, "max_length": max_length}
        wanted |= {"budget": budget, "until": until, "patience": patience, "prices": prices}
        self._extension = {field: value for field, value in wanted.items() if value is not None}
        self.path = directory.path
        check_sandbox(self._config, code)
        if self._config.entrypoint is not None:
            check_code(self._config, directory.code)
        elif trial is None:
            what = "the experiment's class is from a script or a notebook; pass it again: resume(path, trial=MyTrial)"
            raise EntrypointError([("trial", what)])
        return self

    @property
    def config(self) -> ExperimentConfig:
        """The checked config."""
        return self._config

    def run(self, *, on_message: Callable[[Message], None] | None = None) -> Result:
        """Run the search to its end, showing its progress.

        Ctrl-C lets running trials save a checkpoint, and stops the search; so do SIGTERM and SIGHUP in the main thread.
        A second signal acts as it would outside of this call. ``Experiment.resume(path).run()`` continues.

        Args:
            on_message: called with each message of the worker groups to the driver; for benchmarks.

        Returns:
            The same as ``dray.Result(experiment.path)``.

        Raises:
            ConfigError: a fault of the config that only a trial or the cluster could reveal, or an invalid extension.
            ExperimentError: every trial failed, or the search could not continue. Or it was resumed, and its budget is
                spent. Or it has completed, but could not be copied to its object store; then its ``Result``
                is in its local directory.
            ConnectionError: no Ray cluster answers at the address.
            KeyboardInterrupt: it was stopped; the argument is the name of the signal, such as "SIGTERM". On a server it
                continues: ``dray experiment stop`` stops it.
        """
        if self._server:
            return self._run_on(self._server)
        with Interrupts() as interrupts:
            withhold_writing()
            directory = self.prepare()
            also = () if self.lent is None else (self.lent.alert,)
            notifier = Notifier(self._config.notify, directory, *also)
            try:
                result = self._run_in(directory, interrupts, notifier, on_message)
            except KeyboardInterrupt:
                notifier.ended("stopped")
                raise
            except AlreadyEnded:
                notifier.ended("completed")  # unless it was killed before it could
                raise
            except Exception as error:
                if directory.is_gone():  # which has caused the failure
                    raise DirectoryGone(directory.path) from None
                if self._leaves_import and isinstance(error, ConfigError):
                    self._import_class(directory)
                if self.lent is None or (isinstance(error, ConfigError | ExperimentError) and not is_full(error)):
                    # Otherwise the server restarts it.
                    notifier.ended("failed", hidden_text(str(error), self._config.secrets))
                raise
            notifier.ended("completed")
            return result

    def _import_class(self, directory: ExperimentDirectory) -> None:
        """Import the class as `Experiment` does; if that fails, delete the experiment's directory."""
        try:
            check_code(self._config, self._code or Path())
        except EntrypointError:
            shutil.rmtree(directory.path, ignore_errors=True)
            unlink_from_results(directory.path)
            raise

    def _run_on(self, url: str) -> Result:
        from dray.serve.submission import reject_objects, run_on_server

        given = {"trial": self._trial, "path": None if self._links else self.path, "address": self._address}
        reject_objects(**given, **self._custom.names())
        assert self._code is not None

        def begun(name: str) -> None:
            self.path = results_root() / name

        return run_on_server(_server_at(url), self._config, self._code, say=print, begun=begun)

    def prepare(self) -> ExperimentDirectory:
        """Create or open the experiment's directory; `run` does this too. Raises `ConfigError` if it can't be created,
        its object store can't be used, or it contains an experiment with a different config."""
        if not self._resumes and not self._links and (existing := config_of_existing(self.path, self._config)):
            self._config, self._resumes = existing, True
        if self._resumes:
            directory = ExperimentDirectory.open(self.path)
            check_storage(directory.storage)
        else:
            check_storage(self._config.checkpoint_storage.location)
            loggers.try_loggers(self._config)
            found = learn(self._config, self._custom)
            self._config, self.learned = found.config, found.lines
            directory = ExperimentDirectory.create(self.path, self._config, self._code)
            if self._links:
                link_into_results(self.path)
        self._resumes = True
        return directory

    def _run_in(
        self,
        directory: ExperimentDirectory,
        interrupts: Interrupts,
        notifier: Notifier,
        on_message: Callable[[Message], None] | None,
    ) -> Result:
        with contextlib.closing(ExperimentReader(directory)) as reader:
            reader.refresh()
        if lost := reader.lost_records():
            raise ExperimentError(lost)
        # The mirror closes after everything is on the disk, and the lock after the last copy.
        with (
            contextlib.closing(DriverLock(directory)) as lock,
            contextlib.closing(Mirror(directory, lock.is_held)) as mirror,
            Journal(directory.journal) as journal,
            notifier.writing(journal),
            contextlib.closing(Observers(directory, loggers.makes(directory, self._config))) as observers,
        ):
            lock.acquire()

            given = self._config, self._custom, self._extension
            opened = open_search(
                *given,
                journal=journal,
                records=read_journal(directory.journal),
                requests=RequestFiles(directory),
                watched=Watched.by(self._config.notify) | (Watched() if self.lent is None else self.lent.notify),
            )
            for alert in opened.alerts.pending.values():
                notifier.send(alert)
            searcher = opened.config.searcher
            display = Display(
                name=opened.config.name,
                path=directory.path,
                metric=searcher.first_metric,
                smaller_is_better=searcher.sign == 1,
                unit=searcher.unit,
            )
            interrupts.final_message = display.stopped_at_once
            observers.begin(display.say)
            limits = opened.limits
            limits.spend(spending_of(opened.config, directory.metrics).usage)
            if opened.new_limits is not None and not limits.reason:
                journal.append(opened.new_limits)
            if opened.search.done is not None:
                display.ended()
            elif limits.reason:
                if not limits.is_recorded:
                    journal.append({"event": "ended", "reason": limits.reason, "time": time.time()})
                if self._must_go_on:
                    extend = f"dray experiment extend {typed(directory.path)} {limits.remedy}"
                    spent = limits.usage and f" ({limits.usage})"
                    raise AlreadyEnded(f"the experiment has ended: {limits.reason}{spent}; to continue: {extend}")
            else:
                try:
                    before = reader.trials
                    self._run(
                        opened, directory, lock, journal, observers, notifier, display, interrupts, on_message, before
                    )
                except ConfigError as error:
                    # It can't run as it is, so it must not be listed as STOPPED.
                    journal.append({"event": "failed", "error": str(error), "time": time.time()})
                    raise
            observers.close(done=True)
        from dray.records.result import Result  # imports pandas

        result = Result(directory.path, trial=self._trial)
        display.result(result.reader)
        if opened.search.done is not None:
            _raise_failure(opened.search.done.reason, directory)
        if mirror.missing is not None:
            raise ExperimentError(f"the search has completed, but {mirror.missing}")
        return result

    def _run(
        self,
        opened: OpenSearch,
        directory: ExperimentDirectory,
        lock: DriverLock,
        journal: Journal,
        observers: Observers,
        notifier: Notifier,
        display: Display,
        interrupts: Interrupts,
        on_message: Callable[[Message], None] | None,
        before: Mapping[int, TrialRecord],
    ) -> None:
        def announce() -> None:
            self._leaves_import = False  # the first workers have imported it, so the experiment is real from now on
            elsewhere = "" if directory.storage.is_local else f", checkpoints in {directory.storage}"
            number = take_number(directory.path)
            numbered = "experiment" if number is None else f"experiment {number}:"
            display.say(f"{numbered} {opened.config.name}, stored in {directory.path}{elsewhere}")
            if not opened.records and (line := searched_line(opened.config.space)):
                display.say(line)
            for line in self.learned:
                display.say(line)

        if self._leaves_import:
            on_message = once_ready(announce, on_message)
        else:
            announce()
        with contextlib.ExitStack() as stack:
            metrics = stack.enter_context(contextlib.closing(MetricsLog(directory.metrics)))
            stack.enter_context(display)
            try:
                display.starting("waiting for Ray")
                # Imported here, so that bad input is reported before Ray is imported.
                from dray.cluster import ray_output
                from dray.cluster.connection import connect

                stack.enter_context(ray_output.redirect_ray_output(directory.path / ray_output.FILE))
                with ThreadPoolExecutor(1) as pool:
                    # Ray's start consists mostly of waiting for its processes: meanwhile Train and Tune are imported.
                    modules = pool.submit(importlib.import_module, "dray.experiment.run")
                    cluster = stack.enter_context(
                        connect(self._address) if self.lent is None else self.lent.server.cluster()
                    )
                    run = modules.result()
                from dray.groups.on_ray import OnRay

                display.say(f"on {cluster.description}")
                display.begin(opened.search, before)
                self.last_run = run.Run(
                    opened=opened,
                    records=run.Records(
                        directory=directory,
                        lock=lock,
                        journal=journal,
                        observers=observers,
                        metrics=metrics,
                        notifier=notifier,
                    ),
                    trial=self._trial,
                    on_ray=OnRay(cluster),
                    display=display,
                    interrupts=interrupts,
                    lent=self.lent,
                    on_message=on_message,
                )
                self.last_run.run()
            except KeyboardInterrupt as stopped:
                display.interrupted()
                print_no_traceback(stopped)
                raise


def _server_at(url: str) -> Server:
    # With `_run_on` the only place where a lower layer uses `dray.serve`.
    from dray.serve.client import Server

    server = Server.find(url=url)
    if server is None:
        raise ExperimentError(f"no server is up in {results_root()}; start one with: dray serve")
    return server


def once_ready(announce: Callable[[], None], on_message: Callable[[Message], None] | None) -> Callable[[Message], None]:
    """A wrapper of `on_message` that calls ``announce`` when the first group is ready, and has imported the class."""
    waits = True

    def heard(message: Message) -> None:
        nonlocal waits
        if waits and isinstance(message, GroupReady):
            waits = False
            announce()
        if on_message is not None:
            on_message(message)

    return heard


def _raise_failure(reason: DoneReason, directory: ExperimentDirectory) -> None:
    """Raise an `ExperimentError` unless the search has completed."""
    if reason == "errored":
        failures = [record for record in read_journal(directory.journal) if "error" in record]
        last = failures[-1] if failures else {}
        place = f" ({at})" if (at := where(last)) else ""
        raise ExperimentError(
            f"every trial failed, the last with {short_error(last.get('error'))[0]}{place}; all errors are in "
            f"{directory.journal}"
        )
    if reason == "invalid_hp":
        raise ExperimentError(
            "too many trials had invalid hyperparameters (they raised InvalidHP); narrow the search space, see "
            f"{directory.config_file}"
        )
    if reason == "out_of_memory":
        raise ExperimentError(
            "too many trials ran out of memory; narrow the search space to hyperparameters that need less, see "
            f"{directory.config_file}"
        )
