"""Where am I, and who are my peers: the parts of dray that work without a trainer."""

from dray.training.cluster_info import ClusterInfo, TrialInfo, get_cluster_info, set_cluster_info
from dray.training.distributed import DistributedContext

__all__ = ["ClusterInfo", "DistributedContext", "TrialInfo", "get_cluster_info", "set_cluster_info"]
