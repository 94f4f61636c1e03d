"""Observers record a run elsewhere: an Optuna study, MLflow, Weights & Biases."""
