"""Writers of metrics: `pytorch.TorchWriter`."""
