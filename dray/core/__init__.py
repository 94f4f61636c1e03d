"""Where am I, and who are my peers: the parts of dray that work without a trainer."""

from dray.core.cluster_info import ClusterInfo, TrialInfo, get_cluster_info, set_cluster_info
from dray.core.distributed import DistributedContext

__all__ = ["ClusterInfo", "DistributedContext", "TrialInfo", "get_cluster_info", "set_cluster_info"]
