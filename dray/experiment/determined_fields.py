"""The fields of Determined's experiment file that are not in ``schema.py``: read and left out, or no more.

Those that have no meaning here describe its master, its containers or its web pages: an experiment that has them runs,
and they are told once. Those of old versions can't be passed over, for they say how much is trained. What is in none of
these places is a mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONTAINER = "trials run in Ray's workers, without a container; "
_HOROVOD = "an option of Horovod's; gradients are averaged by PyTorch's DistributedDataParallel"
_BATCH_SYSTEM = "there is no batch system; ask it for nodes, and start Ray on them"
_QUEUE = "Ray has no queue of experiments; what does not fit waits until there is room"
_PAGE = "of Determined's web pages; experiments lie in checkpoint_storage by their names"
_SERVICES = "there is neither Pachyderm nor are there webhooks"

#: Each with what there is instead. A field stands for all that is below it.
NOT_USED: dict[str, str] = {
    "bind_mounts": _CONTAINER + "code sees the nodes' own paths: put the data, or a link, where it looks for it",
    "checkpoint_storage.propagation": _CONTAINER + "the directory is that of the node",
    "checkpoint_storage.tensorboard_path": "events of TensorBoard lie beside the trial's metrics",
    "data_layer": "of its estimator and Keras data sets, which cached there",
    "debug": "dray logs what is worth knowing; set the levels of other loggers in code",
    "environment.add_capabilities": _CONTAINER + "code has the rights of the user who started Ray",
    "environment.drop_capabilities": _CONTAINER + "code has the rights of the user who started Ray",
    "environment.force_pull_image": _CONTAINER + "install what the code needs on every node",
    "environment.image": _CONTAINER + "install what the code needs on every node",
    "environment.pod_spec": _CONTAINER + "what a pod needs stands in the cluster's own files",
    "environment.ports": _CONTAINER + "a port that code opens is open on its node",
    "environment.proxy_ports": _CONTAINER + "a port that code opens is open on its node",
    "environment.registry_auth": _CONTAINER + "no image is fetched",
    "integration": _SERVICES,
    "integrations": _SERVICES,
    "internal": "what old versions of Determined's noted for themselves",
    "log_policies.exclude_node": "Ray places workers; take a bad node out of the cluster: dray cluster check finds it",
    "log_policies.send_webhook": _SERVICES,
    "log_policies.signal": _PAGE.partition(";")[0],
    "optimizations.auto_tune_tensor_fusion": _HOROVOD,
    "optimizations.average_training_metrics": "training metrics are averaged over all slots, always",
    "optimizations.grad_updates_size_file": _HOROVOD,
    "optimizations.tensor_fusion_cycle_time": _HOROVOD,
    "optimizations.tensor_fusion_threshold": _HOROVOD,
    "pbs": _BATCH_SYSTEM,
    "preemption_timeout": "Ray says itself how long a node remains that it takes away",
    "profiling": "the use of CPU, memory and GPUs is recorded always; context.set_profiler() profiles code",
    "project": _PAGE,
    "resources.agent_label": _QUEUE,
    "resources.devices": _CONTAINER + "code sees the devices of its node, and of GPUs its own",
    "resources.native_parallel": "PyTorch's DistributedDataParallel trains on several slots",
    "resources.priority": _QUEUE,
    "resources.resource_manager": "there is one cluster, the one that dray is started on",
    "resources.resource_pool": "there is one cluster, the one that dray is started on",
    "resources.shm_size": _CONTAINER + "all shared memory of the node is there",
    "resources.slots": "of commands and notebooks; slots_per_trial says how many slots train a trial",
    "resources.weight": _QUEUE,
    "retention_policy": "logs remain until the experiment's directory is deleted",
    "searcher.unit": "a method of your own counts in the unit of max_length",
    "security": "nothing reads it, in Determined neither",
    "slurm": _BATCH_SYSTEM,
    "tensorboard_storage": "events of TensorBoard lie beside the trial's metrics",
    "workspace": _PAGE,
}

_STEPS = "steps are no more, in Determined neither; "
_HDFS = "HDFS is no more, in Determined neither; mount it and write type: directory, or use s3, gcs or azure"
_SYNC = "of search methods that are no more, in Determined neither; adaptive_asha and asha take max_trials"
_PBT = "of population-based training, which is no more, in Determined neither; use name: adaptive_asha"

#: Of old versions, with what to write.
NO_MORE: dict[str, str] = {
    "batches_per_step": _STEPS + "write scheduling_unit, in batches, for how often metrics are reported",
    "checkpoint_storage.hdfs_path": _HDFS,
    "checkpoint_storage.hdfs_url": _HDFS,
    "checkpoint_storage.user": _HDFS,
    "searcher.budget": _SYNC,
    "searcher.explore_function": _PBT,
    "searcher.length_per_round": _PBT,
    "searcher.max_steps": _STEPS + "write max_length: {batches: 1000}",
    "searcher.num_rounds": _PBT,
    "searcher.population_size": _PBT,
    "searcher.replace_function": _PBT,
    "searcher.step_budget": _SYNC,
    "searcher.steps_per_round": _PBT,
    "searcher.target_trial_steps": _STEPS + "write max_length: {batches: 1000}",
    "searcher.train_stragglers": _SYNC,
}

#: Of old versions, and read as what they are called now.
OLDER = {"checkpoint_storage.checkpoint_path": "as storage_path, which it is called now"}

#: Of the schema, and not of Determined's.
OURS = frozenset(
    {
        "checkpoint_storage.account_key",
        "checkpoint_storage.sas_token",
        "checkpoint_storage.session_token",
        "hang_timeout_s",
        "loggers",
        "resources.cpus_per_slot",
        "resources.placement_strategy",
        "resources.reuse_workers",
        "resources.slot",
        "searcher.options",
        "searcher.points",
        "searcher.sampler",
        "searcher.variant",
    }
)


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
    """Of all fields that are not null, of those one level below, and of the actions of log policies."""
    found: list[str] = []
    for name, value in raw.items():
        if value is not None:
            found.append(str(name))
        if isinstance(value, Mapping):
            found += [f"{name}.{inner}" for inner, item in value.items() if item is not None]
        elif name == "log_policies" and isinstance(value, list):
            found += dict.fromkeys(f"{name}.{action}" for policy in value for action in actions(policy))
    return found


def actions(policy: object) -> list[str]:
    """What is done about a line of a log, by the policy's new or old spelling; a signal is an action here too.

    >>> actions({"pattern": "ECC", "action": {"type": "exclude_node"}, "signal": "bad memory"})
    ['exclude_node', 'signal']
    """
    if not isinstance(policy, Mapping):
        return []
    said: list[object] = [policy.get("action"), policy.get("policy")]
    several = policy.get("actions")
    said += several if isinstance(several, list) else [several]
    said += [{"signal": policy.get("signal")}]
    found: list[str] = []
    for each in said:
        if isinstance(each, str):
            found.append(_ACTIONS.get(each, each))
        elif isinstance(each, Mapping) and isinstance(kind := each.get("type"), str):
            found.append(_ACTIONS.get(kind, kind))
        elif isinstance(each, Mapping) and each.get("signal") is not None:
            found.append("signal")
    return found


#: As their first version had them.
_ACTIONS = {"on_failure_dont_retry": "cancel_retries", "on_failure_exclude_node": "exclude_node"}
