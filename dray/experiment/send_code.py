"""Sends code to the nodes of an existing cluster, where only its dependencies need to be installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import cloudpickle

from dray.code.archive import Archived
from dray.code.factory import FromDirectory, Sent, home_of
from dray.code.ignore import code_of, copied
from dray.code.packages import Package, package, runtime_env
from dray.config.schema import ExperimentConfig
from dray.records.directory import ExperimentDirectory

if TYPE_CHECKING:
    from dray.pytorch import PyTorchTrial


def send_code(
    trial: type[PyTorchTrial] | None,
    directory: ExperimentDirectory,
    config: ExperimentConfig,
    say: Callable[[str], None],
    *,
    local: bool,
    borrows: bool = False,
) -> tuple[FromDirectory | Sent, dict[str, Any]]:
    """What loads an experiment's code on its workers, and their runtime environment.

    Unless they are on this machine (`local`), the experiment's copy of its code, and dray itself, are put into the
    cluster's store. For a class from a script or a notebook, the directory that it may import from is copied into the
    experiment first.

    Args:
        trial: the class, if the config has no entrypoint.
        borrows: the workers are a server's, and run already: they get the code with the first trial.
    """
    entrypoint = config.entrypoint
    if entrypoint is not None and local:
        return FromDirectory(entrypoint=entrypoint, directory=str(directory.code)), {}
    if entrypoint is not None and borrows:
        return FromDirectory(entrypoint=entrypoint, directory=Archived.of(directory.code)), runtime_env()
    sent: Package | None = None
    env: dict[str, Any] = {}
    if not local:
        if trial is not None and not directory.has_code:
            _copy_home(trial, directory, config)
        what = "the trial's class"
        if directory.has_code or entrypoint is not None:  # even if all its modules are installed
            code = copied(directory.code)
            sent = package(directory.code, tuple(code.targets()))
            what = f"{directory.code} ({code.summary})"
        say(f"sending {what} and dray itself to the workers")
        env = runtime_env(*([sent] if sent is not None else []))
    if entrypoint is not None:
        assert sent is not None
        return FromDirectory(entrypoint=entrypoint, directory=sent), env
    assert trial is not None, "an experiment has an entrypoint or a class"
    return Sent(name=trial.__qualname__, pickled=cloudpickle.dumps(trial), home=sent), env


def _copy_home(trial: type[PyTorchTrial], directory: ExperimentDirectory, config: ExperimentConfig) -> None:
    home = home_of(trial)
    if home is None:
        return
    # A whole home directory is not code; but `ray submit` puts scripts there, with modules beside them.
    deep = not Path.home().resolve().is_relative_to(home.resolve())
    directory.copy_code(code_of(home, leave_out=directory.path, deep=deep, field="trial"), config)
