"""`dray.tensorboard.metric_writers.pytorch.TorchWriter`, at the path that it has in Determined."""
