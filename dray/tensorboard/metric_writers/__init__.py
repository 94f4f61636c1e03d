"""Metric writers: `pytorch.TorchWriter`."""
