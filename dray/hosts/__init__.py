"""Hosts, where a training run happens: a laptop, the processes of torchrun, a Ray worker."""

from dray.hosts.current import current_host, current_peers, use_host
from dray.hosts.local import LocalHost

__all__ = ["LocalHost", "current_host", "current_peers", "use_host"]
