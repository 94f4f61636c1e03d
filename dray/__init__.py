"""dray trains PyTorch models and searches their hyperparameters on Ray."""
