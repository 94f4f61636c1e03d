"""Finds nodes on which an experiment can't run: before it trains, or when the first worker there reports it."""

from __future__ import annotations

from pathlib import Path

from dray.cluster.checks.node import REMEDIES, Needs, Trouble, UnfitNode, nodes_without, versions, write_sign
from dray.code.startup_hook import HOOK, StartupHookFailed
from dray.desk.connection import DeskUnreachable
from dray.errors import ConfigError, ExperimentError
from dray.records.directory import ExperimentDirectory

NAMED_NODES = 3


def check_nodes(directory: ExperimentDirectory, run: str, *, gpu: bool) -> Needs:
    """What each node needs. If checkpoints are in a directory, all nodes are checked first.

    Args:
        run: a name for this run of the experiment.
        gpu: whether workers use GPUs; nodes without GPUs are then not checked.

    Raises:
        ConfigError: a node lacks something.
    """
    path = str(directory.path)
    sign = run if directory.storage.is_local else None
    if sign is not None:
        write_sign(directory.path, sign)
        found = nodes_without(path, sign, "GPU" if gpu else "CPU")
        # The same trouble of several nodes is reported once; nodes are sorted, whichever answered first.
        having: dict[Trouble, list[str]] = {}
        for name in sorted(found):
            having.setdefault(found[name], []).append(name)
        faults = [
            ("checkpoint_storage", f"node {names[0]} {trouble.what}{_also(names[1:])}; {REMEDIES[trouble.kind]}")
            for trouble, names in having.items()
        ]
        if faults:
            raise ConfigError(faults)
    store = None if directory.storage.is_local else directory.storage
    return Needs(versions=versions(), directory=path, sign=sign, store=store)


def _also(names: list[str]) -> str:
    if not names:
        return ""
    further = len(names) - NAMED_NODES
    more = f" and {further} more" if further > 0 else ""
    return f" (also {', '.join(names[:NAMED_NODES])}{more})"


def error_of_unfit_worker(cause: Exception, experiment: Path) -> Exception:
    """The error for the user: why a worker can't run any trial, and how to resume once that is fixed."""
    resume = f"then resume with: dray experiment resume {experiment}"
    match cause:
        case ConfigError():
            return cause
        case UnfitNode() if cause.trouble.kind in ("unseen", "refused"):
            return ConfigError([("checkpoint_storage", f"{cause}; {resume}")])
        case UnfitNode():
            return ExperimentError(f"a trial can't run on the node that it was placed on: {cause}; {resume}")
        case StartupHookFailed():
            return ConfigError([(HOOK, str(cause))], "The model's directory")
        case ImportError() | DeskUnreachable():
            return ExperimentError(f"{cause}, {resume}")
    return ExperimentError(f"a worker can't run any trial: {cause!r}")
