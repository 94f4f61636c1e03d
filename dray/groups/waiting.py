"""What worker groups wait for while they have no nodes, as text for the user."""

from __future__ import annotations

import time

import ray

from dray.cluster import autoscaler
from dray.cluster.nodes import nodes
from dray.groups.group import Slots
from dray.text import counted

SAY_AFTER_S = 10.0
"""How long a group must have waited before that is reported: with free nodes it takes less than a second, and an
autoscaler looks every five."""
LOOK_S = 5.0
"""How often to ask for the autoscaler's activity."""


class NodeWait:
    """Follows what a run's groups wait for.

    Args:
        slots: the slots of a group.
        has_autoscaler: whether an autoscaler may start nodes.

    Attributes:
        status: what groups wait for, in short; "" if none waits.
    """

    def __init__(self, slots: Slots, *, has_autoscaler: bool) -> None:
        self._slots, self._has_autoscaler = slots, has_autoscaler
        self._since: float | None = None
        self._looked_at = 0.0
        self._said: object = None
        self.status = ""

    def look(self, waiting: int, groups: int) -> str:
        """What groups wait for, in one line, if that has changed; otherwise "".

        Args:
            waiting: how many of the groups have no resources.
            groups: how many there are.
        """
        now = time.monotonic()
        if not waiting:
            self._since, self._said, self.status = None, None, ""
            return ""
        self._since = now if self._since is None else self._since
        if now - self._since < SAY_AFTER_S or (self._said is not None and now - self._looked_at < LOOK_S):
            return ""
        self._looked_at = now
        which = f"{waiting} of {groups} worker groups wait" if groups > 1 else "the worker group waits"
        long, news, short = "no autoscaler is running to start more", "", ""
        if self._has_autoscaler:
            activity = autoscaler.activity()
            long, news, short = str(activity), str(sorted(activity.failed)), activity.short()
        self.status = f"{which} for nodes{short and f' ({short})'}"
        if self._said == news:
            return ""
        self._said = news
        return f"{which} for nodes. Each needs {self._slots}. The cluster has {_resources()}; {long}"


def _resources() -> str:
    """What the cluster has, and how much of it is free."""
    has, free = ray.cluster_resources(), ray.available_resources()
    kinds = [f"{has[kind]:g} {kind}s ({free.get(kind, 0):g} free)" for kind in ("GPU", "CPU") if has.get(kind)]
    return f"{' and '.join(kinds) or 'no CPUs'} on {counted(len(nodes()), 'node')}"
