"""Fields of Determined's experiment file that are not in ``schema``: ignored, or refused.

Ignored fields describe its master, containers or web pages: the experiment runs, and they are named once. Fields of old
versions that say how much is trained can't be ignored and are errors. So are all unknown fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from searchers.errors import SHOWN
from searchers.space import spaces_in_lists

_CONTAINER = "trials run in Ray workers, without a container; "
_HOROVOD = "an option of Horovod; gradients are averaged by PyTorch's DistributedDataParallel"
_BATCH_SYSTEM = "batch systems are not used; allocate nodes there, and start Ray on them"
_QUEUE = "Ray has no queue of experiments; trials wait until the cluster has room for them"
_PAGE = "for Determined's web UI; experiments are in checkpoint_storage, by their names"
_IN_LIST = (
    "a list is a constant, with any spaces in it, as in Determined; give the space a name of its own to search it"
)
_SERVICES = "Pachyderm and webhooks are not supported"

#: Ignored fields, with what to use instead. A field stands for everything below it.
NOT_USED: dict[str, str] = {
    "bind_mounts": _CONTAINER
    + "code sees the node's own paths: put the data, or a link to it, where the code looks for it",
    "checkpoint_storage.propagation": _CONTAINER + "the directory is the node's own",
    "checkpoint_storage.tensorboard_path": "TensorBoard event files are stored with the trial's metrics",
    "data_layer": "a cache of Determined's Estimator and Keras trials",
    "debug": "not needed; set the levels of loggers in code",
    "environment.add_capabilities": _CONTAINER + "code runs as the user who started Ray",
    "environment.drop_capabilities": _CONTAINER + "code runs as the user who started Ray",
    "environment.force_pull_image": _CONTAINER + "install what the code needs on every node",
    "environment.image": _CONTAINER + "install what the code needs on every node",
    "environment.pod_spec": _CONTAINER + "pods are specified in the cluster's own files",
    "environment.ports": _CONTAINER + "a port that code opens is open on its node",
    "environment.proxy_ports": _CONTAINER + "a port that code opens is open on its node",
    "environment.registry_auth": _CONTAINER + "no image is pulled",
    "environment.slurm": _BATCH_SYSTEM,
    "integration": _SERVICES,
    "integrations": _SERVICES,
    "internal": "internal data of old versions of Determined",
    "log_policies.exclude_node": "Ray places workers; remove a bad node from the cluster: dray cluster check finds it",
    "log_policies.send_webhook": _SERVICES,
    "log_policies.signal": _PAGE.partition(";")[0],
    "optimizations.auto_tune_tensor_fusion": _HOROVOD,
    "optimizations.average_training_metrics": "training metrics are always averaged over all slots",
    "optimizations.grad_updates_size_file": _HOROVOD,
    "optimizations.tensor_fusion_cycle_time": _HOROVOD,
    "optimizations.tensor_fusion_threshold": _HOROVOD,
    "pbs": _BATCH_SYSTEM,
    "preemption_timeout": "Ray sets the deadline of a node that is preempted",
    "profiling": "the use of CPU, memory and GPUs is always recorded; context.set_profiler() profiles code",
    "project": _PAGE,
    "resources.agent_label": _QUEUE,
    "resources.devices": _CONTAINER + "code sees all devices of its node, but only its own GPUs",
    "resources.native_parallel": "PyTorch's DistributedDataParallel is used to train on several slots",
    "resources.priority": _QUEUE,
    "resources.resource_manager": "there is one cluster, the one that dray is started on",
    "resources.resource_pool": "there is one cluster, the one that dray is started on",
    "resources.shm_size": _CONTAINER + "all shared memory of the node can be used",
    "resources.slots": "for commands and notebooks; slots_per_trial is the number of slots of a trial",
    "resources.weight": _QUEUE,
    "retention_policy": "logs are kept until the experiment's directory is deleted",
    "searcher.unit": "a custom method uses the unit of max_length",
    "security": "not used by Determined, either",
    "slurm": _BATCH_SYSTEM,
    "tensorboard_storage": "TensorBoard event files are stored with the trial's metrics",
    "workspace": _PAGE,
}

#: Ignored in a checkpoint_storage of this type.
IN_SHARED_FS = {"checkpoint_storage.container_path": _CONTAINER + "the directory is host_path, on every node"}

_MOUNT = ("container_path", "host_path")
_PACHYDERM = ("branch", "dataset", "pachd", "previous_commit", "project", "proxy", "repo")
_POLICY = ("pattern", "action", "actions", "policy", "signal", "name")
_ACTION = ("signal", "type", "webhook_name")

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
    "integrations.pachyderm.dataset": ("branch", "commit", "project", "repo", "token"),
    "integrations.pachyderm.pachd": ("host", "port", "token"),
    "integrations.pachyderm.proxy": ("host", "port", "scheme"),
    "integrations.webhooks": ("exclude", "webhook_id", "webhook_name"),
    "internal": ("native",),
    "internal.native": ("command",),
    "log_policies": _POLICY,
    "log_policies.action": _ACTION,
    "log_policies.actions": _ACTION,
    "log_policies.policy": _ACTION,
    "pbs": ("pbsbatch_args", "slots_per_node"),
    "profiling": ("begin_on_batch", "enabled", "end_after_batch", "sync_timings"),
    "resources.devices": (*_MOUNT, "mode"),
    "retention_policy": ("log_retention_days",),
    "security": ("kerberos",),
    "security.kerberos": ("config_file",),
    "slurm": ("gpu_type", "sbatch_args", "slots_per_node"),
}

#: What Determined's master fills in; `det experiment config` writes it out.
DEFAULTS: dict[str, object] = {
    "checkpoint_storage.propagation": "rprivate",
    "data_layer": {"container_storage_path": None, "host_storage_path": None, "type": "shared_fs"},
    "debug": False,
    "environment.force_pull_image": False,
    "optimizations.auto_tune_tensor_fusion": False,
    "optimizations.average_training_metrics": True,
    "optimizations.tensor_fusion_cycle_time": 1,
    "optimizations.tensor_fusion_threshold": 64,
    "pbs": {"pbsbatch_args": [], "slots_per_node": None},
    "project": "",
    "resources.agent_label": "",
    "resources.native_parallel": False,
    "resources.resource_manager": "",
    "resources.resource_pool": "",
    "resources.weight": 1,
    "slurm": {"gpu_type": None, "sbatch_args": [], "slots_per_node": None},
    "workspace": "",
}

_STEPS = "Determined has removed steps, too; "
_HDFS = "Determined has removed HDFS, too; mount it and write type: directory, or use s3, gcs or azure"
_SYNC = "belongs to search methods that Determined has removed, too; use max_trials of adaptive_asha or asha"
_PBT = "belongs to population-based training, which Determined has removed, too; use name: adaptive_asha"

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
OLDER = {"checkpoint_storage.checkpoint_path": "older name of storage_path"}

#: Fields of the schema that Determined does not have.
OURS = frozenset(
    {
        "checkpoint_storage.account_key",
        "checkpoint_storage.sas_token",
        "checkpoint_storage.session_token",
        "hang_timeout_s",
        "loggers",
        "reproducibility.deterministic",
        "resources.cpus_per_slot",
        "resources.placement_strategy",
        "resources.reuse_workers",
        "resources.slot",
        "searcher.options",
        "searcher.points",
        "searcher.sampler",
        "searcher.variant",
        "stop_on_nan",
    }
)


def not_used(raw: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """The ignored fields of a raw config, in its order, each with the reason.

    Fields that are null or empty, or that say what Determined's default is, are not listed.

    >>> not_used({"name": "digits", "workspace": "vision", "resources": {"weight": 1}, "bind_mounts": []})
    [('workspace', "for Determined's web UI; experiments are in checkpoint_storage, by their names")]
    """
    ignored = _ignored(raw)
    told = [(path, ignored[path]) for path in _paths(raw) if path in ignored]
    hyperparameters = raw.get("hyperparameters")
    return told + [(path, _IN_LIST) for path in spaces_in_lists(hyperparameters, "hyperparameters")]


def without_not_used(raw: Mapping[Any, Any]) -> dict[Any, Any]:
    """The config without its ignored fields; lists with spaces in them are explicit constants."""
    ignored, kept = _ignored(raw), {}
    for name, value in raw.items():
        if name in ignored:
            continue
        if isinstance(value, Mapping):
            value = {inner: item for inner, item in value.items() if f"{name}.{inner}" not in ignored}
        kept[name] = _explicit(value) if name == "hyperparameters" and isinstance(value, Mapping) else value
    return kept


def _explicit(spec: Any) -> Any:
    if isinstance(spec, Mapping) and "type" not in spec:
        return {name: _explicit(item) for name, item in spec.items()}
    return {"type": "const", "val": spec} if isinstance(spec, list) and spaces_in_lists(spec, "") else spec


def _ignored(raw: Mapping[Any, Any]) -> dict[str, str]:
    storage = raw.get("checkpoint_storage")
    is_shared = isinstance(storage, Mapping) and storage.get("type") == "shared_fs"
    return NOT_USED | IN_SHARED_FS if is_shared else NOT_USED


def misspelt(raw: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Unknown fields within the ignored ones and in log policies, each with the nearest name in Determined's schema.

    >>> list(misspelt({"environment": {"image": {"cpu": "a:1", "cdua": "b:2"}}}))
    [('environment.image.cdua', 'unknown field; did you mean cuda?')]
    """
    for place, known in INSIDE.items():
        for path, found in _mappings_at(raw, place.split(".")):
            for number, name in enumerate(name for name in found if name not in known):
                near = difflib.get_close_matches(str(name), known, n=1) if number < SHOWN else []
                hint = f"did you mean {near[0]}?" if near else f"known fields are {', '.join(known)}"
                yield f"{path}.{name}", f"unknown field; {hint}"


def _mappings_at(value: object, names: Sequence[str], path: str = "") -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """The mappings at a place, each with its path; where there is a list, those of all its items."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _mappings_at(item, names, f"{path}[{number}]")
    elif isinstance(value, Mapping):
        if not names:
            yield path, value
        else:
            yield from _mappings_at(value.get(names[0]), names[1:], f"{path}.{names[0]}" if path else names[0])


def _is_nothing(path: str, value: object) -> bool:
    if path == "profiling" and isinstance(value, Mapping):
        return not value.get("enabled")
    return value is None or value in ([], {}) or (path in DEFAULTS and value == DEFAULTS[path])


def _paths(raw: Mapping[Any, Any]) -> list[str]:
    """The paths of all fields that say something, of those one level below, and of the actions of log policies."""
    found: list[str] = []
    for name, value in raw.items():
        if not _is_nothing(str(name), value):
            found.append(str(name))
        if isinstance(value, Mapping):
            below = {f"{name}.{inner}": item for inner, item in value.items()}
            found += [path for path, item in below.items() if not _is_nothing(path, item)]
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
        elif each is not None and not isinstance(each, Mapping):
            found.append(repr(each))
    if not found and policy.get("name") is not None and policy.get("pattern") is not None:
        found.append("signal")  # its name is shown like one
    return found


#: Their names in the first version.
_ACTIONS = {"on_failure_dont_retry": "cancel_retries", "on_failure_exclude_node": "exclude_node"}
