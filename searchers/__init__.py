"""Hyperparameter search methods as pure state machines, and the adapters that drive them."""
