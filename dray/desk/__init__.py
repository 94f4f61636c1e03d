"""The desk, which leases worker groups to trials; and the connections between the processes of a run."""
