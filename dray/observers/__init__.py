"""Observers, which record a run elsewhere: in MLflow, or in Weights & Biases."""
