"""The core API, for programs with their own training loop: metrics, checkpoints, preemption, processes."""

from dray.core.checkpoint import CheckpointContext, DownloadMode
from dray.core.context import Context, ExperimentalCoreContext, PreemptContext, PreemptMode, ProfilerContext, init
from dray.core.searcher import SearcherContext, SearcherMode, SearcherOperation, Unit
from dray.core.train import EarlyExitReason, TensorboardMode, TrainContext
from dray.training.cluster_info import ClusterInfo, TrialInfo, get_cluster_info
from dray.training.parallel.distributed import DistributedContext

# Determined has other classes for runs without a cluster; here they are the same.
DummyCheckpointContext = CheckpointContext
DummyDistributedContext = DistributedContext
DummyExperimentalCoreContext = ExperimentalCoreContext
DummyPreemptContext = PreemptContext
DummyProfilerContext = ProfilerContext
DummySearcherContext = SearcherContext
DummySearcherOperation = SearcherOperation
DummyTrainContext = TrainContext

__all__ = [
    "CheckpointContext",
    "ClusterInfo",
    "Context",
    "DistributedContext",
    "DownloadMode",
    "DummyCheckpointContext",
    "DummyDistributedContext",
    "DummyExperimentalCoreContext",
    "DummyPreemptContext",
    "DummyProfilerContext",
    "DummySearcherContext",
    "DummySearcherOperation",
    "DummyTrainContext",
    "EarlyExitReason",
    "ExperimentalCoreContext",
    "PreemptContext",
    "PreemptMode",
    "ProfilerContext",
    "SearcherContext",
    "SearcherMode",
    "SearcherOperation",
    "TensorboardMode",
    "TrainContext",
    "TrialInfo",
    "Unit",
    "get_cluster_info",
    "init",
]
