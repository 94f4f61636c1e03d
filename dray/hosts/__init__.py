"""Hosts: where a training run happens. On a laptop or under torchrun here, in a Ray worker in `dray.worker`."""

from dray.hosts.current import current_host, current_peers, use_host
from dray.hosts.local import LocalHost

__all__ = ["LocalHost", "current_host", "current_peers", "use_host"]
