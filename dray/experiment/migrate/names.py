"""What becomes of Determined's names: which are dray's, and what to do in the place of the others."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from dray.compat.names import COUNTERPARTS, MISSING, MODULES, missing
from dray.experiment.migrate.scopes import DETERMINED

_MASTER = "there is no master here"
_TORCH = "dray's workers have torch's process group: DistributedContext.from_torch_distributed()"
_HARNESS = "it is a part of Determined's inside, which no model needs: leave it out"

MEMBERS: Mapping[str, str] = {
    "determined.ClusterInfo.agent_id": "there are no agents here; ray.get_runtime_context().get_node_id() names a node",
    "determined.ClusterInfo.allocation_id": _MASTER,
    "determined.ClusterInfo.cluster_id": _MASTER,
    "determined.ClusterInfo.container_slot_counts": "the DistributedContext has local_size and cross_size",
    "determined.ClusterInfo.gpu_uuids": "torch.cuda.get_device_properties(device).uuid",
    "determined.ClusterInfo.master_cert_file": _MASTER,
    "determined.ClusterInfo.master_cert_name": _MASTER,
    "determined.ClusterInfo.master_url": f"{_MASTER}; dray.Result(path) reads an experiment",
    "determined.ClusterInfo.session_token": f"{_MASTER}, nor a login to it",
    "determined.ClusterInfo.task_id": f"{_MASTER}; get_cluster_info().trial has trial_id and experiment_id",
    "determined.core.DistributedContext.from_deepspeed": _TORCH,
    "determined.core.DistributedContext.from_horovod": _TORCH,
    "determined.core.DistributedContext.from_tf_config": "dray has no TensorFlow",
    "determined.pytorch.PyTorchTrialContext._epoch_len": "private to Determined; len() of the training data loader",
    "determined.pytorch.PyTorchTrialContext.autocast_forward_pass": _HARNESS,
    "determined.pytorch.PyTorchTrialContext.reduce_metrics": _HARNESS,
    "determined.pytorch.PyTorchTrialContext.reset_reducers": _HARNESS,
    "determined.pytorch.PyTorchTrialContext.run_cross_slot_reduction": _HARNESS,
}
"""Attributes of classes that dray has, which it has not."""

_KEPT = frozenset({"determined.TrialInfo._config", "determined.TrialInfo._steps_completed"})
"""Private attributes of Determined's that dray has, for Determined's own examples use them."""


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
            member = path.removeprefix(prefix).removeprefix(".").partition(".")[0]
            is_private = member.startswith("_") and not member.startswith("__") and f"{prefix}.{member}" not in _KEPT
            # Of what else is in a class, the tables do not tell.
            return f"{member} is private to Determined, and dray has none" if is_private else None
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
