"""Fields of Determined's experiment file that are not in ``schema``: ignored, or refused.

Ignored fields describe its master, containers or web UI: the experiment runs, and one warning names them. Fields of old
versions that say how much is trained can't be ignored: they are errors, as unknown fields are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dray.errors import Fault
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
IGNORED_FIELDS: dict[str, str] = {
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
IGNORED_IN_SHARED_FS = {"checkpoint_storage.container_path": _CONTAINER + "the directory is host_path, on every node"}

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
REMOVED_FIELDS: dict[str, str] = {
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
OLDER_NAMES = {"checkpoint_storage.checkpoint_path": "older name of storage_path"}

#: Fields of the schema that Determined does not have.
DRAY_FIELDS = frozenset(
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


def ignored_fields(raw: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """The ignored fields of a raw config, in its order, each with the reason.

    Fields that are null or empty, or that say what Determined's default is, are not listed.

    >>> ignored_fields({"name": "digits", "workspace": "vision", "resources": {"weight": 1}, "bind_mounts": []})
    [('workspace', "for Determined's web UI; experiments are in checkpoint_storage, by their names")]
    """
    ignored = _ignored_in(raw)
    found = [(path, ignored[path]) for path in _paths(raw) if path in ignored]
    hyperparameters = raw.get("hyperparameters")
    return found + [(path, _IN_LIST) for path in spaces_in_lists(hyperparameters, "hyperparameters")]


def without_ignored(raw: Mapping[Any, Any]) -> dict[Any, Any]:
    """The config without its ignored fields; lists with spaces in them are explicit constants."""
    ignored, kept = _ignored_in(raw), {}
    for name, value in raw.items():
        if name in ignored:
            continue
        if isinstance(value, Mapping):
            value = {inner: item for inner, item in value.items() if f"{name}.{inner}" not in ignored}
        kept[name] = _explicit(value) if name == "hyperparameters" and isinstance(value, Mapping) else value
    return kept


def without_steps(raw: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[Fault]]:
    """The config with lengths in batches where Determined's oldest configs count steps, and a fault for each."""
    changed, faults = dict(raw), []
    batches = raw.get("batches_per_step", 100)  # Determined's default
    searcher = raw.get("searcher")

    def convert(section: dict[Any, Any], field: str, path: str, current: str) -> None:
        steps = section[field]
        if isinstance(steps, int) and isinstance(batches, int):
            del section[field]
            section[current] = {"batches": max(1, steps * batches)}
            what = f"is in steps of {batches} batches, which Determined has removed, too; write "
            faults.append(Fault(path, f"{what}{current}: {{batches: {steps * batches}}}"))

    counts_steps = "batches_per_step" in raw
    if isinstance(searcher, Mapping):
        changed["searcher"] = dict(searcher)
        for field in ("max_steps", "target_trial_steps"):
            if field in searcher:
                counts_steps = True
                convert(changed["searcher"], field, f"searcher.{field}", "max_length")
    for field in ("min_validation_period", "min_checkpoint_period"):
        if counts_steps and field in raw:
            convert(changed, field, field, field)
    return changed, faults


def _explicit(spec: Any) -> Any:
    if isinstance(spec, Mapping) and "type" not in spec:
        return {name: _explicit(item) for name, item in spec.items()}
    return {"type": "const", "val": spec} if isinstance(spec, list) and spaces_in_lists(spec, "") else spec


def _ignored_in(raw: Mapping[Any, Any]) -> dict[str, str]:
    storage = raw.get("checkpoint_storage")
    is_shared = isinstance(storage, Mapping) and storage.get("type") == "shared_fs"
    return IGNORED_FIELDS | IGNORED_IN_SHARED_FS if is_shared else IGNORED_FIELDS


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
