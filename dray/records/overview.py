"""An overview of an experiment: a line of a list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast

from searchers.objectives import Metric, Objectives, of_names

ExperimentState = Literal["RUNNING", "COMPLETED", "PARTLY_FAILED", "STOPPED", "ERROR", "UNKNOWN", "DAMAGED"]
COMPLETED: tuple[ExperimentState, ...] = ("COMPLETED", "PARTLY_FAILED")
"""States in which the search has completed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """An overview of an experiment.

    Attributes:
        name, path: of its directory; or its URI in an object store.
        number: in the results directory, see `numbering`.
        title: the config's ``name``.
        state: docs/cli.md says what each means; on a server also those of `dray.serve.control.ExperimentState`.
        why: it is DAMAGED, or in ERROR, or does not run though it should; "" if that is not known.
        trials, ended, failed: how many trials there are so far, have ended, and have failed.
        max_trials: how many there will be; None if that is not known in advance.
        metric: the searcher's metric; of several the first objective.
        best, best_trial: the best validation of a trial that did not fail and keeps the constraints, and its trial.
        front: with several metrics, the trials of the Pareto front.
        began, last: its creation and its last event, in Unix time (s).
        ran_s: for how long drivers have run it.
        is_local: it is a local run: one trial, without a search.
    """

    name: str
    path: str
    number: int | None = None
    title: str = ""
    state: ExperimentState = "DAMAGED"
    trials: int = 0
    ended: int = 0
    failed: int = 0
    max_trials: int | None = None
    metric: str = ""
    best: float | None = None
    best_trial: int | None = None
    front: tuple[int, ...] = ()
    began: float | None = None
    last: float | None = None
    ran_s: float = 0.0
    is_local: bool = False
    why: str = ""

    def on_server(self, state: str, error: str) -> Overview:
        """The same of an experiment that was submitted to a server, which knows more of it: the command and the page,
        the list and the description all show this.
        """
        if state == "COMPLETED" and self.state in (*COMPLETED, "DAMAGED"):
            return self
        return replace(self, state=cast("ExperimentState", state), why=self.why or error)

    @property
    def label(self) -> str:
        return self.name if self.number is None else f"{self.number}: {self.name}"

    def to_json(self) -> dict[str, Any]:
        """As JSON, for the commands and the API; times are Unix times in s."""
        found = {_NAMES.get(name, name): value for name, value in asdict(self).items()}
        nothing = {"why": self.why or None, "metric": self.metric or None}
        return found | nothing | {"title": self.title or self.name, "front": list(self.front) or None}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Overview:
        """The reverse of `to_json`; what is missing, or null, is as by default."""
        given = {each.name: found.get(_NAMES.get(each.name, each.name)) for each in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


_NAMES = {"best": "best_metric"}
"""Names of fields in JSON, where they are others."""


def compared_by(searcher: Mapping[str, Any]) -> Objectives:
    """What trials are compared by, of a searcher section as it is in a file: one metric is one objective."""
    if metrics := searcher.get("metrics"):
        return of_names(metrics)
    smaller = bool(searcher.get("smaller_is_better", True))
    return Objectives((Metric(name=str(searcher["metric"]), smaller_is_better=smaller),))
