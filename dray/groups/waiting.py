"""Messages for the user about worker groups that wait for nodes."""

from __future__ import annotations

from dray.cluster.view import ClusterView
from dray.groups.slots import Slots
from dray.text import counted

SAY_AFTER_S = 10.0
"""How long a group must wait before that is reported: with free nodes it takes less than a second, and the autoscaler
acts every five seconds."""
SAY_EVERY_S = 5.0  # seconds between checks for changes after that


class NodeWait:
    """Follows the waiting groups of a run. `status`: a short summary; "" if none waits."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._since: float | None = None
        self._looked_at = 0.0
        self._said: object = None
        self.status = ""

    def look(self, waiting: int, groups: int, view: ClusterView, now: float) -> str:
        """A line about the waiting groups if their situation has changed, else "". Also "" if the view was not taken
        for waiting groups."""
        if not waiting:
            self._since, self._said, self.status = None, None, ""
            return ""
        self._since = now if self._since is None else self._since
        if now - self._since < SAY_AFTER_S or (self._said is not None and now - self._looked_at < SAY_EVERY_S):
            return ""
        if view.free is None:
            return ""
        self._looked_at = now
        which = f"{waiting} of {groups} worker groups wait" if groups > 1 else "the worker group waits"
        long, news, short = "no autoscaler is running to start more", "", ""
        if view.activity is not None:
            long, news, short = str(view.activity), str(sorted(view.activity.failed)), view.activity.short()
        self.status = f"{which} for nodes{short and f' ({short})'}"
        if self._said == news:
            return ""
        self._said = news
        return f"{which} for nodes. Each needs {self._slots}. The cluster has {_resources(view)}; {long}"


def _resources(view: ClusterView) -> str:
    """The cluster's GPUs and CPUs, and the free ones, as text."""
    has = {kind: sum(node.resources.get(kind, 0.0) for node in view.nodes) for kind in ("GPU", "CPU")}
    kinds = [f"{has[kind]:g} {kind}s ({(view.free or {}).get(kind, 0):g} free)" for kind in has if has[kind]]
    return f"{' and '.join(kinds) or 'no CPUs'} on {counted(len(view.nodes), 'node')}"
