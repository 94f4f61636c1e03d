"""Determined's names, with dray's names or replacements. Only data.

`dray.compat` builds ``import determined`` from them; ``dray migrate`` and the command's error messages use them too.
"""

from __future__ import annotations

VERSION = "0.38.1"  # the last version of Determined, which these names come from

_INNER_CORE = "_checkpoint _context _distributed _preempt _profiler _searcher _tensorboard_mode _train"
_INNER_PYTORCH = """
_callback _data _experimental _load _lr_scheduler _pytorch_context _pytorch_trial _reducer _trainer _trainer_utils
"""

MODULES: dict[str, str] = {
    "determined.core": "dray.core",
    "determined.pytorch": "dray.pytorch",
    "determined.transformers": "dray.transformers",
    "determined.pytorch.experimental": "dray.pytorch.experimental",
    "determined.pytorch.samplers": "dray.pytorch.samplers",
    "determined.tensorboard.metric_writers.pytorch": "dray.tensorboard.metric_writers.pytorch",
    # Private modules that Determined's documentation mentions, and code imports.
    **{f"determined.core.{name}": "dray.core" for name in _INNER_CORE.split()},
    **{f"determined.pytorch.{name}": "dray.pytorch" for name in _INNER_PYTORCH.split()},
}
"""dray's modules, by Determined's names."""

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
_BATCHES = "TorchBatchProcessor TorchBatchProcessorContext get_default_device torch_batch_process"
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
    **{f"determined.pytorch.experimental.{name}": f"dray.pytorch.experimental.{name}" for name in _BATCHES.split()},
    **{f"determined.pytorch.samplers.{name}": f"dray.pytorch.samplers.{name}" for name in _SAMPLERS.split()},
    "determined.tensorboard.metric_writers.pytorch.TorchWriter": "dray.tensorboard.metric_writers.pytorch.TorchWriter",
    "determined.transformers.DetCallback": "dray.transformers.DetCallback",
}
"""dray's modules and objects, by Determined's name."""

_IN_A_PROGRAM = "train it in a program of your own with the core API (dray.core.init())"
_NO_LIGHTNING = f"dray has no support for Lightning: write a PyTorchTrial, or {_IN_A_PROGRAM}"
_NO_MASTER = "dray has no master: use the dray command, or dray.Experiment and its Result in Python"
_CLIP = "write context.step_optimizer(optimizer, clip_grads=lambda params: torch.nn.utils."
_INTERNAL = "it is internal to Determined, and no model needs it: leave it out"
_HELPER = (
    "it is a helper of Determined's own: replace it by code of yours, or copy it from Determined's sources (Apache 2.0)"
)

_INNER = """
EnvContext TrialController constants core.SearcherContextMissing exec ipc layers load pytorch._metric_utils workload
"""

MISSING: dict[str, str] = {
    **{f"determined.{name}": _INTERNAL for name in _INNER.split()},
    "determined.ExperimentConfig": "in dray an experiment's config is a plain dict: context.get_experiment_config()",
    "determined.RendezvousInfo": "use context.distributed, or get_cluster_info().container_addrs",
    "determined.ResourcesInfo": "use torch.cuda for the GPUs of this process",
    "determined.cli": "use the dray command",
    "determined.common": _HELPER,
    "determined.common.api": _NO_MASTER,
    "determined.common.experimental": _NO_MASTER,
    "determined.common.set_logger": "experiments set up logging; elsewhere call logging.basicConfig(format=LOG_FORMAT)",
    "determined.deploy": "start a Ray cluster: ray up cluster.yaml",
    "determined.errors": "dray raises Python's own exceptions (ValueError, RuntimeError), and InvalidHP",
    "determined.estimator": f"dray has no TensorFlow: {_IN_A_PROGRAM}",
    "determined.experimental": _NO_MASTER,
    "determined.experimental.core_v2": (
        "dray has no master to report to: use core.init(), which outside an experiment starts a local run"
    ),
    "determined.gpu": "use torch.cuda",
    "determined.horovod": "dray has no Horovod: a PyTorchTrial uses PyTorch's own distributed training",
    "determined.keras": f"dray has no Keras: {_IN_A_PROGRAM}",
    "determined.launch": "dray starts a trial's processes itself, one per slot: name the "
    "program itself as the entrypoint",
    "determined.lightning": _NO_LIGHTNING,
    "determined.profiler": "use context.set_profiler(), which is torch.profiler",
    # From the API before 0.13, where a trial had build_model() and optimizer().
    "determined.pytorch.ClipGradsL2Norm": f"{_CLIP}clip_grad_norm_(params, max_norm))",
    "determined.pytorch.ClipGradsL2Value": f"{_CLIP}clip_grad_value_(params, max_value))",
    "determined.pytorch.deepspeed": f"dray has no DeepSpeed: write a PyTorchTrial, or {_IN_A_PROGRAM}",
    "determined.pytorch.dsat": "it tuned DeepSpeed, and Determined itself has removed it: "
    "train without its `with` block",
    "determined.pytorch.lightning": _NO_LIGHTNING,
    "determined.pytorch.reset_parameters": "torch already does so for each new module: leave it out",
    "determined.searcher": "write the search method with searchers.SearchMethod, and name it in searcher.name",
    "determined.tensorboard": "use context.get_tensorboard_writer(), or context.get_tensorboard_path()",
    "determined.util": _HELPER,
    "determined.util.merge_dicts": "write {**base, **source} in its place; where dicts are nested, a function "
    "that merges them level by level",
    "determined.util.download_gcs_blob_with_backoff": "call blob.download_as_bytes(), which retries by itself",
}
"""What to do instead of what has no counterpart, by prefix of Determined's dotted name; the longest prefix counts."""

_TORCH = "dray's workers use torch's process group: call DistributedContext.from_torch_distributed()"
_INNER_CONTEXT = "autocast_forward_pass reduce_metrics reset_reducers run_cross_slot_reduction"

MEMBERS: dict[str, str] = {
    **{f"determined.pytorch.PyTorchTrialContext.{name}": _INTERNAL for name in _INNER_CONTEXT.split()},
    "determined.ClusterInfo.agent_id": "dray has no agents; ray.get_runtime_context().get_node_id() names a node",
    "determined.ClusterInfo.allocation_id": "dray has no master",
    "determined.ClusterInfo.cluster_id": "dray has no master",
    "determined.ClusterInfo.master_cert_file": "dray has no master",
    "determined.ClusterInfo.master_cert_name": "dray has no master",
    "determined.ClusterInfo.master_url": "dray has no master; dray.Result(path) reads an experiment",
    "determined.ClusterInfo.session_token": "dray has no master, and no login",
    "determined.ClusterInfo.task_id": ("dray has no master; get_cluster_info().trial has trial_id and experiment_id"),
    "determined.core.DistributedContext.from_horovod": _TORCH,
    "determined.core.DistributedContext.from_tf_config": "dray has no TensorFlow",
}
"""What to do instead of attributes that a class has in Determined, but its counterpart lacks."""


_VERBS = "create list describe pause activate kill delete download wait set"
COMMANDS: dict[str, str] = {
    **{f"experiment {verb}": f"dray experiment {verb}" for verb in _VERBS.split()},
    **{known: f"dray {known}" for known in ("trial describe", "trial logs", "checkpoint download")},
    "experiment logs": "dray trial logs",
    "experiment list-trials": "dray trial list",
    "experiment list-checkpoints": "dray checkpoint list",
    "experiment continue": "dray experiment extend",
    "experiment cancel": "dray experiment stop",
    "experiment download-model-def": "code/ in the experiment's directory",
    "experiment config": "experiment.yaml in the experiment's directory",
    "trial download": "dray checkpoint download",
    "checkpoint describe": "dray checkpoint list",
    "preview-search": "dray preview",
    "tensorboard": "dray ui EXPERIMENT",
    "agent list": "dray cluster status",
    "slot list": "dray cluster status",
    "deploy": "dray cluster validate, and ray up",
}
"""Commands of Determined's ``det``, with what to use instead."""


def missing(name: str) -> str | None:
    """What to do instead of a name of Determined's without a counterpart in dray; None for any other name.

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
