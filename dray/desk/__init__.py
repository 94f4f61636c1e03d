"""The desk: leases of worker groups to trials; and how the processes of a run are connected."""
