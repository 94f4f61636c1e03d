"""Fields of Determined's experiment file that dray does not have: ignored, or rejected.

Ignored fields concern Determined's master, containers or web UI: the experiment runs, and one warning names them.
Fields of old versions that set the amount of training can't be ignored: they are errors, like unknown fields.
"""

from __future__ import annotations

from collections.abc import Mapping

CONTAINER = "trials run in Ray workers, without a container; "
_HOROVOD = "an option of Horovod; gradients are averaged by PyTorch's DistributedDataParallel"
_BATCH_SYSTEM = "start Ray on nodes that the batch system allocates, as clusters/slurm.sh does"
_WEB_UI = "for Determined's web UI; experiments are in checkpoint_storage, by their names"
_ONE_CLUSTER = "experiments use all of the cluster that dray is started on; resources.slot_type restricts them"
_SERVICES = "Pachyderm is not supported; for a webhook there is notify"

#: Ignored fields, with what to use instead. A field stands for everything below it.
IGNORED_FIELDS: dict[str, str] = {
    "bind_mounts": CONTAINER
    + "code sees the node's own paths: put the data, or a link to it, where the code looks for it",
    "checkpoint_storage.propagation": CONTAINER + "the directory is the node's own",
    "checkpoint_storage.tensorboard_path": "TensorBoard event files are stored with the trial's metrics",
    "data_layer": "a cache of Determined's Estimator and Keras trials",
    "debug": "not needed; set the levels of loggers in code",
    "environment.add_capabilities": CONTAINER + "code runs as the user who started Ray",
    "environment.drop_capabilities": CONTAINER + "code runs as the user who started Ray",
    "environment.force_pull_image": CONTAINER + "install what the code needs on every node",
    "environment.image": CONTAINER + "install what the code needs on every node",
    "environment.pod_spec": CONTAINER + "pods are specified in the cluster's own files",
    "environment.ports": CONTAINER + "a port that code opens is open on its node",
    "environment.proxy_ports": CONTAINER + "a port that code opens is open on its node",
    "environment.registry_auth": CONTAINER + "no image is pulled",
    "environment.slurm": _BATCH_SYSTEM,
    "integration": _SERVICES,
    "integrations": _SERVICES,
    "internal": "internal data of old versions of Determined",
    "log_policies.exclude_node": "remove a bad node from the cluster; dray cluster check finds it",
    "log_policies.send_webhook": "use notify",
    "log_policies.signal": "for Determined's web UI",
    "optimizations.auto_tune_tensor_fusion": _HOROVOD,
    "optimizations.average_training_metrics": "training metrics are always averaged over all slots",
    "optimizations.grad_updates_size_file": _HOROVOD,
    "optimizations.tensor_fusion_cycle_time": _HOROVOD,
    "optimizations.tensor_fusion_threshold": _HOROVOD,
    "pbs": _BATCH_SYSTEM,
    "preemption_timeout": "Ray sets the deadline of a node that is preempted",
    "profiling.sync_timings": "the profiler has the GPU's own times",
    "project": _WEB_UI,
    "resources.agent_label": "workers run wherever there are free slots; resources.slot_type restricts them",
    "resources.devices": CONTAINER + "code sees all devices of its node, but only its own GPUs",
    "resources.native_parallel": "PyTorch's DistributedDataParallel is used to train on several slots",
    "resources.resource_manager": _ONE_CLUSTER,
    "resources.resource_pool": _ONE_CLUSTER,
    "resources.shm_size": CONTAINER + "all shared memory of the node can be used",
    "resources.slots": "for commands and notebooks; slots_per_trial is the number of slots of a trial",
    "retention_policy": "logs are kept as long as the experiment",
    "searcher.unit": "a custom method uses the unit of max_length",
    "security": "not used by Determined, either",
    "slurm": _BATCH_SYSTEM,
    "tensorboard_storage": "TensorBoard event files are stored with the trial's metrics",
    "workspace": _WEB_UI,
}

#: The nonempty defaults that Determined's master fills in, and `det experiment config` prints.
_DEFAULTS: dict[str, object] = {
    "checkpoint_storage.propagation": "rprivate",
    "data_layer": {"type": "shared_fs"},
    "optimizations.average_training_metrics": True,
    "optimizations.tensor_fusion_cycle_time": 1,
    "optimizations.tensor_fusion_threshold": 64,
    "profiling.sync_timings": True,
}

_STEPS = "Determined removed steps; "
_MAX_LENGTH = "write max_length: {batches: ...}; a step has batches_per_step batches, by default 100"
_HDFS = "Determined removed HDFS; mount it and write type: directory, or use s3, gcs or azure"
_SYNC = "belongs to search methods that Determined removed; use max_trials of adaptive_asha or asha"
_PBT = "Determined's pbt had other fields; write "

#: Refused fields of old versions, with what to write instead.
REMOVED_FIELDS: dict[str, str] = {
    "batches_per_step": _STEPS + "write scheduling_unit, in batches, for how often metrics are reported",
    "checkpoint_storage.hdfs_path": _HDFS,
    "checkpoint_storage.hdfs_url": _HDFS,
    "checkpoint_storage.user": _HDFS,
    "searcher.budget": _SYNC,
    "searcher.explore_function": _PBT + "resample_probability, and for a perturb_factor of 0.2 factors: [0.8, 1.2]",
    "searcher.length_per_round": _PBT + "interval",
    "searcher.max_steps": _STEPS + _MAX_LENGTH,
    "searcher.num_rounds": _PBT + "max_length, num_rounds times length_per_round",
    "searcher.population_size": _PBT + "population",
    "searcher.replace_function": _PBT + "quantile, its truncate_fraction",
    "searcher.step_budget": _SYNC,
    "searcher.steps_per_round": _PBT + "interval, in batches",
    "searcher.target_trial_steps": _STEPS + _MAX_LENGTH,
    "searcher.train_stragglers": _SYNC,
}


def says_something(path: str, value: object) -> bool:
    """Whether the value of an ignored field differs from Determined's default."""
    if isinstance(value, Mapping):
        value = {name: item for name, item in value.items() if item}
    return value != _DEFAULTS[path] if path in _DEFAULTS else bool(value)
