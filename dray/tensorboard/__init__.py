"""Where Determined has it: `dray.tensorboard.metric_writers.pytorch.TorchWriter`."""
