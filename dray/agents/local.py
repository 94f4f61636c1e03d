"""The tools for an agent on this machine: it can also submit directories, and bisect git repositories."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dray.agents.answers import answer
from dray.agents.reading import LONGEST_WAIT_S
from dray.agents.tools import Tools
from dray.bisect.history import History, NoHistory
from dray.bisect.runs import Goal, find, on_server
from dray.errors import Invalid
from dray.serve.client import Server
from dray.serve.control import Submitted
from dray.serve.submission import submit_file


class LocalTools(Tools):
    """The tools for agents on this machine."""

    def __init__(self, find: Callable[[], Server]) -> None:
        super().__init__(find)
        self._bisections: dict[str, _Bisection] = {}

    def submit(
        self,
        config: str,
        directory: str = "",
        files: dict[str, str] | None = None,
        changes: dict[str, Any] | None = None,
    ) -> str:
        """Submit a new experiment: its config and its code. It is queued, and starts when slots are free.

        A config without a budget can run for long: set budget.time, budget.slot_hours or budget.usd.

        Args:
            config: the experiment file: its path within the code, or its text in YAML (several lines).
            directory: the directory with the code, on this machine.
            files: instead of a directory: the text of each file, by its path.
            changes: fields of the config to change, such as {"searcher.max_trials": 8}.
        """
        return self._submit(config, directory, files or {}, changes or {})

    def _sent(self, server: Server, config: Path, changes: Sequence[str], code: Path) -> Submitted:
        return submit_file(server, config, changes, code)[0]

    def bisect(
        self,
        config: str,
        good: str,
        bad: str,
        metric: str,
        batches: int | None = None,
        larger_is_better: bool = False,
        seconds: int = 45,
    ) -> str:
        """Find the commit of a git repository on this machine after which a metric is worse, with a short run of some
        commits. Call it again with the same arguments until `ended` is true.

        Args:
            config: the path of the experiment's config file, in the directory with the code.
            good: a commit at which the metric was good.
            bad: a later commit at which it may be worse.
            metric: a validation metric.
            batches: of each run; by default, the max_length of each commit's config.
            larger_is_better: by default only if the config says so.
            seconds: the longest wait, at most 60.
        """
        goal = Goal(metric=metric, batches=batches, larger_is_better=larger_is_better)
        key = repr((config, good, bad, goal))
        if key not in self._bisections:
            try:
                history = History(Path(os.path.expanduser(config)), good, bad)
                history.config_text(history.commits[-1])
            except NoHistory as error:
                raise Invalid(str(error)) from None
            self._bisections[key] = _Bisection(self._find(), history, goal)
        bisection = self._bisections[key]
        bisection.join(min(max(seconds, 0), LONGEST_WAIT_S))
        if bisection.is_alive():
            return answer({"ended": False}, "log", bisection.lines, last=True, more="the last ones are shown")
        self._bisections.pop(key, None)  # asked again, it runs again; another call may have removed it
        if bisection.error is not None:
            raise bisection.error
        return answer(
            {"ended": True, **bisection.verdict}, "log", bisection.lines, last=True, more="the last are shown"
        )


class _Bisection(threading.Thread):
    """A bisection under way. If this process ends, its runs go on to their end."""

    def __init__(self, server: Server, history: History, goal: Goal) -> None:
        super().__init__(name="dray-bisect", daemon=True)
        self._server, self._history, self._goal = server, history, goal
        self.lines: list[str] = []
        self.verdict: Mapping[str, Any] = {}
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        say = self.lines.append
        try:
            with on_server(self._server, self._history, self._goal, say) as train:
                self.verdict = find(self._history, self._goal, train, say).to_json(self._history)
        except Exception as error:  # the tool raises it
            self.error = error
