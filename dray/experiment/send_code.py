"""Sends code to the nodes of an existing cluster, where only its dependencies need to be installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import cloudpickle

from dray.code.archive import Archived
from dray.code.factory import ByValue, FromDirectory, Sent, home_of
from dray.code.ignore import code_of, copied
from dray.code.packages import Package, package, runtime_env
from dray.config.schema import ExperimentConfig
from dray.records.directory import ExperimentDirectory


def send_code(
    load: FromDirectory | ByValue,
    directory: ExperimentDirectory,
    config: ExperimentConfig,
    say: Callable[[str], None],
    *,
    borrows: bool = False,
) -> tuple[FromDirectory | Sent, dict[str, Any]]:
    """Put the experiment's copy of its code, and dray itself, into the cluster's store.

    For a class from a script or a notebook, the directory that it may import from is copied into the experiment first.

    Args:
        load: loads the code on workers on this machine.
        borrows: the workers are a server's, and run already: they get the code with the first trial.

    Returns:
        What loads the code on other machines, and the workers' runtime environment.
    """
    if borrows and isinstance(load, FromDirectory):
        return FromDirectory(entrypoint=load.entrypoint, directory=Archived.of(directory.code)), runtime_env()
    if isinstance(load, ByValue) and not directory.has_code:
        _copy_home(load, directory, config)
    sends: list[Package] = []
    what = "the trial's class"
    if directory.has_code or isinstance(load, FromDirectory):  # even if all its modules are installed
        code = copied(directory.code)
        sends.append(package(directory.code, tuple(code.targets())))
        what = f"{directory.code} ({code.summary})"
    say(f"sending {what} and dray itself to the workers")
    workers_env = runtime_env(*sends)
    if isinstance(load, FromDirectory):
        return FromDirectory(entrypoint=load.entrypoint, directory=sends[0]), workers_env
    pickled = cloudpickle.dumps(load.trial)
    return Sent(name=load.trial.__qualname__, pickled=pickled, home=sends[0] if sends else None), workers_env


def _copy_home(load: ByValue, directory: ExperimentDirectory, config: ExperimentConfig) -> None:
    home = home_of(load.trial)
    if home is None:
        return
    # A whole home directory is not code; but `ray submit` puts scripts there, with modules beside them.
    deep = not Path.home().resolve().is_relative_to(home.resolve())
    directory.copy_code(code_of(home, leave_out=directory.path, deep=deep, field="trial"), config)
