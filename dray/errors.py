"""The errors of an experiment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dray.text import counted
from searchers.errors import shown

RAY = "ray[default,train,tune]>=2.54,<3"
"""The versions of Ray that dray works with, as in pyproject.toml."""


class Fault(NamedTuple):
    """One fault of a config."""

    path: str  # the field, such as ``searcher.divisor``, or the line of a file that can't be parsed
    what: str  # the requirement, the value given, and the remedy: ``must be > 1, got 1; ...``

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


class ConfigError(ValueError):
    """An experiment config that can't be run. The message lists the first 20 of its faults, one per line.

    Args:
        faults: ``Fault`` or ``(path, what)`` pairs; at least one.
        source: the origin of the config: a file's name, or a phrase.

    >>> print(ConfigError([("searcher.divisor", "must be > 1, got 1")], source="asha.yaml"))
    asha.yaml has 1 error:
      searcher.divisor: must be > 1, got 1
    """

    def __init__(self, faults: Iterable[tuple[str, str]], source: str = "The experiment config") -> None:
        self.faults = tuple(Fault(path, what) for path, what in faults)
        self.source = source
        assert self.faults, "a ConfigError without a fault says nothing"
        super().__init__(self.faults, source)

    def __str__(self) -> str:
        count = counted(len(self.faults), "error", ",")
        source = self.source if len(self.source) < 300 else f"{self.source[:300]} ..."
        return "\n  ".join([f"{source} has {count}:", *shown(self.faults)])


class FoundInTraining(ConfigError):
    """A fault of the config that only a trial, or a worker started later, could reveal: trials may have trained.

    >>> print(FoundInTraining([("searcher.metric", "the search compares 'los', but ...")]))
    searcher.metric: the search compares 'los', but ...
    """

    def __str__(self) -> str:
        return "\n".join(shown(self.faults))


class EntrypointError(ConfigError):
    """``entrypoint`` names neither a trial class nor a program."""


class ImportRaisedError(EntrypointError):
    """The module of ``entrypoint`` exists, but raises when it is imported."""


class NoExperiment(LookupError):
    """There is no such experiment, trial or checkpoint, or several match; the message lists these."""


class Invalid(ValueError):
    """What was asked for is invalid, or can't be carried out; the message is one line."""


class ExperimentError(RuntimeError):
    """A search failed after it had begun. The message is for the user, without a traceback."""


class AlreadyEnded(ExperimentError):
    """The experiment was resumed, but it has ended because of its limits, such as a budget."""


class DirectoryGone(ExperimentError):
    """The experiment's directory, given as the argument, was deleted or moved while it ran."""

    def __str__(self) -> str:
        return f"the experiment's directory {self.args[0]} was deleted or moved while it ran, so it was ended"


class TakenOver(ExperimentError):
    """Another driver, given as the argument, has taken over the experiment after this one's heartbeat had stopped."""

    def __str__(self) -> str:
        lost = "this driver's heartbeat did not reach the object store for a while"
        return f"{lost}, and {self.args[0]} has taken over the experiment; this driver has exited"
