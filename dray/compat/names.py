"""Which name of Determined's is which of dray's, and which has no counterpart here. Facts, and nothing that runs.

`dray.compat` makes ``import determined`` of them, ``dray migrate check`` reads them.
"""

from __future__ import annotations

VERSION = "0.38.1"
"""Of Determined, the last one: whose names these are."""

_INNER_CORE = "_checkpoint _context _distributed _preempt _profiler _searcher _tensorboard_mode _train"
_INNER_PYTORCH = """
_callback _data _experimental _load _lr_scheduler _pytorch_context _pytorch_trial _reducer _trainer _trainer_utils
"""

MODULES: dict[str, str] = {
    "determined.core": "dray.core",
    "determined.pytorch": "dray.pytorch",
    "determined.transformers": "dray.transformers",
    "determined.pytorch.samplers": "dray.pytorch.samplers",
    "determined.tensorboard.metric_writers.pytorch": "dray.pytorch.tensorboard",
    # Private there, and named in its documents and in code that was written from them.
    **{f"determined.core.{name}": "dray.core" for name in _INNER_CORE.split()},
    **{f"determined.pytorch.{name}": "dray.pytorch" for name in _INNER_PYTORCH.split()},
}
"""Modules, by Determined's name."""

_CORE = """
CheckpointContext Context DistributedContext DownloadMode DummyCheckpointContext DummyDistributedContext
DummyExperimentalCoreContext DummyPreemptContext DummyProfilerContext DummySearcherContext DummySearcherOperation
DummyTrainContext EarlyExitReason ExperimentalCoreContext PreemptContext PreemptMode ProfilerContext SearcherContext
SearcherMode SearcherOperation TensorboardMode TrainContext Unit init
"""
_PYTORCH = """
Batch CheckpointLoadContext DataLoader Epoch LRScheduler MetricReducer PyTorchCallback PyTorchExperimentalContext
PyTorchTrial PyTorchTrialContext Reducer TorchData TrainUnit Trainer _ShouldExit _TrainBoundaryType adapt_batch_sampler
data_length init load_trial_from_checkpoint_path to_device
"""
_SAMPLERS = """
DistributedBatchSampler DistributedSampler RepeatBatchSampler RepeatSampler ReproducibleShuffleBatchSampler
ReproducibleShuffleSampler SkipBatchSampler SkipSampler
"""

COUNTERPARTS: dict[str, str] = {
    **MODULES,
    "determined.ClusterInfo": "dray.core.ClusterInfo",
    "determined.InvalidHP": "dray.InvalidHP",
    "determined.LOG_FORMAT": "dray.LOG_FORMAT",
    "determined.LegacyTrial": "dray.pytorch.PyTorchTrial",
    "determined.TrialContext": "dray.pytorch.PyTorchTrialContext",
    "determined.TrialInfo": "dray.core.TrialInfo",
    "determined.get_cluster_info": "dray.get_cluster_info",
    "determined.import_from_path": "dray.import_from_path",
    **{f"determined.core.{name}": f"dray.core.{name}" for name in _CORE.split()},
    **{f"determined.pytorch.{name}": f"dray.pytorch.{name}" for name in _PYTORCH.split()},
    **{f"determined.pytorch.samplers.{name}": f"dray.pytorch.samplers.{name}" for name in _SAMPLERS.split()},
    "determined.tensorboard.metric_writers.pytorch.TorchWriter": "dray.pytorch.tensorboard.TorchWriter",
    "determined.transformers.DetCallback": "dray.transformers.DetCallback",
}
"""Modules and what is in them, by Determined's name: the same object under both."""

_IN_A_PROGRAM = "train it in a program of your own, with the core API (dray.core.init())"
_NO_LIGHTNING = f"dray has nothing of its own for Lightning: write a PyTorchTrial, or {_IN_A_PROGRAM}"
_NO_MASTER = "there is no master to ask: use the command dray, or dray.Experiment and its Result in Python"
_INTERNAL = "it is a part of Determined's inside, which no model needs: leave it out"

MISSING: dict[str, str] = {
    "determined.EnvContext": _INTERNAL,
    "determined.ExperimentConfig": "an experiment's config is a plain dict here: context.get_experiment_config()",
    "determined.RendezvousInfo": "ask context.distributed, or get_cluster_info().container_addrs",
    "determined.ResourcesInfo": "ask torch.cuda for the GPUs of this process",
    "determined.TrialController": _INTERNAL,
    "determined.cli": "use the command dray",
    "determined.common": _INTERNAL,
    "determined.common.api": _NO_MASTER,
    "determined.common.experimental": _NO_MASTER,
    "determined.common.set_logger": "logging is set up in an experiment; else logging.basicConfig(format=LOG_FORMAT)",
    "determined.constants": _INTERNAL,
    "determined.core.SearcherContextMissing": _INTERNAL,
    "determined.deploy": "start a Ray cluster: ray up cluster.yaml",
    "determined.errors": "dray raises Python's own exceptions (ValueError, RuntimeError), and InvalidHP",
    "determined.estimator": f"dray has no TensorFlow: {_IN_A_PROGRAM}",
    "determined.exec": _INTERNAL,
    "determined.experimental": _NO_MASTER,
    "determined.gpu": "ask torch.cuda",
    "determined.horovod": "dray has no Horovod: a PyTorchTrial trains with PyTorch's own distributed training",
    "determined.ipc": _INTERNAL,
    "determined.keras": f"dray has no Keras: {_IN_A_PROGRAM}",
    "determined.launch": "a trial's processes are there already, one a slot: name the program itself as the entrypoint",
    "determined.layers": _INTERNAL,
    "determined.lightning": _NO_LIGHTNING,
    "determined.load": _INTERNAL,
    "determined.profiler": "use context.set_profiler(), which is torch.profiler",
    "determined.pytorch._metric_utils": _INTERNAL,
    "determined.pytorch.deepspeed": f"dray has no DeepSpeed: write a PyTorchTrial, or {_IN_A_PROGRAM}",
    "determined.pytorch.dsat": "dray has no DeepSpeed, hence no autotuning of it",
    "determined.pytorch.experimental": "dray has no batch inference of its own: do it in a program, with the core API",
    "determined.pytorch.lightning": _NO_LIGHTNING,
    "determined.searcher": "write the search method with searchers.SearchMethod, and name it in searcher.name",
    "determined.tensorboard": "use context.get_tensorboard_writer(), or context.get_tensorboard_path()",
    "determined.util": _INTERNAL,
    "determined.workload": _INTERNAL,
}
"""What has no counterpart, by the beginning of Determined's dotted names: what to do instead. The longest one holds."""

_TORCH = "dray's workers have torch's process group: DistributedContext.from_torch_distributed()"

MEMBERS: dict[str, str] = {
    "determined.ClusterInfo.agent_id": "there are no agents here; ray.get_runtime_context().get_node_id() names a node",
    "determined.ClusterInfo.allocation_id": "there is no master here",
    "determined.ClusterInfo.cluster_id": "there is no master here",
    "determined.ClusterInfo.container_slot_counts": "the DistributedContext has local_size and cross_size",
    "determined.ClusterInfo.gpu_uuids": "torch.cuda.get_device_properties(device).uuid",
    "determined.ClusterInfo.master_cert_file": "there is no master here",
    "determined.ClusterInfo.master_cert_name": "there is no master here",
    "determined.ClusterInfo.master_url": "there is no master here; dray.Result(path) reads an experiment",
    "determined.ClusterInfo.session_token": "there is no master here, nor a login to it",
    "determined.ClusterInfo.task_id": (
        "there is no master here; get_cluster_info().trial has trial_id and experiment_id"
    ),
    "determined.core.DistributedContext.from_deepspeed": _TORCH,
    "determined.core.DistributedContext.from_horovod": _TORCH,
    "determined.core.DistributedContext.from_tf_config": "dray has no TensorFlow",
    "determined.pytorch.PyTorchTrialContext._epoch_len": "private to Determined; len() of the training data loader",
    "determined.pytorch.PyTorchTrialContext.autocast_forward_pass": _INTERNAL,
    "determined.pytorch.PyTorchTrialContext.reduce_metrics": _INTERNAL,
    "determined.pytorch.PyTorchTrialContext.reset_reducers": _INTERNAL,
    "determined.pytorch.PyTorchTrialContext.run_cross_slot_reduction": _INTERNAL,
}
"""Attributes that classes with a counterpart have in Determined and not here: what to do instead."""


def missing(name: str) -> str | None:
    """What to do instead of something of Determined's that dray has no counterpart for; None for all else.

    >>> missing("determined.keras.TFKerasTrial")[:18]
    'dray has no Keras:'
    """
    if name in COUNTERPARTS:
        return None
    while name:
        if name in MISSING:
            return MISSING[name]
        name = name.rpartition(".")[0]
    return None
