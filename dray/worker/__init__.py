"""Workers: the processes of a worker group, which run one leased trial after another."""
