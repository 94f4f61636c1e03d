"""Runs two trials again and finds the first batch at which they part: for ``dray diff --exact``."""
