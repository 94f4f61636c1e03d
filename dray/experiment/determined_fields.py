"""Fields of Determined's experiment file that are not in ``schema``: ignored, or refused.

Ignored fields describe its master, containers or web pages: the experiment runs, and they are named once. Fields of old
versions that say how much is trained can't be ignored and are errors. So are all unknown fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

_CONTAINER = "trials run in Ray's workers, without a container; "
_HOROVOD = "an option of Horovod's; gradients are averaged by PyTorch's DistributedDataParallel"
_BATCH_SYSTEM = "there is no batch system; ask it for nodes, and start Ray on them"
_QUEUE = "Ray has no queue of experiments; what does not fit waits until there is room"
_PAGE = "of Determined's web pages; experiments lie in checkpoint_storage by their names"
_SERVICES = "there is neither Pachyderm nor are there webhooks"

#: Ignored fields, with what to use instead. A field stands for everything below it.
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
    "environment.slurm": _BATCH_SYSTEM,
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

_MOUNT = ("container_path", "host_path")
_PACHYDERM = ("branch", "dataset", "pachd", "previous_commit", "project", "proxy", "repo")

#: The fields below these in Determined's schemas, of a mapping or of each list item; other names are mistakes.
INSIDE: dict[str, tuple[str, ...]] = {
    "bind_mounts": (*_MOUNT, "propagation", "read_only"),
    "data_layer": (
        *("access_key", "bucket", "bucket_directory_path", "container_storage_path", "endpoint_url"),
        *("host_storage_path", "local_cache_container_path", "local_cache_host_path", "secret_key", "type"),
    ),
    "environment.image": ("cpu", "cuda", "gpu", "rocm"),
    "environment.proxy_ports": ("default_service_id", "proxy_port", "proxy_tcp", "unauthenticated"),
    "environment.registry_auth": (
        *("auth", "email", "identitytoken", "password", "registrytoken", "serveraddress", "username"),
    ),
    "integration": ("pachyderm",),
    "integrations": ("pachyderm", "webhooks"),
    "integrations.pachyderm": _PACHYDERM,
    "integrations.webhooks": ("exclude", "webhook_id", "webhook_name"),
    "internal": ("native",),
    "pbs": ("pbsbatch_args", "slots_per_node"),
    "profiling": ("begin_on_batch", "enabled", "end_after_batch", "sync_timings"),
    "resources.devices": (*_MOUNT, "mode"),
    "retention_policy": ("log_retention_days",),
    "security": ("kerberos",),
    "security.kerberos": ("config_file",),
    "slurm": ("gpu_type", "sbatch_args", "slots_per_node"),
}

_STEPS = "steps are no more, in Determined neither; "
_HDFS = "HDFS is no more, in Determined neither; mount it and write type: directory, or use s3, gcs or azure"
_SYNC = "of search methods that are no more, in Determined neither; adaptive_asha and asha take max_trials"
_PBT = "of population-based training, which is no more, in Determined neither; use name: adaptive_asha"

#: Refused fields of old versions, with what to write instead.
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

#: Old names that are read as the current ones.
OLDER = {"checkpoint_storage.checkpoint_path": "as storage_path, which it is called now"}

#: Fields of the schema that Determined does not have.
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
    """The ignored fields of a raw config, in its order, each with the reason.

    Fields that are null or empty are not listed.

    >>> not_used({"name": "digits", "workspace": "vision", "resources": {"slots_per_trial": 2}, "bind_mounts": []})
    [('workspace', "of Determined's web pages; experiments lie in checkpoint_storage by their names")]
    """
    return [(path, NOT_USED[path]) for path in _paths(raw) if path in NOT_USED]


def without_not_used(raw: Mapping[Any, Any]) -> dict[Any, Any]:
    """The config without its ignored fields."""
    kept: dict[Any, Any] = {}
    for name, value in raw.items():
        if name in NOT_USED:
            continue
        if isinstance(value, Mapping):
            value = {inner: item for inner, item in value.items() if f"{name}.{inner}" not in NOT_USED}
        kept[name] = value
    return kept


def misspelt(raw: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Unknown fields within the ignored ones, each with the nearest name in Determined's schema.

    >>> list(misspelt({"environment": {"image": {"cpu": "a:1", "cdua": "b:2"}}}))
    [('environment.image.cdua', 'unknown field; did you mean cuda?')]
    """
    for place, known in INSIDE.items():
        value: object = raw
        for name in place.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        several = isinstance(value, list)
        for number, each in enumerate(value if isinstance(value, list) else [value]):
            for name in each if isinstance(each, Mapping) else ():
                if name not in known:
                    near = difflib.get_close_matches(str(name), known, n=1)
                    hint = f"did you mean {near[0]}?" if near else f"the fields here are {', '.join(known)}"
                    yield f"{place}{f'[{number}]' if several else ''}.{name}", f"unknown field; {hint}"


_NOTHING: tuple[object, ...] = (None, [], {})


def _paths(raw: Mapping[Any, Any]) -> list[str]:
    """The paths of all fields that are not empty, of those one level below, and of the actions of log policies."""
    found: list[str] = []
    for name, value in raw.items():
        if value not in _NOTHING:
            found.append(str(name))
        if isinstance(value, Mapping):
            found += [f"{name}.{inner}" for inner, item in value.items() if item not in _NOTHING]
        elif name == "log_policies" and isinstance(value, list):
            found += dict.fromkeys(f"{name}.{action}" for policy in value for action in actions(policy))
    return found


def actions(policy: object) -> list[str]:
    """The actions of a log policy, in its new or old spelling; a signal counts as one.

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
    if not found and policy.get("name") is not None and policy.get("pattern") is not None:
        found.append("signal")  # its name is shown like one
    return found


#: Their names in the first version.
_ACTIONS = {"on_failure_dont_retry": "cancel_retries", "on_failure_exclude_node": "exclude_node"}
