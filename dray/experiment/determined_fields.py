"""The fields of Determined's experiment file that have no meaning here: they are read, told once, and left out.

They describe its master, its containers or its web pages. What is neither here nor in ``schema.py`` is a mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONTAINER = "trials run in Ray's workers, without a container; "
_POD = _CONTAINER + "what a pod needs stands in the cluster's own files"
_HOROVOD = "an option of Horovod's; gradients are averaged by PyTorch's DistributedDataParallel"
_BATCH_SYSTEM = "there is no batch system; ask it for nodes, and start Ray on them"
_QUEUE = "Ray has no queue of experiments; what does not fit waits until there is room"
_PAGE = "of Determined's web pages"

#: Each with what there is instead. A field stands for all that is below it.
NOT_USED: dict[str, str] = {
    "bind_mounts": _CONTAINER + "code sees the nodes' own paths: put the data, or a link, where it looks for it",
    "data_layer": "of its estimator and Keras data sets, which cached there",
    "debug": "of its own harness",
    "environment.add_capabilities": _CONTAINER + "it has the rights of the user who started Ray",
    "environment.drop_capabilities": _CONTAINER + "it has the rights of the user who started Ray",
    "environment.force_pull_image": _CONTAINER + "install what the code needs on every node",
    "environment.image": _CONTAINER + "install what the code needs on every node",
    "environment.pod_spec": _POD,
    "environment.podSpec": _POD,
    "environment.ports": _CONTAINER + "a port that code opens is open on its node",
    "environment.proxy_ports": _CONTAINER + "a port that code opens is open on its node",
    "environment.registry_auth": _CONTAINER + "no image is fetched",
    "integrations": "there is neither Pachyderm nor are there webhooks",
    "internal": "of Determined's own",
    "optimizations.auto_tune_tensor_fusion": _HOROVOD,
    "optimizations.tensor_fusion_cycle_time": _HOROVOD,
    "optimizations.tensor_fusion_threshold": _HOROVOD,
    "pbs": _BATCH_SYSTEM,
    "preemption_timeout": "Ray says itself how long a node remains that it takes away",
    "project": _PAGE + "; experiments lie in checkpoint_storage by their names",
    "resources.agent_label": _QUEUE,
    "resources.devices": _CONTAINER + "it sees all devices of its node",
    "resources.native_parallel": "PyTorch's DistributedDataParallel trains on several slots",
    "resources.priority": _QUEUE,
    "resources.resource_manager": "there is one cluster, the one that dray is started on",
    "resources.resource_pool": "there is one cluster, the one that dray is started on",
    "resources.shm_size": _CONTAINER + "all shared memory of the node is there",
    "resources.slots": "of commands and notebooks; slots_per_trial says how many slots train a trial",
    "resources.weight": _QUEUE,
    "retention_policy": "logs remain until the experiment's directory is deleted",
    "security": "of Determined's own",
    "slurm": _BATCH_SYSTEM,
    "tensorboard_storage": "events of TensorBoard lie beside the trial's metrics",
    "workspace": _PAGE + "; experiments lie in checkpoint_storage by their names",
}


def not_used(raw: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """The fields of a config, as it was read, that have no meaning here, in its order, each with why.

    A field that is null says nothing, and is not told.

    >>> not_used({"name": "digits", "workspace": "vision", "resources": {"slots_per_trial": 2}})
    [('workspace', "of Determined's web pages; experiments lie in checkpoint_storage by their names")]
    """
    return [(path, NOT_USED[path]) for path in _paths(raw) if path in NOT_USED]


def without_not_used(raw: Mapping[Any, Any]) -> dict[Any, Any]:
    """The config without them."""
    kept: dict[Any, Any] = {}
    for name, value in raw.items():
        if name in NOT_USED:
            continue
        if isinstance(value, Mapping):
            value = {inner: item for inner, item in value.items() if f"{name}.{inner}" not in NOT_USED}
        kept[name] = value
    return kept


def _paths(raw: Mapping[Any, Any]) -> list[str]:
    """Of all fields that are not null, and of those one level below."""
    found: list[str] = []
    for name, value in raw.items():
        if value is not None:
            found.append(str(name))
        if isinstance(value, Mapping):
            found += [f"{name}.{inner}" for inner, item in value.items() if item is not None]
    return found
