"""Sends dray itself to the nodes of a cluster that others have started, with Ray's runtime environments.

The code is put into the cluster's own store, once per content, and each node that needs it unpacks it once.
``ray.init(runtime_env=...)`` does the same, but only where it makes the connection: not in a job that has a
``py_modules`` of its own, or in a program that has connected already.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

import searchers
from dray.cluster import internals
from dray.storage.disk import scratch


def runtime_env() -> dict[str, Any]:
    """A runtime environment for actors and tasks: dray itself as this process has it.

    Ray merges it with the job's own environment, except for py_modules, so the job's are repeated here.
    """
    with scratch("upload") as place:
        root = place / "root"
        root.mkdir()
        for part in (Path(__file__).parents[1], Path(searchers.__file__).parent):
            (root / part.name).symlink_to(part.resolve())
        itself = internals.upload(root, place)
    if itself is None:
        return {}
    theirs: Sequence[str] = ray.get_runtime_context().runtime_env.get("py_modules") or ()
    # Modules are searched for in this order.
    return {"py_modules": [itself, *theirs]}
