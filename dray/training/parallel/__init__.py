"""The processes of one trial: devices, process groups, sharding, and agreement between ranks."""
