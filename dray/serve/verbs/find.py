"""Finds an experiment wherever it is, for its verbs: commands, programs and agents have no rules of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.errors import NoExperiment
from dray.serve.client import Server
from dray.serve.refusals import NotSubmitted
from dray.serve.verbs.handle import Handle
from dray.serve.verbs.on_server import OnServer

if TYPE_CHECKING:
    from dray.records.lookup import Name


def handle(experiment: Name, *, here: bool = False, answered: Callable[[Any], None] = lambda decided: None) -> Handle:
    """An experiment: on the server that it was submitted to, if that is up, else in its directory.

    Args:
        experiment: its number, a unique part of its name, ``"latest"``, its directory, or its URI.
        here: use its directory even if a server is up.
        answered: called with the answer to each request for a trial, even if the experiment then fails in this process.

    Raises:
        NoExperiment: there is none, or several match.

    .. code-block:: python

        experiment = dray.handle("latest")
        experiment.add_trial({"lr": 0.02})
        print(experiment.wait().best_metric)
    """
    from dray.records.lookup import locate

    found = None if here else on_server(experiment)
    if found is not None:
        server, name = found
        try:
            server.experiment(name)
        except NotSubmitted:
            if not server.is_here:
                raise
        else:
            return OnServer(server, name, answered)
    from dray.serve.verbs.in_directory import InDirectory  # numpy and pyarrow

    return InDirectory(locate(experiment), answered, None if found is None else found[0])


def on_server(experiment: Name) -> tuple[Server, str] | None:
    """The server, and an experiment's name in its results directory; None if no server is up, or the experiment is
    elsewhere."""
    from dray.records.lookup import locate
    from dray.records.root import results_root

    server = Server.find()
    if server is None or "://" in str(experiment):
        return None
    if server.is_here:
        path = Path(locate(experiment))
        is_linked = (results_root() / path.name).resolve() == path.resolve()
        return (server, path.name) if is_linked else None
    try:
        return server, server.named(str(experiment))
    except NoExperiment:
        try:
            locate(experiment)
        except NoExperiment:
            pass
        else:
            return None  # it is on this machine, not on the server's
        raise
