"""What becomes of Determined's names: which are dray's, and what to do in the place of the others."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from dray.compat.names import COUNTERPARTS, MISSING, MODULES, missing
from dray.experiment.migrate.scopes import DETERMINED

_MASTER = "there is no master here"

MEMBERS: Mapping[str, str] = {
    "determined.ClusterInfo.agent_id": "there are no agents here; ray.get_runtime_context().get_node_id() names a node",
    "determined.ClusterInfo.allocation_id": _MASTER,
    "determined.ClusterInfo.cluster_id": _MASTER,
    "determined.ClusterInfo.cluster_name": _MASTER,
    "determined.ClusterInfo.master_cert_file": _MASTER,
    "determined.ClusterInfo.master_cert_name": _MASTER,
    "determined.ClusterInfo.master_url": f"{_MASTER}; results are read with dray.load_experiment()",
    "determined.ClusterInfo.session_token": f"{_MASTER}, nor a login to it",
}
"""Attributes of classes that dray has, which it has not."""


def public(module: str) -> list[str]:
    """The names that a star import of this module of Determined's brings."""
    inside = (path.removeprefix(f"{module}.") for path in (*COUNTERPARTS, *MISSING) if path.startswith(f"{module}."))
    return [name for name in inside if "." not in name and not name.startswith("_")]


def why_not(path: str) -> str | None:
    """What to do instead of using this dotted name of Determined's; None if it is one of dray's."""
    for prefix in _prefixes(path):
        if prefix in MEMBERS:
            return MEMBERS[prefix]
        if prefix in MODULES or prefix == DETERMINED:
            rest = path.removeprefix(prefix).removeprefix(".")
            return _not_in(prefix, rest.partition(".")[0]) if rest else None
        if prefix in COUNTERPARTS:
            return None  # or what is in a class, of which the tables do not tell
        if prefix in MISSING:
            return MISSING[prefix]
    raise AssertionError(f"{path} is none of Determined's names")


def is_nowhere(path: str) -> bool:
    """Whether neither Determined nor dray has this name, so that importing it fails."""
    return missing(path) is None and why_not(path) is not None


def _not_in(module: str, name: str) -> str | None:
    home = DETERMINED + MODULES.get(module, "dray").removeprefix("dray")  # of a private module, the public one
    if f"{home}.{name}" in COUNTERPARTS:
        return None
    if name.startswith("_"):
        return f"{name} is private to Determined, and dray has none; use what is public in {module}"
    near = difflib.get_close_matches(name, public(home), n=1)
    return f"neither Determined nor dray has it; did you mean {home}.{near[0]}?" if near else "dray has no such name"


def _prefixes(path: str) -> Iterator[str]:
    """``a.b.c``, ``a.b``, ``a``."""
    while path:
        yield path
        path = path.rpartition(".")[0]
