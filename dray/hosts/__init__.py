"""Hosts: where a training run happens. Here, on a laptop or under torchrun; in a Ray worker, see `dray.worker.host`."""

from dray.hosts.current import current_host, current_peers, use_host
from dray.hosts.local import LocalHost

__all__ = ["LocalHost", "current_host", "current_peers", "use_host"]
